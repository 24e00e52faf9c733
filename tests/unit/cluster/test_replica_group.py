import asyncio
from collections.abc import Callable

import pytest
from helpers.cluster import FakeClock, Formations, model_spec, turns

from cluster.lifecycle import GroupState, RestartPolicy
from cluster.rank_values import Outcome
from cluster.replica_group import ReplicaGroup
from cluster.saved_state import GroupRecord


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def forms() -> Formations:
    return Formations()


@pytest.fixture
def changes() -> list[None]:
    return []


@pytest.fixture
def group(clock: FakeClock, forms: Formations, changes: list[None]) -> ReplicaGroup:
    on_change: Callable[[], None] = lambda: changes.append(None)  # noqa: E731
    return make_group(clock, forms, on_change)


def make_group(
    clock: FakeClock, forms: Formations, on_change: Callable[[], None] = lambda: None, *, num_lives: int = 0
) -> ReplicaGroup:
    spec = model_spec("/models/m", tensor_parallel=2)
    record = GroupRecord(group_id="m-0", number=0, revision=1, section=spec.section, hash_key=b"k", num_lives=num_lives)
    return ReplicaGroup(
        record,
        form=forms,
        policy=RestartPolicy(),
        clock=clock,
        on_change=on_change,
        on_record=lambda: None,
        adopts=num_lives > 0,
    )


async def test_reconcile_forms_a_group_once(group: ReplicaGroup, forms: Formations) -> None:
    for _ in range(3):
        group.reconcile()
    assert [life.replica_id for life in forms.lives] == ["m-0.1"]
    assert group.endpoint is None


async def test_ready_group_is_in_membership_with_its_ranks(
    group: ReplicaGroup, forms: Formations, clock: FakeClock
) -> None:
    group.reconcile()
    forms.lives[0].become_ready()
    clock.advance(5.0)
    assert group.endpoint is not None
    assert (group.endpoint.replica_id, group.endpoint.model) == ("m-0.1", "m")
    status = group.status()
    assert [rank.pid for rank in status.ranks] == [1000, 1001]
    assert all(rank.alive for rank in status.ranks)
    assert (status.progress, status.tensor_parallel, status.seconds_in_state) == (1.0, 2, 5.0)


async def test_dead_rank_leaves_membership_and_the_group_forms_again_as_a_new_replica(
    group: ReplicaGroup, forms: Formations, changes: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    group.reconcile()
    forms.lives[0].become_ready()
    num_changes = len(changes)
    await forms.lives[0].end(Outcome(message="rank 1 died"))
    assert len(changes) > num_changes  # wakes the controller
    group.reconcile()
    assert caplog.messages == ["group m-0 (m-0.1) ended: rank 1 died"]
    assert [life.replica_id for life in forms.lives] == ["m-0.1", "m-0.2"]
    assert group.endpoint is None
    assert not group.status().ranks
    forms.lives[1].become_ready()
    assert group.endpoint is not None
    assert group.endpoint.replica_id == "m-0.2"
    assert group.status().restarts == 1


async def test_group_that_dies_again_waits_for_its_backoff(
    group: ReplicaGroup, forms: Formations, clock: FakeClock
) -> None:
    for _ in range(2):
        group.reconcile()
        forms.lives[-1].become_ready()
        await forms.lives[-1].end(Outcome(message="rank 0 died"))
    group.reconcile()
    assert len(forms.lives) == 2
    assert group.status().detail == "starts again in 1 s: rank 0 died"
    clock.advance(1.0)
    group.reconcile()
    assert len(forms.lives) == 3


async def test_refused_group_fails_for_good(group: ReplicaGroup, forms: Formations, clock: FakeClock) -> None:
    group.reconcile()
    await forms.lives[0].end(Outcome(message="tensor lm_head.weight is missing", is_refusal=True))
    group.reconcile()
    clock.advance(1e6)
    group.reconcile()
    assert len(forms.lives) == 1
    assert group.lifecycle.state is GroupState.FAILED
    assert group.status().detail == "tensor lm_head.weight is missing"


async def test_reason_for_waiting_is_shown(group: ReplicaGroup, forms: Formations) -> None:
    group.reconcile()
    forms.lives[0].listener.on_waiting("needs 2 GPUs on one node; the largest free node has 1")
    assert group.lifecycle.state is GroupState.PENDING
    assert group.status().detail.startswith("needs 2 GPUs")


async def test_stop_drains_and_ends_every_process(group: ReplicaGroup, forms: Formations) -> None:
    group.reconcile()
    await forms.lives[0].begun.wait()
    forms.lives[0].become_ready()
    await group.stop(grace_s=3.0)
    assert forms.lives[0].drained_s == 3.0
    assert forms.lives[0].was_cancelled
    assert group.lifecycle.state is GroupState.STOPPED
    assert group.endpoint is None
    group.reconcile()
    assert len(forms.lives) == 1


async def test_stop_while_starting_ends_it_without_a_drain(group: ReplicaGroup, forms: Formations) -> None:
    group.reconcile()
    await forms.lives[0].begun.wait()
    forms.lives[0].listener.on_placed()
    await group.stop(grace_s=3.0)
    assert forms.lives[0].drained_s is None
    assert forms.lives[0].was_cancelled
    assert group.lifecycle.state is GroupState.STOPPED


async def test_bug_in_a_formation_is_a_failure_of_the_group_only(group: ReplicaGroup, forms: Formations) -> None:
    group.reconcile()
    await forms.lives[0].break_down(RuntimeError("boom"))
    group.reconcile()
    assert "RuntimeError: boom" in group.status().detail
    assert len(forms.lives) == 2


async def test_group_that_leaves_drains_stays_in_membership_and_is_not_formed_again(
    group: ReplicaGroup, forms: Formations, changes: list[None]
) -> None:
    group.reconcile()
    await turns()
    (life,) = forms.lives
    life.become_ready()
    life.holds_requests = True
    changes.clear()
    group.leave(7.0)
    await turns()
    assert life.drained_s == 7.0
    assert changes, "routers are told at once"
    assert group.lifecycle.state is GroupState.DRAINING
    assert group.endpoint is not None
    assert group.endpoint.draining
    assert not group.is_gone
    assert group.record.is_leaving
    life.requests_ended.set()
    await turns()
    assert group.is_gone
    assert group.endpoint is None
    assert life.was_cancelled
    group.reconcile()
    assert len(forms.lives) == 1


@pytest.mark.parametrize("graces_s", [(3600.0, 0.0), (3600.0, 0.02), (0.02, 3600.0)])
@pytest.mark.parametrize("first", ["leave", "stop"])
async def test_drain_ends_with_the_shorter_grace_of_two(
    group: ReplicaGroup, forms: Formations, graces_s: tuple[float, float], first: str, caplog: pytest.LogCaptureFixture
) -> None:
    group.reconcile()
    await turns()
    (life,) = forms.lives
    life.become_ready()
    life.holds_requests = True
    stopping = asyncio.create_task(group.stop(graces_s[0])) if first == "stop" else None
    if stopping is None:
        group.leave(graces_s[0])
    await turns()
    assert not life.was_cancelled
    group.leave(graces_s[1])
    async with asyncio.timeout(10):
        await group.stop(3600.0)
        if stopping is not None:
            await stopping
    assert life.was_cancelled
    assert group.is_gone
    assert caplog.messages == ["group m-0 (m-0.1) ends at once: its grace is over"]


@pytest.mark.parametrize("graces_s", [(7.0, 60.0), (60.0, 7.0)])
async def test_stop_of_a_group_that_leaves_waits_for_its_requests(
    group: ReplicaGroup, forms: Formations, graces_s: tuple[float, float]
) -> None:
    group.reconcile()
    await turns()
    (life,) = forms.lives
    life.become_ready()
    life.holds_requests = True
    group.leave(graces_s[0])
    await turns()
    stopping = asyncio.create_task(group.stop(graces_s[1]))
    await turns()
    assert not life.was_cancelled
    life.requests_ended.set()
    await stopping
    assert life.was_cancelled
    assert group.is_gone


async def test_pass_at_any_moment_of_a_leave_does_not_disturb_it(group: ReplicaGroup, forms: Formations) -> None:
    group.reconcile()
    await turns()
    forms.lives[0].become_ready()
    group.leave(7.0)
    for _ in range(20):
        group.reconcile()
        await asyncio.sleep(0)
    assert group.is_gone
    assert len(forms.lives) == 1


async def test_rank_that_dies_while_its_group_leaves_ends_the_group(group: ReplicaGroup, forms: Formations) -> None:
    group.reconcile()
    await turns()
    forms.lives[0].become_ready()
    forms.lives[0].holds_requests = True
    group.leave(7.0)
    await turns()
    await forms.lives[0].end(Outcome(message="rank 1 died"))
    group.reconcile()
    forms.lives[0].requests_ended.set()
    await turns()
    group.reconcile()
    assert group.is_gone
    assert len(forms.lives) == 1


async def test_live_group_is_adopted_under_its_replica_id(clock: FakeClock, forms: Formations) -> None:
    group = make_group(clock, forms, num_lives=3)
    assert group.is_adopting
    group.reconcile()
    (life,) = forms.lives
    assert (life.replica_id, life.adopts) == ("m-0.3", True)
    life.be_adopted()
    assert not group.is_adopting
    assert group.endpoint is not None
    assert (group.endpoint.replica_id, group.lifecycle.restarts) == ("m-0.3", 0)


async def test_group_that_loads_its_model_is_adopted_too(
    clock: FakeClock, forms: Formations, changes: list[None]
) -> None:
    group = make_group(clock, forms, lambda: changes.append(None), num_lives=1)
    group.reconcile()
    forms.lives[0].be_adopted(is_ready=False)
    assert (group.lifecycle.state, group.status().detail) == (GroupState.STARTING, "loading the model")
    assert not group.is_adopting
    changes.clear()
    forms.lives[0].listener.on_ready(forms.lives[0].addresses)
    assert changes, "routers are told at once"
    assert group.lifecycle.state is GroupState.READY


async def test_group_that_did_not_outlive_the_controller_is_formed_as_a_new_replica(
    clock: FakeClock, forms: Formations
) -> None:
    group = make_group(clock, forms, num_lives=1)
    group.reconcile()
    await forms.lives[0].end(Outcome(message="was lost while no controller watched it"))
    group.reconcile()
    assert not group.is_adopting
    assert [(life.replica_id, life.adopts) for life in forms.lives] == [("m-0.1", True), ("m-0.2", False)]
    assert group.record.num_lives == 2


async def test_leaving_group_is_adopted_first_and_then_drained(clock: FakeClock, forms: Formations) -> None:
    group = make_group(clock, forms, num_lives=1)
    group.leave(5.0)
    group.reconcile()
    await turns()
    assert not group.is_gone
    forms.lives[0].be_adopted()
    await turns()
    assert forms.lives[0].drained_s == 5.0
    assert group.is_gone


async def test_stop_during_an_adoption_waits_until_it_is_known_what_there_is(
    clock: FakeClock, forms: Formations
) -> None:
    group = make_group(clock, forms, num_lives=1)
    stopping = asyncio.create_task(group.stop(grace_s=60.0))  # before any pass
    await turns()
    (life,) = forms.lives
    assert life.adopts
    assert not life.was_cancelled
    clock.advance(2.0)
    life.be_adopted()
    await stopping
    assert life.drained_s == 58.0
    assert life.was_cancelled


async def test_stop_during_an_adoption_that_takes_too_long_ends_the_life_that_looks(
    clock: FakeClock, forms: Formations
) -> None:
    group = make_group(clock, forms, num_lives=1)
    async with asyncio.timeout(10):
        await group.stop(grace_s=0.0)
    (life,) = forms.lives
    assert life.begun.is_set()  # else it would not have looked for what there is
    assert life.was_cancelled
    assert not group.is_adopting
    assert group.lifecycle.state is GroupState.STOPPED


async def test_status_says_why_a_group_is_slow_as_long_as_it_lives(clock: FakeClock, forms: Formations) -> None:
    group = make_group(clock, forms)
    group.reconcile()
    (life,) = forms.lives
    life.listener.on_slow("no compiler")
    life.become_ready()
    assert group.status().detail == "no compiler"
    await life.end(Outcome(message="rank 1 died"))
    group.reconcile()
    forms.lives[1].become_ready()
    assert (group.lifecycle.state, group.status().detail) == (GroupState.READY, "")
