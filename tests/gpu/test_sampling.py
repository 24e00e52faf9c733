"""Tokens chosen on a GPU are those of the reference, and the host never waits for them. Not yet run."""

import pytest
import torch
from helpers.sampling_cases import SamplingCase, sampling_cases
from torch import Tensor

from parallel.kernels.sampling import Draws
from parallel.kernels.select import select_sampling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", sampling_cases(), ids=lambda case: case.name)
def test_tokens_equal_reference_and_never_wait(case: SamplingCase) -> None:
    device = torch.device("cuda")
    choose = select_sampling(device)

    def choose_without_waiting(logits: Tensor, draws: Draws | None) -> Tensor:
        choose(logits, draws)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            return choose(logits, draws)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    case.check(choose_without_waiting, device)
