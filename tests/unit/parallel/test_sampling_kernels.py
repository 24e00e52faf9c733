"""Where tokens are chosen, and that the cases which hold the fast choice to the reference can fail."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from helpers.sampling_cases import SamplingCase, check_edits, make_draws, sampling_cases
from torch import Tensor

from parallel.errors import DeviceError
from parallel.kernels.cpu_sampling import make_native_choice
from parallel.kernels.native import build
from parallel.kernels.sampling import IN_TORCH, Draws, choose_in_torch, rank_in_torch
from parallel.kernels.select import select_sampling

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_torch_chooses_on_a_cpu_whose_kernels_are_not_compiled(name: str) -> None:
    assert select_sampling(CPU, name) is IN_TORCH


def test_without_a_compiler_torch_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select_sampling(CPU) is IN_TORCH


@pytest.mark.parametrize("case", sampling_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_compiled_choice_is_that_of_torch(library: Path, num_threads: int, case: SamplingCase) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        choice = make_native_choice(library)
    finally:
        torch.set_num_threads(before)
    case.check(choice, CPU)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_edits_are_what_they_say(library: Path, is_compiled: bool) -> None:
    check_edits(make_native_choice(library) if is_compiled else IN_TORCH, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compared_as_it_is(dtype: torch.dtype) -> None:
    try:
        choice = make_native_choice()
    except DeviceError as error:
        pytest.skip(str(error))
    for case in sampling_cases():
        logits = case.logits.to(dtype)
        expected = choose_in_torch(logits.float(), None)
        for each in (choice, IN_TORCH):
            assert torch.equal(each.choose(logits, None), expected), case.name
            values, columns = each.find(logits, None, 0)
            assert values.dtype is torch.float32
            assert torch.equal(columns, expected), case.name


@pytest.mark.parametrize("place", [0, 15, 63, 64, 1023, 1024, 1040, 1087, 1099])
def test_the_largest_and_a_nan_are_found_anywhere(place: int) -> None:
    try:
        choice = make_native_choice()
    except DeviceError as error:
        pytest.skip(str(error))
    row = torch.randn(1, 1100, generator=torch.Generator().manual_seed(0))
    row[0, place] = 9.0
    assert choice.choose(row, None).tolist() == [place]
    row[0, place] = torch.nan
    assert choice.choose(row, None).tolist() == [-1]


def test_triton_chooses_on_a_gpu() -> None:
    pytest.importorskip("triton")
    from parallel.kernels import triton_sampling as triton

    expected = triton.choose_in_triton, triton.find_in_triton, rank_in_torch, triton.edit_in_triton
    assert select_sampling(torch.device("cuda")) == expected


def test_without_triton_torch_chooses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "parallel.kernels.triton_sampling", raising=False)
    assert select_sampling(torch.device("cuda")) is IN_TORCH


def late_ties(logits: Tensor, draws: Draws | None) -> Tensor:
    """The last of the largest."""
    return logits.shape[1] - 1 - logits.flip(1).argmax(1)


def without_top_k(logits: Tensor, draws: Draws | None) -> Tensor:
    assert draws is not None
    return choose_in_torch(logits, dataclasses.replace(draws, top_k=draws.top_k * 0))


def other_noise(logits: Tensor, draws: Draws | None) -> Tensor:
    assert draws is not None
    noise = draws.noise.copy()
    noise["key"] ^= 1
    return choose_in_torch(logits, dataclasses.replace(draws, noise=noise))


@pytest.mark.parametrize(
    ("wrong", "draws"),
    [(late_ties, None), (without_top_k, make_draws(80, [*range(80)])), (other_noise, make_draws(80, [*range(80)]))],
)
def test_a_wrong_choice_is_found(wrong: object, draws: Draws | None) -> None:
    logits = torch.randn(80, 500, generator=torch.Generator().manual_seed(0)).round()
    case = SamplingCase("wrong", logits, draws)
    case.check(IN_TORCH, CPU)
    with pytest.raises(AssertionError):
        case.check(IN_TORCH._replace(choose=wrong), CPU)  # type: ignore[arg-type]
