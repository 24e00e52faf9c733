"""Each way to choose experts gives the logits, the experts and the weights that the module of `transformers` gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.weights import fill, full_tensor
from torch import Tensor

from parallel.description import MoeDescription, RouterScore
from parallel.errors import ConfigError
from parallel.expert_router import Router, choose_experts
from parallel.kernels.reference import ReferenceKernels
from parallel.layer import LayerContext
from parallel.mesh import Axis

NUM_EXPERTS, HIDDEN, NUM_TOKENS = 16, 32, 200
SIZES: dict[str, Any] = {"num_experts": NUM_EXPERTS, "num_chosen": 4, "intermediate_size": 8}
SIGMOID: dict[str, Any] = {"score": RouterScore.SIGMOID, "choice_bias": True}


def _mixtral() -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter

    return MixtralTopKRouter(MixtralConfig(num_local_experts=NUM_EXPERTS, num_experts_per_tok=4, hidden_size=HIDDEN))


def _qwen(norm_topk_prob: bool) -> Callable[[], Any]:
    def make() -> Any:
        from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeTopKRouter

        sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 4, "hidden_size": HIDDEN}
        return Qwen2MoeTopKRouter(Qwen2MoeConfig(**sizes, norm_topk_prob=norm_topk_prob))

    return make


def _deepseek(n_group: int, topk_group: int, norm_topk_prob: bool, routed_scaling_factor: float) -> Callable[[], Any]:
    def make() -> Any:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter

        return DeepseekV3TopkRouter(
            DeepseekV3Config(
                n_routed_experts=NUM_EXPERTS,
                num_experts_per_tok=4,
                hidden_size=HIDDEN,
                n_group=n_group,
                topk_group=topk_group,
                norm_topk_prob=norm_topk_prob,
                routed_scaling_factor=routed_scaling_factor,
            )
        )

    return make


def _gpt_oss() -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssTopKRouter

    return GptOssTopKRouter(GptOssConfig(num_local_experts=NUM_EXPERTS, num_experts_per_tok=4, hidden_size=HIDDEN))


VARIANTS: dict[str, tuple[dict[str, Any], Callable[[], Any]]] = {
    "mixtral": ({"is_normalized": True}, _mixtral),
    "qwen": ({}, _qwen(norm_topk_prob=False)),
    "qwen-normalized": ({"is_normalized": True}, _qwen(norm_topk_prob=True)),
    "deepseek": (SIGMOID, _deepseek(1, 1, norm_topk_prob=False, routed_scaling_factor=1.0)),
    "deepseek-groups": (
        {**SIGMOID, "is_normalized": True, "num_groups": 4, "num_chosen_groups": 2, "weight_multiplier": 2.5},
        _deepseek(4, 2, norm_topk_prob=True, routed_scaling_factor=2.5),
    ),
    "gpt-oss": ({"score": RouterScore.SOFTMAX_OF_CHOSEN, "router_bias": True}, _gpt_oss),
}


def _router(moe: MoeDescription, dtype: torch.dtype) -> Router:
    context = LayerContext(axis=Axis(), kernels=ReferenceKernels(), device=torch.device("cpu"), dtype=dtype)
    router = Router(moe, HIDDEN, context=context)
    parameters = list(router.sharded_parameters("router"))
    fill(parameters)
    for parameter in parameters[: 1 + moe.router_bias]:
        parameter.tensor.copy_(parameter.tensor.to(dtype))  # as checkpoints store them, whatever computes with them
    router.finish_loading()
    return router


@torch.no_grad()
def _load_original(original: Any, dtype: torch.dtype) -> None:
    original.weight.copy_(full_tensor("router.weight", NUM_EXPERTS, HIDDEN))
    if hasattr(original, "bias"):
        original.bias.copy_(full_tensor("router.bias", NUM_EXPERTS))
    original.to(dtype)
    if hasattr(original, "e_score_correction_bias"):
        original.e_score_correction_bias = full_tensor("router.choice_bias", NUM_EXPERTS)


def _by_expert(experts: Tensor, weights: Tensor) -> Tensor:
    """[T, X]: the weight of each expert; those not chosen have -1."""
    return torch.full((len(experts), NUM_EXPERTS), -1.0).scatter_(1, experts, weights.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_router_chooses_as_transformers_does(variant: str, dtype: torch.dtype) -> None:
    options, make_original = VARIANTS[variant]
    router, original = _router(MoeDescription(**SIZES, **options), dtype), make_original()
    _load_original(original, dtype)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)

    with torch.inference_mode():
        logits, weights, experts = original(x)
        routing = router(x)

    torch.testing.assert_close(router.logits(x), logits, rtol=0, atol=0)
    assert routing.weights_TC.dtype == torch.float32
    # the originals round weights to the dtype of the logits
    tolerance = 1e-6 if dtype is torch.float32 else 2**-8
    expected = _by_expert(experts, weights)
    torch.testing.assert_close(_by_expert(*routing), expected, rtol=tolerance, atol=tolerance)


def test_choice_bias_changes_experts_but_not_weights() -> None:
    moe = MoeDescription(**SIZES, **SIGMOID)
    logits = torch.zeros(1, NUM_EXPERTS)
    bias = torch.zeros(NUM_EXPERTS)
    bias[[3, 5, 8, 13]] = 4.0
    experts, weights = choose_experts(moe, logits, bias)
    assert sorted(experts[0].tolist()) == [3, 5, 8, 13]
    assert weights.tolist() == [[0.5] * 4]


def test_experts_come_from_the_best_groups_only() -> None:
    moe = MoeDescription(**SIZES, **SIGMOID, num_groups=4, num_chosen_groups=2)
    logits = torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    logits[:, 0] = 9.0  # the best of all, in the group with the worst second best
    logits[:, 1:4] = -20.0
    experts, _ = choose_experts(moe, logits, torch.zeros(NUM_EXPERTS))
    assert all(len(set(row)) <= 2 for row in (experts // 4).tolist())
    free = choose_experts(MoeDescription(**SIZES, **SIGMOID), logits, torch.zeros(NUM_EXPERTS)).experts_TC
    assert any(len(set(row)) > 2 for row in (free // 4).tolist())


def test_weights_of_scores_that_vanish_are_numbers() -> None:
    moe = MoeDescription(**SIZES, **SIGMOID, is_normalized=True)
    _, weights = choose_experts(moe, torch.full((1, NUM_EXPERTS), -1e4), torch.zeros(NUM_EXPERTS))
    assert weights.tolist() == [[0.0] * 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_chosen": 17}, "num_chosen is 17; allowed: 1 to 16"),
        ({"num_groups": 3}, "num_groups is 3; allowed: divisors of the 16 experts"),
        ({"num_groups": 16}, "num_groups is 16; allowed: divisors of the 16 experts that leave at least two"),
        ({"num_groups": 4, "num_chosen_groups": 5}, "num_chosen_groups is 5; allowed: 1 to 4"),
        ({"num_groups": 8}, "num_chosen is 4; allowed: 1 to 2"),
    ],
)
def test_choice_that_cannot_be_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MoeDescription(**{**SIZES, **changes})
