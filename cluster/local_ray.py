"""Ray as this process uses it: a small local one that ends with the service, or a running cluster that is joined.

Only what was started here is ended. `ray stop` is never called, for it would end every Ray on the machine.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._private import node as ray_node
from ray._private import services as ray_services
from ray._private import utils as ray_utils
from ray._private import worker as ray_worker
from ray.job_config import JobConfig
from weft.addresses import split_host_port

from cluster import late_agent
from cluster.controller import NAMESPACE
from cluster.errors import RayStartError
from cluster.signals import deaf_to_signals, signals_wait
from parallel.control_groups import refused_processes
from router.tls import connect_blocking
from workers.cores import give_way

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 100 << 20  # nothing large goes through Ray; the least it takes is about 75 MB

_LEAST_FREE_BYTES = 64 << 20
"""What Ray's folder takes in its first minutes, some times over: where files cannot be written, Ray tries for ever."""

_START_ATTEMPTS = 2
"""Once in hundreds of starts Ray's node, just begun, left no trace, and Ray gave it up after 30 seconds: where it is
forked (see `_only_what_is_used`), it may never begin."""

_JOIN_TIMEOUT_S = 10.0  # for Ray's head to answer

_TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_REFUSED_TOKEN = "InvalidAuthToken"
"""What Ray's message has when a cluster wants another token, or one at all."""
_TOKEN_HINT = (
    "it wants the token that it was started with; allowed: RAY_AUTH_MODE=token with that in RAY_AUTH_TOKEN or "
    "~/.ray/auth_token"
)

_LOOPBACK = "127.0.0.2" if sys.platform == "linux" else "127.0.0.1"
"""Ray replaces 127.0.0.1 by an outside address on Linux; the rest of 127.0.0.0/8 is loopback as well, and is kept."""

_LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # no idle workers: each is a process of some 50 MB
    "RAY_enable_metrics_collection": "0",
    "RAY_worker_niceness": "0",  # at Ray's own 15 other processes take the cores that compute
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    # Ten seconds, as Ray has them, but whoever connects before the other listens tries again soon, not after one.
    "RAY_raylet_client_num_connect_attempts": "200",
    "RAY_raylet_client_connect_timeout_milliseconds": "50",
    # Where memory runs out, by whomever it is taken, Ray would end everything here, and the kernel what is Ray's first,
    # however small. So Ray does not look, and the kernel ends the largest, as among any processes.
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_oom_score_adjustment": "0",
    # What Ray looks at while nothing happens: each look takes a core from a rank. Three are of agents.
    "REPORTER_UPDATE_INTERVAL_MS": "600000",  # these go to the dashboard, which is left out
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "5",
    "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "5",
    "RAY_local_fs_monitor_interval_ms": "10000",
    "RAY_raylet_check_gc_period_milliseconds": "5000",
    "RAY_kill_idle_workers_interval_ms": "5000",
    "RAY_object_manager_timer_freq_ms": "2000",
}

_LATE_AGENTS = {"--dashboard_agent_command": late_agent.NEVER, "--runtime_env_agent_command": late_agent.ASKED}
"""Flags of Ray's node that say how its agents are started, and when each of them begins here."""


def start_local_ray(*, log_to_driver: bool) -> None:
    """Start a Ray of one node, whose address is a loopback one. Raises RayStartError."""
    free_bytes = shutil.disk_usage(tempfile.gettempdir()).free
    if free_bytes < _LEAST_FREE_BYTES:
        raise RayStartError(
            f"{tempfile.gettempdir()} has {free_bytes >> 20} MiB free for temporary files; allowed: at least "
            f"{_LEAST_FREE_BYTES >> 20} MiB, there or in the folder that TMPDIR names"
        )
    _check_folder()
    _check_loopback()
    for name, value in _LOCAL_SETTINGS.items():
        os.environ.setdefault(name, value)
    _choose_token()
    _quieten()
    give_way()  # Ray's own processes inherit it
    for attempt in range(1, _START_ATTEMPTS + 1):
        with _uninterrupted(), _only_what_is_used(log_to_driver=log_to_driver) as nodes:
            try:
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    job_config=_without_this_folder(),
                    include_dashboard=False,
                    object_store_memory=_OBJECT_STORE_BYTES,
                    log_to_driver=log_to_driver,
                    logging_level=logging.ERROR,
                    _node_ip_address=_LOOPBACK,
                )
                return
            except Exception as error:  # Ray has no common base for what its start may raise
                processes = _end(nodes)
                if "AF_UNIX path length" in str(error) or isinstance(error, UnicodeError):
                    raise RayStartError(
                        f"a local Ray cannot have its sockets in {tempfile.gettempdir()}: {error}; allowed: a folder "
                        "for temporary files (TMPDIR) with a short path of ASCII characters"
                    ) from error
                if attempt == _START_ATTEMPTS:
                    said = "; ".join(filter(None, (f"{error} ({processes})", refused_processes())))
                    raise RayStartError(f"a local Ray could not be started: {said}") from error
                logger.warning("a local Ray did not start, and is started again: %s (%s)", error, processes)


def _check_folder() -> None:
    """Raise RayStartError where this process is in a folder that was removed, of which Ray asks the name."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise RayStartError("the working folder was removed; allowed: one that is there (cd)") from error


def _check_loopback() -> None:
    """Raise RayStartError where this machine does not reach itself, which Ray would try for minutes."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_JOIN_TIMEOUT_S).close()
    except OSError as error:
        raise RayStartError(
            f"a local Ray cannot be reached at {_LOOPBACK}: {error}; allowed: a network with a loopback interface that "
            "is up and has IPv4"
        ) from error


class _Fixed(list[str]):
    """A list that stays as it is."""

    def extend(self, values: Iterable[str]) -> None:
        """Do nothing."""


def _without_this_folder() -> JobConfig:
    """Return a job whose processes import nothing from the working folder, where anything may be called `cluster`.

    Ray would put it first on the path of each, and has no setting against it.
    """
    config = JobConfig()
    config._py_driver_sys_path = _Fixed()
    return config


def _choose_token() -> None:
    """Give Ray a token for this service, where the user says nothing of one.

    Else Ray writes one to ~/.ray/auth_token, for which every later `ray start` of this user would ask all who join it.
    """
    if not os.environ.keys() & set(_TOKEN_VARIABLES):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def join_ray(address: str, *, log_to_driver: bool) -> None:
    """Connect to a running Ray cluster. Raises RayStartError."""
    _quieten()
    _check_folder()
    try:
        _check_reachable(address)
        if _wants_token(address) and not _bring_token():
            raise PermissionError(_TOKEN_HINT)
        with _uninterrupted():
            ray.init(
                address=address,
                namespace=NAMESPACE,
                job_config=_without_this_folder(),
                log_to_driver=log_to_driver,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # as above
        was_refused = _REFUSED_TOKEN in f"{error} {error.__cause__}"
        reason = _TOKEN_HINT if was_refused else error
        raise RayStartError(f"the Ray cluster at {address!r} cannot be joined: {reason}") from error


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError when nothing listens at host:port, where ray.init would go on trying for minutes."""
    place = address.removeprefix("ray://")
    if ":" in place:  # else "auto", or whatever Ray makes of it
        socket.create_connection(split_host_port(place), timeout=_JOIN_TIMEOUT_S).close()


def _wants_token(address: str) -> bool:
    """Return whether the cluster at host:port refuses who brings no token. Ray itself would try for 20 seconds."""
    if address.startswith("ray://") or ":" not in address:  # "auto": Ray brings its token by itself
        return False
    with connect_blocking(address, tls=None) as channel:
        ask: Any = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=_JOIN_TIMEOUT_S)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def _bring_token() -> bool:
    """Have Ray send the token that this user has, as it does by itself for "auto"; whether there is one.

    Not to a cluster that wants none: this process would refuse the processes there, which have none.
    """
    try:
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
    except ImportError:  # before Ray 2.59, which does what RAY_AUTH_MODE says
        return True
    return bool(maybe_enable_token_auth_if_token_available(warn_if_disabled=False))


def has_local_ray_died() -> bool:
    """Return whether processes of the Ray that was started here have ended, as by a signal to all of them."""
    node = ray_worker._global_node
    return node is not None and bool(node.dead_processes())


def logs_folder() -> str:
    """Return where processes of the cluster that was joined log, on each node alike."""
    node: Any = ray_worker._global_node
    return str(node.get_logs_dir_path())


def leave_ray() -> None:
    """Disconnect; a local Ray ends, a joined one goes on. No signal interrupts it: else Ray's processes would stay."""
    with deaf_to_signals():
        node: Any = ray_worker._global_node  # None: nothing was started, or joined
        begun = [] if node is None else list(chain(*node.all_processes.values()))
        ray.shutdown()
        _end_sessions({info.process.pid for info in begun})


def _end_sessions(leaders: Set[int]) -> None:
    """End what is left in the sessions of processes that have ended.

    Ray's node forgets the processes that it was just starting, and these look for it for half a minute.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.getsid(int(process.name)) in leaders:
                os.kill(int(process.name), signal.SIGTERM)


def _end(nodes: Sequence[Any]) -> str:
    """End the processes of nodes that did not start; return how each was before that."""
    states = [
        f"{kind} {'ran' if info.process.poll() is None else f'had ended with {info.process.returncode}'}"
        for node in nodes
        for kind, infos in node.all_processes.items()
        for info in infos
    ]
    for node in nodes:
        node.kill_all_processes(check_alive=False)
    ray.shutdown()
    return ", ".join(states) or "no process was begun"


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let signals wait while Ray begins: one of its objects, ended while it is being made, waits for itself for ever.

    Ray would also set a handler of SIGTERM of its own, which raises SystemExit.
    """
    module: Any = ray_utils
    set_handler = module.set_sigterm_handler
    module.set_sigterm_handler = lambda handler: None
    try:
        with signals_wait():
            yield
    finally:
        module.set_sigterm_handler = set_handler


@contextmanager
def _only_what_is_used(*, log_to_driver: bool) -> Iterator[list[Any]]:
    """Let Ray's head come up without its autoscaler and dashboard, and without the reader of logs if nobody listens.

    Nothing here asks them, and `ray.init`, which has no settings for that, would wait for the dashboard to come up. Nor
    has it any for its node's agents, or for how its processes begin. Yields the nodes that are made meanwhile.
    """
    nodes: list[Any] = []
    module: Any = ray_node
    services: Any = ray_services
    whole, start_process, popen = module.Node, services.start_ray_process, services.ConsolePopen

    class LocalNode(whole):  # type: ignore[misc,valid-type]
        def __init__(self, *args: object, **settings: object) -> None:
            nodes.append(self)
            super().__init__(*args, **settings)

        def start_monitor(self) -> None:
            pass

        def start_api_server(self, **settings: object) -> None:
            pass

        def start_log_monitor(self) -> None:
            if log_to_driver:
                super().start_log_monitor()

    def start(command: Sequence[str], *args: object, **settings: object) -> object:
        return start_process(list(map(with_late_agent, command)), *args, **settings)

    class Process(popen):  # type: ignore[misc,valid-type]
        """Begins in a group of its own: a signal to this process's, as `timeout` sends it, is for this process, which
        then ends the others in order. They end with it anyway.

        Where that is said by `setpriv`, no code of this process runs in the new one, which Python then does not fork:
        in a fork gRPC's threads begin again, and abort when they find their files closed.
        """

        def __init__(self, command: Sequence[str], *, preexec_fn: Callable[[], None] | None, **settings: Any) -> None:
            if prefix := _ends_with_parent():
                preexec_fn = None
            super().__init__([*prefix, *command], preexec_fn=preexec_fn, start_new_session=True, **settings)

    module.Node, services.start_ray_process, services.ConsolePopen = LocalNode, start, Process
    try:
        yield nodes
    finally:
        module.Node, services.start_ray_process, services.ConsolePopen = whole, start_process, popen


def _ends_with_parent() -> list[str]:
    """What begins a command that is killed when its parent ends; nothing where no program here can say so."""
    prefix = [shutil.which("setpriv") or "", "--pdeathsig", "KILL"]
    with suppress(OSError):
        if not subprocess.run([*prefix, "true"], check=False, stderr=subprocess.DEVNULL).returncode:
            return prefix
    return []


def with_late_agent(word: str) -> str:
    """Return this word of the command of one of Ray's processes; if it says how an agent starts, that begins late."""
    flag, _, agent = word.partition("=")
    if flag not in _LATE_AGENTS or not agent:
        return word
    late = subprocess.list2cmdline([sys.executable, "-I", "-S", late_agent.__file__, _LATE_AGENTS[flag]])
    return f"{flag}={late} {agent}"


def _quieten() -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
