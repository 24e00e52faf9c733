import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import ray_prestart, spares
from cluster.errors import SpareError
from cluster.spares import SpareKind, code_id, leave_spares, prepare, spare_options, take_spare

KIND = SpareKind(num_threads=2, lifetime_s=600.0)
SERVICE = SpareKind(lifetime_s=600.0)
HOOK = ray_prestart.hook_variable()
NO_JOB = spares.ray.JobID.nil().hex()


class Notes:
    """Ray's store of notes, in memory, and what it was asked to start."""

    def __init__(self) -> None:
        self.notes: set[str] = set()
        self.started: list[tuple[str, int]] = []

    def list_notes(self, prefix: str) -> list[str]:
        return sorted(note for note in self.notes if note.startswith(prefix))

    def has_note(self, note: str) -> bool:
        return note in self.notes

    def leave_note(self, note: str) -> None:
        self.notes.add(note)

    def drop_notes(self, prefix: str) -> None:
        self.notes -= set(self.list_notes(prefix))

    def start_ahead(
        self, node_id: str, count: int, *, keep_s: float, variables: dict[str, str], has_parent: bool
    ) -> None:
        self.started.append((node_id, count))


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    modules: list[str] = []
    monkeypatch.setattr(spares, "import_for_good", lambda *names: modules.extend(names))
    return modules


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, imported: list[str]) -> Iterator[Notes]:
    """The store of a node n, in whose process nothing is imported."""
    store = Notes()
    for name in ("list_notes", "has_note", "leave_note", "drop_notes", "start_ahead"):
        monkeypatch.setattr(spares, name, getattr(store, name))
    yield store
    take_spare()


def become(monkeypatch: pytest.MonkeyPatch, kind: str = KIND.name, *, job: str = NO_JOB) -> None:
    """Be a process that Ray has started on node n, for the work of a job or before there is any."""
    context = SimpleNamespace(get_node_id=lambda: "n", get_job_id=lambda: job)
    monkeypatch.setattr(spares.ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("WEFT_SPARE", kind)
    prepare()


def note(*, node: str = "n", kind: str = KIND.name, pid: int = 1, ends_in_s: float = 600.0) -> str:
    return f"spare/{node}/{kind}/{pid}/{time.time() + ends_in_s:.0f}"


def test_ranks_of_a_controller_that_was_a_spare_become_spares_where_enough_wait(
    store: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.notes.add(note())
    assert spare_options("n", KIND) == {}, "they would have another environment than those that wait"
    monkeypatch.setenv("WEFT_SPARE", SERVICE.name)
    assert spare_options("n", KIND) == {"runtime_env": {"env_vars": KIND.variables}}
    for options in (
        spare_options("n", KIND, count=2),
        spare_options("m", KIND),
        spare_options("n", SpareKind(num_threads=1, lifetime_s=600.0)),
    ):
        assert options == {"runtime_env": {"env_vars": {"WEFT_SPARE": "", HOOK: ""}}}, "not the controller's"


def test_controller_becomes_a_spare_where_one_waits(store: Notes) -> None:
    assert spare_options("n", SERVICE) == {}
    store.notes.add(note(kind=SERVICE.name))
    assert spare_options("n", SERVICE) == {"runtime_env": {"env_vars": SERVICE.variables}}


@pytest.mark.parametrize(
    ("kind", "modules"), [(KIND, ["cluster.leader"]), (SERVICE, ["cluster.controller", "router.app"])]
)
def test_spare_notes_that_it_waits_when_everything_is_imported(
    store: Notes, imported: list[str], monkeypatch: pytest.MonkeyPatch, kind: SpareKind, modules: list[str]
) -> None:
    become(monkeypatch, kind.name)
    assert spare_options("n", kind)
    assert imported == modules


def test_taken_spare_is_not_counted_any_more(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    other = note()
    store.notes.add(other)
    become(monkeypatch)
    assert spare_options("n", KIND, count=2)
    take_spare()
    assert store.notes == {other}


def test_actor_that_had_to_be_started_makes_the_notes_of_dead_spares_go(
    store: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = note(node="m")
    store.notes |= {note(), other}
    become(monkeypatch, job="01000000")
    assert store.notes == {other}


def test_spare_that_is_about_to_end_is_not_counted(store: Notes) -> None:
    store.notes.add(note(kind=SERVICE.name, ends_in_s=-1))
    assert spare_options("n", SERVICE) == {}


def test_spare_ends_when_its_note_is_dropped(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(spares.os, "kill", lambda pid, number: ended.set())
    monkeypatch.setattr(spares, "_LOOK_S", 0.001)
    become(monkeypatch)
    store.notes.clear()
    assert ended.wait(5)


def test_spares_of_other_code_end_when_new_ones_are_left(store: Notes) -> None:
    mine, stale = note(), note(kind=f"{'0' * 16}-2-600")
    store.notes |= {mine, stale}
    leave_spares("n", KIND, count=2)
    assert (store.notes, store.started) == ({mine}, [("n", 2)])


def test_process_with_other_code_is_no_spare(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, f"{'0' * 16}-2-600")
    assert not store.notes


def test_import_that_fails_does_not_end_the_process(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*modules: str) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr(spares, "import_for_good", fail)
    become(monkeypatch)
    assert not store.notes


def test_code_has_another_id_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scheduler.py"
    monkeypatch.setattr(spares, "_folders", lambda package: [tmp_path])

    def id_of(text: str) -> str:
        file.write_text(text)
        code_id.cache_clear()
        return code_id()

    try:
        assert id_of("a = 1") == id_of("a = 1") != id_of("a = 2")
    finally:
        monkeypatch.undo()
        code_id.cache_clear()


def test_process_of_a_spare_is_told_its_threads_and_finds_this_code() -> None:
    variables = KIND.variables
    assert (variables["OMP_NUM_THREADS"], variables["WEFT_SPARE"]) == ("2", KIND.name)
    assert str(Path(spares.__file__).parents[1]) in variables["PYTHONPATH"].split(os.pathsep)
    assert "OMP_NUM_THREADS" not in SERVICE.variables


def test_ray_that_keeps_nothing_ready_is_told_once_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object, **more: object) -> None:
        raise SpareError("Ray keeps no processes ready: AttributeError: PrestartWorkers")

    for name in ("list_notes", "start_ahead"):
        monkeypatch.setattr(spares, name, fail)
    spares._tell.cache_clear()
    with caplog.at_level(logging.WARNING, logger=spares.logger.name):
        leave_spares("n", KIND, count=1)
        assert spare_options("n", SERVICE) == {}
        leave_spares("n", KIND, count=1)
    assert [record.message for record in caplog.records if "PrestartWorkers" in record.message] == [
        "Ray keeps no processes ready: AttributeError: PrestartWorkers; starts take longer"
    ]


def test_whatever_fails_in_ray_is_a_spare_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> list[dict[str, object]]:
        raise RuntimeError("not connected")

    monkeypatch.setattr(ray_prestart.ray, "nodes", nodes)
    with pytest.raises(SpareError, match="RuntimeError: not connected"):
        ray_prestart.start_ahead("n", 1, keep_s=1.0, variables={}, has_parent=False)
