import pytest

from cluster.lifecycle import GroupState, Lifecycle, RestartPolicy

POLICY = RestartPolicy(first_delay_s=1.0, max_delay_s=8.0, stable_after_s=30.0, max_start_attempts=3)


def ready_group(now_s: float = 0.0) -> Lifecycle:
    life = Lifecycle(POLICY, now_s)
    life.placed(now_s)
    life.ready(now_s)
    return life


def test_new_group_waits_and_may_form_at_once() -> None:
    life = Lifecycle(POLICY, 5.0)
    assert life.state is GroupState.PENDING
    assert life.may_form(5.0)


def test_group_goes_through_starting_to_ready() -> None:
    life = Lifecycle(POLICY, 0.0)
    life.wait("needs 2 GPUs on one node; the largest free node has 1")
    assert "2 GPUs" in life.detail
    life.placed(1.0)
    assert (life.state, life.since_s) == (GroupState.STARTING, 1.0)
    life.starting("loads its weights: 40 %")
    assert life.detail == "loads its weights: 40 %"
    life.ready(3.0)
    assert (life.state, life.since_s, life.detail) == (GroupState.READY, 3.0, "")


def test_first_failure_of_a_ready_group_forms_again_at_once() -> None:
    life = ready_group()
    life.failed("rank 1 died", 100.0)
    assert life.state is GroupState.PENDING
    assert life.may_form(100.0)
    assert life.restarts == 1
    assert "rank 1 died" in life.detail
    life.placed(101.0)
    life.ready(102.0)
    assert (life.detail, life.last_failure) == ("", ("rank 1 died", 100.0))


def test_failures_in_a_row_wait_longer_up_to_the_maximum() -> None:
    life = ready_group()
    now_s, waits = 1.0, []
    for _ in range(7):
        life.failed("rank 0 died", now_s)
        wait_s = next(w for w in (0.0, 1.0, 2.0, 4.0, 8.0, 16.0) if life.may_form(now_s + w))
        waits.append(wait_s)
        now_s += wait_s
        life.placed(now_s)
        life.ready(now_s)
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert life.restarts == 7


def test_a_weekend_of_failures_waits_no_longer_and_is_no_error() -> None:
    """Past 1,025 of them the number before the maximum is taken is too large for a float."""
    assert POLICY.delay_s(100_000) == 8.0


def test_a_stable_time_forgets_earlier_failures() -> None:
    life = ready_group()
    life.failed("x", 1.0)
    life.placed(1.0)
    life.ready(1.0)
    life.failed("x", 31.0)
    assert life.may_form(31.0)


def test_group_that_never_was_ready_is_given_up() -> None:
    life = Lifecycle(POLICY, 0.0)
    for now_s in (10.0, 20.0):
        life.placed(now_s)
        life.failed("out of memory", now_s)
        assert life.state is GroupState.PENDING
    life.placed(30.0)
    life.failed("out of memory", 30.0)
    assert life.state is GroupState.FAILED
    assert life.is_over
    assert life.detail == "gave up after 3 attempts: out of memory"
    assert not life.may_form(1e9)


def test_group_that_was_ready_is_never_given_up() -> None:
    life = ready_group()
    for now_s in (100.0, 200.0, 300.0, 400.0, 500.0):
        life.failed("node lost", now_s)
        assert life.state is GroupState.PENDING
        life.placed(now_s + 50)


def test_refused_group_is_not_tried_again() -> None:
    life = Lifecycle(POLICY, 0.0)
    life.placed(1.0)
    life.refused("tensor_parallel is 3; allowed: a divisor of 8 heads", 2.0)
    assert life.state is GroupState.FAILED
    assert life.detail.startswith("tensor_parallel is 3")
    for event in (life.drain, life.stopped):
        event(2.5)
    life.failed("its processes ended", 3.0)
    assert life.state is GroupState.FAILED
    assert life.detail.startswith("tensor_parallel is 3")


@pytest.mark.parametrize("placed", [False, True])
def test_draining_a_group_without_requests_stops_it(placed: bool) -> None:
    life = Lifecycle(POLICY, 0.0)
    if placed:
        life.placed(0.0)
    life.drain(1.0)
    life.refused("no such model", 2.0)
    assert life.state is GroupState.STOPPED
    assert not life.may_form(1e9)


def test_ready_group_drains_then_stops() -> None:
    life = ready_group()
    states = []
    for event in (life.drain, life.stopped):
        event(1.0)
        states.append(life.state)
    assert states == [GroupState.DRAINING, GroupState.STOPPED]


def test_rank_that_dies_while_draining_is_not_formed_again() -> None:
    life = ready_group()
    life.drain(1.0)
    life.failed("rank 1 died", 2.0)
    assert life.state is GroupState.STOPPED
    assert life.restarts == 0


def test_events_out_of_order_are_our_bug() -> None:
    life = Lifecycle(POLICY, 0.0)
    with pytest.raises(AssertionError):
        life.ready(0.0)
