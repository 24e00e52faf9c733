import logging
import os
import shutil
from pathlib import Path

import pytest
from helpers.cluster import turns
from helpers.wanted_bench import Bench
from weft.v1 import control_pb2

from cluster.errors import ClusterConfigError, ModelNotFoundError
from cluster.rank_values import Outcome
from cluster.saved_state import decode
from workers.errors import EngineConfigError


async def test_every_wanted_group_is_formed_once_however_often_it_is_reconciled(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    for _ in range(5):
        bench.state.reconcile()
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1"]
    assert bench.router.num_reconciled == bench.other_router.num_reconciled == 6


async def test_a_pass_with_nothing_to_do_saves_nothing(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    num_saves = bench.num_saves
    bench.state.reconcile()
    assert bench.num_saves == num_saves


async def test_what_operators_want_wakes_the_controller(bench: Bench) -> None:
    await bench.apply({"replicas": 1})

    async def scale() -> None:
        bench.state.scale("m", 2)

    for change in (
        scale(),
        bench.state.drain("node-b", None),
        bench.state.undrain("node-b"),
        bench.state.shut_down(1.0),
    ):
        bench.changed.clear()
        await change
        assert bench.changed.is_set()


async def test_ranks_are_counted_over_all_models(bench: Bench) -> None:
    await bench.apply({"name": "a", "tensor_parallel": 2, "pipeline_parallel": 2, "replicas": 2}, {"name": "b"})
    assert bench.state.num_ranks == 9


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


async def test_scale_down_ends_a_group_that_was_given_up_before_one_that_starts(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.forms.lives[0].end(Outcome(message="no", is_refusal=True))
    bench.state.reconcile()
    bench.state.scale("m", 1)
    await bench.settle()
    assert bench.replicas() == ["m-1.1"]


@pytest.mark.parametrize(("wanted", "told"), [(None, 256), (100, 100)])
async def test_routers_are_told_the_context_that_is_served(bench: Bench, wanted: int | None, told: int) -> None:
    await bench.apply({"max_context": wanted})
    assert [(model.name, model.max_context, model.path) for model in bench.state.models()] == [
        ("m", told, str(bench.folder))
    ]


async def test_what_cannot_be_served_is_refused_and_changes_nothing(bench: Bench) -> None:
    await bench.apply({})
    with pytest.raises(ModelNotFoundError):
        await bench.apply({"path": str(bench.folder / "none")})
    with pytest.raises(EngineConfigError, match="max_context is 257"):
        await bench.state.roll("m", {"max_context": 257})
    assert bench.model().revision == 1


async def test_ranks_are_placed_from_when_a_group_has_room_until_it_leaves(bench: Bench) -> None:
    await bench.apply({"replicas": 2, "tensor_parallel": 2})
    first, second = bench.forms.lives
    first.become_ready()
    second.listener.on_waiting("needs 2 CPUs on one node; the largest free node has 0")
    assert (bench.state.num_ranks, bench.state.num_placed_ranks) == (4, 2)
    second.become_ready()
    assert bench.state.num_placed_ranks == 4
    first.holds_requests = True
    bench.state.scale("m", 1)
    bench.state.reconcile()
    assert bench.state.num_placed_ranks == 2
    first.requests_ended.set()
    await bench.state.shut_down(0.0)
    assert bench.state.num_placed_ranks == 2, "who stops leaves spares for as many"


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
    assert decode(bench.saved).groups[0].is_leaving, "a successor has it drained to its end"
    assert [model.name for model in bench.state.models()] == ["b"]
    await bench.settle()
    assert bench.forms.of("a-0.1").drained_s == 30.0
    assert bench.forms.of("a-0.1").was_cancelled
    assert [model.name for model in bench.state.model_statuses()] == ["b"]
    assert await bench.apply({"name": "b", "replicas": 2}) == []


async def test_log_tells_each_change_and_what_is_to_be_said_of_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cluster.wanted_models")
    await bench.apply({"name": "a"}, {"name": "b"})
    caplog.clear()
    await bench.apply({"name": "b", "replicas": 2})
    told = [record.getMessage() for record in caplog.records if record.name == "cluster.wanted_models"]
    assert sorted(told) == ["remove a", "scale b: replicas: 1 -> 2"]


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


async def test_a_path_that_a_successor_could_not_read_is_not_kept(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"mod\xe8les")
    try:
        shutil.copytree(bench.folder, folder / "m")
    except OSError:
        pytest.skip("names of files are UTF-8 here")
    monkeypatch.chdir(folder)
    saved = bench.saved
    with pytest.raises(ClusterConfigError, match="Invalid JSON: lone leading surrogate"):
        await bench.apply({"path": "./m"})
    assert bench.saved == saved
    assert bench.state.models() == []


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
