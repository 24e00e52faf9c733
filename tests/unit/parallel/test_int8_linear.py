"""Linear layers in 8 bits: what they mean, that the compiled ones have the same bits, and which layers they are."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.largest_outputs import check_drawn, check_largest
from helpers.sampling_cases import make_draws
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.host_memory import HugePages
from parallel.kernels import int8_linear
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.cpu_sampling import make_native_choice
from parallel.kernels.int8_linear import Int8Linear, quantize_rows
from parallel.kernels.linears import Search
from parallel.kernels.native.int8_linear import NativeInt8Linear
from parallel.kernels.native.library import Int8Operations, Operations, load_int8
from parallel.kernels.native.tape import Recorder
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Mesh
from parallel.random_model import write_random_model

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(512, 96, True), (336, 1056, False), (50, 352, True), (7, 13, True), (64, 2048, True)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_case(num_out: int, num_in: int, has_bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    bias = random(num_out, dtype=dtype, seed=2) if has_bias else None
    return random(num_out, num_in, dtype=dtype, seed=1), bias


def make_rows(num_rows: int, num_in: int, dtype: torch.dtype) -> Tensor:
    """Rows that are not dense, of very different size, one of zeros and one of almost nothing."""
    x = random(num_rows, num_in + 8, dtype=torch.float32, seed=num_rows)
    x *= random(num_rows, 1, dtype=torch.float32, seed=3).mul_(4).exp_()
    x[1:2] = 0
    x[2:3] = 1e-38
    if dtype is torch.float16:
        x.clamp_(-100, 100)  # so that products are numbers
    return x.to(dtype)[:, :num_in]


def test_rows_are_rounded_to_the_nearest_of_255_values() -> None:
    x = torch.tensor([[0.0, 1.0, -2.54, 0.013], [0.0, 0.0, 0.0, 0.0], [6.35, 0.025, 0.075, -6.35]])
    integers, scales = quantize_rows(x)
    assert integers.tolist() == [[0, 50, -127, 1], [0, 0, 0, 0], [127, 0, 2, -127]]  # 0.5 and 1.5 become even
    torch.testing.assert_close(scales[::2, 0], torch.tensor([0.02, 0.05]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
def test_sums_are_those_of_the_integers(dtype: torch.dtype) -> None:
    weight, bias = make_case(48, 2048, True, dtype)
    x = make_rows(9, 2048, torch.float32).clamp(-1e4, 1e4).to(dtype)
    (x_int, x_scales), (w_int, w_scales) = quantize_rows(x), quantize_rows(weight)
    assert bias is not None
    expected = (x_int.double() @ w_int.double().T) * x_scales * w_scales.T + bias
    torch.testing.assert_close(Int8Linear(weight, bias)(x).double(), expected, rtol=2**-7, atol=1e-5)


def test_both_ways_to_multiply_are_exact() -> None:
    extremes = torch.full((40, 4864), -127, dtype=torch.int8)
    extremes[:, ::3] = 127
    integers = torch.randint(-127, 128, (24, 4864), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    integers[0] = -127
    expected = (extremes.double() @ integers.double().T).int()
    assert torch.equal(int8_linear._multiply_exactly(extremes, integers), expected)
    if int8_linear._multiplies_integers(CPU):
        assert torch.equal(int8_linear._multiply_integers(extremes, integers), expected)


@pytest.mark.parametrize(
    ("num_out", "num_in", "has_vnni", "is_integer"),
    [(48, 96, True, True), (48, 96, False, False), (50, 96, True, False), (48, 100, True, False)],
)
def test_torch_multiplies_integers_where_it_is_exact_and_takes_the_sizes(
    monkeypatch: pytest.MonkeyPatch, num_out: int, num_in: int, has_vnni: bool, is_integer: bool
) -> None:
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: has_vnni)
    assert int8_linear._multiplies_integers(torch.device("cuda")), "whatever the CPU has"
    assert not int8_linear._multiplies_integers(torch.device("meta"))
    monkeypatch.delattr(int8_linear, "_multiply_exactly" if is_integer else "_multiply_integers")
    weight, bias = make_case(num_out, num_in, True, torch.float32)
    assert Int8Linear(weight, bias)(random(20, num_in, dtype=torch.float32)).shape == (20, num_out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_close_to_that_of_the_model(dtype: torch.dtype) -> None:
    weight, bias = make_case(256, 768, True, dtype)
    x = random(20, 768, dtype=dtype)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    error = (Int8Linear(weight, bias)(x).double() - exact).norm() / exact.norm()
    assert error < 0.015


def test_the_bits_of_a_row_do_not_depend_on_the_others() -> None:
    linear = Int8Linear(*make_case(64, 96, True, torch.bfloat16))
    x = make_rows(33, 96, torch.bfloat16)
    together = linear(x)
    assert all(torch.equal(linear(x[row : row + 1])[0], together[row]) for row in range(33))


@pytest.fixture(scope="module")
def native(library: Path) -> Int8Operations:
    return load_int8(library) or pytest.skip("this CPU multiplies no vectors of 8 bits")


@pytest.mark.parametrize(("num_out", "num_in", "has_bias"), SHAPES)
def test_compiled_products_have_the_same_bits(
    native: Int8Operations, library: Path, dtype: torch.dtype, num_out: int, num_in: int, has_bias: bool
) -> None:
    choice = make_native_choice(library)
    weight, bias = make_case(num_out, num_in, has_bias, dtype)
    meaning = Int8Linear(weight, bias)
    compiled = [
        NativeInt8Linear(weight.clone(), bias, native, Recorder(), num_threads, memory=HugePages(), keeps_weight=False)
        for num_threads in (1, 2)
    ]
    for num_rows in (1, 3, 5, 16, 17, 32, 33, 64, 65, 100, 700):
        x = make_rows(num_rows, num_in, dtype)
        expected = meaning(x)
        for linear in compiled:
            assert torch.equal(linear(x), expected), num_rows
            check_largest(linear, x)
            check_drawn(linear, x, Search(make_draws(num_rows, [*range(0, num_rows, 2)]).noise), choice)


@pytest.mark.parametrize(
    ("num_out", "num_in"),
    [(2560, 64), (2570, 64), (600, 5248)],
    ids=["past-the-caches", "rows-not-on-cache-lines", "sums-in-parts"],
)
def test_a_large_product_has_the_bits_of_its_rows(
    native: Int8Operations, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    weight, _ = make_case(num_out, num_in, False, dtype)
    linear = NativeInt8Linear(weight, None, native, Recorder(), 2, memory=HugePages(), keeps_weight=True)
    x = make_rows(900, num_in, dtype)
    assert torch.equal(linear(x), torch.cat([linear(rows) for rows in x.split(17)]))
    check_largest(linear, x)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(
    native: Int8Operations, dtype: torch.dtype, bad: float
) -> None:
    weight, bias = make_case(96, 128, True, dtype)
    x = random(20, 128, dtype=dtype)
    expected = Int8Linear(weight, bias)(x)
    x[7, 100] = bad
    compiled = NativeInt8Linear(weight.clone(), bias, native, Recorder(), 2, memory=HugePages(), keeps_weight=False)
    for linear in (Int8Linear(weight, bias), compiled):
        y = linear(x)
        assert not y[7].isfinite().any()
        assert torch.equal(y[:7], expected[:7])
        assert torch.equal(y[8:], expected[8:])


def test_a_weight_is_given_up_unless_it_is_kept(native: Int8Operations, dtype: torch.dtype) -> None:
    weight, _ = make_case(2048, 512, False, dtype)  # several pages, packed in several parts
    kept = weight.clone()
    NativeInt8Linear(kept, None, native, Recorder(), 2, memory=HugePages(), keeps_weight=True)
    assert torch.equal(kept, weight)
    given_up = weight.clone()
    NativeInt8Linear(given_up, None, native, Recorder(), 2, memory=HugePages(), keeps_weight=False)
    assert not torch.equal(given_up, weight)


def test_a_weight_that_is_given_up_in_pieces_is_packed_whole(native: Int8Operations, dtype: torch.dtype) -> None:
    weight, x = random(2080, 1024, dtype=dtype, seed=1), random(3, 1024, dtype=dtype)  # 4 pieces and a rest
    kept, given_up = (
        NativeInt8Linear(weight.clone(), None, native, Recorder(), 2, memory=HugePages(), keeps_weight=keeps)
        for keeps in (True, False)
    )
    assert torch.equal(kept(x), given_up(x))


def test_without_the_instructions_torch_does_it(operations: Operations, dtype: torch.dtype) -> None:
    weight, bias = make_case(48, 96, True, dtype)
    assert isinstance(NativeCpuKernels(operations, None, 2).quantize_linear(weight, bias), Int8Linear)
    assert isinstance(CpuKernels().quantize_linear(weight, bias), Int8Linear)


CONFIG: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


class CountingKernels(ReferenceKernels):
    """Counts what is laid out how."""

    def __init__(self) -> None:
        self.in_8_bits: list[tuple[int, ...]] = []
        self.plain: list[tuple[int, ...]] = []

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> Any:
        self.plain.append(tuple(weight_OI.shape))
        return super().pack_linear(weight_OI, bias_O)

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> Any:
        self.in_8_bits.append(tuple(weight_OI.shape))
        return super().quantize_linear(weight_OI, bias_O, keeps_weight=keeps_weight)


@pytest.mark.parametrize(
    ("config", "in_8_bits", "plain"),
    [
        ({"model_type": "llama"}, [(320, 64), *[(128, 64), (64, 64), (192, 64), (64, 96)] * 2], []),
        (
            {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False},
            [(320, 64), *[(128, 64), (64, 64)] * 2],
            [(3, 64)] * 2,
        ),
    ],
    ids=["dense", "experts"],
)
def test_which_layers_are_in_8_bits(
    config: dict[str, Any], in_8_bits: list[tuple[int, ...]], plain: list[tuple[int, ...]], tmp_path: Path
) -> None:
    write_random_model(tmp_path / "model", CONFIG | config, 0, torch.float32)
    for int8_linears in (True, False):
        kernels = CountingKernels()
        load_decoder(
            tmp_path / "model",
            mesh=Mesh.single(),
            device=CPU,
            dtype=torch.float32,
            kernels=kernels,
            int8_linears=int8_linears,
        )
        assert kernels.in_8_bits == (in_8_bits if int8_linears else [])
        assert not int8_linears or kernels.plain == plain


def test_a_row_of_zeros_is_zeros() -> None:
    integers, scales = quantize_rows(torch.zeros(1, 8))
    assert not integers.any()
    assert scales.isfinite().all()
    assert (scales > 0).all()
