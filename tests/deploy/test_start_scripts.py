"""The scripts that start the service beside Ray, with doubles of `ray` and `weft` that say what they were told."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers.chart import CHART, REPOSITORY

HEAD = CHART / "files/head.sh"
SERVE = REPOSITORY / "deploy/ray/serve.sh"

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a script with commands of ours before all others; whatever of it is left in the end is killed."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(script: Path, *arguments: str, pod_ip: str = "127.0.0.1", **commands: str) -> "subprocess.Popen[bytes]":
        for name, text in commands.items():
            path = tmp_path / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        environment = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "POD_IP": pod_ip,
            "KUBERAY_GEN_RAY_START_CMD": "ray start --head  --num-cpus=0  --block",
        }
        command = ["bash", str(script), *arguments]
        processes.append(subprocess.Popen(command, env=environment, cwd=tmp_path, start_new_session=True))
        return processes[-1]

    yield start
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(path: Path, text: str) -> None:
    deadline_s = time.monotonic() + 120
    while not path.is_file() or text not in path.read_text():
        assert time.monotonic() < deadline_s, f"{path.name} never says {text!r}"
        time.sleep(0.01)


RAY = """
if [[ $1 = health-check ]]; then exit 0; fi
trap 'echo stopped >> ray.log; exit 143' TERM
echo "$@" >> ray.log
while true; do sleep 0.05; done
"""

SERVICE = """
trap 'cat ray.log > seen.log; exit 0' TERM
echo on >> weft.log
while true; do sleep 0.05; done
"""


def test_the_heads_container_ends_with_the_service(start: Start, tmp_path: Path) -> None:
    weft = 'until [[ -s ray.log ]]; do sleep 0.05; done; echo "$@" >> weft.log; exit 3'
    process = start(HEAD, "cluster.yaml", "info", ray=RAY, weft=weft)
    assert process.wait(120) == 3
    assert (tmp_path / "weft.log").read_text() == "serve cluster.yaml --log-level info --take-over\n"
    assert (tmp_path / "ray.log").read_text() == "start --head --num-cpus=0 --block\nstopped\n"


@pytest.mark.parametrize(
    ("pod_ip", "address"), [("10.0.0.7", "10.0.0.7:6379"), ("fd00::7", "[fd00::7]:6379")], ids=["IPv4", "IPv6"]
)
def test_the_head_finds_its_own_ray(start: Start, tmp_path: Path, pod_ip: str, address: str) -> None:
    ray, weft = f'echo "$@" >> asked.log\n{RAY}', 'echo "$RAY_ADDRESS" > weft.log; exit 3'
    process = start(HEAD, "cluster.yaml", "info", pod_ip=pod_ip, ray=ray, weft=weft)
    assert process.wait(120) == 3
    assert (tmp_path / "weft.log").read_text() == f"{address}\n"
    assert f"health-check --address {address}\n" in (tmp_path / "asked.log").read_text()


def test_sigterm_stops_the_service_before_ray(start: Start, tmp_path: Path) -> None:
    process = start(HEAD, "cluster.yaml", "info", ray=RAY, weft=SERVICE)
    wait_for(tmp_path / "ray.log", "start")
    wait_for(tmp_path / "weft.log", "on")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert "stopped" not in (tmp_path / "seen.log").read_text(), "requests in flight need Ray"
    assert "stopped" in (tmp_path / "ray.log").read_text()


def test_a_head_that_is_outlived_leaves_the_service_alone(start: Start, tmp_path: Path) -> None:
    process = start(HEAD, "cluster.yaml", "info", "outlived", ray=RAY, weft=SERVICE)
    wait_for(tmp_path / "ray.log", "start")
    wait_for(tmp_path / "weft.log", "on")
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    assert not (tmp_path / "seen.log").exists(), "nobody told the service to end"
    assert "stopped" in (tmp_path / "ray.log").read_text()


def test_the_heads_container_ends_when_ray_does_not_start(start: Start, tmp_path: Path) -> None:
    process = start(HEAD, "cluster.yaml", "info", ray="exit 1", weft="echo on > weft.log")
    assert process.wait(120) == 1
    assert not (tmp_path / "weft.log").exists()


@pytest.mark.parametrize(("last", "lives"), [(0, 3), (2, 3), (143, 3)])
def test_a_service_that_breaks_is_started_again_until_it_is_stopped(
    start: Start, tmp_path: Path, last: int, lives: int
) -> None:
    weft = f'echo "$@" >> weft.log; [[ $(wc -l < weft.log) -lt {lives} ]] && exit 1; exit {last}'
    process = start(SERVE, "cluster.yaml", weft=weft, sleep="exit 0")
    process.wait(120)
    assert (tmp_path / "weft.log").read_text() == "serve cluster.yaml --take-over\n" * lives


def test_only_one_service_is_kept(start: Start, tmp_path: Path) -> None:
    weft = "trap 'exit 0' TERM; echo $$ > weft.pid; while true; do sleep 0.05; done"
    first = start(SERVE, weft=weft)
    wait_for(tmp_path / "weft.pid", "\n")
    second = start(SERVE, weft="echo twice > weft.pid")
    assert second.wait(120) == 0
    assert (tmp_path / "weft.pid").read_text() != "twice\n"
    os.kill(int((tmp_path / "weft.pid").read_text()), signal.SIGTERM)
    assert first.wait(120) == 0


def test_sigterm_stops_the_service_that_is_kept_and_does_not_start_it_again(start: Start, tmp_path: Path) -> None:
    process = start(SERVE, "cluster.yaml", weft="touch ray.log\n" + SERVICE)
    wait_for(tmp_path / "weft.log", "on")
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    assert (tmp_path / "seen.log").exists(), "it was told to end, and did so by itself"
    assert (tmp_path / "weft.log").read_text() == "on\n"


TELLS_ITS_PARENT = """
trap 'echo told >> seen.log; exit 0' TERM
kill -TERM $PPID
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("script", [SERVE, HEAD])
def test_sigterm_reaches_a_service_that_has_only_just_been_started(start: Start, tmp_path: Path, script: Path) -> None:
    process = start(script, "cluster.yaml", "info", ray=RAY, weft=TELLS_ITS_PARENT)
    assert process.wait(120) == 0
    assert (tmp_path / "seen.log").read_text() == "told\n"


def test_sigterm_ends_a_ray_that_is_not_healthy_yet(start: Start, tmp_path: Path) -> None:
    ray = RAY.replace("exit 0", "[[ -s ray.log ]] && kill -TERM $PPID; exit 1", 1)
    process = start(HEAD, "cluster.yaml", "info", ray=ray, weft="echo on > weft.log")
    assert process.wait(120) == 143
    assert (tmp_path / "ray.log").read_text() == "start --head --num-cpus=0 --block\nstopped\n"
    assert not (tmp_path / "weft.log").exists()
