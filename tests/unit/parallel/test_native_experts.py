"""Experts as one call of the compiled library: they mean what the reference means, whatever else is in a step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from parallel.activation import clamped_gate
from parallel.description import Activation, ClampedGate, MoeDescription, RouterScore
from parallel.expert_router import choose_experts
from parallel.kernels.base import ExpertWeights
from parallel.kernels.cpu_experts import CpuExperts
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.native.experts import NativeExperts
from parallel.kernels.native.library import Int8Operations, Programs, load_int8, load_programs
from parallel.kernels.native.tape import Recorder
from parallel.kernels.reference import ReferenceExperts, ReferenceKernels, ReferenceLinear

TOLERANCE = 2e-2
"""Of bfloat16, as in test_kernels_cpu.py; others are finer."""


@pytest.fixture(scope="module")
def programs(library: Path) -> Programs:
    return load_programs(library) or pytest.skip("this CPU has no packed products")


@pytest.fixture(scope="module")
def int8(library: Path) -> Int8Operations | None:
    return load_int8(library)


def _weights(
    num_experts: int = 5,
    hidden: int = 64,
    inner: int = 96,
    *,
    has_bias: bool = False,
    dtype: torch.dtype,
    activation: Activation = Activation.SILU,
    gate: ClampedGate | None = None,
) -> ExpertWeights:
    generator = torch.Generator().manual_seed(num_experts)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    return ExpertWeights(
        into_XJE=random(num_experts, 2 * inner, hidden),
        down_XEI=random(num_experts, hidden, inner),
        into_bias_XJ=random(num_experts, 2 * inner) if has_bias else None,
        down_bias_XE=random(num_experts, hidden) if has_bias else None,
        activate=ReferenceKernels().gated(activation) if gate is None else clamped_gate(gate),
        activation=activation if gate is None else None,
        clamped_gate=gate,
    )


def _choose(num_tokens: int, num_ids: int, num_chosen: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(num_ids, generator=generator)[:num_chosen] for _ in range(num_tokens)])
    return ids, torch.rand(num_tokens, num_chosen, generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.sampled_from([1, 2, 5, 33, 70, 300]),
    num_chosen=st.integers(1, 4),
    first=st.integers(-4, 0),
    num_others=st.integers(0, 9),
    num_experts=st.sampled_from([1, 5, 40]),
    hidden=st.sampled_from([32, 64, 288]),
    inner=st.sampled_from([32, 96, 1312]),
    has_bias=st.booleans(),
    gate=st.sampled_from([None, ClampedGate(alpha=1.7, limit=0.6)]),
    num_threads=st.sampled_from([1, 2, 5]),
    is_int8=st.booleans(),
)
def test_they_equal_the_reference(
    programs: Programs,
    int8: Int8Operations | None,
    num_tokens: int,
    num_chosen: int,
    first: int,
    num_others: int,
    num_experts: int,
    hidden: int,
    inner: int,
    has_bias: bool,
    gate: ClampedGate | None,
    num_threads: int,
    is_int8: bool,
) -> None:
    """Ids from `first` on: as on a rank with some of the experts, those of other ranks are below and above."""
    sizes = {"num_experts": num_experts, "hidden": hidden, "inner": inner, "has_bias": has_bias, "gate": gate}
    sizes["dtype"] = programs.dtype
    ids, scale = _choose(num_tokens, num_experts + num_others, min(num_chosen, num_experts + num_others))
    x = torch.randn(num_tokens, 2 * hidden, generator=torch.Generator().manual_seed(2)).to(programs.dtype)[:, :hidden]
    is_int8 = is_int8 and int8 is not None
    expected = ReferenceExperts(_weights(**sizes), Int8Linear if is_int8 else ReferenceLinear)(x, ids + first, scale)
    experts = NativeExperts(_weights(**sizes), programs, Recorder(), num_threads, int8=int8 if is_int8 else None)
    actual = experts(x, ids + first, scale)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("num_tokens", [2, 40, 400])
def test_a_token_has_the_bits_that_it_has_alone_on_any_number_of_threads(
    programs: Programs, int8: Int8Operations | None, num_tokens: int, is_int8: bool
) -> None:
    """Runs of few rows and of many, which lie in blocks."""
    if is_int8 and int8 is None:
        pytest.skip("this CPU multiplies no vectors of 8 bits")
    ids, scale = _choose(num_tokens, 5, 2)
    x = torch.randn(num_tokens, 64, generator=torch.Generator().manual_seed(2)).to(programs.dtype)
    experts_by_threads = [
        NativeExperts(_weights(dtype=programs.dtype), programs, Recorder(), num_threads, int8=int8 if is_int8 else None)
        for num_threads in (1, 2, 5)
    ]
    results = [experts(x, ids, scale) for experts in experts_by_threads]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    experts = experts_by_threads[1]
    for token in (0, num_tokens // 2, num_tokens - 1):
        row = slice(token, token + 1)
        assert torch.equal(experts(x[row], ids[row], scale[row]), results[0][row])
        assert torch.equal(experts(x[row], ids[row].flip(1), scale[row].flip(1)), results[0][row])


def test_experts_of_other_ranks_add_nothing(programs: Programs) -> None:
    experts = NativeExperts(_weights(has_bias=True, dtype=programs.dtype), programs, Recorder(), 2)
    for num_tokens in (1, 4):
        ids = torch.tensor([[-1, 5, -7]]).expand(num_tokens, 3)
        result = experts(torch.randn(num_tokens, 64).to(programs.dtype), ids, torch.ones(num_tokens, 3))
        assert torch.equal(result, torch.zeros(num_tokens, 64))


def _moe(**fields: Any) -> MoeDescription:
    return MoeDescription(num_experts=40, num_chosen=3, intermediate_size=96, **fields)


@pytest.mark.parametrize("num_tokens", [1, 7, 90])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "moe",
    [
        _moe(),
        _moe(is_normalized=True),
        _moe(score=RouterScore.SOFTMAX_OF_CHOSEN),
        _moe(weight_multiplier=2.5),
        _moe(score=RouterScore.SIGMOID),
        _moe(score=RouterScore.SIGMOID, is_normalized=True, weight_multiplier=2.5, choice_bias=True),
        _moe(score=RouterScore.SIGMOID, num_groups=8, num_chosen_groups=3, choice_bias=True),
        _moe(score=RouterScore.SIGMOID, num_groups=2, num_chosen_groups=1),
    ],
    ids=[
        *("softmax", "normalized", "softmax-of-chosen", "multiplied", "sigmoid"),
        *("sigmoid-biased", "sigmoid-groups-biased", "sigmoid-groups"),
    ],
)
def test_they_choose_as_the_router_does(
    moe: MoeDescription, has_bias: bool, num_tokens: int, programs: Programs
) -> None:
    generator = torch.Generator().manual_seed(3)
    dtype = torch.float32 if moe.score is RouterScore.SIGMOID else programs.dtype
    router_XE = torch.randn(40, 64, generator=generator).mul_(0.2).to(programs.dtype).to(dtype)
    bias_X = torch.randn(40, generator=generator).to(programs.dtype).to(dtype) if has_bias else None
    choice_bias_X = torch.randn(40, generator=generator).mul_(0.3) if moe.choice_bias else None
    x = torch.randn(num_tokens, 64, generator=generator).to(programs.dtype)
    experts = NativeExperts(_weights(40, dtype=programs.dtype), programs, Recorder(), 2)
    route = experts.routed_by(moe, router_XE, bias_X, choice_bias_X)
    assert route is not None
    logits = F.linear(x.float(), router_XE.float(), None if bias_X is None else bias_X.float()).to(dtype)
    expected = experts(x, *choose_experts(moe, logits, choice_bias_X))
    torch.testing.assert_close(route(x), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("moe", [_moe(), _moe(score=RouterScore.SIGMOID)], ids=["softmax", "sigmoid"])
def test_a_token_whose_logits_are_no_numbers_has_none_and_others_have(moe: MoeDescription, programs: Programs) -> None:
    route = NativeExperts(_weights(40, dtype=programs.dtype), programs, Recorder(), 2).routed_by(
        moe, torch.ones(40, 64).to(programs.dtype), None, None
    )
    assert route is not None
    x = torch.ones(3, 64).to(programs.dtype)
    x[1, 5] = torch.nan
    result = route(x)
    assert result[1].isnan().all()
    assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    "moe",
    [
        _moe(choice_bias=True),
        _moe(num_groups=4, num_chosen_groups=2),
        replace(_moe(), num_experts=80),
    ],
    ids=["softmax-with-choice-bias", "groups-by-softmax", "some-of-them"],
)
def test_what_they_do_not_choose_is_chosen_before(moe: MoeDescription, programs: Programs) -> None:
    experts = NativeExperts(_weights(40, dtype=programs.dtype), programs, Recorder(), 2)
    choice_bias_X = torch.zeros(40) if moe.choice_bias else None
    weight_XE = torch.zeros(moe.num_experts, 64).to(programs.dtype)
    assert experts.routed_by(moe, weight_XE, None, choice_bias_X) is None


def test_a_router_whose_weights_would_be_rounded_stays_as_it_is(programs: Programs) -> None:
    if programs.dtype is torch.float32:
        pytest.skip("float32 is not rounded")
    experts = NativeExperts(_weights(40, dtype=programs.dtype), programs, Recorder(), 2)
    moe = _moe(score=RouterScore.SIGMOID)
    for weight, bias in ((0.1, 1.0), (1.0, 0.1)):
        assert experts.routed_by(moe, torch.full((40, 64), weight), torch.full((40,), bias), None) is None
    assert experts.routed_by(moe, torch.ones(40, 64), torch.ones(40), None) is not None


def test_a_logit_in_float32_is_not_rounded_before_experts_are_compared(programs: Programs) -> None:
    """In bfloat16 all would be equal, and the first experts chosen."""
    moe, x = _moe(score=RouterScore.SIGMOID), torch.zeros(1, 64).to(programs.dtype)
    x[0, :2] = torch.tensor([256.0, 1.0])
    weight_XE = torch.zeros(40, 64)
    weight_XE[:, 0], weight_XE[-3:, 1] = 2**-8, 2**-8
    experts = NativeExperts(_weights(40, dtype=programs.dtype), programs, Recorder(), 2)
    route = experts.routed_by(moe, weight_XE, None, None)
    assert route is not None
    chosen = torch.tensor([[37, 38, 39]])[:, -moe.num_chosen :]
    weights = torch.full(chosen.shape, 1 + 2**-8).sigmoid()
    torch.testing.assert_close(route(x), experts(x, chosen, weights), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("fields", "is_native"),
    [
        ({}, True),
        ({"gate": ClampedGate(alpha=1.7, limit=0.6)}, True),
        ({"inner": 48}, False),
        ({"hidden": 48}, False),
        ({"dtype": torch.float64}, False),
        ({"activation": Activation.GELU}, False),
    ],
    ids=["whole", "clamped", "inner-48", "hidden-48", "float64", "gelu"],
)
def test_what_they_do_not_take_is_torchs(fields: dict[str, Any], is_native: bool, programs: Programs) -> None:
    weights = _weights(**{"dtype": programs.dtype} | fields)
    kernels = NativeCpuKernels({}, programs, 2)
    assert isinstance(kernels.pack_experts(weights), NativeExperts if is_native else CpuExperts)
