"""Tokens chosen on a GPU are those of the reference, and the host never waits for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.sampling_cases import SamplingCase, check_edits, sampling_cases

from parallel.kernels.sampling import Edits, TokenChoice
from parallel.kernels.select import select_sampling

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", sampling_cases(), ids=lambda case: case.name)
def test_tokens_equal_reference_and_never_wait(case: SamplingCase) -> None:
    device = torch.device("cuda")
    choose, find, rank, edit = map(_without_waiting, select_sampling(device))
    case.check(TokenChoice(choose, find, rank, edit), device)


def test_edits_are_what_they_say_and_never_wait() -> None:
    device = torch.device("cuda")
    choice = select_sampling(device)

    def edit(logits_SV: torch.Tensor, edits: Edits, first_token: int) -> None:
        _without_waiting(lambda logits: choice.edit(logits, edits, first_token))(logits_SV.clone())
        choice.edit(logits_SV, edits, first_token)

    check_edits(choice._replace(edit=edit), device)


def _without_waiting(work: Any) -> Callable[..., Any]:
    def checked(*args: object) -> Any:
        work(*args)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            return work(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return checked
