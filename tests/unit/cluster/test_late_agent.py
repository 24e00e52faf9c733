"""The agents of Ray's node that begin late: one never, one when it is asked; both at once in a Ray of another shape."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cluster import late_agent
from cluster.local_ray import with_late_agent

_DEADLINE_S = 60.0
_AGENT = "import sys; print('begun', *sys.argv[1:], flush=True); sys.stdin.read()"
_UNUSED = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")


def _command(folder: Path) -> list[str]:
    flags = [f"--session-dir={folder}", "--node-id=n1", "--node-ip-address=127.0.0.1"]
    return [sys.executable, "-c", _AGENT, *flags, "--runtime-env-agent-port=0", "--grpc-port=0", "--head"]


@contextmanager
def _started(begins: str, command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    script = [sys.executable, "-I", "-S", late_agent.__file__, begins, *command]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _read_port(path: Path) -> int:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"nobody wrote {path.name}"
        time.sleep(0.01)
    return int(path.read_text())


def test_one_that_is_never_needed_tells_no_ports_and_ends_with_its_node(tmp_path: Path) -> None:
    with _started(late_agent.NEVER, _command(tmp_path)) as process:
        assert [_read_port(tmp_path / f"{name}_n1") for name in _UNUSED] == [-1, -1, -1]
        assert process.poll() is None
        printed, _ = process.communicate(timeout=_DEADLINE_S)
    assert (process.returncode, printed) == (0, "")
    assert len(list(tmp_path.iterdir())) == len(_UNUSED)


def test_one_that_is_asked_begins_in_the_same_process_on_the_port_that_was_told(tmp_path: Path) -> None:
    command = _command(tmp_path)
    with _started(late_agent.ASKED, command) as process:
        port = _read_port(tmp_path / "runtime_env_agent_port_n1")
        with suppress(ConnectionResetError):  # it ends its listener at once
            socket.create_connection(("127.0.0.1", port), timeout=_DEADLINE_S).close()
        assert process.stdout is not None
        expected = ["begun", *command[3:6], f"--runtime-env-agent-port={port}", *command[7:]]
        assert process.stdout.readline().split() == expected
        with socket.socket() as agent:  # it is free again
            agent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            agent.bind(("127.0.0.1", port))
        process.communicate(timeout=_DEADLINE_S)


def test_one_that_nobody_asks_ends_with_its_node(tmp_path: Path) -> None:
    with _started(late_agent.ASKED, _command(tmp_path)) as process:
        _read_port(tmp_path / "runtime_env_agent_port_n1")
        printed, _ = process.communicate(timeout=_DEADLINE_S)
    assert (process.returncode, printed) == (0, "")


@pytest.mark.parametrize(
    ("begins", "change"),
    [
        (late_agent.ASKED, {"--runtime-env-agent-port=0": "--runtime-env-agent-port=4711"}),  # it is known already
        (late_agent.NEVER, {"--grpc-port=0": "--grpc-port=4711"}),
        (late_agent.ASKED, {"--node-id=n1": "--node=n1"}),
        (late_agent.NEVER, {"--node-id=n1": "--node=n1"}),
        (late_agent.NEVER, {"--session-dir={}": "--session-dir={}/nowhere"}),
    ],
)
def test_another_ray_has_its_agents_at_once(begins: str, change: dict[str, str], tmp_path: Path) -> None:
    change = {before.format(tmp_path): after.format(tmp_path) for before, after in change.items()}
    command = [change.get(word, word) for word in _command(tmp_path)]
    with _started(begins, command) as process:
        printed, _ = process.communicate(timeout=_DEADLINE_S)
    assert printed.split() == ["begun", *command[3:]]


def test_an_agent_whose_node_has_no_pipe_to_it_begins_at_once(tmp_path: Path) -> None:
    script = [sys.executable, "-I", "-S", late_agent.__file__, late_agent.NEVER, *_command(tmp_path)]
    run = subprocess.run(
        script, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_DEADLINE_S, check=True
    )
    assert run.stdout.split()[0] == "begun"
    assert "begins at once" in run.stderr


def test_both_agents_of_rays_node_and_nothing_else_begin_late() -> None:
    agent = "/usr/bin/python -u /ray/agent.py --node-id=n1"
    late = f"{sys.executable} -I -S {late_agent.__file__}"
    assert with_late_agent(f"--dashboard_agent_command={agent}") == f"--dashboard_agent_command={late} never {agent}"
    flag = "--runtime_env_agent_command"
    assert with_late_agent(f"{flag}={agent}") == f"{flag}={late} asked {agent}"
    for other in ("--head", "--node_id=n1", "--dashboard_agent_command=", "/ray/raylet"):
        assert with_late_agent(other) == other
