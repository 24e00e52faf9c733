"""Where tokens are chosen, and that the cases which hold the fast choice to the reference can fail."""

import dataclasses
import sys

import pytest
import torch
from helpers.sampling_cases import SamplingCase, make_draws
from torch import Tensor

from parallel.kernels.sampling import Draws, choose_in_torch
from parallel.kernels.select import select_sampling

CPU = torch.device("cpu")


def test_torch_chooses_on_a_cpu() -> None:
    assert select_sampling(CPU) is choose_in_torch


def test_without_triton_torch_chooses_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "parallel.kernels.triton_sampling", raising=False)
    assert select_sampling(torch.device("cuda")) is choose_in_torch


def late_ties(logits: Tensor, draws: Draws | None) -> Tensor:
    """The last of the largest."""
    return logits.shape[1] - 1 - logits.flip(1).argmax(1)


def without_top_k(logits: Tensor, draws: Draws | None) -> Tensor:
    assert draws is not None
    return choose_in_torch(logits, dataclasses.replace(draws, top_k=draws.top_k * 0))


def other_noise(logits: Tensor, draws: Draws | None) -> Tensor:
    assert draws is not None
    return choose_in_torch(logits, dataclasses.replace(draws, noise=(draws.noise + 1e-3) % 1))


@pytest.mark.parametrize(
    ("wrong", "draws"),
    [(late_ties, None), (without_top_k, make_draws(80, [*range(80)])), (other_noise, make_draws(80, [*range(80)]))],
)
def test_a_wrong_choice_is_found(wrong: object, draws: Draws | None) -> None:
    logits = torch.randn(80, 500, generator=torch.Generator().manual_seed(0)).round()
    case = SamplingCase("wrong", logits, draws)
    case.check(choose_in_torch, CPU)
    with pytest.raises(AssertionError):
        case.check(wrong, CPU)  # type: ignore[arg-type]
