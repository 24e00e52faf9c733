"""A service that stands still whenever it is not measured: its processes are watched in /proc."""

import sys
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.paused_service import start_service
from tests.helpers.polling import until

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")

_WITH_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("ready at", child.pid, flush=True)
try:
    time.sleep(300)
finally:
    child.kill()
    child.wait()
"""


def find_child(said: str) -> str | None:
    return said.split()[-1] if said.startswith("ready at") and said.endswith("\n") else None


def state(pid: int) -> str:
    """One letter, as in proc(5); "X": it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


async def test_all_its_processes_stand_still_but_while_it_is_measured() -> None:
    with start_service([sys.executable, "-c", _WITH_CHILD], find_child, timeout_s=30) as service:
        child = int(service.address)
        assert child in service.pids
        assert len(service.pids) == 2
        await until(lambda: all(state(pid) == "T" for pid in service.pids))
        with service.awake():
            assert all(state(pid) in "SRD" for pid in service.pids)
        await until(lambda: all(state(pid) == "T" for pid in service.pids))
    await until(lambda: all(state(pid) in "XZ" for pid in service.pids))


def test_one_that_ends_or_is_late_is_told_with_its_last_words() -> None:
    ends = [sys.executable, "-c", "print('no such model')"]
    refused = pytest.raises(BenchError, match="not become ready:\nno such model")
    with refused, start_service(ends, find_child, timeout_s=30):
        pass
    sleeps = [sys.executable, "-c", "import time; time.sleep(300)"]
    with pytest.raises(BenchError, match="not become ready"), start_service(sleeps, find_child, timeout_s=0.2):
        pass


async def test_nothing_is_left_of_one_that_passes_over_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.paused_service._END_TIMEOUT_S", 0.2)
    daemon = "trap '' INT; orphan=$(sh -c 'sleep 300 >&2 & echo $!'); echo ready at $orphan; exec sleep 300"
    with start_service(["sh", "-c", daemon], find_child, timeout_s=30) as service:
        assert len(service.pids) == 2
    await until(lambda: all(state(pid) in "XZ" for pid in service.pids))
