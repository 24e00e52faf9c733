"""`weft serve --detach`: starts the process of background.py, waits until it serves, and leaves it behind."""

import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from rich.console import Console
from weft.addresses import connectable, family_of, join_host_port
from weft.v1 import control_pb2

from cluster.config import ClusterSpec, build_spec
from cluster.control_client import ControlClient
from cluster.defaults import DEFAULT_HOST
from cluster.errors import ControllerError, StartError
from cluster.preflight import check_spec
from cluster.readiness import is_ready
from cluster.serve import print_addresses, tell_slowness
from cluster.signals import Interrupts, signals_as_interrupts, signals_wait
from cluster.status_view import StartView

_POLL_S = 0.1
_LOG_LINES = 15


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
    process = None
    with signals_as_interrupts() as interrupts:
        try:
            with _open_log(path) as log, signals_wait():
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "cluster.background", log_level],  # whatever this folder calls cluster
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(settings))
            process.stdin.close()
            status = _wait_ready(process, spec, console, path, interrupts)
        except BaseException:
            if process is not None:
                process.terminate()
                process.wait()
            raise
    print_addresses(
        console,
        status,
        _control_address(spec),
        spec.inner_tls,
        has_https=spec.router.tls is not None,
        stays=False,
        log_file=path,
    )
    tell_slowness(console, status)


def _default_log(port: int) -> Path:
    try:
        folder = Path.home() / ".cache" / "weft"
    except RuntimeError as error:
        raise StartError("this user has no home folder for the log; allowed: --log-file") from error
    with suppress(OSError):  # it is told when the log is opened
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # code that is loaded will lie there too
    return folder / f"serve-{port}.log"


def _open_log(path: Path) -> BinaryIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")
    except OSError as error:
        raise StartError(f"{path} cannot be written: {error.strerror}; allowed: another --log-file") from error


def _wait_ready(
    process: "subprocess.Popen[bytes]", spec: ClusterSpec, console: Console, log_file: Path, interrupts: Interrupts
) -> control_pb2.GetStatusResponse:
    with StartView(console) as view, ControlClient(_control_address(spec), tls=spec.inner_tls) as client:
        while True:
            interrupts.check()
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
            time.sleep(_POLL_S)


def _control_address(spec: ClusterSpec) -> str:
    return join_host_port(connectable(spec.host), spec.control_port)


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
