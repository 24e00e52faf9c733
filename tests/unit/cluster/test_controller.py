"""A controller that comes after another one or itself: what it goes on with, and what it tells routers and Ray."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from helpers.ports import unlisted_port
from ray.exceptions import RaySystemError
from weft.addresses import split_host_port

from cluster import controller as module
from cluster import reconciler as reconciler_module
from cluster.config import build_spec
from cluster.controller import Controller
from cluster.errors import ClusterConfigError, StartError
from cluster.log_reader import LogSource
from cluster.reconciler import Reconciler
from cluster.saved_state import RouterRecord, SavedState, decode, encode
from cluster.started_settings import decode_spec, encode_spec

ANY_PORTS = {"router": {"port": 0, "http_port": 0, "metrics_port": 0}, "controller": {"port": 0}}


class Ray:
    """The cluster that outlives its controllers: its store, and its autoscaler."""

    def __init__(self) -> None:
        self.saved: bytes | None = None
        self.asked: list[Sequence[dict[str, float]]] = []
        self.num_begun = 0

    def load(self) -> bytes | None:
        return self.saved

    def save(self, data: bytes) -> None:
        self.saved = data

    def get_actor_id(self) -> str:
        return "an actor"

    def get_node_id(self) -> str:
        return "a node"

    was_current_actor_reconstructed = False


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    async def begin(controller: Controller, reconciler: Reconciler, listener: grpc.aio.Server) -> Reconciler:
        """Serve nobody, and form no groups."""
        ray.num_begun += 1
        await listener.start()
        await listener.stop(None)  # lets go of the port
        return reconciler

    ray = Ray()
    monkeypatch.setattr(module, "ray", SimpleNamespace(get_runtime_context=lambda: ray))
    monkeypatch.setattr(module, "RayStateStore", lambda: ray)
    monkeypatch.setattr(reconciler_module, "ask_ray", ray.asked.append)
    monkeypatch.setattr(Controller, "_begin", begin)
    for name in ("configure_logging", "take_spare", "give_way", "leave_spares", "_end_this_actor"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    return ray


def make(*, num_routers: int = 1, ray_address: str | None = "auto", **model: Any) -> Controller:
    settings = {**ANY_PORTS, "router": {**ANY_PORTS["router"], "num_routers": num_routers}}
    spec = build_spec({"models": [{"name": "m", **model}], "ray": {"address": ray_address}, **settings})
    return Controller(encode_spec(spec), "warning", time.time())


async def start(*, takes_over: bool = False, **settings: Any) -> tuple[Controller, bool]:
    """Start a controller of this model, which is lost in the end."""
    controller = make(**settings)
    _, goes_on = await controller.start(takes_over=takes_over)
    await lose(controller)
    return controller, goes_on


async def resume(monkeypatch: pytest.MonkeyPatch, *, repeats_start: bool = False, **settings: Any) -> Controller:
    """Let Ray start a controller again, and perhaps repeat the call of `start`; it is lost in the end."""

    def end_process(code: int) -> None:
        raise AssertionError(f"ended with {code}")

    monkeypatch.setattr(Ray, "was_current_actor_reconstructed", True)
    monkeypatch.setattr("cluster.controller.os._exit", end_process)
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    controller = make(**settings)
    assert controller._resuming is not None
    if repeats_start:
        await controller.start()
    await controller._resuming
    await lose(controller)
    return controller


async def test_controller_whose_code_does_not_take_its_settings_ends_for_good_and_says_what_to_do(
    ray: Ray, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"file": {}, "checked": {"router": {"front_door": 1}}}
    for data, reason in (
        (json.dumps(settings).encode(), "router.front_door"),
        (object(), "no settings that this version"),
    ):
        caplog.clear()
        with pytest.raises(ClusterConfigError, match=reason):  # Ray starts no actor again that cannot be made
            Controller(cast(Any, data), "warning", 0.0)
        (line,) = caplog.messages
        assert reason in line
        assert "allowed: `weft serve --take-over`" in line


@pytest.mark.parametrize(
    ("fault", "has_changed", "is_final"),
    [
        (None, False, True),
        (AttributeError("'GroupRecord' object has no attribute 'colour'"), True, True),
        (AttributeError("a bug"), False, False),
        (StartError("router.port: 1 on 127.0.0.1 is taken"), True, False),
        (RaySystemError("its head does not answer"), True, False),
    ],
)
async def test_controller_that_cannot_go_on_ends_for_good_only_where_the_code_is_why(
    ray: Ray,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception | None,
    has_changed: bool,
    is_final: bool,
) -> None:
    def fail(*_: object, **__: object) -> None:
        assert fault is not None
        raise fault

    ended: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(module, "_end_this_actor", lambda: ended.put_nowait("for good"))
    monkeypatch.setattr("cluster.controller.os._exit", lambda code: ended.put_nowait("to be tried again"))
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    monkeypatch.setattr(module, "has_code_changed", lambda since_s: has_changed)
    monkeypatch.setattr(Ray, "was_current_actor_reconstructed", True)
    ray.saved = encode(SavedState(control_port=0)) if fault else b'{"groups": [{"colour": 1}]}'
    if fault is not None:
        monkeypatch.setattr(module, "Reconciler", fail)
    controller = make()
    assert controller._resuming is not None
    async with asyncio.timeout(10):
        assert await ended.get() == ("for good" if is_final else "to be tried again")
    assert controller._resuming.done() is not is_final, "nobody is answered any more"
    assert ("allowed: `weft serve --take-over`" in caplog.text) is is_final
    controller._resuming.cancel()


async def lose(controller: Controller) -> None:
    if controller._reconciler is not None:
        await controller._reconciler._metrics.close()


def parts(controller: Controller) -> Reconciler:
    assert controller._reconciler is not None
    return controller._reconciler


def served(controller: Controller) -> dict[str, int]:
    return {name: section.replicas for name, section in parts(controller).state.sections().items()}


def routers_of(controller: Controller) -> Sequence[Any]:
    return parts(controller).state._routers


async def test_a_service_that_is_taken_over_goes_on_with_its_models_and_settings(ray: Ray) -> None:
    for takes_over, replicas, expected in ((True, 2, (2, False)), (True, 3, (2, True)), (False, 4, (4, False))):
        controller, goes_on = await start(takes_over=takes_over, replicas=replicas)
        assert (served(controller), goes_on) == ({"m": expected[0]}, expected[1])


async def test_nothing_is_taken_over_of_a_service_that_was_stopped(ray: Ray) -> None:
    await start(replicas=2)
    ray.saved = encode(SavedState(ended_controller="another actor"))
    controller, goes_on = await start(takes_over=True, replicas=3)
    assert (served(controller), goes_on) == ({"m": 3}, False)


@pytest.mark.parametrize("ray_address", ["auto", None])
async def test_groups_wait_for_nodes_only_on_a_cluster_that_these_may_join(ray: Ray, ray_address: str | None) -> None:
    controller, _ = await start(ray_address=ray_address)
    (model,) = controller._spec.models
    life = parts(controller)._form("m-0.1", model, cast(Any, None), text=None, adopts=False)
    may_join = ray_address is not None
    assert (life._spec.may_grow, parts(controller)._nodes is not None) == (may_join, may_join)


async def test_what_a_controller_before_has_asked_ray_for_is_taken_back(ray: Ray) -> None:
    for asked in ([], [[]]):
        controller, _ = await start()
        nodes = parts(controller)._nodes
        assert nodes is not None
        await nodes.want([])
        assert ray.asked == asked


async def test_a_stop_that_a_lost_controller_was_at_is_gone_on_with_and_nothing_is_wanted_anew(ray: Ray) -> None:
    ray.saved = encode(SavedState(control_port=0, stop_left_s=5.0))
    controller, goes_on = await start(replicas=2)
    assert (served(controller), goes_on, ray.num_begun) == ({}, False, 1)


async def test_a_controller_is_started_once_however_often_that_is_asked_for(ray: Ray) -> None:
    controller, goes_on = await start(replicas=2)
    assert await controller.start() == (parts(controller).address, goes_on)
    assert ray.num_begun == 1
    assert decode_spec(decode(ray.saved or b"").settings).file == controller._spec.file, "for whoever takes it over"


async def test_who_asks_for_a_service_while_it_is_started_waits_for_that(ray: Ray) -> None:
    controller = make()
    first, second = await asyncio.gather(controller.start(), controller.start())
    await lose(controller)
    assert (first, ray.num_begun) == (second, 1)


async def test_a_controller_whose_service_was_stopped_does_not_start_another_one(ray: Ray) -> None:
    controller, _ = await start()
    controller._has_stopped.set()
    with pytest.raises(StartError, match="the service was stopped, and its controller is about to end"):
        await controller.start()


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_ports_and_failures_that_others_know_are_those_of_the_controller_before(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    control, metrics = unlisted_port(), unlisted_port()
    lost = RouterRecord(grpc=1, http=None, metrics=2, restarts=3, last_failure="killed", failed_ago_s=3600.0)
    routers, saved_s = {"router-0": lost}, time.time() - 3600
    ray.saved = encode(SavedState(control_port=control, metrics_port=metrics, routers=routers, saved_s=saved_s))
    controller = await resume(monkeypatch) if is_restarted else (await start(takes_over=True))[0]
    assert split_host_port(parts(controller).address)[1] == control
    assert split_host_port(parts(controller)._metrics.address)[1] == metrics
    (router,) = routers_of(controller)
    assert (router.record, router.is_adopting, router.status().restarts) == (lost, True, 3)
    assert (failure := router.status().last_failure).reason == "killed"
    assert failure.seconds_ago == pytest.approx(7200, abs=300)


async def test_several_routers_share_ports_that_the_controller_holds_and_none_is_looked_for_at_first(ray: Ray) -> None:
    controller, _ = await start(num_routers=2)
    first, second = (router.record for router in routers_of(controller))
    assert (
        (first.grpc, first.http)
        == (second.grpc, second.http)
        == tuple(each.port for each in parts(controller)._shared_ports)
    )
    assert 0 not in (first.grpc, first.http)
    assert not any(router.is_adopting for router in routers_of(controller))
    for each in parts(controller)._shared_ports:
        each.close()
    ray.saved = None
    controller, _ = await start()
    assert [router.record for router in routers_of(controller)] == [RouterRecord(grpc=0, http=0, metrics=0, restarts=0)]
    assert parts(controller)._service._num_restarts == 0
    assert parts(controller)._shared_ports == []


@pytest.mark.parametrize(("port", "expected"), [(9464, [9464, 0, 0]), (None, [None, None, None])])
async def test_metrics_port_is_the_first_routers_and_the_others_have_free_ones(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, port: int | None, expected: list[int | None]
) -> None:
    monkeypatch.setitem(ANY_PORTS, "router", {**ANY_PORTS["router"], "metrics_port": port})
    controller, _ = await start(num_routers=3)
    assert [router.record.metrics for router in routers_of(controller)] == expected
    for each in parts(controller)._shared_ports:
        each.close()


@pytest.mark.parametrize("repeats_start", [False, True])
async def test_restarts_are_counted(ray: Ray, monkeypatch: pytest.MonkeyPatch, repeats_start: bool) -> None:
    ray.saved = encode(SavedState(control_port=0, num_restarts=2))
    controller = await resume(monkeypatch, repeats_start=repeats_start)
    assert (parts(controller)._service._num_restarts, ray.num_begun) == (3, 1)


async def test_logs_of_a_rank_and_a_controller_that_ended_stay_known_over_lives_of_the_controller(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LogSource(name="m-0.1/0", belongs_to=frozenset({"m", "m-0.1"}), node_id="n", path="/log")
    with monkeypatch.context() as first:
        first.setattr(module, "own_log", lambda: "/log")
        first.setattr(module, "os", SimpleNamespace(getpid=lambda: 4711))
        controller, _ = await start()
    monkeypatch.setattr(parts(controller).state, "log_sources", lambda: [log])
    parts(controller).state.scale("m", 2)  # saves
    for replicas in (3, 4):
        controller, _ = await start(takes_over=True)
        assert {"m", "m-0.1", "m-0.1/0", "controller/4711"} <= set(parts(controller)._logs.names)
        parts(controller).state.scale("m", replicas)
        assert log in decode(ray.saved or b"").logs


async def test_a_life_after_the_service_was_stopped_ends(ray: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.saved = encode(SavedState(ended_controller="an actor"))
    controller = await resume(monkeypatch)
    async with asyncio.timeout(10):
        await controller.stopped()
    assert ray.num_begun == 0


async def test_a_life_before_which_nothing_was_saved_waits_to_be_started(
    ray: Ray, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = await resume(monkeypatch, replicas=2)
    assert (ray.num_begun, controller._has_stopped.is_set()) == (0, False)
    await controller.start()
    await lose(controller)
    assert (ray.num_begun, served(controller)) == (1, {"m": 2})


@dataclass
class Passes:
    """A state that is brought nearer to what is wanted pass by pass, and what was done meanwhile; a service too."""

    changed: asyncio.Event
    is_stopping: bool
    is_adopting: bool = True
    is_stopped: bool = False
    done: list[str] = field(default_factory=list)

    def reconcile(self) -> None:
        self.is_adopting = "look" not in self.done
        self.is_stopped = "know" in self.done
        self.done.append("look" if self.is_adopting else "know")
        self.changed.set()

    def log_sources(self) -> list[Any]:
        return []

    def missing_bundles(self) -> list[dict[str, float]]:
        return [{"GPU": 1.0}]

    async def finish_stop(self) -> None:
        self.done.append("finish the stop")

    async def publish(self) -> None:
        self.done.append("publish")

    async def stop(self) -> None:
        self.done.append("end")

    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("is_stopping", [False, True])
async def test_routers_are_told_who_serves_only_once_that_is_known(
    ray: Ray, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    controller, _ = await start()
    reconciler = parts(controller)
    monkeypatch.setattr(reconciler._metrics, "close", lambda: asyncio.sleep(0))
    passes = Passes(reconciler._changed, is_stopping)
    reconciler.state = reconciler._service = reconciler._scaling = cast(Any, passes)
    async with asyncio.timeout(30):
        await controller._run(reconciler)
    assert [each for each in passes.done if each != "finish the stop"] == [
        "look", "know", "publish", "know", "publish", "end"
    ]  # fmt: skip
    assert ("finish the stop" in passes.done) is is_stopping
    assert ray.asked == [[{"GPU": 1.0}], []], "and what was asked for is taken back"
    assert ray.saved is not None
    assert decode(ray.saved).ended_controller == "an actor"
    await controller.stopped()
