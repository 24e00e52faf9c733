import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.process_tree import measure_tree, watch_tree

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "x = bytearray(64_000_000); print('ready', flush=True); input()"])
child.wait()
"""


def test_tree_counts_grandchildren_and_peak_outlives_them() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        with watch_tree(process.pid, interval_s=0.01) as peak:
            now = measure_tree(process.pid)
            process.stdin.write("\n")
            process.stdin.flush()
            process.wait(timeout=30)
    assert len(now.processes) == 2
    assert now.pss_bytes > 64_000_000
    assert peak.memory.pss_bytes > 64_000_000
    assert measure_tree(process.pid).processes == ()


def test_command_is_run_and_reported() -> None:
    code = "for _ in range(40): x = bytearray(64_000_000)"  # lives for some samples
    result = subprocess.run(
        [sys.executable, "-m", "bench.process_tree", "--interval", "0.02", "--", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["processes"] == 1
    assert report["pss_bytes"] > 64_000_000


def test_a_command_that_cannot_be_run_is_told() -> None:
    command = [sys.executable, "-m", "bench.process_tree", "--", "/no/such/command"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert done.returncode == 2
    assert done.stderr.endswith("error: /no/such/command cannot be run: No such file or directory\n")
