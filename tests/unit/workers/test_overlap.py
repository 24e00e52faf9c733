"""Which steps overlap, by device, ranks and settings."""

import pytest

from workers.overlap import Lookahead, StepExecution, choose_execution, choose_lookahead


@pytest.mark.parametrize(
    ("works_by_itself", "world_size", "expected"),
    [(True, 1, "queued"), (True, 4, "queued"), (False, 1, "joined"), (False, 4, "computed")],
)
def test_who_computes_a_step_follows_from_device_and_ranks(
    works_by_itself: bool, world_size: int, expected: str
) -> None:
    assert choose_execution(works_by_itself=works_by_itself, world_size=world_size) == expected


@pytest.mark.parametrize(
    ("execution", "async_scheduling", "num_stages", "starts_steps", "expected"),
    [
        ("queued", None, 1, False, "always"),
        ("queued", False, 1, False, "never"),
        ("queued", True, 2, False, "never"),
        ("computed", None, 1, False, "never"),
        ("computed", None, 1, True, "never"),
        ("computed", True, 1, False, "always"),
        ("joined", None, 1, True, "while_requests_wait"),
        ("joined", None, 1, False, "never"),
        ("joined", True, 1, True, "always"),
        ("joined", False, 1, True, "never"),
    ],
)
def test_steps_are_planned_ahead_where_it_is_wanted_or_makes_them_faster(
    execution: str, async_scheduling: bool | None, num_stages: int, starts_steps: bool, expected: str
) -> None:
    lookahead = choose_lookahead(
        StepExecution(execution),
        async_scheduling=async_scheduling,
        num_stages=num_stages,
        starts_steps=starts_steps,
    )
    assert lookahead is Lookahead(expected)
