"""What is saved, and what the next controller takes over of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import LLAMA, turns, write_tokenizer
from helpers.wanted_bench import Bench
from weft.v1 import control_pb2

from cluster.errors import ClusterConfigError, ModelNotFoundError, NotServedError
from cluster.rank_values import Outcome
from cluster.saved_state import RouterRecord, decode, encode


async def test_restarts_of_the_controller_are_counted_where_nothing_else_changes(bench: Bench) -> None:
    await bench.apply({})
    for restarts in (1, 2):
        before = bench.saved
        bench.saved = encode(replace(decode(bench.saved), num_restarts=restarts))
        bench.restart()
        bench.saved = before
        bench.state.reconcile()
        assert decode(bench.saved).num_restarts == restarts


async def test_nothing_is_wanted_that_a_new_controller_could_not_read(bench: Bench, tmp_path: Path) -> None:
    await bench.apply({"replicas": 1})
    folder = tmp_path / "a model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    write_tokenizer(folder)
    with pytest.raises(ClusterConfigError, match="path ends in 'a model'"):
        await bench.apply({"path": str(folder), "name": None})
    bench.restart()
    assert list(bench.state.sections()) == ["m"]


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


async def test_group_that_waited_for_room_goes_on_waiting_under_the_same_number(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.of("m-0.1").become_ready()
    for _ in range(2):
        bench.forms.of("m-1.1").listener.on_waiting("needs 2 GPUs on one node; the largest free node has 1")
        bench.restart()
        bench.state.reconcile()
        bench.forms.of("m-0.1").be_adopted()
        waits = bench.forms.of("m-1.1")
        assert waits.adopts, "a place that Ray has kept for it is given back"
        await waits.end(Outcome(message="was lost while no controller watched it"))
        bench.forms.lives.remove(waits)
        bench.state.reconcile()
        assert not bench.state.is_adopting
        assert not bench.forms.of("m-1.1").adopts
    bench.forms.of("m-1.1").become_ready()
    assert [(group.replica_id, group.restarts) for group in bench.model().groups] == [("m-0.1", 0), ("m-1.1", 0)]
    assert not caplog.records
    bench.restart()
    bench.state.reconcile()
    await bench.forms.of("m-1.1").end(Outcome(message="was lost while no controller watched it"))
    bench.state.reconcile()
    assert [group.restarts for group in bench.model().groups] == [0, 1], "it had its place at last"


async def test_ports_of_a_router_are_saved_as_soon_as_it_listens(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    bench.router.record = RouterRecord(grpc=1, http=2, metrics=None)
    bench.state.reconcile()
    assert decode(bench.saved).routers["router-0"] == bench.router.record
    num_saves = bench.num_saves
    bench.router.record = replace(bench.router.record, failed_ago_s=0.5)
    bench.state.reconcile()
    assert bench.num_saves == num_saves, "time passes at every pass"


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


async def test_group_that_was_given_up_stays_so_with_its_reason(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.forms.lives[0].end(Outcome(message="no such weights", is_refusal=True))
    bench.state.reconcile()
    for _ in range(2):
        bench.restart()
        await bench.settle()
        (group,) = bench.model().groups
        assert (group.state, group.detail, group.restarts) == (control_pb2.GROUP_STATE_FAILED, "no such weights", 0)
        assert not bench.forms.lives
    with pytest.raises(NotServedError, match="no replica or node is ''; replicas: m-0"):  # it has no replica to name
        await bench.state.drain("", None)
    await bench.state.drain("m-0", None)
    await bench.settle()
    assert bench.replicas() == ["m-1.1"]


async def test_last_failure_is_known_to_a_successor_and_no_ended_life_is_looked_for(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    for _ in range(2):
        await bench.forms.lives[-1].end(Outcome(message="rank 1: out of memory"))
        bench.state.reconcile()
    assert len(bench.forms.lives) == 2, "the third one waits for a second"
    bench.clock.advance(3.0)
    await bench.state.undrain("node-b")  # saves
    bench.clock.advance(2.0)
    bench.move(booted_s=1.0)
    bench.restart()
    assert not bench.state.is_adopting
    bench.state.reconcile()
    assert [(life.replica_id, life.adopts) for life in bench.forms.lives] == [("m-0.3", False)]
    bench.clock.advance(2.0)
    (group,) = bench.model().groups
    failure = group.last_failure
    assert (failure.reason, failure.seconds_ago, group.restarts) == ("rank 1: out of memory", 7.0, 2)
    bench.restart()
    assert bench.state.is_adopting, "the third one may live"


async def test_state_that_an_older_controller_saved_is_read(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    saved = json.loads(bench.saved)
    for group in saved["groups"]:
        for name in ("was_ready", "node_ids", "is_placed", "has_ended", "gave_up", "last_failure", "failed_ago_s"):
            del group[name]
    del saved["next_revisions"]
    bench.saved = json.dumps(saved).encode()
    bench.restart()
    bench.state.reconcile()
    bench.forms.lives[0].be_adopted()
    assert bench.replicas() == ["m-0.1"]
    assert decode(bench.saved).groups[0].was_ready


async def test_a_life_is_saved_before_it_begins(bench: Bench) -> None:
    saved_lives = []
    form = bench.forms

    def note(replica_id: str, *args: Any, **fields: Any) -> Any:
        saved_lives.append(decode(bench.saved).groups[0].num_lives)
        return form(replica_id, *args, **fields)

    bench.state._form = note  # type: ignore[assignment]
    await bench.apply({"replicas": 1})
    assert saved_lives == [1]
