"""`python -m bench.all_reduce` on two ranks: each size in the ways that the engine may take it."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from parallel.kernels.select import select_kernels

REPOSITORY = Path(__file__).resolve().parents[2]


def test_command_measures_every_way_of_each_size(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    arguments = ["--ranks", "2", "--sizes", "128,129", "--device", "cpu", "--rounds", "1", "--json", str(lines)]
    command = [sys.executable, "-m", "bench.all_reduce", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line == json.loads(lines.read_text())
    native = () if select_kernels(torch.device("cpu"), torch.bfloat16).slowness else ("shared memory",)
    assert [(row["num_bytes"], row["way"]) for row in line["rows"]] == [
        *((128 << 10, way) for way in (*native, "Unix sockets", "gloo")),
        *((129 << 10, way) for way in (*native, "gloo")),
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in line["rows"])
