"""A service that stops: in which order, with how much grace, and under the next controller."""

import asyncio

import pytest
from helpers.cluster import turns
from helpers.wanted_bench import Bench
from weft.v1 import control_pb2

from cluster.errors import StoppingError
from cluster.rank_values import Outcome


async def test_shutdown_stops_routers_and_then_groups_whose_requests_of_other_routers_finish(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.lives[0].become_ready()
    await bench.state.shut_down(4.0)
    assert bench.router.stopped_with_s == bench.other_router.stopped_with_s == 4.0
    assert [life.drained_s for life in bench.forms.lives] == [4.0, None], "one has not begun"
    assert all(life.was_cancelled for life in bench.forms.lives)
    assert bench.state.is_stopped
    bench.state.reconcile()
    assert len(bench.forms.lives) == 2


async def test_a_stop_without_groups_wakes_the_controller(bench: Bench) -> None:
    bench.changed.clear()
    await bench.state.shut_down(1.0)
    assert bench.changed.is_set()


async def test_two_shutdowns_at_once_let_requests_finish(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    for life in bench.forms.lives:
        life.holds_requests = True
    await bench.state.drain("m-1.1", 3600.0)
    stops = [asyncio.create_task(bench.state.shut_down(grace_s)) for grace_s in (60.0, 50.0)]
    await turns()
    assert not any(life.was_cancelled for life in bench.forms.lives)
    assert not bench.state.is_stopped
    for life in bench.forms.lives:
        life.requests_ended.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*stops)
    assert all(life.was_cancelled for life in bench.forms.lives)
    assert bench.state.is_stopped


async def test_a_shutdown_goes_on_when_whoever_asked_for_it_goes_away(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.router.may_stop.clear()
    asking = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    asking.cancel()  # Ctrl-C of `weft stop`, or its deadline
    await turns()
    assert not bench.state.is_stopped
    bench.router.may_stop.set()
    async with asyncio.timeout(10):
        await asyncio.wait([asking])
    assert all(life.was_cancelled for life in bench.forms.lives)
    assert bench.state.is_stopped


async def test_shutdown_of_a_new_controller_lets_requests_of_what_lives_finish(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.restart()
    stopping = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    lives, lost = bench.forms.lives
    lives.holds_requests = True
    lives.be_adopted()
    await lost.end(Outcome(message="was lost while no controller watched it"))
    bench.state.reconcile()
    await turns()
    assert lives.drained_s == 60.0
    assert not lives.was_cancelled
    lives.requests_ended.set()
    async with asyncio.timeout(10):
        await stopping
    assert lives.was_cancelled
    assert len(bench.forms.lives) == 2


async def test_a_service_that_stops_refuses_every_change_one_begun_before_too(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.state.roll("m", {"max_context": 128})
    await bench.settle()
    bench.router.may_stop.clear()
    applying = asyncio.create_task(bench.state.apply(bench.specs({"replicas": 3})))
    await asyncio.sleep(0)  # the model is being read
    stopping = asyncio.create_task(bench.state.shut_down(60.0))
    await asyncio.sleep(0)
    for change in (
        applying,
        bench.state.apply(bench.specs({"replicas": 2}), dry_run=True),
        bench.state.roll("m", {}),
        bench.state.undo("m"),
        bench.state.undrain("node-a"),
    ):
        with pytest.raises(StoppingError, match="the service is stopping"):
            await change
    with pytest.raises(StoppingError):
        bench.state.scale("m", 2)
    assert (bench.model().wanted_replicas, bench.model().revision) == (2, 2)
    bench.router.may_stop.set()
    await stopping


async def test_a_replica_can_be_drained_sooner_than_the_service_stops(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.router.may_stop.clear()  # until then groups serve on
    stopping = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    assert await bench.state.drain("m-0.1", 5.0) == (["m-0.1"], "")
    await turns()
    bench.state.reconcile()
    assert [group.replica_id for group in bench.model().groups] == ["m-1.1"]
    assert len(bench.forms.lives) == 2
    bench.router.may_stop.set()
    await stopping


async def test_a_stop_is_gone_on_with_by_the_next_controller(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.router.may_stop.clear()
    lost = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    assert not any(life.was_cancelled for life in bench.forms.lives), "kept before anything is done"
    bench.clock.advance(20.0)
    bench.router.may_stop.set()
    bench.restart()
    assert bench.state.is_stopping
    bench.state.reconcile()
    with pytest.raises(StoppingError):
        bench.state.scale("m", 3)
    finishing = asyncio.create_task(bench.state.finish_stop())
    await turns()
    assert bench.router.stopped_with_s == 40.0
    for life in bench.forms.lives:
        life.be_adopted()
    async with asyncio.timeout(10):
        await finishing
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1"], "none was formed"
    assert [life.drained_s for life in bench.forms.lives] == [40.0, 40.0]
    assert all(life.was_cancelled for life in bench.forms.lives)
    assert bench.state.is_stopped
    await lost


async def test_groups_of_a_stop_that_the_next_controller_goes_on_with_are_told_as_they_are(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.router.may_stop.clear()
    lost = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    bench.restart()

    def told() -> list[tuple[str, str]]:
        return [(control_pb2.GroupState.Name(group.state), group.detail) for group in bench.model().groups]

    finishing = asyncio.create_task(bench.state.finish_stop())
    bench.state.reconcile()
    await turns()
    assert told() == [("GROUP_STATE_PENDING", "a new controller looks for its processes")] * 2
    for life in bench.forms.lives:
        life.holds_requests = True
        life.be_adopted()
    assert told() == [("GROUP_STATE_READY", "")] * 2, "for requests that routers finish"
    bench.router.may_stop.set()
    await turns()
    assert told() == [("GROUP_STATE_DRAINING", "finishes its requests")] * 2
    for life in bench.forms.lives:
        life.requests_ended.set()
    async with asyncio.timeout(10):
        await asyncio.gather(finishing, lost)
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1"]


async def test_the_next_controller_gives_a_stop_the_least_grace_that_was_asked_for(bench: Bench) -> None:
    await bench.apply({})
    bench.router.may_stop.clear()
    stops = [asyncio.create_task(bench.state.shut_down(grace_s)) for grace_s in (60.0, 10.0, 30.0)]
    await turns()
    bench.router.may_stop.set()
    await asyncio.gather(*stops)
    bench.restart()
    finishing = asyncio.create_task(bench.state.finish_stop())
    await turns()
    assert bench.router.stopped_with_s == 10.0
    bench.forms.lives[0].be_adopted()
    await finishing


@pytest.mark.parametrize("booted_s", [1.0, 1e7])
@pytest.mark.parametrize(("wall_set_by_s", "left_s"), [(0.0, 40.0), (3600.0, 0.0), (-3600.0, 60.0)])
async def test_a_stop_has_the_rest_of_its_grace_on_another_machine_and_never_more_than_all(
    bench: Bench, booted_s: float, wall_set_by_s: float, left_s: float
) -> None:
    await bench.apply({})
    await bench.settle()
    bench.router.may_stop.clear()
    lost = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    bench.clock.advance(20.0)
    bench.router.may_stop.set()
    bench.move(booted_s=booted_s)
    bench.wall_ahead_s += wall_set_by_s
    bench.restart()
    finishing = asyncio.create_task(bench.state.finish_stop())
    await turns()
    assert bench.router.stopped_with_s == pytest.approx(left_s)
    bench.forms.lives[0].be_adopted()
    async with asyncio.timeout(10):
        await asyncio.gather(finishing, lost)


async def test_groups_have_what_the_routers_left_of_the_time_to_stop(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    bench.router.may_stop.clear()
    stopping = asyncio.create_task(bench.state.shut_down(60.0))
    await turns()
    bench.clock.advance(20.0)
    bench.router.may_stop.set()
    await stopping
    assert [life.drained_s for life in bench.forms.lives] == [40.0]
