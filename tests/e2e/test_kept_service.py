"""The service on a Ray head whose `weft serve` is killed, told to end, and started anew by deploy/ray/serve.sh."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.ports import unlisted_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(700)]

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("model_folder")
def test_killed_front_is_replaced_by_one_that_takes_over_and_sigterm_ends_everything(tmp_path: Path) -> None:
    roots = os.pathsep.join(str(REPOSITORY / folder) for folder in (".", "proto", "tests"))
    control = f"127.0.0.1:{unlisted_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "helpers.kept_service", str(tmp_path), control],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": roots},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert min(told["num_killed"], told["num_waiting"]) >= 3, "killed spares are started anew"
    assert told["after"] == told["before"], "nothing that serves has noticed"
    assert (told["num_tokens"], told["status"]) == (told["wanted_tokens"], 0), "the request in flight was finished"
    assert not set(told["anew"].values()) & set(told["before"].values())
    assert min(told["waited_s"]) > 0, "all are processes that Ray had started ahead"
