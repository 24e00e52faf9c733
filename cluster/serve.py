"""`weft serve`: brings a service up, says where it is, and stays until it is stopped."""

import logging
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from weft.v1 import control_pb2

from cluster.cli_connection import connection_flags
from cluster.config import ClusterSpec
from cluster.errors import ControllerError, StartError, StoppedAtStartError
from cluster.imports import import_for_good
from cluster.signals import Interrupts, signals_as_interrupts
from cluster.status_view import ChangeView, StartView, bounds
from router.tls import InnerTls

if TYPE_CHECKING:
    from cluster.service import Service

logger = logging.getLogger(__name__)

_WATCH_S = 2.0  # each look costs the controller some milliseconds of the cores that compute


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
        KeyboardInterrupt: a signal came before it was ready.
    """
    import_for_good("cluster.service")  # Ray: only those who serve pay for its import
    from cluster.service import Service

    with signals_as_interrupts() as interrupts:
        try:
            with Service.start(spec, log_level=log_level, takes_over=takes_over) as service:
                watch_service(service, console, interrupts, stays=stays)
        except KeyboardInterrupt:
            console.print("Interrupted before it was ready.")
            raise


def watch_service(service: "Service", console: Console, interrupts: Interrupts, *, stays: bool) -> None:
    """Show how a service comes up, then, where the command stays, what changes in it until it ends; interrupts stop it.

    One that was taken over goes on when who does not stay is interrupted, as if it had returned.

    Raises StartError when it does not come up, KeyboardInterrupt when that came before the command was done.
    """
    console.file = cast("IO[str]", _LastingOutput(console.file))
    was_ready = False
    try:
        status = _wait_until_ready(service, console, interrupts, stays=stays)
        was_ready = True
        print_addresses(
            console,
            status,
            service.control_address,
            service.spec.inner_tls,
            has_https=service.spec.router.tls is not None,
            stays=stays,
        )
        tell_slowness(console, status)
        changes = ChangeView(console)
        while stays and not service.wait_stopped(timeout_s=_WATCH_S):
            interrupts.check()
            with suppress(ControllerError):  # it is being stopped, or has died; wait_stopped knows
                changes.show(service.status())
    except StoppedAtStartError:
        if not stays:  # who returns would say that it serves
            raise
        console.print("Stopped before it was ready.")  # as wanted: whoever keeps this command running starts it no more
        return
    except KeyboardInterrupt:
        interrupts.note_seen()
        if service.was_taken_over and not stays:
            console.print("The service that was taken over goes on.")
            raise
        console.print("Stopping ...")
        router = service.spec.router
        with suppress(KeyboardInterrupt):  # a second one: nobody waits any longer
            service.shut_down(router.unready_s + router.grace_s)
        if not (was_ready and stays):  # else who returns would say that it serves
            raise
    if stays:
        console.print("Stopped.")


def _wait_until_ready(
    service: "Service", console: Console, interrupts: Interrupts, *, stays: bool
) -> control_pb2.GetStatusResponse:
    """Return the last status; not asked for again, since a controller may die at any time.

    Ends a service that does not come up, but one that was there before goes on with whatever of it is READY.
    """
    last = control_pb2.GetStatusResponse()

    def note(status: control_pb2.GetStatusResponse) -> None:
        nonlocal last
        interrupts.check()
        last = status
        view.show(status)

    try:
        with StartView(console) as view:
            service.wait_ready(on_status=note)
    except StartError as error:
        if not service.is_alive():
            raise
        if not service.was_taken_over:
            service.shut_down(0.0)
            raise
        if not stays:
            raise
        logger.error("not all of the service that was taken over is ready: %s", error)
    return last


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


def print_addresses(
    console: Console,
    status: control_pb2.GetStatusResponse,
    control: str,
    tls: InnerTls | None,
    *,
    has_https: bool,
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
        say(f"  OpenAI HTTP {'https' if has_https else 'http'}://{address}/v1")
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


def tell_slowness(console: Console, status: control_pb2.GetStatusResponse) -> None:
    """Warn of groups that compute slower than they could, each reason once."""
    groups_of: dict[str, list[str]] = {}
    for group in (group for model in status.models for group in model.groups):
        if group.state == control_pb2.GROUP_STATE_READY and group.detail:
            groups_of.setdefault(group.detail, []).append(group.group_id)
    for detail, group_ids in groups_of.items():
        warning = f"Warning: {', '.join(group_ids)}: {detail}"
        console.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
