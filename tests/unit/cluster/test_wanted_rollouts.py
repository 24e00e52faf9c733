"""Revisions of a model: rollouts, undo, and the files that each was wanted with."""

import asyncio
import itertools
import json
import threading
from pathlib import Path
from unittest.mock import ANY

import pytest
from helpers.cluster import turns, write_tokenizer
from helpers.wanted_bench import Bench

from cluster import preflight
from cluster.config import ModelSpec
from cluster.errors import ClusterConfigError, ModelFilesChangedError, ModelNotFoundError
from cluster.rank_values import Outcome
from cluster.revision_files import RevisionText, check_files
from cluster.saved_state import decode


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


async def test_models_on_a_file_system_that_hangs_keep_nobody_else_waiting(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.apply({"replicas": 1})
    goes_on = threading.Event()

    def hang(spec: ModelSpec) -> ModelSpec:
        goes_on.wait()
        return preflight.check_model(spec)

    monkeypatch.setattr("cluster.wanted_models.check_model", hang)
    try:
        changes = [asyncio.create_task(bench.state.roll("m", {"max_context": 64})) for _ in range(40)]
        changes += [asyncio.create_task(bench.state.apply(bench.specs({"replicas": 2}))) for _ in range(40)]
        await turns()
        async with asyncio.timeout(30):
            assert await bench.state.node_statuses()  # as placement, in a thread of those that all share
    finally:
        goes_on.set()
        for change in changes:
            change.cancel()
        await asyncio.gather(*changes, return_exceptions=True)


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

    def read_text(model: ModelSpec, *, before: RevisionText | None = None) -> RevisionText:
        assert model.engine.dtype != "float32" or is_applied.wait(10)
        return preflight.read_text(model, before=before)

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

    def read_text(model: ModelSpec, *, before: RevisionText | None = None) -> RevisionText:
        assert model.engine.max_context is not None or is_rolled.wait(10)
        return preflight.read_text(model, before=before)

    monkeypatch.setattr("cluster.wanted_models.read_text", read_text)
    undoing = asyncio.create_task(bench.state.undo("m"))
    await bench.state.roll("m", {"max_context": 32})
    is_rolled.set()
    assert await undoing == (ANY, 2)
    assert [model.max_context for model in bench.state.models()] == [64]


async def test_undo_reads_the_commit_of_the_revision_that_it_goes_back_to(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = "aaa"

    def read_text(model: ModelSpec, *, before: RevisionText | None = None) -> RevisionText:
        return RevisionText(path=f"/hub/snapshots/{before.commit if before else newest}", max_context=64)

    def paths() -> list[str]:
        return [model.path for model in bench.state.models()]

    monkeypatch.setattr("cluster.wanted_models.read_text", read_text)
    await bench.apply({"replicas": 1})
    newest = "bbb"
    await bench.state.roll("m", {})
    assert paths() == ["/hub/snapshots/bbb"]
    newest = "ccc"
    await bench.state.undo("m")
    assert paths() == ["/hub/snapshots/aaa"]


async def test_rollout_of_a_model_that_is_never_left_alone_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.apply({"replicas": 1})
    replicas = itertools.count(2)

    def read_text(model: ModelSpec, *, before: RevisionText | None = None) -> RevisionText:
        bench.state.scale("m", next(replicas))
        return preflight.read_text(model, before=before)

    monkeypatch.setattr("cluster.wanted_models.read_text", read_text)
    with pytest.raises(ClusterConfigError, match="m was changed by others each of the 5 times that it was read"):
        await bench.state.roll("m", {"dtype": "float32"})
    assert bench.model().revision == 1


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


async def roll_in_vain(bench: Bench) -> None:
    await bench.state.roll("m", {"max_context": 64})
    bench.state.reconcile()
    await turns()
    await bench.forms.lives[-1].end(Outcome(message="no such tensor", is_refusal=True))
    bench.state.reconcile()
    await turns()


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_undo_of_a_rollout_that_failed_twice_goes_back_to_what_was_ready(
    bench: Bench, is_restarted: bool
) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    await roll_in_vain(bench)
    if is_restarted:
        bench.restart()
        bench.state.reconcile()
        for life in bench.forms.lives:
            life.be_adopted()
    await roll_in_vain(bench)
    assert (bench.model().revision, bench.model().previous_revision) == (3, 1)
    assert (await bench.state.undo("m"))[1] == 1
    await bench.settle()
    assert bench.replicas() == ["m-0.1", "m-1.1"], "none of them was replaced"
    assert (await bench.state.undo("m"))[1] == 3
    await bench.settle()
    assert (bench.model().revision, bench.model().previous_revision) == (3, 1)
    assert (await bench.state.roll("m", {}))[1] == 4
    assert bench.model().previous_revision == 3, "it was READY after all"


async def test_undo_goes_back_one_revision_where_none_was_ready(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    for max_context in (64, 32):
        await bench.state.roll("m", {"max_context": max_context})
    assert (await bench.state.undo("m"))[1] == 2


async def test_undo_goes_back_to_a_revision_that_was_ready_only_during_the_rollout_from_it(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.state.roll("m", {"max_context": 64})
    bench.forms.lives[0].become_ready()
    bench.state.reconcile()
    await bench.state.roll("m", {"max_context": 32})
    assert (bench.model().revision, bench.model().previous_revision) == (3, 1)


async def test_a_revision_that_was_ready_before_a_version_that_keeps_it_is_known_by_its_groups(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    saved = json.loads(bench.saved)
    assert saved["models"]["m"]["current"].pop("was_ready")
    bench.saved = json.dumps(saved).encode()
    bench.restart()
    bench.state.reconcile()
    bench.forms.lives[0].be_adopted()
    for _ in range(2):
        await roll_in_vain(bench)
    assert bench.model().previous_revision == 1


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
    assert not decode(bench.saved).models["m"].current.was_ready, "with these files"
    await bench.settle()
    assert decode(bench.saved).models["m"].current.was_ready
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
