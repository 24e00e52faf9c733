import asyncio
import itertools
import json
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from helpers.cluster import LLAMA, FakeClock, FakeRouter, Formations, turns, write_tokenizer
from weft.v1 import control_pb2

from cluster import preflight
from cluster.config import ModelSpec, build_spec
from cluster.errors import ClusterConfigError, ModelFilesChangedError, ModelNotFoundError, NotServedError, StoppingError
from cluster.lifecycle import RestartPolicy
from cluster.placement import NodeResources
from cluster.rank_actor import Outcome
from cluster.revision_files import RevisionText, check_files
from cluster.saved_state import RouterRecord, SavedState, decode, encode
from cluster.wanted_state import WantedState
from workers.errors import EngineConfigError

NODES = [
    NodeResources(node_id=f"node-{name}", cpus=8, gpus=0, free_cpus=8, free_gpus=0, address=f"10.0.0.{index}")
    for index, name in enumerate("ab")
]


@dataclass
class Bench:
    """A cluster of fakes whose controller can die and come back."""

    folder: Path
    forms: Formations = field(default_factory=Formations)
    router: FakeRouter = field(default_factory=FakeRouter)
    other_router: FakeRouter = field(default_factory=lambda: FakeRouter("router-1"))
    saved: bytes = encode(SavedState())
    clock: FakeClock = field(default_factory=FakeClock)
    wall_ahead_s: float = 1.8e9
    """Of `clock`."""
    nodes: list[NodeResources] = field(default_factory=lambda: list(NODES))
    state: WantedState = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new controller, from what the last one saved."""
        self.forms = Formations()
        self.state = WantedState(
            decode(self.saved),
            routers=[self.router, self.other_router],
            form=self.forms,
            save=self.save,
            nodes=lambda: self.nodes,
            changed=asyncio.Event(),
            policy=RestartPolicy(),
            clock=self.clock,
            wall_clock=lambda: self.clock() + self.wall_ahead_s,
        )

    def move(self, *, booted_s: float) -> None:
        """Be on another machine from now on, that started so long ago."""
        self.wall_ahead_s += self.clock.now_s - booted_s
        self.clock.now_s = booted_s

    def save(self, state: SavedState) -> None:
        self.saved = encode(state)

    def specs(self, *sections: dict[str, Any]) -> tuple[ModelSpec, ...]:
        return build_spec(
            {"models": [{"path": str(self.folder), "name": "m"} | section for section in sections]}
        ).models

    async def apply(self, *sections: dict[str, Any]) -> list[str]:
        changes = await self.state.apply(self.specs(*sections))
        self.state.reconcile()
        await turns()
        return [f"{change.kind} {change.name}" for change in changes]

    async def settle(self) -> None:
        """Let every group that can become READY, until nothing changes."""
        for _ in range(20):
            self.state.reconcile()
            await turns()
            for life in self.forms.lives:
                if not life.was_cancelled and not life.is_over:
                    life.become_ready()

    def replicas(self) -> list[str]:
        return [endpoint.replica_id for endpoint in self.state.replicas() if not endpoint.draining]

    def model(self, name: str = "m") -> control_pb2.ModelStatus:
        return next(model for model in self.state.model_statuses() if model.name == name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
async def bench(folder: Path) -> Bench:
    return Bench(folder)


async def test_every_wanted_group_is_formed_once_however_often_it_is_reconciled(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    for _ in range(5):
        bench.state.reconcile()
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1"]
    assert bench.router.num_reconciled == bench.other_router.num_reconciled == 6


async def test_membership_names_only_ready_replicas(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    assert bench.state.replicas() == []
    bench.forms.lives[1].become_ready()
    assert bench.replicas() == ["m-1.1"]
    await bench.forms.lives[1].end(Outcome(message="rank 0 died"))
    bench.state.reconcile()
    assert bench.state.replicas() == []
    assert len(bench.forms.lives) == 3


async def test_one_failed_group_leaves_the_other_alone(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.lives[0].become_ready()
    await bench.forms.lives[1].end(Outcome(message="no", is_refusal=True))
    bench.state.reconcile()
    assert bench.replicas() == ["m-0.1"]
    assert not bench.forms.lives[0].was_cancelled
    assert len(bench.forms.lives) == 2


@pytest.mark.parametrize(("wanted", "told"), [(None, 256), (100, 100)])
async def test_routers_are_told_the_context_that_is_served(bench: Bench, wanted: int | None, told: int) -> None:
    await bench.apply({"max_context": wanted})
    assert [(model.name, model.max_context, model.path) for model in bench.state.models()] == [
        ("m", told, str(bench.folder))
    ]


async def test_restarts_of_the_controller_are_counted_where_nothing_else_changes(bench: Bench) -> None:
    await bench.apply({})
    for restarts in (1, 2):
        before = bench.saved
        bench.saved = encode(replace(decode(bench.saved), num_restarts=restarts))
        bench.restart()
        bench.saved = before
        bench.state.reconcile()
        assert decode(bench.saved).num_restarts == restarts


async def test_what_cannot_be_served_is_refused_and_changes_nothing(bench: Bench) -> None:
    await bench.apply({})
    with pytest.raises(ModelNotFoundError):
        await bench.apply({"path": str(bench.folder / "none")})
    with pytest.raises(EngineConfigError, match="max_context is 257"):
        await bench.state.roll("m", {"max_context": 257})
    assert bench.model().revision == 1


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
    await bench.state.finish_stop()
    assert bench.router.stopped_with_s == 10.0


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


async def test_status_tells_wanted_and_ready_groups(bench: Bench) -> None:
    await bench.apply({"replicas": 3})
    bench.forms.lives[0].become_ready()
    model = bench.model()
    assert (model.wanted_replicas, model.ready_replicas, len(model.groups)) == (3, 1, 3)
    assert [router.router_id for router in bench.state.router_statuses()] == ["router-0", "router-1"]


async def test_models_of_several_shapes_come_and_go(bench: Bench) -> None:
    assert await bench.apply({"name": "a", "tensor_parallel": 2}, {"name": "b", "replicas": 2}) == ["add a", "add b"]
    await bench.settle()
    assert bench.replicas() == ["a-0.1", "b-0.1", "b-1.1"]
    assert bench.model("a").groups[0].tensor_parallel == 2
    assert await bench.apply({"name": "b", "replicas": 2}) == ["remove a"]
    assert [model.name for model in bench.state.models()] == ["b"]
    await bench.settle()
    assert bench.forms.of("a-0.1").drained_s == 30.0
    assert bench.forms.of("a-0.1").was_cancelled
    assert [model.name for model in bench.state.model_statuses()] == ["b"]
    assert await bench.apply({"name": "b", "replicas": 2}) == []


async def test_replicas_of_a_model_that_is_no_longer_served_are_not_told(bench: Bench) -> None:
    await bench.apply({"name": "a"}, {"name": "b"})
    await bench.settle()
    bench.forms.of("a-0.1").holds_requests = True
    await bench.apply({"name": "b"})
    assert [endpoint.replica_id for endpoint in bench.state.replicas()] == ["b-0.1"]
    assert [model.name for model in bench.state.model_statuses()] == ["b", "a"], "it finishes its requests"


async def test_only_ready_replicas_are_asked_what_they_have_to_do(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.of("m-1.1").become_ready()
    assert await bench.state.loads("m") == [bench.forms.of("m-1.1").busy]


async def test_room_is_asked_for_while_a_group_waits_for_it(bench: Bench) -> None:
    await bench.apply({"name": "a", "pipeline_parallel": 2}, {"name": "b"})
    assert bench.state.missing_bundles() == []
    bench.forms.of("a-0.1").become_ready()
    bench.forms.of("b-0.1").listener.on_waiting("needs 1 GPUs on one node; the largest free node has 0")
    assert bench.state.missing_bundles() == [{"CPU": 1.0}] * 3
    bench.forms.of("b-0.1").become_ready()
    assert bench.state.missing_bundles() == []


async def test_room_is_not_asked_for_when_the_group_that_waited_is_no_longer_wanted(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    bench.forms.lives[0].listener.on_waiting("needs 8 CPUs")
    assert len(bench.state.missing_bundles()) == 1
    bench.state.scale("m", 0)
    bench.state.reconcile()
    await turns()
    assert bench.state.missing_bundles() == []


async def test_rollout_keeps_a_number_that_changed_while_it_was_checked(bench: Bench) -> None:
    await bench.apply({"replicas": 1, "max_replicas": 3, "autoscaling": {}})
    rolling = asyncio.create_task(bench.state.roll("m", {"max_context": 64}))
    await asyncio.sleep(0)
    bench.state.scale("m", 3, reason="load")
    await rolling
    assert bench.model().wanted_replicas == 3
    await bench.state.roll("m", {"replicas": 2})
    assert bench.model().wanted_replicas == 2


async def test_rollout_of_a_tokenizer_that_cannot_be_read_is_refused_and_changes_nothing(bench: Bench) -> None:
    await bench.apply({})
    await bench.settle()
    told = bench.state.models()
    (bench.folder / "tokenizer_config.json").write_text('{"chat_template": "{% for"}')
    with pytest.raises(ModelNotFoundError, match=r"model 'm' cannot be served: chat_template of .* does not compile"):
        await bench.state.roll("m", {})
    (bench.folder / "tokenizer_config.json").unlink()
    (bench.folder / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model 'm' cannot be served: .* has no tokenizer"):
        await bench.apply({"max_context": 64})
    assert (bench.model().revision, bench.state.models(), bench.replicas()) == (1, told, ["m-0.1"])


async def test_each_replica_tells_the_tokenizer_of_its_revision_to_a_successor_too(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    (first,) = {endpoint.text.digest for endpoint in bench.state.replicas()}
    write_tokenizer(bench.folder, "another")
    await bench.state.roll("m", {})
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-2.1").become_ready()
    (model,) = bench.state.models()
    assert model.text_digest != first
    texts = [(str(bench.folder), first, 1)] * 2 + [(str(bench.folder), model.text_digest, 2)]

    def told() -> list[tuple[str, str, int]]:
        return [(each.text.path, each.text.digest, each.text.revision) for each in bench.state.replicas()]

    assert told() == texts
    bench.restart()
    bench.state.reconcile()
    for life in bench.forms.lives:
        life.be_adopted()
    assert told() == texts


async def test_two_rollouts_at_once_both_hold(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await asyncio.gather(bench.state.roll("m", {"max_context": 64}), bench.state.roll("m", {"dtype": "float32"}))
    section = bench.state.sections()["m"]
    assert (section.max_context, section.dtype) == (64, "float32")
    assert bench.model().revision == 3


async def test_rollout_holds_on_top_of_what_was_applied_while_it_was_checked(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.apply({"replicas": 1})
    is_applied = threading.Event()

    def read_text(model: ModelSpec, *, commit: str | None = None) -> RevisionText:
        assert model.engine.dtype != "float32" or is_applied.wait(10)
        return preflight.read_text(model, commit=commit)

    monkeypatch.setattr("cluster.wanted_models.read_text", read_text)
    rolling = asyncio.create_task(bench.state.roll("m", {"dtype": "float32"}))
    await bench.state.apply(bench.specs({"replicas": 1, "max_context": 64, "max_replicas": 3}))
    is_applied.set()
    await rolling
    section = bench.state.sections()["m"]
    assert (section.dtype, section.max_context, section.max_replicas) == ("float32", 64, 3)


async def test_rollout_is_refused_where_its_bounds_no_longer_hold(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    rolling = asyncio.create_task(bench.state.roll("m", {"max_replicas": 2}))
    await asyncio.sleep(0)
    bench.state.scale("m", 4)
    with pytest.raises(ClusterConfigError, match="replicas is 4; allowed: 0 to 2"):
        await rolling
    bench.restart()
    assert (bench.model().wanted_replicas, bench.model().revision) == (4, 1)


async def test_undo_tells_routers_of_the_revision_that_it_goes_back_to_in_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.apply({"replicas": 1})
    await bench.state.roll("m", {"max_context": 64})
    is_rolled = threading.Event()

    def read_text(model: ModelSpec, *, commit: str | None = None) -> RevisionText:
        assert model.engine.max_context is not None or is_rolled.wait(10)
        return preflight.read_text(model, commit=commit)

    monkeypatch.setattr("cluster.wanted_models.read_text", read_text)
    undoing = asyncio.create_task(bench.state.undo("m"))
    await bench.state.roll("m", {"max_context": 32})
    is_rolled.set()
    assert await undoing == (ANY, 2)
    assert [model.max_context for model in bench.state.models()] == [64]


async def test_rollout_of_a_model_that_is_never_left_alone_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.apply({"replicas": 1})
    replicas = itertools.count(2)

    def read_text(model: ModelSpec, *, commit: str | None = None) -> RevisionText:
        bench.state.scale("m", next(replicas))
        return preflight.read_text(model, commit=commit)

    monkeypatch.setattr("cluster.wanted_models.read_text", read_text)
    with pytest.raises(ClusterConfigError, match="m was changed by others each of the 5 times that it was read"):
        await bench.state.roll("m", {"dtype": "float32"})
    assert bench.model().revision == 1


async def test_nothing_is_wanted_that_a_new_controller_could_not_read(bench: Bench, tmp_path: Path) -> None:
    await bench.apply({"replicas": 1})
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(folder)
    with pytest.raises(ClusterConfigError, match="name: "):
        await bench.apply({"path": str(folder), "name": None})
    bench.restart()
    assert list(bench.state.sections()) == ["m"]


async def test_scale_up_forms_and_scale_down_drains_the_newest(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    assert bench.state.scale("m", 3) == 1
    await bench.settle()
    assert bench.replicas() == ["m-0.1", "m-1.1", "m-2.1"]
    bench.state.scale("m", 1)
    await bench.settle()
    assert bench.replicas() == ["m-0.1"]
    bench.state.scale("m", 2)
    await bench.settle()
    assert bench.replicas() == ["m-0.1", "m-3.1"]  # an id is used once


@pytest.mark.parametrize("restarts", [0, 1])
async def test_groups_of_a_model_that_was_removed_are_not_kept_when_it_is_added_again(
    bench: Bench, restarts: int
) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    await bench.state.apply(bench.specs({"name": "other"}))
    for _ in range(restarts):
        bench.restart()
    await bench.state.apply(bench.specs({"name": "other"}, {"replicas": 1, "max_context": 128}))
    bench.state.reconcile()
    await turns()
    for life in bench.forms.lives:
        if life.adopts:
            life.be_adopted()
    await bench.settle()
    (group,) = bench.model().groups
    assert (group.group_id, group.revision, group.state) == ("m-1", 2, control_pb2.GROUP_STATE_READY)
    assert bench.forms.of("m-1.1").model.engine.max_context == 128


async def test_rollout_replaces_one_group_after_the_other_and_undo_keeps_what_still_runs(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    change, revision = await bench.state.roll("m", {"max_context": 64})
    assert (revision, change.details) == (2, ("max_context: default -> 64",))
    bench.state.reconcile()
    await turns()
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1", "m-2.1"]
    assert bench.replicas() == ["m-0.1", "m-1.1"]
    bench.forms.of("m-2.1").become_ready()
    bench.state.reconcile()
    await turns()
    assert bench.replicas() == ["m-0.1", "m-2.1"]
    assert bench.forms.of("m-1.1").was_cancelled

    await bench.state.undo("m")
    await bench.settle()
    assert bench.replicas() == ["m-0.1", "m-4.1"]
    assert not bench.forms.of("m-0.1").was_cancelled
    assert {group.revision for group in bench.model().groups} == {1}


def write_weights(folder: Path, value: int) -> None:
    (folder / "model.safetensors").write_bytes(bytes([value]) * 10_000)


async def test_a_group_knows_what_its_folder_held_when_its_revision_was_wanted(bench: Bench) -> None:
    write_weights(bench.folder, 0)
    await bench.apply({"replicas": 1})
    await bench.settle()
    (text,) = {bench.forms.of("m-0.1").text}
    assert text is not None
    check_files(bench.folder, text, node="here")
    write_weights(bench.folder, 1)
    bench.state.scale("m", 2)
    await bench.settle()
    assert bench.forms.of("m-1.1").text == text
    with pytest.raises(ModelFilesChangedError):
        check_files(bench.folder, text, node="here")
    await bench.state.roll("m", {})
    await bench.settle()
    text = bench.forms.of("m-2.1").text
    assert text is not None
    check_files(bench.folder, text, node="here")


@pytest.mark.parametrize("undo", [True, False])
async def test_a_revision_that_comes_back_to_other_files_is_a_new_one(bench: Bench, undo: bool) -> None:
    write_weights(bench.folder, 0)
    await bench.apply({"replicas": 2})
    await bench.settle()
    await bench.state.roll("m", {"max_context": 64})
    write_weights(bench.folder, 1)
    if undo:
        assert await bench.state.undo("m") == (ANY, 3)
    else:
        await bench.apply({"replicas": 2})
    await bench.settle()
    assert bench.model().revision == 3
    assert {group.revision for group in bench.model().groups} == {3}, "those that run still have the old weights"
    assert await bench.state.undo("m") == (ANY, 4), "revision 2 was wanted before the files changed, too"
    assert await bench.state.undo("m") == (ANY, 3)


async def test_group_that_has_just_died_is_no_reason_to_let_another_one_go(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    await bench.state.roll("m", {"max_context": 64})
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-2.1").become_ready()
    await bench.forms.of("m-0.1").end(Outcome(message="rank 0 died"))
    bench.state.reconcile()
    await turns()
    assert bench.replicas() == ["m-1.1", "m-2.1"]


async def test_rollout_to_what_cannot_start_keeps_every_old_group(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    await bench.state.roll("m", {"max_context": 64})
    bench.state.reconcile()
    await turns()
    await bench.forms.of("m-2.1").end(Outcome(message="no such tensor", is_refusal=True))
    for _ in range(5):
        bench.state.reconcile()
        await turns()
    assert bench.replicas() == ["m-0.1", "m-1.1"]
    assert len(bench.forms.lives) == 3
    await bench.state.undo("m")
    await bench.settle()
    assert [group.group_id for group in bench.model().groups] == ["m-0", "m-1"]


async def test_drained_replica_finishes_and_another_group_takes_its_place(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.forms.of("m-0.1").holds_requests = True
    assert await bench.state.drain("m-0.1", 5.0) == (["m-0.1"], "")
    bench.state.reconcile()
    await turns()
    endpoints = {endpoint.replica_id: endpoint.draining for endpoint in bench.state.replicas()}
    assert endpoints == {"m-0.1": True, "m-1.1": False}
    bench.forms.of("m-2.1").become_ready()
    assert bench.forms.of("m-0.1").drained_s == 5.0
    bench.forms.of("m-0.1").requests_ended.set()
    await bench.settle()
    assert bench.replicas() == ["m-1.1", "m-2.1"]


async def test_drained_node_loses_its_groups_and_gets_none_until_it_is_undone(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.of("m-0.1").become_ready("node-a")
    bench.forms.of("m-1.1").become_ready("node-b")
    assert await bench.state.drain("10.0.0.1", None) == (["m-1.1"], "node-b")
    assert bench.state.drained_nodes == {"node-b"}
    assert [node.drained for node in await bench.state.node_statuses()] == [False, True]
    bench.restart()
    assert bench.state.drained_nodes == {"node-b"}
    assert await bench.state.undrain("node-b") == "node-b"
    assert not bench.state.drained_nodes
    with pytest.raises(NotServedError, match=r"'x'; replicas: .*; nodes: 10\.0\.0\.0, 10\.0\.0\.1"):
        await bench.state.drain("x", None)


async def test_only_the_drain_of_a_node_can_be_undone(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    with pytest.raises(NotServedError) as refused:
        await bench.state.undrain("m-0.1")
    told = "no node is 'm-0.1', and only a node's drain can be undone; nodes: 10.0.0.0, 10.0.0.1"
    assert str(refused.value) == told


async def test_nodes_at_one_address_are_told_apart_by_their_ids(bench: Bench) -> None:
    bench.nodes = [replace(node, address="10.0.0.0") for node in bench.nodes]
    for change in (bench.state.drain("10.0.0.0", None), bench.state.undrain("10.0.0.0")):
        with pytest.raises(NotServedError, match=r"several nodes are at 10\.0\.0\.0; allowed: .* node-a, node-b"):
            await change
    assert await bench.state.drain("node-b", None) == ([], "node-b")


async def test_group_that_starts_on_a_node_that_is_drained_leaves_and_another_is_formed(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    bench.forms.lives[0].listener.on_placed(["node-b"])
    assert await bench.state.drain("10.0.0.1", None) == (["m-0.1"], "node-b")
    await turns()
    bench.state.reconcile()
    await turns()
    assert bench.forms.of("m-0.1").was_cancelled
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1"]


async def test_group_that_turns_out_to_be_on_a_drained_node_leaves(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    life = bench.forms.lives[0]
    assert await bench.state.drain("10.0.0.1", None) == ([], "node-b")
    life.become_ready("node-b")
    bench.state.reconcile()
    assert decode(bench.saved).groups[0].is_leaving
    await turns()
    assert bench.replicas() == []
    bench.state.reconcile()
    assert [group.group_id for group in bench.model().groups] == ["m-1"]


@pytest.mark.parametrize("is_ready", [False, True])
async def test_node_that_is_drained_during_an_adoption_loses_what_is_on_it(bench: Bench, is_ready: bool) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.of("m-1.1").become_ready("node-b")
    if is_ready:
        bench.forms.of("m-0.1").become_ready("node-a")
    else:
        bench.forms.of("m-0.1").listener.on_placed(["node-a"])
    bench.restart()
    assert await bench.state.drain("10.0.0.0", 5.0) == (["m-0.1"], "node-a")
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-0.1").be_adopted(is_ready=is_ready)
    await turns()
    assert bench.forms.of("m-0.1").drained_s == (5.0 if is_ready else None)
    assert bench.forms.of("m-0.1").was_cancelled
    assert not bench.forms.of("m-1.1").was_cancelled


@pytest.mark.parametrize("booted_s", [120.0, 1.0, 1e7])  # 120: on the machine of the controller before
@pytest.mark.parametrize(("grace_s", "left_s"), [(100.0, 80.0), (21.0, 1.0), (5.0, None)])
async def test_grace_of_a_drain_ends_when_it_would_have_without_a_restart(
    bench: Bench, grace_s: float, left_s: float | None, booted_s: float
) -> None:
    await bench.apply({"replicas": 1, "drain_timeout_s": 30.0})
    bench.forms.of("m-0.1").become_ready()
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("m-0", grace_s)
    bench.clock.advance(20.0)
    bench.move(booted_s=booted_s)
    bench.restart()
    bench.state.reconcile()
    await turns()
    life = bench.forms.of("m-0.1")
    life.be_adopted()
    await turns()
    assert life.drained_s == left_s
    assert life.was_cancelled


async def test_a_pass_leaves_a_node_s_drain_the_grace_that_was_asked_for(bench: Bench) -> None:
    await bench.apply({"replicas": 1, "drain_timeout_s": 30.0})
    bench.forms.of("m-0.1").become_ready("node-b")
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("10.0.0.1", 60.0)
    bench.state.reconcile()
    await turns()
    assert decode(bench.saved).groups[0].left_s == 60.0


async def test_a_group_that_leaves_a_drained_node_is_saved_though_others_are_still_looked_for(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.state.drain("10.0.0.0", None)
    bench.restart()
    bench.state.reconcile()
    bench.forms.of("m-0.1").be_adopted()
    bench.state.reconcile()
    assert bench.state.is_adopting
    assert [group.is_leaving for group in decode(bench.saved).groups] == [True, False]


async def test_a_group_that_has_left_is_forgotten_though_another_one_has_long_taken_its_place(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("m-0", None)
    await bench.settle()
    assert [group.group_id for group in decode(bench.saved).groups] == ["m-0", "m-1"]
    bench.forms.of("m-0.1").requests_ended.set()
    await turns()
    bench.state.reconcile()
    assert [group.group_id for group in decode(bench.saved).groups] == ["m-1"]


async def test_a_grace_that_an_older_controller_did_not_save_begins_anew(bench: Bench) -> None:
    await bench.apply({"replicas": 1, "drain_timeout_s": 30.0})
    await bench.settle()
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("m-0", 60.0)
    saved = json.loads(bench.saved)
    del saved["groups"][0]["left_s"]
    bench.saved = json.dumps(saved).encode()
    bench.restart()
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-0.1").be_adopted()
    await turns()
    assert bench.forms.of("m-0.1").drained_s == 30.0


async def test_drained_node_that_has_gone_is_forgotten_at_the_next_drain(bench: Bench) -> None:
    await bench.state.drain("node-a", None)
    del bench.nodes[0]
    await bench.state.drain("node-b", None)
    assert bench.state.drained_nodes == {"node-b"}


async def test_new_controller_adopts_what_lives_and_forms_nothing(bench: Bench) -> None:
    await bench.apply({"name": "a", "replicas": 2}, {"name": "b"})
    await bench.settle()
    bench.router.record = RouterRecord(grpc=1, http=2, metrics=None)
    bench.state.scale("b", 2)
    await bench.settle()
    bench.restart()
    assert bench.state.is_adopting
    bench.state.reconcile()
    lives = bench.forms.lives
    assert [(life.replica_id, life.adopts) for life in lives] == [
        ("a-0.1", True), ("a-1.1", True), ("b-0.1", True), ("b-1.1", True)
    ]  # fmt: skip
    for life in lives:
        assert bench.state.is_adopting
        life.be_adopted()
    assert not bench.state.is_adopting
    await turns()
    bench.state.reconcile()
    assert len(bench.forms.lives) == 4
    assert bench.replicas() == ["a-0.1", "a-1.1", "b-0.1", "b-1.1"]
    assert decode(bench.saved).routers == {
        "router-0": RouterRecord(grpc=1, http=2, metrics=None),
        "router-1": RouterRecord(grpc=0, http=0, metrics=0),
    }
    assert bench.state.scale("a", 3) == 2
    await bench.settle()
    assert bench.replicas()[-1] == "a-2.1"


async def test_ports_of_a_router_are_saved_as_soon_as_it_listens(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    bench.router.record = RouterRecord(grpc=1, http=2, metrics=None)
    bench.state.reconcile()
    assert decode(bench.saved).routers["router-0"] == bench.router.record


async def test_a_router_that_is_still_looked_for_is_waited_for(bench: Bench) -> None:
    bench.other_router.is_adopting = True
    assert bench.state.is_adopting
    bench.other_router.is_adopting = False
    assert not bench.state.is_adopting


async def test_no_group_is_let_go_before_it_is_known_which_ones_live(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.restart()
    bench.state.scale("m", 1)
    bench.state.reconcile()
    bench.forms.of("m-1.1").be_adopted()
    await bench.forms.of("m-0.1").end(Outcome(message="was lost while no controller watched it"))
    await bench.settle()
    assert bench.replicas() == ["m-1.1"]
    assert len(bench.forms.lives) == 2


async def test_new_controller_goes_on_where_a_model_can_no_longer_be_read(bench: Bench) -> None:
    await bench.apply({"replicas": 1, "max_context": 100})
    await bench.settle()
    told = bench.state.models()
    (bench.folder / "config.json").unlink()
    bench.restart()
    assert bench.state.models() == told
    assert bench.model().path == str(bench.folder)
    await bench.settle()
    bench.forms.lives[0].be_adopted()
    assert bench.replicas() == ["m-0.1"]
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        await bench.state.roll("m", {})


async def test_state_that_an_earlier_version_has_saved_is_completed_from_the_folder(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    told = bench.state.models()
    saved = json.loads(bench.saved)
    del saved["models"]["m"]["current"]["text"]
    bench.saved = json.dumps(saved).encode()
    bench.restart()
    assert bench.state.models() == told


async def test_routers_are_told_of_the_folder_that_was_read_last(bench: Bench) -> None:
    await bench.apply({"max_context": 100})
    (bench.folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 128}))
    await bench.apply({"max_context": 100, "replicas": 2})
    await bench.state.roll("m", {"max_context": None})
    assert [model.max_context for model in bench.state.models()] == [128]
    (bench.folder / "config.json").write_text(json.dumps(LLAMA | {"max_position_embeddings": 192}))
    await bench.apply({"max_context": 100})
    await bench.state.undo("m")
    assert [model.max_context for model in bench.state.models()] == [192]


async def test_new_controller_goes_on_with_a_drain_and_a_rollout(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    await bench.state.roll("m", {"max_context": 64})
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-2.1").become_ready()
    bench.forms.of("m-1.1").holds_requests = True
    bench.state.reconcile()
    await turns()
    bench.restart()
    for _ in range(3):
        bench.state.reconcile()
        await turns()
    for life in bench.forms.lives:
        life.be_adopted()
    await bench.settle()
    assert bench.forms.of("m-1.1").was_cancelled
    assert {group.revision for group in bench.model().groups} == {2}
    assert len(bench.replicas()) == 2


async def test_group_that_served_under_the_controller_before_is_never_given_up(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    bench.restart()
    bench.state.reconcile()
    for _ in range(5):
        await bench.forms.lives[-1].end(Outcome(message="rank 0: the weights cannot be read now"))
        bench.state.reconcile()
        bench.clock.advance(31.0)
        bench.state.reconcile()
    assert len(bench.forms.lives) == 6
    assert bench.model().groups[0].state == control_pb2.GROUP_STATE_PENDING


async def test_state_that_an_older_controller_saved_is_read(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    saved = json.loads(bench.saved)
    for group in saved["groups"]:
        del group["was_ready"], group["node_ids"]
    del saved["next_revisions"]
    bench.saved = json.dumps(saved).encode()
    bench.restart()
    bench.state.reconcile()
    bench.forms.lives[0].be_adopted()
    assert bench.replicas() == ["m-0.1"]
    assert decode(bench.saved).groups[0].was_ready


async def test_dry_run_tells_and_changes_nothing(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    saved = bench.saved
    changes = await bench.state.apply(bench.specs({"replicas": 3}), dry_run=True)
    assert [change.details for change in changes] == [("replicas: 2 -> 3",)]
    assert bench.saved == saved
    assert bench.model().wanted_replicas == 2


async def test_a_group_that_waits_for_its_next_life_is_on_no_node(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    life = bench.forms.lives[0]
    life.become_ready("node-b")
    await life.end(Outcome(message="rank 0 died"))
    bench.state.reconcile()
    assert not bench.model().groups[0].address
    assert await bench.state.drain("10.0.0.1", None) == ([], "node-b")


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


async def test_a_node_whose_drain_was_undone_stays_so_after_a_restart(bench: Bench) -> None:
    await bench.state.drain("node-b", None)
    await bench.state.undrain("node-b")
    bench.restart()
    assert not bench.state.drained_nodes


async def test_a_life_is_saved_before_it_begins(bench: Bench) -> None:
    saved_lives = []
    form = bench.forms

    def note(replica_id: str, *args: Any, **fields: Any) -> Any:
        saved_lives.append(decode(bench.saved).groups[0].num_lives)
        return form(replica_id, *args, **fields)

    bench.state._form = note  # type: ignore[assignment]
    await bench.apply({"replicas": 1})
    assert saved_lives == [1]
