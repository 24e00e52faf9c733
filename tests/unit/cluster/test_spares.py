import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import code_id as code
from cluster import ray_prestart, spares
from cluster.code_id import code_id, has_code_changed
from cluster.errors import SpareError
from cluster.spares import SpareKind, add_spares, leave_spares, num_waiting, prepare, spare_options, take_spare
from parallel.errors import DeviceError
from parallel.kernels.native import build

RANK = SpareKind.RANK
SERVICE = SpareKind.SERVICE
HOOK = ray_prestart.hook_variable()
NO_JOB = spares.ray.JobID.nil().hex()


class Notes:
    """Ray's store of notes, in memory, and what it was asked to start."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.started: list[tuple[str, int]] = []
        self.starts: list[tuple[dict[str, str], bool]] = []
        """How: with which variables, and whether as children of this process."""
        self.killed: set[int] = set()
        self.at_once = 8
        self.nodes = {"m", "n"}
        self.on_start: Callable[[int], None] = lambda count: None

    def list_notes(self, prefix: str) -> list[str]:
        return sorted(note for note in self.notes if note.startswith(prefix))

    def read_note(self, note: str) -> str | None:
        return self.notes.get(note)

    def leave_note(self, note: str, text: str = "") -> None:
        self.notes[note] = text

    def drop_notes(self, prefix: str) -> None:
        for note in self.list_notes(prefix):
            del self.notes[note]

    def num_started_at_once(self, node_id: str) -> int:
        return self.at_once

    def living_nodes(self) -> set[str]:
        return self.nodes

    def running_pids(self, node_id: str) -> set[int]:
        return {int(note.split("/")[3]) for note in self.notes if note.count("/") == 4} - self.killed

    def start_ahead(self, node_id: str, count: int, *, variables: dict[str, str], has_parent: bool) -> None:
        self.started.append((node_id, count))
        self.starts.append((variables, has_parent))
        self.on_start(count)

    def add(self, kind: str = RANK.full_name, *, node: str = "n", pid: int = 1, waits: bool = True) -> None:
        """Let a spare be there."""
        self.notes |= {f"spare/{node}/{kind}/{pid}/begun": "", until(kind, node=node): f"{time.time() + 600:.0f}"}
        if waits:
            self.notes[f"spare/{node}/{kind}/{pid}/waits"] = ""


def until(kind: str = RANK.full_name, *, node: str = "n") -> str:
    return f"spare/{node}/{kind}/until"


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    modules: list[str] = []
    monkeypatch.setattr(spares, "import_for_good", lambda *names: modules.extend(names))
    return modules


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What has been compiled."""
    built: list[str] = []
    monkeypatch.setattr(build, "build_library", lambda: built.append("kernels"))
    return built


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, imported: list[str], compiled: list[str]) -> Iterator[Notes]:
    """The store of a node n, in whose process nothing is imported or compiled."""
    store = Notes()
    for name in ("list_notes", "read_note", "leave_note", "drop_notes"):
        monkeypatch.setattr(spares, name, getattr(store, name))
    for name in ("living_nodes", "num_started_at_once", "running_pids", "start_ahead"):
        monkeypatch.setattr(spares, name, getattr(store, name))
    monkeypatch.setattr(spares, "_BEGIN_S", 0.02)
    yield store
    take_spare()
    for thread in threading.enumerate():
        if thread.name == "spare":
            thread.join(5)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when this process would have ended."""
    event = threading.Event()
    monkeypatch.setattr(spares.os, "kill", lambda pid, number: event.set())
    monkeypatch.setattr(spares, "_LOOK_S", 0.001)
    monkeypatch.setattr(spares, "_MARGIN_S", 0.001)
    return event


def become(monkeypatch: pytest.MonkeyPatch, kind: str = RANK.full_name, *, job: str = NO_JOB) -> None:
    """Be a process that Ray has started on node n, for the work of a job or before there is any."""
    context = SimpleNamespace(get_node_id=lambda: "n", get_job_id=lambda: job)
    monkeypatch.setattr(spares.ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("WEFT_SPARE", kind)
    prepare()


def test_ranks_of_a_controller_that_was_a_spare_become_spares_where_enough_wait(
    store: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add()
    assert spare_options("n", RANK) == {}, "they would have another environment than those that wait"
    monkeypatch.setenv("WEFT_SPARE", SERVICE.full_name)
    assert spare_options("n", RANK) == {"runtime_env": {"env_vars": RANK.variables}}
    for options in (spare_options("n", RANK, count=2), spare_options("m", RANK)):
        assert options == {"runtime_env": {"env_vars": {"WEFT_SPARE": "", HOOK: ""}}}, "not the controller's"


def test_controller_becomes_a_spare_where_one_waits(store: Notes) -> None:
    assert spare_options("n", SERVICE) == {}
    store.add(SERVICE.full_name, waits=False)
    assert spare_options("n", SERVICE) == {}, "it imports"
    store.add(SERVICE.full_name)
    assert spare_options("n", SERVICE) == {"runtime_env": {"env_vars": SERVICE.variables}}


@pytest.mark.parametrize(
    ("kind", "modules", "libraries"),
    [(RANK, ["cluster.leader"], ["kernels"]), (SERVICE, ["cluster.controller", "router.app"], [])],
)
def test_spare_notes_that_it_waits_when_everything_is_imported_and_compiled(
    store: Notes,
    imported: list[str],
    compiled: list[str],
    monkeypatch: pytest.MonkeyPatch,
    kind: SpareKind,
    modules: list[str],
    libraries: list[str],
) -> None:
    leave_spares("n", kind, count=1, lifetime_s=600)
    become(monkeypatch, kind.full_name)
    assert spare_options("n", kind)
    assert imported == modules
    assert compiled == libraries


def test_rank_waits_where_nothing_can_be_compiled(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise DeviceError("no C++ compiler")

    monkeypatch.setattr(build, "build_library", fail)
    leave_spares("n", RANK, count=1, lifetime_s=600)
    become(monkeypatch)
    assert num_waiting("n", RANK) == 1


def test_taken_spare_is_not_counted_any_more(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add(pid=1)
    become(monkeypatch)
    assert num_waiting("n", RANK) == 2
    take_spare()
    assert num_waiting("n", RANK) == 1


def test_actor_that_had_to_be_started_makes_the_notes_of_dead_spares_go_and_no_others(
    store: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_spares("n", RANK, count=3, lifetime_s=600)  # as `weft warm` asks for them
    asked = dict(store.notes)
    store.notes |= {f"spare/n/{RANK.full_name}/{pid}/waits": "" for pid in (1, 2)}
    store.killed.add(1)
    store.add(node="m")
    become(monkeypatch, job="01000000")
    assert (num_waiting("n", RANK), num_waiting("m", RANK)) == (1, 1)
    assert asked.items() <= store.notes.items()


@pytest.mark.parametrize("text", [None, "1", f"{2**40}"])
def test_spare_ends_when_its_time_is_over_or_nobody_knows_it(
    store: Notes, monkeypatch: pytest.MonkeyPatch, ended: threading.Event, text: str | None
) -> None:
    store.add()
    become(monkeypatch)
    store.drop_notes(until())
    if text is not None:
        store.leave_note(until(), text)
    assert ended.wait(0.1 if text == f"{2**40}" else 5) == (text != f"{2**40}")


@pytest.mark.parametrize(("most", "stays"), [(1, False), (2, True)])
def test_waiting_spare_ends_where_fewer_are_wanted(
    store: Notes, monkeypatch: pytest.MonkeyPatch, ended: threading.Event, most: int, stays: bool
) -> None:
    store.add(pid=1)
    become(monkeypatch)
    leave_spares("n", RANK, count=1, most=most, lifetime_s=600)
    assert ended.wait(0.1 if stays else 5) is not stays
    assert num_waiting("n", RANK) == 1 + stays
    assert store.started == []


@pytest.mark.parametrize("lifetime_s", [600.0, -1.0])
def test_spares_that_were_asked_for_alone_wait_as_long_as_that_whatever_groups_need(
    store: Notes, monkeypatch: pytest.MonkeyPatch, ended: threading.Event, lifetime_s: float
) -> None:
    leave_spares("n", RANK, count=2, lifetime_s=lifetime_s)
    store.add(pid=1)
    become(monkeypatch)
    leave_spares("n", RANK, count=1, most=1, lifetime_s=600)
    assert ended.wait(0.1 if lifetime_s > 0 else 5) == (lifetime_s < 0)


def test_spare_that_was_counted_before_its_time_was_over_can_be_taken_a_moment_later(
    store: Notes, monkeypatch: pytest.MonkeyPatch, ended: threading.Event
) -> None:
    monkeypatch.setattr(spares, "_MARGIN_S", 60.0)
    become(monkeypatch)  # its time is over at once
    (thread,) = (each for each in threading.enumerate() if each.name == "spare")
    assert thread.daemon, "a process that wants to end may"
    while num_waiting("n", RANK):
        assert thread.is_alive()
    take_spare()
    thread.join(5)
    assert not thread.is_alive()
    assert not ended.is_set()


def test_spares_of_other_code_end_when_new_ones_are_left(store: Notes) -> None:
    store.add(pid=1)
    store.add(f"{'0' * 16}-rank", pid=2)
    leave_spares("n", RANK, count=2, lifetime_s=600)
    assert {note.split("/")[2] for note in store.notes} == {RANK.full_name}


def test_notes_of_nodes_that_have_gone_are_dropped_when_spares_are_left_on_another(store: Notes) -> None:
    for node in ("gone", "m"):
        leave_spares(node, RANK, count=2, lifetime_s=600)
        store.add(node=node, pid=3)
    leave_spares("n", SERVICE, count=2, lifetime_s=600)
    assert {note.split("/")[1] for note in store.notes} == {"m", "n"}


def test_as_many_are_started_as_are_missing(store: Notes) -> None:
    store.add(pid=1)
    store.add(pid=2, waits=False)
    leave_spares("n", RANK, count=4, most=5, lifetime_s=600)
    leave_spares("n", RANK, count=1, most=5, lifetime_s=600)
    leave_spares("n", RANK, count=2, lifetime_s=600)
    assert store.started == [("n", 3), ("n", 1)]


@pytest.mark.parametrize("kind", list(SpareKind))
def test_killed_spares_are_forgotten_and_started_anew(store: Notes, kind: SpareKind) -> None:
    store.add(kind.full_name, pid=1)
    store.add(kind.full_name, pid=2)
    store.add(kind.full_name, pid=3, waits=False)
    store.add(kind.full_name, pid=4, waits=False)
    store.killed = {1, 3}  # one that waited, one that was still importing
    leave_spares("n", kind, count=4, lifetime_s=600)
    assert store.started == [("n", 2)]
    assert num_waiting("n", kind) == 1
    assert {note.split("/")[3] for note in store.notes if note.count("/") == 4} == {"2", "4"}


def test_ray_that_does_not_tell_which_processes_run_starts_what_is_missing_by_the_notes(
    store: Notes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(node_id: str) -> set[int]:
        raise SpareError("Ray keeps no processes ready: AttributeError: GetWorkerPIDs")

    monkeypatch.setattr(spares, "running_pids", fail)
    store.add(pid=1)
    leave_spares("n", RANK, count=3, lifetime_s=600)
    assert store.started == [("n", 2)]
    assert not caplog.records


def test_node_that_starts_few_at_a_time_is_asked_again(store: Notes) -> None:
    store.at_once = 2
    store.on_start = lambda count: [store.add(pid=len(store.notes) + each, waits=False) for each in range(count)]
    leave_spares("n", RANK, count=5, lifetime_s=600)
    assert store.started == [("n", 2), ("n", 2), ("n", 1)]


def test_node_that_starts_few_at_a_time_is_asked_until_the_time_is_over_only(store: Notes) -> None:
    store.at_once = 2
    add_spares("n", RANK, count=500, lifetime_s=600, give_up_s=time.monotonic())
    assert store.started == [("n", 2)]
    add_spares("n", RANK, count=5, lifetime_s=600, give_up_s=time.monotonic() + 600)
    assert store.started[1:] == [("n", 2), ("n", 2), ("n", 1)]


def test_more_are_asked_for_when_those_before_have_begun(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "_BEGIN_S", 1.0)
    store.at_once = 1
    num_begun, num_begun_at = 0, []

    def begin(_: float) -> None:
        nonlocal num_begun
        num_begun += 1
        store.add(pid=num_begun, waits=False)

    monkeypatch.setattr(spares.time, "sleep", begin)
    store.on_start = lambda count: num_begun_at.append(num_begun)
    leave_spares("n", RANK, count=3, lifetime_s=600)
    assert num_begun_at == [0, 1, 2]
    assert num_begun == 2, "nobody waits for the last"


@pytest.mark.parametrize("kind", list(SpareKind))
def test_spares_are_started_as_the_actors_that_they_become(store: Notes, kind: SpareKind) -> None:
    leave_spares("n", kind, count=1, lifetime_s=600)
    assert store.starts == [(kind.variables, kind is RANK)]


def test_those_that_wait_do_so_as_long_as_anybody_has_asked_for(store: Notes) -> None:
    leave_spares("n", RANK, count=1, lifetime_s=6000)
    before = store.notes[until()]
    leave_spares("n", RANK, count=1, lifetime_s=60)
    assert store.notes[until()] == before
    leave_spares("n", RANK, count=1, lifetime_s=9000)
    assert float(store.notes[until()]) > float(before)


@pytest.mark.parametrize("job", [NO_JOB, "01000000"])
def test_process_that_comes_when_enough_are_there_ends_unless_it_has_work(
    store: Notes, imported: list[str], monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    leave_spares("n", RANK, count=1, lifetime_s=600)
    store.add(pid=1, waits=False)
    with pytest.raises(SpareError, match="1 already") if job == NO_JOB else nullcontext():
        become(monkeypatch, job=job)
    assert f"spare/n/{RANK.full_name}/1/begun" in store.notes
    assert bool(imported) == (job != NO_JOB), "others need the cores"


def test_of_spares_that_come_together_as_many_stay_as_are_wanted(store: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_spares("n", RANK, count=1, lifetime_s=600)
    store.add(pid=2**30, waits=False)  # begun before this one has looked
    become(monkeypatch)
    assert num_waiting("n", RANK) == 1


def test_spare_that_began_alone_ends_where_one_that_goes_before_it_comes_meanwhile(
    store: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_spares("n", RANK, count=1, lifetime_s=600)
    monkeypatch.setattr(spares, "import_for_good", lambda *names: store.add(pid=1, waits=False))
    with pytest.raises(SpareError, match="1 already"):
        become(monkeypatch)
    assert {note.split("/")[3] for note in store.notes if note.count("/") == 4} == {"1"}


@pytest.mark.parametrize("when", ["before it begins", "while it imports"])
def test_spare_that_comes_after_one_that_waits_ends(store: Notes, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    leave_spares("n", RANK, count=1, lifetime_s=600)
    if when == "before it begins":
        store.add(pid=2**30)
    else:
        monkeypatch.setattr(spares, "import_for_good", lambda *names: store.add(pid=2**30))
    with pytest.raises(SpareError, match="1 already"):
        become(monkeypatch)
    assert num_waiting("n", RANK) == 1


@pytest.mark.parametrize("job", [NO_JOB, "01000000"])
def test_process_with_other_code_ends_unless_it_has_work(
    store: Notes, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    with pytest.raises(SpareError, match="code") if job == NO_JOB else nullcontext():
        become(monkeypatch, f"{'0' * 16}-rank", job=job)
    assert not store.notes


@pytest.mark.parametrize("job", [NO_JOB, "01000000"])
def test_process_that_cannot_import_ends_unless_it_has_work(
    store: Notes, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    def fail(*modules: str) -> None:
        raise ImportError("no torch")

    monkeypatch.setattr(spares, "import_for_good", fail)
    with pytest.raises(ImportError) if job == NO_JOB else nullcontext():
        become(monkeypatch, job=job)
    assert not store.notes


@pytest.mark.usefixtures("store")
def test_spare_in_a_folder_that_was_removed_imports_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    leave_spares("n", RANK, count=1, lifetime_s=600)
    folders: list[str] = []
    monkeypatch.setattr(spares, "import_for_good", lambda *names: folders.append(os.getcwd()))
    removed = tmp_path / "removed"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    become(monkeypatch)
    assert folders == ["/"]


def test_code_has_another_id_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "scheduler.py"
    monkeypatch.setattr(code, "_folders", lambda package: [tmp_path])

    def id_of(text: str) -> str:
        file.write_text(text)
        code_id.cache_clear()
        return code_id()

    try:
        assert id_of("a = 1") == id_of("a = 1") != id_of("a = 2")
    finally:
        monkeypatch.undo()
        code_id.cache_clear()


def test_code_has_changed_when_a_file_was_written_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "_folders", lambda package: [tmp_path])
    file = tmp_path / "scheduler.py"
    file.write_text("a = 1")
    os.utime(file, (0, 0))  # as a tool that keeps the times of the files which it copies
    assert has_code_changed(file.stat().st_ctime - 1)
    assert not has_code_changed(file.stat().st_ctime)


def test_code_has_another_id_when_torch_changes_and_the_same_when_a_tool_of_the_head_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "_folders", lambda package: [tmp_path / package])

    def id_with(name: str) -> str:
        (tmp_path / f"{name}.dist-info").mkdir()
        code_id.cache_clear()
        return code_id()

    try:
        before = id_with("torch-2.13.0")
        assert id_with("boto3-1.0") == before != id_with("numpy-2.0")
    finally:
        monkeypatch.undo()
        code_id.cache_clear()


def test_process_of_a_spare_is_told_its_threads_and_finds_this_code() -> None:
    variables = RANK.variables
    assert (variables["OMP_NUM_THREADS"], variables["WEFT_SPARE"]) == ("1", RANK.full_name)
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
        leave_spares("n", RANK, count=1, lifetime_s=600)
        assert spare_options("n", SERVICE) == {}
        monkeypatch.setenv("WEFT_SPARE", SERVICE.full_name)
        assert spare_options("n", RANK) == {"runtime_env": {"env_vars": {"WEFT_SPARE": "", HOOK: ""}}}
        leave_spares("n", RANK, count=1, lifetime_s=600)
    assert [record.message for record in caplog.records if "PrestartWorkers" in record.message] == [
        "Ray keeps no processes ready: AttributeError: PrestartWorkers; starts take longer"
    ]


def test_whatever_fails_in_ray_is_a_spare_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> list[dict[str, object]]:
        raise RuntimeError("not connected")

    monkeypatch.setattr(ray_prestart.ray, "nodes", nodes)
    with pytest.raises(SpareError, match="RuntimeError: not connected"):
        ray_prestart.start_ahead("n", 1, variables={}, has_parent=False)
    with pytest.raises(SpareError, match="RuntimeError: not connected"):
        ray_prestart.running_pids("n")
