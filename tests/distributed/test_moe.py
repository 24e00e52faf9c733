"""Experts, each split over the ranks or whole on one of them, equal the blocks of `transformers`; one all-reduce."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.gloo_pool import GlooPool
from helpers.weights import fill, full_tensor
from torch import Tensor

from parallel.description import ClampedGate, DecoderDescription, MoeDescription, RouterScore
from parallel.kernels.select import select_kernels
from parallel.layer import LayerContext
from parallel.mesh import Mesh
from parallel.moe import MoE

CPU = torch.device("cpu")
HIDDEN, INNER, SHARED, NUM_EXPERTS, NUM_CHOSEN = 16, 12, 20, 8, 3
TOLERANCE = 1e-5  # float32, partial sums in another order; values of a few units
PLAIN = MoeDescription(num_experts=NUM_EXPERTS, num_chosen=NUM_CHOSEN, intermediate_size=INNER)
VARIANTS = {
    "mixtral": replace(PLAIN, is_normalized=True),
    "qwen2_moe": replace(PLAIN, shared_intermediate_size=SHARED, is_shared_gated=True),
    "deepseek_v3": replace(
        PLAIN,
        score=RouterScore.SIGMOID,
        is_normalized=True,
        num_groups=4,
        num_chosen_groups=2,
        choice_bias=True,
        weight_multiplier=2.5,
        shared_intermediate_size=2 * INNER,
    ),
    "gpt_oss": replace(
        PLAIN,
        score=RouterScore.SOFTMAX_OF_CHOSEN,
        router_bias=True,
        expert_bias=True,
        clamped_gate=ClampedGate(alpha=1.702, limit=1.0),  # low enough to clamp
    ),
}


def _description() -> DecoderDescription:
    return DecoderDescription(
        family="mixtral",
        vocab_size=8,
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=4,
        intermediate_size=24,
        max_context=64,
        norm_eps=1e-5,
        rotaries=(None,),
        sliding_windows=(None,),
    )


def _inputs(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(3))


def _run(mesh: Mesh, variant: str, num_tokens: int, kernels: str, expert_parallel: bool) -> tuple[Tensor, int]:
    context = LayerContext(
        axis=mesh.tp,
        kernels=select_kernels(CPU, torch.float32, kernels),
        device=CPU,
        dtype=torch.float32,
        expert_parallel=expert_parallel,
    )
    layer = MoE(_description(), VARIANTS[variant], context=context)
    fill(layer.sharded_parameters("mlp"))
    layer.finish_loading()
    with torch.inference_mode():
        return layer(_inputs(num_tokens)), mesh.tp.counts["all_reduce"]


@pytest.mark.parametrize(("tp", "expert_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_experts_equal_their_original_with_one_all_reduce(
    gloo_pool: GlooPool, variant: str, kernels: str, tp: int, expert_parallel: bool
) -> None:
    for num_tokens in (1, 9):
        expected = _run_original(variant, num_tokens)
        for result, num_all_reduces in gloo_pool.run(_run, variant, num_tokens, kernels, expert_parallel, tp=tp):
            torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE)
            assert num_all_reduces == (tp > 1)


@torch.no_grad()
def _run_original(variant: str, num_tokens: int) -> Tensor:
    block = _ORIGINALS[variant]()
    experts = block.experts
    if variant == "gpt_oss":
        experts.gate_up_proj.copy_(_stack("gate_up.weight", 2 * INNER, HIDDEN).mT)
        experts.gate_up_proj_bias.copy_(_stack("gate_up.bias", 2 * INNER))
        experts.down_proj.copy_(_stack("down.weight", HIDDEN, INNER).mT)
        experts.down_proj_bias.copy_(_stack("down.bias", HIDDEN))
        block.router.bias.copy_(full_tensor("mlp.router.bias", NUM_EXPERTS))
    else:
        both = [_stack(f"{part}.weight", INNER, HIDDEN) for part in ("gate", "up")]
        experts.gate_up_proj.copy_(torch.cat(both, dim=1))
        experts.down_proj.copy_(_stack("down.weight", HIDDEN, INNER))
    router = block.router if variant == "gpt_oss" else block.gate
    router.weight.copy_(full_tensor("mlp.router.weight", NUM_EXPERTS, HIDDEN))
    if variant == "deepseek_v3":
        router.e_score_correction_bias.copy_(full_tensor("mlp.router.choice_bias", NUM_EXPERTS))
        _fill_shared(block.shared_experts, 2 * INNER)
    if variant == "qwen2_moe":
        block.shared_expert_gate.weight.copy_(full_tensor("mlp.shared_gate.weight", 1, HIDDEN))
        _fill_shared(block.shared_expert, SHARED)
    result = block(_inputs(num_tokens).unsqueeze(0))
    return (result[0] if variant == "gpt_oss" else result)[0]


def _stack(name: str, *shape: int) -> Tensor:
    return torch.stack([full_tensor(f"mlp.experts.{expert}.{name}", *shape) for expert in range(NUM_EXPERTS)])


def _fill_shared(mlp: Any, inner_size: int) -> None:
    mlp.gate_proj.weight.copy_(full_tensor("mlp.shared.gate.weight", inner_size, HIDDEN))
    mlp.up_proj.weight.copy_(full_tensor("mlp.shared.up.weight", inner_size, HIDDEN))
    mlp.down_proj.weight.copy_(full_tensor("mlp.shared.down.weight", HIDDEN, inner_size))


def _mixtral() -> Any:
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

    return MixtralSparseMoeBlock(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOSEN
        )
    ).eval()


def _qwen2_moe() -> Any:
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeConfig, Qwen2MoeSparseMoeBlock

    return Qwen2MoeSparseMoeBlock(
        Qwen2MoeConfig(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            shared_expert_intermediate_size=SHARED,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_CHOSEN,
        )
    )


def _deepseek_v3() -> Any:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    return DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=HIDDEN,
            moe_intermediate_size=INNER,
            n_routed_experts=NUM_EXPERTS,
            n_shared_experts=2,
            num_experts_per_tok=NUM_CHOSEN,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        )
    )


def _gpt_oss() -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssMLP

    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=NUM_EXPERTS, num_experts_per_tok=NUM_CHOSEN
    )
    config.swiglu_limit = 1.0
    return GptOssMLP(config)


_ORIGINALS = {"mixtral": _mixtral, "qwen2_moe": _qwen2_moe, "deepseek_v3": _deepseek_v3, "gpt_oss": _gpt_oss}
