from collections.abc import Sequence

import pytest

from cluster.plan_groups import GroupPlan, LiveGroup, plan_groups


def groups(text: str) -> list[LiveGroup]:
    """From "1R 1s 2F": revision, and R for READY, F for FAILED."""
    return [
        LiveGroup(
            group_id=f"g{number}",
            number=number,
            revision=int(word[0]),
            is_ready=word[1] == "R",
            has_failed=word[1] == "F",
        )
        for number, word in enumerate(text.split())
    ]


def plan(num_new: int, leaving: Sequence[int] = ()) -> GroupPlan:
    return GroupPlan(num_new=num_new, leaving=tuple(f"g{number}" for number in leaving))


@pytest.mark.parametrize(
    ("replicas", "revision", "live", "expected"),
    [
        (2, 1, "", plan(2)),
        (2, 1, "1s 1R", plan(0)),
        (3, 1, "1R", plan(2)),
        (1, 1, "1R 1R 1R", plan(0, [1, 2])),  # the oldest stays
        (1, 1, "1s 1R", plan(0, [0])),  # the READY one stays
        (0, 1, "1R 1s", plan(0, [0, 1])),
        (1, 1, "1F 1s", plan(0, [0])),  # the one that may still be READY stays
        (2, 1, "1F 1R", plan(0)),  # not formed anew: it would end the same way
        # a rollout of two
        (2, 2, "1R 1R", plan(1)),
        (2, 2, "1R 1R 2s", plan(0)),
        (2, 2, "1R 1R 2R", plan(1, [1])),
        (2, 2, "1R 2R 2s", plan(0)),
        (2, 2, "1R 2R 2R", plan(0, [0])),
        # an older group that is not READY goes first, and not before one is
        (2, 2, "1s 1R 2s", plan(0)),
        (2, 2, "1s 1R 2R", plan(1, [0])),
        # scaled while it rolls
        (4, 2, "1R 1R 2s", plan(2)),
        (1, 2, "1R 1R 2s", plan(0, [1])),
        (0, 2, "1R 2R", plan(0, [1, 0])),
        # undone half way: what was new is old now
        (2, 1, "1R 1R 2s", plan(0, [2])),
        (2, 1, "1R 2R 2s", plan(1, [2])),
        # the model is no longer wanted
        (0, 0, "1R 2s", plan(0, [0, 1])),
    ],
)
def test_plan_names_the_groups_to_form_and_to_let_go(
    replicas: int, revision: int, live: str, expected: GroupPlan
) -> None:
    assert plan_groups(replicas, revision, groups(live)) == expected
