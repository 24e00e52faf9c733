"""Tokens chosen on a GPU are those of the reference, and the host never waits for them. Not yet run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sampling_cases import SamplingCase, sampling_cases

from parallel.kernels.sampling import TokenChoice
from parallel.kernels.select import select_sampling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", sampling_cases(), ids=lambda case: case.name)
def test_tokens_equal_reference_and_never_wait(case: SamplingCase) -> None:
    device = torch.device("cuda")
    choice = select_sampling(device)

    def without_waiting(work: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: object) -> Any:
            work(*args)  # compiles
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return checked

    case.check(TokenChoice(*map(without_waiting, choice)), device)
