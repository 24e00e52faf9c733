"""`weft serve`: brings a service up, says where it is, and stays until it is stopped; or leaves it behind."""

import logging
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any, BinaryIO, cast

import msgspec
from rich.console import Console
from weft.addresses import family_of, join_host_port
from weft.v1 import control_pb2

from cluster.cli_connection import connection_flags
from cluster.config import ClusterSpec, build_spec
from cluster.control_client import ControlClient
from cluster.defaults import DEFAULT_HOST
from cluster.errors import ControllerError, StartError
from cluster.imports import import_for_good
from cluster.preflight import check_spec, find_slowness
from cluster.readiness import first_failure, is_ready
from cluster.status_view import ChangeView, StartView, bounds
from router.tls import InnerTls

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_WATCH_S = 2.0  # each look costs the controller some milliseconds of the cores that compute
_LOG_LINES = 15
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a service that listens on every address is reached from this machine."""


def serve(spec: ClusterSpec, console: Console, *, log_level: str, stays: bool = True, takes_over: bool = False) -> None:
    """Run a service until it is stopped by a signal or by `weft stop`.

    Args:
        spec: what to serve.
        console: where to show progress and addresses.
        log_level: of every process.
        stays: False: return when it is READY and leave it running, on a Ray cluster that was joined.
        takes_over: go on with the service that the Ray cluster has, where it has one, whatever state that is in.

    Raises:
        ClusterError, ModelError, EngineConfigError: it did not come up, or it broke.
        KeyboardInterrupt: a signal stopped it before it was ready.
    """
    import_for_good("cluster.service")  # Ray: only those who serve pay for its import
    from cluster.service import Service

    with _stop_signals() as rearm:
        try:
            with Service.start(spec, log_level=log_level, takes_over=takes_over) as service:
                rearm()
                _run(service, console, spec=spec, stays=stays)
        except KeyboardInterrupt:
            console.print("Stopped before it was ready.")
            raise


def _run(service: Any, console: Console, *, spec: ClusterSpec, stays: bool) -> None:
    console.file = cast("IO[str]", _LastingOutput(console.file))
    was_ready = False
    try:
        _wait_until_ready(service, console, stays=stays)
        was_ready = True
        print_addresses(console, service.status(), service.control_address, service.tls, stays=stays)
        _tell_slowness(console, spec)
        changes = ChangeView(console)
        while stays and not service.wait_stopped(timeout_s=_WATCH_S):
            with suppress(ControllerError):  # it is being stopped, or has died; wait_stopped knows
                changes.show(service.status())
    except KeyboardInterrupt:
        console.print("Stopping ...")
        with suppress(KeyboardInterrupt):  # a second one: nobody waits any longer
            service.shut_down(spec.router.grace_s)
        if not was_ready:
            raise
    if stays:
        console.print("Stopped.")


def _wait_until_ready(service: Any, console: Console, *, stays: bool) -> None:
    """End a service that does not come up, but one that was there before goes on with whatever of it is READY."""
    try:
        with StartView(console) as view:
            service.wait_ready(on_status=view.show)
    except StartError as error:
        if not service.was_taken_over:
            service.shut_down(0.0)
            raise
        if not stays:
            raise
        logger.error("not all of the service that was taken over is ready: %s", error)


class _LastingOutput:
    """Output that drops what cannot be written, on a full disk or to a pipe that nobody reads; the writer goes on."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._has_told = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        with self._going_on():
            self._file.write(text)

    def flush(self) -> None:
        with self._going_on():
            self._file.flush()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_told:
                logger.warning("output is lost: %s; the service goes on", error.strerror or error)
            self._has_told = True


def serve_in_background(
    settings: Mapping[str, Any], console: Console, *, log_level: str, log_file: Path | None = None
) -> None:
    """Start `weft serve` in a session of its own and return when it is READY.

    Raises:
        ClusterError, ModelError, EngineConfigError: it did not come up; its log is at the end of the message.
    """
    check_spec(build_spec(settings))
    settings = _with_control_port(settings)
    spec = build_spec(settings)
    path = log_file or _default_log(spec.control_port)
    with _open_log(path) as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cluster.background", log_level],  # whatever this folder calls cluster
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        status = _wait_ready(process, spec, console, path)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    print_addresses(console, status, _reachable(spec), spec.inner_tls, stays=False, log_file=path)
    _tell_slowness(console, spec)


def _default_log(port: int) -> Path:
    try:
        return Path.home() / ".cache" / "weft" / f"serve-{port}.log"
    except RuntimeError as error:
        raise StartError("this user has no home folder for the log; allowed: --log-file") from error


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}; allowed: another --log-file") from error


def print_addresses(
    console: Console,
    status: control_pb2.GetStatusResponse,
    control: str,
    tls: InnerTls | None,
    *,
    stays: bool,
    log_file: Path | None = None,
) -> None:
    """Say what is served and where, and how it is stopped; `stays`: the command that says it does not return."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)  # an address may have brackets
    for model in status.models:
        shape = f"{model.wanted_replicas} replicas"
        if model.groups:
            group = model.groups[0]
            split = f"tensor parallel {group.tensor_parallel}, pipeline {group.pipeline_parallel}"
            shape = f"{model.wanted_replicas} x ({split})"
        scales = f", scaling from {bounds(model)}" if bounds(model) else ""
        say(f"Serving {model.name}: {shape}{scales}")
    for address in dict.fromkeys(router.grpc_address for router in status.routers):
        say(f"  gRPC        {address}")
    for address in dict.fromkeys(router.http_address for router in status.routers if router.http_address):
        say(f"  OpenAI HTTP http://{address}/v1")
    for router in status.routers:
        if router.metrics_address:
            say(f"  metrics     http://{router.metrics_address}/metrics")
    say(f"  control     {control}")
    if status.metrics_address:
        say(f"  Prometheus  http://{status.metrics_address}/targets")
    if log_file is not None:
        say(f"  log         {log_file}")
    stop = shlex.join(["weft", "stop", *connection_flags(control, tls)])
    say(f"Stop it with `{stop}`{' or Ctrl-C' if stays else ''}.")


def _tell_slowness(console: Console, spec: ClusterSpec) -> None:
    if (reason := find_slowness(spec)) is not None:
        warning = f"Warning: ranks compute in plain torch, several times slower: {reason}"
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _wait_ready(
    process: "subprocess.Popen[bytes]", spec: ClusterSpec, console: Console, log_file: Path
) -> control_pb2.GetStatusResponse:
    with StartView(console) as view, ControlClient(_reachable(spec), tls=spec.inner_tls) as client:
        while True:
            if process.poll() is not None:
                raise StartError(_last_words(log_file))
            try:
                status = client.status()
            except ControllerError:
                time.sleep(_POLL_S)
                continue
            view.show(status)
            if is_ready(status):
                return status
            if first_failure(status) is None:
                time.sleep(_POLL_S)


def _reachable(spec: ClusterSpec) -> str:
    return join_host_port(_LOOPBACK_OF.get(spec.host, spec.host), spec.control_port)


def _with_control_port(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with a control port chosen here: the background process cannot tell which one it took."""
    controller = dict(settings.get("controller", {}))
    if controller.get("port") == 0:
        host = settings.get("host", DEFAULT_HOST)
        with socket.socket(family_of(host)) as probe:
            probe.bind((host, 0))
            controller["port"] = probe.getsockname()[1]
    return {**settings, "controller": controller}


def _last_words(path: Path) -> str:
    """Return the error that the background process ended with, or else the end of its log."""
    lines = path.read_text(errors="replace").strip().splitlines()
    error = next((line for line in reversed(lines) if line.startswith("Error: ")), None)
    if error is not None:
        return error.removeprefix("Error: ")
    return "\n".join(lines[-_LOG_LINES:]) or f"it ended without a word; its log was {path}"


@contextmanager
def _stop_signals() -> Iterator[Callable[[], None]]:
    """Turn SIGTERM and SIGINT into KeyboardInterrupt; yields what sets this up again after Ray has set its own."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def arm() -> None:
        signal.signal(signal.SIGTERM, interrupt)
        signal.signal(signal.SIGINT, interrupt)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    arm()
    try:
        yield arm
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
