"""Every implementation of experts means what the reference means, and none for accelerators looks at what was chosen.

Tolerances as in test_kernels_cpu.py.
"""

from collections.abc import Callable

import pytest
import torch
from helpers.triton_programs import interpret
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from parallel.description import Activation
from parallel.kernels.base import ExpertWeights
from parallel.kernels.cpu_experts import CpuExperts
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_linear import OneDnnLinear
from parallel.kernels.grouped_experts import GroupedExperts, is_fast_in_torch, torch_grouped_linear
from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.linears import PackedExperts
from parallel.kernels.reference import ReferenceExperts, ReferenceKernels

NUM_EXPERTS, HIDDEN, INNER = 6, 32, 24
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def _grouped(weights: ExpertWeights) -> GroupedExperts:
    return GroupedExperts(weights, torch_grouped_linear)


IMPLEMENTATIONS: dict[str, Callable[[ExpertWeights], PackedExperts]] = {"cpu": CpuExperts, "grouped": _grouped}


def _weights(dtype: torch.dtype, *, has_bias: bool = False, hidden: int = HIDDEN, inner: int = INNER) -> ExpertWeights:
    torch.manual_seed(0)
    return ExpertWeights(
        into_XJE=(torch.randn(NUM_EXPERTS, 2 * inner, hidden) * hidden**-0.5).to(dtype),
        down_XEI=(torch.randn(NUM_EXPERTS, hidden, inner) * inner**-0.5).to(dtype),
        into_bias_XJ=torch.randn(NUM_EXPERTS, 2 * inner).to(dtype) if has_bias else None,
        down_bias_XE=torch.randn(NUM_EXPERTS, hidden).to(dtype) if has_bias else None,
        activate=ReferenceKernels().gated(Activation.SILU),
    )


def _assert_equals_reference(experts: PackedExperts, weights: ExpertWeights, x: Tensor, ids: Tensor) -> None:
    scale = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    expected = ReferenceExperts(weights)(x, ids, scale)
    actual = experts(x, ids, scale)
    tolerance = TOLERANCES[x.dtype]
    assert actual.dtype == x.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.sampled_from([1, 2, 5, 33]),
    num_chosen=st.integers(1, 4),
    first=st.integers(-4, 0),
    num_others=st.integers(0, 9),
    dtype=st.sampled_from(list(TOLERANCES)),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_experts_equal_reference(
    implementation: str,
    num_tokens: int,
    num_chosen: int,
    first: int,
    num_others: int,
    dtype: torch.dtype,
    has_bias: bool,
    seed: int,
) -> None:
    """Ids from `first` on: as on a rank with some of the experts, those of other ranks are below and above."""
    generator = torch.Generator().manual_seed(seed)
    num_ids = NUM_EXPERTS + num_others
    ids = torch.stack([torch.randperm(num_ids, generator=generator)[:num_chosen] for _ in range(num_tokens)]) + first
    weights = _weights(dtype, has_bias=has_bias)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    _assert_equals_reference(IMPLEMENTATIONS[implementation](weights), weights, x, ids)


@pytest.mark.parametrize("num_tokens", [1, 33])
@pytest.mark.parametrize("has_bias", [False, True])
def test_experts_in_8_bits_are_linear_layers_in_8_bits(num_tokens: int, has_bias: bool) -> None:
    weights = _weights(torch.float32, has_bias=has_bias)
    experts, in_reference = CpuKernels().quantize_experts(weights), ReferenceKernels().quantize_experts(weights)
    x = torch.randn(num_tokens, HIDDEN)
    ids = torch.randint(NUM_EXPERTS, (num_tokens, 1))
    scale = torch.ones(num_tokens, 1)
    expected = torch.empty(num_tokens, HIDDEN)
    for token, expert in enumerate(ids.flatten().tolist()):
        into_bias = None if weights.into_bias_XJ is None else weights.into_bias_XJ[expert]
        down_bias = None if weights.down_bias_XE is None else weights.down_bias_XE[expert]
        into, down = Int8Linear(weights.into_XJE[expert], into_bias), Int8Linear(weights.down_XEI[expert], down_bias)
        expected[token] = down(weights.activate(into(x[token : token + 1])))
    torch.testing.assert_close(experts(x, ids, scale), expected)
    torch.testing.assert_close(in_reference(x, ids, scale), expected)


@pytest.mark.parametrize("implementation", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("num_tokens", [1, 4])
def test_experts_of_other_ranks_add_nothing(implementation: str, num_tokens: int) -> None:
    experts = ({"reference": ReferenceExperts} | IMPLEMENTATIONS)[implementation](
        _weights(torch.float32, has_bias=True)
    )
    ids = torch.tensor([[-1, NUM_EXPERTS, -7]]).expand(num_tokens, 3)
    result = experts(torch.randn(num_tokens, HIDDEN), ids, torch.ones(num_tokens, 3))
    assert torch.equal(result, torch.zeros(num_tokens, HIDDEN))


def test_rows_past_the_last_expert_are_struck_out_whatever_they_hold() -> None:
    def spoiling(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        result = torch_grouped_linear(x, weight, ends)
        result[int(ends[-1]) :] = torch.nan
        return result

    weights = _weights(torch.float32)
    ids = torch.tensor([[0, NUM_EXPERTS], [NUM_EXPERTS + 1, 2]])
    _assert_equals_reference(GroupedExperts(weights, spoiling), weights, torch.randn(2, HIDDEN), ids)


def test_large_experts_are_packed_for_the_cpu() -> None:
    weights = _weights(torch.float32, has_bias=True, hidden=512, inner=512)
    experts = CpuExperts(weights)
    if torch.backends.mkldnn.is_available():
        assert isinstance(experts._into[0], OneDnnLinear)
    ids = torch.tensor([[0, 5], [5, 2], [2, 0]])
    _assert_equals_reference(experts, weights, torch.randn(3, 512), ids)


@pytest.mark.parametrize(
    ("capability", "num_out", "dtype", "is_fast"),
    [
        (9, 16, torch.bfloat16, True),
        (8, 16, torch.bfloat16, False),
        (9, 12, torch.bfloat16, False),
        (9, 16, torch.float16, False),
    ],
)
def test_torch_groups_products_where_it_has_a_kernel_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capability: int, num_out: int, dtype: torch.dtype, is_fast: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert is_fast_in_torch(torch.empty(2, num_out, 16, dtype=dtype)) is is_fast


def test_nothing_grouped_depends_on_what_was_chosen() -> None:
    """Tensors without values, as a host sees those on a device: what would wait for them raises."""
    for experts, waits in ((_grouped, False), (ReferenceExperts, True)):
        with FakeTensorMode():
            run = experts(_weights(torch.bfloat16, has_bias=True))
            inputs = torch.empty(9, HIDDEN, dtype=torch.bfloat16), torch.zeros(9, 2).long(), torch.ones(9, 2)
            if waits:
                with pytest.raises(DynamicOutputShapeException):
                    run(*inputs)
            else:
                assert run(*inputs).shape == (9, HIDDEN)


_INTERPRET = """
import torch
from parallel.kernels.triton_grouped_linear import triton_grouped_linear

torch.manual_seed(0)
for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 2e-2)):
    for num_in, num_out, ends in ((48, 70, [3, 3, 20, 21, 30]), (40, 64, [0, 150, 200]), (16, 16, [0, 0, 0])):
        x, weight = torch.randn(ends[-1] + 7, num_in).to(dtype), torch.randn(len(ends), num_out, num_in).to(dtype)
        result = triton_grouped_linear(x, weight, torch.tensor(ends, dtype=torch.int32))
        start = 0
        for expert, end in enumerate(ends):
            expected = x[start:end].float() @ weight[expert].float().T
            torch.testing.assert_close(result[start:end].float(), expected, rtol=tolerance, atol=tolerance)
            start = end
"""


def test_triton_product_is_right_when_interpreted() -> None:
    """In float32 and float16: the interpreter of Triton 3.9 multiplies the bits of bfloat16 as integers."""
    interpret(_INTERPRET)
