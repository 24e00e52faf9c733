"""No policy lets a request wait for ever, however many come that it would serve before."""

import itertools

import pytest
from helpers.fake_model import run_alone
from helpers.scheduling import ScheduledModel, make_request

from workers.config import SchedulingPolicy

PROMOTE_AFTER_S = 30.0
NUM_SLOTS = 2


def serve_under_flood(policy: SchedulingPolicy, promote_after_s: float | None, *, max_steps: int) -> int | None:
    """Return after how many steps a long, unimportant request has ended while more urgent ones fill every slot.

    A step takes a second. None: it has not ended after `max_steps`.
    """
    served = ScheduledModel(
        policy=policy, promote_after_s=promote_after_s, max_num_seqs=NUM_SLOTS, num_blocks=400, max_waiting=10_000
    )
    long = make_request("long", [7] * 40, max_tokens=80, priority=5)
    for name in itertools.count():
        if name == 3:  # they hold the slots when it comes
            served.add(long)
        for part in range(NUM_SLOTS):
            deadline_s = served.now_s + 1e6 if policy is SchedulingPolicy.DEADLINE else None
            served.submit(f"{name}-{part}", [8 + name % 80, part], max_tokens=4, deadline_s=deadline_s)
        served.step()
        served.scheduler.check_integrity()
        served.now_s += 1.0
        if "long" in served.ends:
            assert served.tokens["long"] == run_alone(long)
            return name
        if name == max_steps:
            return None
    raise AssertionError


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_wait_is_bounded_by_promotion_and_own_work(policy: SchedulingPolicy) -> None:
    num_own_steps = 80 + 3
    num_slack_steps = 12  # the requests that hold the slots, and those promoted before it

    num_steps = serve_under_flood(policy, PROMOTE_AFTER_S, max_steps=300)

    assert num_steps is not None
    assert num_steps <= PROMOTE_AFTER_S + num_own_steps + num_slack_steps


@pytest.mark.parametrize("policy", [policy for policy in SchedulingPolicy if policy is not SchedulingPolicy.FCFS])
def test_without_promotion_the_flood_starves_it(policy: SchedulingPolicy) -> None:
    assert serve_under_flood(policy, None, max_steps=300) is None
