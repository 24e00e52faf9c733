"""All-reduces of two ranks on two GPUs are measured, called and recorded. Not yet run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

REPOSITORY = Path(__file__).resolve().parents[2]


def test_command_measures_nccl_called_and_recorded() -> None:
    """The group also comes to its end: NCCL waits for graphs that were not dropped."""
    arguments = ["--ranks", "2", "--sizes", "16,1024", "--device", "cuda", "--rounds", "1"]
    command = [sys.executable, "-m", "bench.all_reduce", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [(row["num_bytes"] >> 10, row["way"]) for row in rows if row["way"].startswith("NCCL")] == [
        (16, "NCCL, eager"),
        (16, "NCCL, recorded"),
        (1024, "NCCL, eager"),
        (1024, "NCCL, recorded"),
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
