"""From what replicas and routers say to a number of replicas, over a controller that may restart. In virtual time."""

import asyncio
import json
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.cluster import LLAMA, FakeClock, FakeLife, FakeRouter, Formations, turns, write_tokenizer
from weft.recording import Recorder, Recording
from weft.v1 import control_pb2

from bench.simulation.replay import replay_file
from cluster.config import build_spec
from cluster.demand import Demand, DemandLedger, RouterDemand
from cluster.errors import ClusterConfigError
from cluster.lifecycle import RestartPolicy
from cluster.rank_values import Outcome, ReplicaLoad
from cluster.recording import AutoscalerMade, ScalingCall, ScalingRecording, ScalingSetup
from cluster.saved_state import SavedState, decode, encode
from cluster.scaling import Scaling, observe
from cluster.wanted_state import WantedState

RULES = {"target_requests": 10, "window_s": 10, "upscale_delay_s": 10, "downscale_delay_s": 60, "idle_s": 120}
STEP_S = 2.0


@dataclass
class Service:
    """A controller over fakes, two routers, and a load that its READY replicas share."""

    folder: Path
    clock: FakeClock = field(default_factory=FakeClock)
    forms: Formations = field(default_factory=Formations)
    saved: bytes = encode(SavedState())
    num_running: int = 0
    routers: list[RouterDemand] = field(default_factory=list)
    recording: ScalingRecording | None = None

    async def begin(self, **settings: Any) -> "Service":
        await self.start_controller()
        await self.apply(**settings)
        return self

    async def start_controller(self) -> None:
        lives = {life.replica_id: life for life in self.running()}
        self.forms = Formations()
        self.state = WantedState(
            decode(self.saved),
            routers=[FakeRouter()],
            form=self.forms,
            save=self.save,
            nodes=list,
            changed=asyncio.Event(),
            policy=RestartPolicy(),
            clock=self.clock,
        )
        self.ledger = DemandLedger()
        self.streams = ExitStack()  # they end with the controller
        self.routers = [self.streams.enter_context(self.ledger.router()) for _ in range(2)]
        self.scaling = Scaling(self.state, self.ledger, recording=self.recording, clock=self.clock)
        self.state.reconcile()
        await turns()
        for life in self.forms.lives:
            assert life.replica_id in lives
            life.be_adopted()

    def save(self, state: SavedState) -> None:
        self.saved = encode(state)

    async def apply(self, **settings: Any) -> list[str]:
        section = {"path": str(self.folder), "name": "m", "max_replicas": 4, "autoscaling": RULES} | settings
        changes = await self.state.apply(build_spec({"models": [section]}).models)
        return [line for change in changes for line in change.details]

    def running(self) -> list[FakeLife]:
        return [life for life in self.forms.lives if not life.was_cancelled and not life.is_over]

    def hold(self, *by_router: int) -> None:
        for router, held in zip(self.routers, by_router, strict=True):
            router.note([control_pb2.ModelDemand(model="m", num_held=held)])

    async def run(self, seconds: float) -> None:
        """Let time pass; groups become READY in the step after the one that formed them."""
        for _ in range(round(seconds / STEP_S)):
            self.clock.advance(STEP_S)
            self.state.reconcile()
            await turns()
            ready = self.running()
            for life in ready:
                life.become_ready()
                life.busy = ReplicaLoad(num_running=self.num_running // len(ready), num_waiting=0, kv_usage=0.1)
            await self.scaling.look()
        self.state.reconcile()
        await turns()

    @property
    def wanted(self) -> int:
        return self.state.sections()["m"].replicas

    def status(self) -> control_pb2.ModelStatus:
        return self.state.model_statuses()[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(tmp_path)
    return tmp_path


async def test_recorded_decisions_are_made_again(folder: Path, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "file", max_bytes=1 << 24)
    service = await Service(folder, recording=ScalingRecording(recorder)).begin(min_replicas=1)
    service.num_running = 25
    await service.run(20)
    await service.apply(min_replicas=2, replicas=3)
    service.num_running = 0
    await service.run(90)
    assert service.wanted == 2
    recorder.close()
    outcome = replay_file(tmp_path / "file")
    assert outcome.difference is None
    assert outcome.calls["autoscaler"] > 1
    assert outcome.calls["decide"] > 40

    recording = Recording(tmp_path / "file")
    recording.read_header(ScalingSetup)
    frames = list(recording.read_frames(ScalingCall))
    changed = Recorder(tmp_path / "changed", max_bytes=1 << 24)
    changed.begin("autoscaler", ScalingSetup())
    for frame in frames:
        changed.write(msgspec.structs.replace(frame, max_replicas=2) if isinstance(frame, AutoscalerMade) else frame)
    changed.close()
    difference = replay_file(tmp_path / "changed").difference
    assert difference is not None
    assert (difference.place, difference.recorded, difference.now) == ("decision.replicas", "3", "2")


async def test_load_scales_up_and_down_by_way_of_draining(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    service.num_running = 25
    await service.run(8)
    assert service.wanted == 1
    await service.run(8)
    assert service.wanted == 3
    autoscaling = service.status().autoscaling
    assert (autoscaling.min_replicas, autoscaling.max_replicas) == (1, 4)
    assert autoscaling.last_change == "1 -> 3: 25.0 requests at 10 a replica"
    await service.run(10)
    assert service.status().ready_replicas == 3
    service.num_running = 0
    await service.run(80)
    assert service.wanted == 1
    assert [life.drained_s for life in service.forms.lives] == [None, 30.0, 30.0]
    assert [life.replica_id for life in service.running()] == ["m-0.1"]


async def test_more_than_the_most_is_never_wanted(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    service.num_running = 10_000
    await service.run(100)
    assert service.wanted == 4


async def test_first_request_starts_a_replica_and_a_long_silence_ends_it(folder: Path) -> None:
    service = await Service(folder).begin(replicas=0)
    assert service.state.models()[0].starts_on_demand
    await service.run(20)
    assert (service.wanted, service.forms.lives) == (0, [])
    service.hold(0, 1)
    assert service.ledger.somebody_waits.is_set()
    await service.scaling.look()
    assert service.wanted == 1
    assert service.status().autoscaling.last_change == "0 -> 1: 1 requests wait for the first replica"
    await service.run(4)
    assert service.status().ready_replicas == 1
    service.hold(0, 0)
    await service.run(110)
    assert service.wanted == 1
    await service.run(20)
    assert service.wanted == 0
    await service.run(4)
    assert service.running() == []


async def test_requests_that_several_routers_hold_add_up(folder: Path) -> None:
    service = await Service(folder).begin(replicas=0)
    service.hold(12, 15)
    await service.run(2)
    assert service.wanted == 1
    await service.run(20)
    assert service.wanted == 3


async def test_a_service_that_stops_is_not_scaled(folder: Path) -> None:
    service = await Service(folder).begin(replicas=0)
    await service.state.shut_down(0.0)
    service.hold(0, 1)
    await service.scaling.look()
    assert service.wanted == 0


async def test_late_requests_scale_up(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    for _ in range(10):
        for router in service.routers:
            router.note([control_pb2.ModelDemand(model="m", num_finished=5, num_on_time=1)])
        await service.run(STEP_S)
    assert service.wanted == 2
    assert "of the requests on time" in service.status().autoscaling.last_change


async def test_number_outlives_the_controller_and_nothing_shrinks_too_early(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    service.num_running = 25
    await service.run(30)
    assert service.wanted == 3
    service.num_running = 0
    await service.run(50)
    await service.start_controller()
    assert service.wanted == 3
    await service.run(50)
    assert service.wanted == 3, "what the controller before has seen is not known"
    await service.run(20)
    assert service.wanted == 1


async def test_apply_keeps_the_number_and_follows_the_bounds(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1, replicas=2)
    assert service.wanted == 2
    service.num_running = 35
    await service.run(30)
    assert service.wanted == 4
    assert await service.apply(min_replicas=1, replicas=2) == []
    assert service.wanted == 4
    assert await service.apply(min_replicas=1, max_replicas=3) == ["replicas: 4 -> 3", "max_replicas: 4 -> 3"]
    assert service.status().autoscaling.last_change == "4 -> 3: by an operator"
    assert await service.apply(min_replicas=1, max_replicas=3, autoscaling=None) == [
        "replicas: 3 -> 1",
        "autoscaling: target_requests 10.0, target_kv_usage 0.8, target_goodput 0.95, window_s 10.0, "
        "upscale_delay_s 10.0, downscale_delay_s 60.0, idle_s 120.0 -> default",
    ]
    assert not service.status().HasField("autoscaling")
    await service.run(30)
    assert service.wanted == 1


async def test_number_set_by_hand_holds_for_a_delay(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    await service.run(100)
    service.state.scale("m", 3)
    assert service.status().autoscaling.last_change == "1 -> 3: by an operator"
    await service.run(58)
    assert service.wanted == 3
    await service.run(10)
    assert service.wanted == 1
    with pytest.raises(ClusterConfigError, match="m: replicas is 5; allowed: 1 to 4"):
        service.state.scale("m", 5)


async def test_the_last_scaling_is_told_until_the_next_whatever_else_changes(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    service.state.scale("m", 3)
    await service.state.roll("m", {"max_context": 64})
    assert service.status().autoscaling.last_change == "1 -> 3: by an operator"


async def test_a_model_that_is_added_again_has_not_been_scaled_yet(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    service.state.scale("m", 3)
    await service.state.apply([])
    await service.apply(min_replicas=1)
    assert service.status().autoscaling.last_change == ""


async def test_what_was_seen_of_a_model_is_forgotten_with_it(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    service.num_running = 25
    await service.run(8)
    await service.state.apply([])
    await service.run(2)
    await service.apply(min_replicas=1)
    await service.run(8)
    assert service.wanted == 1
    await service.run(8)
    assert service.wanted == 3


async def test_a_model_that_is_added_during_a_look_is_watched_from_the_next_one_on(folder: Path) -> None:
    service = await Service(folder).begin(replicas=0)
    loads = service.state.loads

    async def add_another(name: str) -> list[ReplicaLoad | None]:
        await service.apply(name="another", replicas=0)
        return await loads(name)

    service.state.loads = add_another  # type: ignore[method-assign]
    await service.scaling.look()
    assert list(service.state.sections()) == ["another"]
    service.state.loads = loads  # type: ignore[method-assign]
    service.routers[0].note([control_pb2.ModelDemand(model="another", num_held=1)])
    await service.scaling.look()
    assert service.state.sections()["another"].replicas == 1


async def test_replica_that_says_nothing_is_left_out(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1, replicas=2)
    service.num_running = 10
    await service.run(4)
    service.forms.lives[0].busy = None
    assert await service.state.loads("m") == [None, ReplicaLoad(num_running=5, num_waiting=0, kv_usage=0.1)]
    await service.scaling.look()
    assert service.wanted == 2


async def test_nobody_waits_for_a_model_that_cannot_start(folder: Path) -> None:
    service = await Service(folder).begin(replicas=0)
    service.hold(1, 0)
    await service.scaling.look()
    service.state.reconcile()
    await turns()
    await service.forms.lives[0].end(Outcome(message="no such weights", is_refusal=True))
    service.state.reconcile()
    assert not service.state.models()[0].starts_on_demand
    assert not service.state.model_statuses()[0].ready_replicas


async def test_only_a_model_that_may_go_to_zero_starts_on_demand(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=1)
    assert not service.state.models()[0].starts_on_demand
    await service.apply(min_replicas=0, autoscaling=None)
    assert not service.state.models()[0].starts_on_demand


async def test_routers_are_told_the_targets_of_the_model(folder: Path) -> None:
    service = await Service(folder).begin(autoscaling={"target_ttft_s": 2.5})
    (model,) = service.state.models()
    assert (model.target_ttft_s, model.target_tpot_s) == (2.5, 0.0)


async def test_run_looks_at_once_when_somebody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.scaling.LOOK_S", 3600.0)
    service = await Service(folder).begin(replicas=0)
    running = asyncio.create_task(service.scaling.run())
    await turns()
    service.hold(1, 0)
    async with asyncio.timeout(120):  # less than from one look to the next
        while service.wanted == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_replicas_that_do_not_say_are_there() -> None:
    told = ReplicaLoad(num_running=3, num_waiting=1, kv_usage=0.5)
    seen = observe([None, told], Demand(num_held=2), 1.0)
    assert (seen.num_ready, seen.num_running, seen.num_waiting, seen.kv_usage) == (2, 3, 3, 0.5)


async def test_nobody_is_looked_at_before_it_is_known_what_lives(folder: Path) -> None:
    service = await Service(folder).begin(replicas=0)
    router = service.state._routers[0]
    assert isinstance(router, FakeRouter)
    router.is_adopting = True
    running = asyncio.create_task(service.scaling.run())
    service.hold(1, 0)
    await turns()
    assert service.wanted == 0
    router.is_adopting = False
    service.hold(2, 0)
    service.ledger.somebody_waits.set()
    await turns()
    running.cancel()
    assert service.wanted == 1


async def test_a_wait_causes_one_look_and_no_endless_looking(folder: Path) -> None:
    service = await Service(folder).begin(min_replicas=0, replicas=0)
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        assert looks < 5, "it looks without a pause"

    service.scaling.look = look  # type: ignore[method-assign]
    task = asyncio.create_task(service.scaling.run())
    await turns()
    service.ledger.somebody_waits.set()
    for _ in range(10):
        await turns()
    task.cancel()
    assert looks == 2
