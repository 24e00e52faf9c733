"""Several Ray nodes: a pipeline over two of them moves when one is drained, and what fits nowhere says why."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(700)]

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("model_folder")
def test_pipeline_over_nodes_moves_off_a_drained_node_and_what_fits_nowhere_says_why() -> None:
    roots = os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "proto", "tests"))
    done = subprocess.run(
        [sys.executable, "-m", "helpers.node_cluster"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": roots},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(set(told["nodes_before"])) == 2, "each stage has a node of its own"
    assert told["drained"] not in told["nodes_after"]
    assert len(set(told["nodes_after"])) == 2
    assert told["moved"] == told["alone"]
    assert told["states"] == ["GROUP_STATE_PENDING"] * 2
    assert told["reasons"] == [
        "needs 2 GPUs on one node; the largest node has 1",
        "needs H100 accelerators; the nodes have none",
    ]
    assert told["ready"] == 1
