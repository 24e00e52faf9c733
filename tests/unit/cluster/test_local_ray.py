"""Joining Ray where nobody is, and leaving it: whoever presses Ctrl-C once more leaves none of its processes behind."""

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from helpers.polling import GUARD_S, until
from ray._private import utils as ray_utils
from ray._private.authentication import authentication_token_setup

from cluster import local_ray, signals
from cluster.errors import RayStartError
from cluster.signals import signals_as_interrupts
from parallel import control_groups


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_signal_interrupts_the_end_of_ray(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def shut_down() -> None:
        os.kill(os.getpid(), number)
        ended.append(True)

    monkeypatch.setattr(local_ray.ray, "shutdown", shut_down)
    before = signal.getsignal(number)
    local_ray.leave_ray()
    assert ended == [True]
    assert signal.getsignal(number) is before


_FORGETS = """
import subprocess
print(subprocess.Popen(["sleep", "100"], process_group=0).pid, flush=True)
input()
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_what_a_local_node_was_just_starting_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray's, each node has a session of its own, and what it starts a group of its own."""

    def end(node: "subprocess.Popen[bytes]") -> None:
        assert node.stdin is not None
        node.stdin.write(b"\n")
        node.stdin.flush()
        node.wait()

    def is_left(node: "subprocess.Popen[bytes]", timeout_s: float) -> bool:  # it has the node's output
        return select.select([node.stdout], [], [], timeout_s)[0] == []

    start = partial(subprocess.Popen, [sys.executable, "-c", _FORGETS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with start(start_new_session=True) as node, start(start_new_session=True) as other:
        assert node.stdout is not None
        assert other.stdout is not None
        node.stdout.readline()
        pid = int(other.stdout.readline())
        try:
            started = {"raylet": [SimpleNamespace(process=node)]}
            monkeypatch.setattr(local_ray.ray_worker, "_global_node", SimpleNamespace(all_processes=started))
            monkeypatch.setattr(local_ray.ray, "shutdown", lambda: end(node))
            local_ray.leave_ray()
            end(other)
            assert not is_left(node, GUARD_S)
            assert is_left(other, 0.0)
        finally:
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def starts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.mark.usefixtures("starts_alone")
@pytest.mark.parametrize("start", [local_ray.start_local_ray, partial(local_ray.join_ray, "auto")])
@pytest.mark.parametrize("comes_early", [True, False])
def test_signal_while_ray_starts_or_after_it_is_an_interrupt_of_what_follows(
    start: Callable[..., None], comes_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    def init(**settings: object) -> None:  # with a handler of its own
        ray_utils.set_sigterm_handler(lambda number, frame: sys.exit(number))
        if comes_early:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # in the same moment
        begun.append(True)

    monkeypatch.setattr(local_ray.ray, "init", init)
    with signals_as_interrupts() as interrupts:
        if comes_early:
            with pytest.raises(KeyboardInterrupt):
                start(log_to_driver=False)
        else:
            start(log_to_driver=False)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        signal.raise_signal(signal.SIGTERM)  # in the same moment
    assert begun == [True]


@pytest.mark.usefixtures("starts_alone")
def test_second_signal_does_not_wait_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now_s))

    def init(**settings: object) -> None:
        nonlocal now_s
        signal.raise_signal(signal.SIGINT)
        now_s += 1.0
        signal.raise_signal(signal.SIGINT)
        pytest.fail("nothing was raised")

    monkeypatch.setattr(local_ray.ray, "init", init)
    with signals_as_interrupts(), pytest.raises(KeyboardInterrupt):
        local_ray.start_local_ray(log_to_driver=False)


@pytest.mark.usefixtures("starts_alone")
def test_signal_while_ray_fails_to_start_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise ConnectionError

    monkeypatch.setattr(local_ray.ray, "init", init)
    with signals_as_interrupts(), pytest.raises(KeyboardInterrupt):
        local_ray.start_local_ray(log_to_driver=False)


def test_full_disk_is_told_before_ray_tries_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = []
    monkeypatch.setattr(local_ray.ray, "init", lambda **settings: started.append(settings))
    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(local_ray.tempfile, "gettempdir", lambda: str(tmp_path))
    disk = SimpleNamespace(free=(64 << 20) - 1)
    monkeypatch.setattr(local_ray.shutil, "disk_usage", lambda folder: disk)
    with pytest.raises(RayStartError, match=f"{tmp_path} has 63 MiB free .* at least 64 MiB, .* TMPDIR"):
        local_ray.start_local_ray(log_to_driver=False)
    assert not started
    disk.free += 1
    local_ray.start_local_ray(log_to_driver=False)
    assert started


@pytest.mark.parametrize("start", [local_ray.start_local_ray, partial(local_ray.join_ray, "auto")])
def test_a_working_folder_that_was_removed_is_told(
    start: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(local_ray.ray, "init", lambda **_: pytest.fail("Ray was asked"))
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(RayStartError, match="the working folder was removed; allowed: one that is there"):
        start(log_to_driver=False)


def test_machine_that_does_not_reach_itself_is_told_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray.ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(local_ray, "_LOOPBACK", "192.0.2.1")  # of documentation: nobody has it
    with pytest.raises(RayStartError, match=r"reached at 192\.0\.2\.1: .*; allowed: a network with a loopback"):
        local_ray.start_local_ray(log_to_driver=False)


def test_an_address_where_nothing_listens_is_told_before_ray_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(local_ray.ray, "init", lambda **settings: asked.append(settings["address"]))
    monkeypatch.setattr(local_ray, "_wants_token", lambda address: False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        for nobody in (address, f"ray://{address}", "127.0.0.1:port"):
            with pytest.raises(RayStartError, match="cannot be joined"):
                local_ray.join_ray(nobody, log_to_driver=False)
        assert asked == []
        listener.listen()
        for somebody in (address, f"ray://{address}", "auto"):
            local_ray.join_ray(somebody, log_to_driver=False)
    assert asked == [address, f"ray://{address}", "auto"]


@contextmanager
def head_of_ray(*, wants_token: bool) -> Iterator[str]:
    """Serve as Ray's head does for whoever brings no token; yields its address."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        if wants_token:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken: Authentication token is missing")
        return b""

    handlers = {"GetClusterId": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That of this process, where nobody has said anything."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(local_ray.os, "environ", variables)
    return variables


@pytest.mark.parametrize(
    ("wants_token", "has_token", "expected"),
    [(True, True, ["token", "joined"]), (False, True, ["joined"]), (True, False, ["token"])],
)
def test_a_token_is_brought_to_a_cluster_that_wants_one_only(
    wants_token: bool, has_token: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def bring_token(**settings: object) -> bool:
        seen.append("token")
        return has_token

    name = "maybe_enable_token_auth_if_token_available"
    monkeypatch.setattr(authentication_token_setup, name, bring_token, raising=False)  # an older Ray has none
    monkeypatch.setattr(local_ray.ray, "init", lambda **settings: seen.append("joined"))
    with head_of_ray(wants_token=wants_token) as address:
        if wants_token and not has_token:
            with pytest.raises(RayStartError, match=r"it wants the token .*RAY_AUTH_MODE=token .*~/\.ray/auth_token"):
                local_ray.join_ray(address, log_to_driver=False)
        else:
            local_ray.join_ray(address, log_to_driver=False)
    assert seen == expected


def test_a_token_that_the_cluster_refuses_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**settings: object) -> None:
        raise ConnectionError("Failed to connect") from RuntimeError("InvalidAuthToken: it is incorrect")

    monkeypatch.setattr(local_ray.ray, "init", init)
    with pytest.raises(RayStartError, match="cannot be joined: it wants the token"):
        local_ray.join_ray("auto", log_to_driver=False)


@pytest.mark.parametrize("said", [{}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN_PATH": "/token"}])
def test_a_ray_of_its_own_has_a_token_that_is_in_no_file(
    said: dict[str, str], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(local_ray.ray, "init", lambda **settings: None)
    environment |= said
    local_ray.start_local_ray(log_to_driver=False)
    assert len(environment.get("RAY_AUTH_TOKEN", "")) == (0 if said else 64)
    assert said.items() <= environment.items()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize("start_ray", [local_ray.start_local_ray, partial(local_ray.join_ray, "auto")])
def test_processes_of_ray_import_nothing_from_this_folder(
    start_ray: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = []

    def start(*, job_config: Any, **settings: object) -> None:
        job_config._py_driver_sys_path.extend(["/home/somebody/cluster"])  # as Ray does
        jobs.append(job_config._get_proto_job_config())

    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(local_ray.ray, "init", start)
    start_ray(log_to_driver=False)
    (job,) = jobs
    assert list(job.py_driver_sys_path) == []


@pytest.mark.parametrize(
    "error",
    [
        OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /tmp/a/long/one"),
        UnicodeEncodeError("ascii", "ö", 0, 1, "ordinal not in range(128)"),
    ],
)
@pytest.mark.usefixtures("environment")
def test_a_folder_in_which_no_socket_can_be_is_told_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def start(**settings: object) -> None:
        attempts.append(settings)
        raise error

    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(local_ray.ray, "init", start)
    with pytest.raises(RayStartError, match=r"allowed: a folder for temporary files \(TMPDIR\) with a short path"):
        local_ray.start_local_ray(log_to_driver=False)
    assert len(attempts) == 1


def test_a_machine_that_has_ipv6_alone_is_told_what_ray_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_ray, "_LOOPBACK", "192.0.2.1")  # nobody's
    with pytest.raises(RayStartError, match=r"cannot be reached at 192\.0\.2\.1: .* is up and has IPv4"):
        local_ray._check_loopback()


class Process:
    returncode = -9

    def poll(self) -> int:
        return self.returncode


class Node:
    """A node of Ray whose own process ends at once."""

    num_ended = 0

    def __init__(self) -> None:
        self.all_processes = {"raylet": [SimpleNamespace(process=Process())]}
        raise RuntimeError("it does not come up")

    def kill_all_processes(self, *, check_alive: bool) -> None:
        Node.num_ended += 1


@pytest.mark.parametrize("num_failures", [0, 1, 2])
@pytest.mark.usefixtures("environment")
def test_a_ray_that_does_not_come_up_is_started_again(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, told = [], []

    def start(**settings: object) -> None:
        attempts.append(settings["address"])
        if len(attempts) <= num_failures:
            local_ray.ray_node.Node()

    monkeypatch.setattr(local_ray.ray_node, "Node", Node)
    monkeypatch.setattr(Node, "num_ended", 0)
    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(local_ray.ray, "init", start)
    monkeypatch.setattr(local_ray.logger, "warning", lambda message, *args: told.append(message % args))
    if num_failures < 2:
        local_ray.start_local_ray(log_to_driver=False)
    else:
        with pytest.raises(RayStartError, match=r"it does not come up \(raylet had ended with -9\)"):
            local_ray.start_local_ray(log_to_driver=False)
    assert attempts == ["local"] * min(num_failures + 1, 2)
    assert ["it does not come up (raylet had ended with -9)" in line for line in told] == [True] * (num_failures > 0)
    assert Node.num_ended == num_failures
    assert local_ray.ray_node.Node is Node


@pytest.mark.parametrize("num_refused", [0, 3])
@pytest.mark.usefixtures("environment")
def test_a_limit_on_processes_is_told_where_it_kept_ray_from_starting(
    num_refused: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(**settings: object) -> None:
        local_ray.ray_node.Node()

    (tmp_path / "pids.max").write_text("60\n")
    (tmp_path / "pids.events").write_text(f"max {num_refused}\n")
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(local_ray.ray_node, "Node", Node)
    monkeypatch.setattr(local_ray, "give_way", lambda: None)
    monkeypatch.setattr(local_ray.ray, "init", start)
    with pytest.raises(RayStartError, match="it does not come up") as caught:
        local_ray.start_local_ray(log_to_driver=False)
    told = f"; {tmp_path} allows 60 processes and threads (pids.max), and has refused more"
    assert str(caught.value).endswith(told) == (num_refused > 0)


_START_ONE = """
import os, time
from pathlib import Path
from cluster import local_ray, signals

forks = []
os.register_at_fork(before=lambda: forks.append(1))
with local_ray._only_what_is_used(log_to_driver=False):
    process = local_ray.ray_services.start_ray_process(["/bin/sleep", "300"], "raylet", fate_share=True).process
while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\\n":
    time.sleep(0.001)  # until then nothing ends it
print(process.pid, len(forks), os.getsid(process.pid) == process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def has_ended(pid: str) -> bool:
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, where processes can end with their parent")
@pytest.mark.parametrize("has_setpriv", [True, False])
def test_processes_of_ray_begin_without_a_fork_and_end_with_this_one(has_setpriv: bool, tmp_path: Path) -> None:
    """In a fork gRPC's threads may abort."""
    environment = os.environ if has_setpriv else {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, "-c", _START_ONE]
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=GUARD_S).stdout
    pid, num_forks, has_own_group = told.split()
    assert (num_forks, has_own_group) == ("0" if has_setpriv and shutil.which("setpriv") else "1", "True")
    asyncio.run(until(lambda: has_ended(pid)))
