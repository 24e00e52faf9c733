"""No policy lets a request wait for ever, however many come that it would serve before."""

import itertools

import pytest
from helpers.fake_model import run_alone
from helpers.scheduling import ScheduledModel, make_request

from workers.config import SchedulingPolicy
from workers.sequence import SequenceStatus

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


def serve_begun_prompt_under_flood(policy: SchedulingPolicy, promote_after_s: float | None) -> float | None:
    """Return when a long, unimportant prompt has ended that began before the prompts of more urgent ones took all
    tokens of every step, of a second each. There are slots for all. None: it has not ended after 100 steps.
    """
    served = ScheduledModel(
        policy=policy, promote_after_s=promote_after_s, max_num_batched_tokens=256, num_blocks=1000, max_context=2000
    )
    long = served.submit("long", [7] * 1100, max_tokens=80, priority=5)
    for number in range(100):
        served.step()
        served.scheduler.check_integrity()
        served.now_s += 1.0
        if long.first_token_s is not None:
            return long.first_token_s
        for part in range(3):
            deadline_s = served.now_s + 1e6 if policy is SchedulingPolicy.DEADLINE else None
            served.submit(f"{number}-{part}", [8 + number % 80, part] * 64, max_tokens=1, deadline_s=deadline_s)
    assert long.num_computed_tokens == 256
    assert served.scheduler.num_running < 8, "nobody needs its slot"
    return None


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_prompt_that_has_begun_waits_no_longer_for_its_next_step(policy: SchedulingPolicy) -> None:
    ended_s = serve_begun_prompt_under_flood(policy, PROMOTE_AFTER_S)

    assert ended_s is not None
    assert ended_s <= PROMOTE_AFTER_S + 6


@pytest.mark.parametrize("policy", [policy for policy in SchedulingPolicy if policy is not SchedulingPolicy.FCFS])
def test_without_promotion_the_flood_takes_every_step_from_a_prompt(policy: SchedulingPolicy) -> None:
    assert serve_begun_prompt_under_flood(policy, None) is None


def serve_until(served: ScheduledModel, end_s: int) -> None:
    """Make a step each second until then."""
    while served.now_s < end_s:
        served.now_s += 1.0
        served.step()
        served.scheduler.check_integrity()


def test_waits_in_a_slot_and_in_the_queue_add_up() -> None:
    served = ScheduledModel(
        policy=SchedulingPolicy.PRIORITY,
        promote_after_s=PROMOTE_AFTER_S,
        max_num_batched_tokens=16,
        max_num_seqs=2,
        num_blocks=1000,
        max_context=2000,
    )
    long = served.submit("long", [7] * 1600, max_tokens=80, priority=5)
    serve_until(served, 1)
    served.submit("urgent", [8] * 16 * 14, max_tokens=1, priority=1)
    serve_until(served, 40)
    assert (long.status, long.waited_s) == (SequenceStatus.RUNNING, 15.0), "to 1, and from 2 to 16"
    served.submit("urgent again", [9] * 16 * 20, max_tokens=1, priority=1)
    serve_until(served, 50)
    served.submit("more urgent", [3] * 4, max_tokens=80, priority=0)
    serve_until(served, 51)
    assert (long.status, long.waited_s) == (SequenceStatus.WAITING, 25.0), "from 41 too"

    serve_until(served, 55)
    assert not long.is_promoted
    serve_until(served, 56)
    assert long.is_promoted
    assert long.status is SequenceStatus.RUNNING


def test_a_prompt_that_is_aborted_waits_no_more() -> None:
    served = ScheduledModel(policy=SchedulingPolicy.PRIORITY, max_num_batched_tokens=16, num_blocks=1000)
    served.submit("long", [7] * 200, max_tokens=1, priority=5)
    serve_until(served, 1)
    served.submit("urgent", [8] * 200, max_tokens=1, priority=1)
    serve_until(served, 3)
    served.abort("long")
    served.scheduler.check_integrity()


def test_a_prompt_does_not_wait_while_a_part_of_it_is_in_flight() -> None:
    served = ScheduledModel(
        policy=SchedulingPolicy.PRIORITY, max_num_batched_tokens=16, max_in_flight=2, max_context=2000, num_blocks=1000
    )
    long = served.submit("long", [7] * 100, max_tokens=1, priority=1)
    served.launch()
    served.submit("urgent", list(range(48)), max_tokens=1)
    for _ in range(3):
        served.launch()  # a third of the urgent one each
        served.now_s += 1.0
        served.collect()
    assert long.num_in_flight == 0
    served.launch()

    assert long.num_in_flight == 1
    assert long.waited_s == 2.0, "since 1, when its first part was back"
