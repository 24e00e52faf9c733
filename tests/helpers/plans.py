"""Plans that tests write down, share by share."""

from collections.abc import Iterable
from typing import Any

from workers.plan import NewSequence, ScheduledSequence, ScheduledSequences, StepPlan


def make_plan(
    number: int, removed: list[int], new: list[NewSequence], shares: Iterable[ScheduledSequence], **fields: Any
) -> StepPlan:
    """Return a plan of these shares; `fields` are others of StepPlan."""
    return StepPlan(number, removed, new, ScheduledSequences.of(shares), **fields)
