"""How many threads a rank has; which of its threads leave running ones on their cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel import control_groups
from workers import cores
from workers.cores import threads_per_rank

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="no scheduling classes here")

_SCRIPT = """
import os, threading
from workers.cores import compute_here, give_way

classes = {}
def note(name):
    classes[name] = os.sched_getscheduler(0)
def run(name, work):
    thread = threading.Thread(target=work, args=(name,))
    thread.start()
    thread.join()
def compute(name):
    compute_here()
    note(name)
    run("started by one that computes", note)

waits, goes_on = threading.Event(), threading.Event()
def live(name):
    waits.set()
    goes_on.wait()
    note(name)
early = threading.Thread(target=live, args=("started before",))
early.start()
waits.wait()
give_way()
goes_on.set()
early.join()
note("main")
run("started after", note)
run("computes", compute)
print({name: {os.SCHED_BATCH: "batch", os.SCHED_OTHER: "other"}[policy] for name, policy in classes.items()})
"""


def test_a_process_gives_way_but_for_its_threads_that_compute() -> None:
    ran = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=240, check=True)
    assert ran.stdout.strip() == str(
        {
            "started before": "batch",
            "main": "batch",
            "started after": "batch",
            "computes": "other",
            "started by one that computes": "other",
        }
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for /sys of 8 cores with 2 hyperthreads each; its container is not limited."""
    for cpu in range(16):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(cores, "_CPUS", tmp_path)
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    return tmp_path


def test_a_core_is_one_thread_and_every_rank_has_one(machine: Path) -> None:
    assert threads_per_rank(1) == 8
    assert threads_per_rank(3) == 2
    assert threads_per_rank(20) == 1
    assert threads_per_rank(0) == 8


def test_ranks_have_no_more_than_ray_has_cpus(machine: Path) -> None:
    assert threads_per_rank(1, 16.0) == 8
    assert threads_per_rank(2, 6.0) == 3
    assert threads_per_rank(4, 2.0) == 1


def test_threads_are_on_cores_that_the_process_may_use(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 8, 9})
    assert threads_per_rank(1, 16.0) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert threads_per_rank(1) == 1


@pytest.mark.parametrize(("limit", "num_threads"), [("450000 100000", 4), ("50000 100000", 1), ("nonsense", 8)])
def test_threads_are_no_more_than_the_container_has_cpus(machine: Path, limit: str, num_threads: int) -> None:
    (machine / "cpu.max").write_text(limit)
    assert threads_per_rank(1) == num_threads


def test_limits_of_a_unit_within_the_machine_hold_too(machine: Path) -> None:
    slices = machine / "system.slice"
    (slices / "weft.service").mkdir(parents=True)
    (machine / "own").write_text("1:cpu:/elsewhere\n0::/system.slice/weft.service\n")
    (slices / "weft.service" / "cpu.max").write_text("300000 100000")
    assert threads_per_rank(1) == 3
    (slices / "cpu.max").write_text("200000 100000")
    assert threads_per_rank(1) == 2


def test_where_nothing_is_told_every_cpu_is_a_core(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_CPUS", machine / "absent")
    monkeypatch.setattr(control_groups, "_MOUNT", machine / "absent")
    assert threads_per_rank(1) == 16
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert threads_per_rank(1) == 12
