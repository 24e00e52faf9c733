"""The operator's end of weft.v1.Control: what the commands and a starting service ask of the controller."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from weft.limits import MAX_TIMEOUT_S
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from cluster.errors import ClusterConfigError, ClusterError, ControllerError
from cluster.settings_json import settings_json
from router.tls import InnerTls, connect_blocking

_TIMEOUT_S = 10.0
"""Limit of a question, and of a change that takes no time."""
_CHANGE_TIMEOUT_S = 600.0
"""Limit of one change: a model that comes from a hub may be fetched first."""

_NUM_THREADS = 4
"""A stop goes out while the answer to an interrupted question is awaited."""

_AnswerT = TypeVar("_AnswerT")


class ControlClient:
    """A connection to one controller; close it, or use it in a `with`. Every call has a deadline.

    gRPC is called in other threads: a KeyboardInterrupt amid its code, which a signal raises in the main thread, would
    leave its locks taken, and whatever is called then would wait for good.
    """

    def __init__(self, address: str, *, tls: InnerTls | None = None) -> None:
        """Connect, with TLS where the controller has it. Raises RouterConfigError when a TLS file cannot be read."""
        self._address = address
        self._tls = tls
        self._channel = connect_blocking(address, tls, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = ControlStub(self._channel)
        self._threads = ThreadPoolExecutor(_NUM_THREADS)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls that somebody waits for fail."""
        with suppress(RuntimeError):  # closed before
            self._threads.submit(self._channel.close)
        self._threads.shutdown(wait=False)

    def status(self) -> control_pb2.GetStatusResponse:
        """Return the state of models, groups and routers. Raises ControllerError."""
        return self._call(self._stub.GetStatus, control_pb2.GetStatusRequest(), _TIMEOUT_S)

    def apply(self, settings: Mapping[str, Any], *, dry_run: bool) -> Sequence[control_pb2.Change]:
        """Want exactly the models of a cluster file; return what that changes.

        Raises:
            ClusterConfigError: a setting is unknown or wrong.
            ControllerError: a model cannot be had or split as wanted, or nobody answers.
        """
        request = control_pb2.ApplyRequest(settings_json=settings_json(settings), dry_run=dry_run)
        return self._call(self._stub.Apply, request, _CHANGE_TIMEOUT_S).changes

    def scale(self, model: str, replicas: int) -> int:
        """Want so many replicas; return how many were wanted before. Raises as `apply`."""
        request = control_pb2.ScaleRequest(model=model, replicas=replicas)
        return self._call(self._stub.Scale, request, _TIMEOUT_S).previous_replicas

    def rollout(self, model: str, settings: Mapping[str, Any], *, undo: bool = False) -> control_pb2.RolloutResponse:
        """Replace a model's groups, or go back. Raises as `apply`."""
        text = settings_json(settings) if settings else ""
        request = control_pb2.RolloutRequest(model=model, settings_json=text, undo=undo)
        return self._call(self._stub.Rollout, request, _CHANGE_TIMEOUT_S)

    def drain(self, target: str, *, grace_s: float | None = None, undo: bool = False) -> control_pb2.DrainResponse:
        """Take a replica or a node out of service, or a node into it again. Raises ControllerError."""
        request = control_pb2.DrainRequest(target=target, grace_s=grace_s, undo=undo)
        return self._call(self._stub.Drain, request, _TIMEOUT_S)

    def read_logs(self, target: str, offsets: Mapping[str, int], *, tail_bytes: int) -> control_pb2.ReadLogsResponse:
        """Return what logs hold after these offsets; without an offset, from `tail_bytes` before the end.

        Raises ControllerError.
        """
        request = control_pb2.ReadLogsRequest(target=target, offsets=offsets, tail_bytes=tail_bytes)
        return self._call(self._stub.ReadLogs, request, 2 * _TIMEOUT_S)

    def read_metrics(self, addresses: Iterable[str]) -> Mapping[str, bytes]:
        """Return the metrics pages at these addresses of `status`, by way of the controller.

        Those that do not answer are missing. Raises ControllerError.
        """
        request = control_pb2.ReadMetricsRequest(addresses=addresses)
        pages = self._call(
            lambda asked, timeout: [*self._stub.ReadMetrics(asked, timeout=timeout)], request, 2 * _TIMEOUT_S
        )
        return {each.address: each.page for each in pages}

    def shut_down(self, grace_s: float) -> None:
        """Stop everything; returns when it has stopped. Raises ControllerError."""
        timeout_s = min(grace_s, MAX_TIMEOUT_S) + _TIMEOUT_S  # settings take longer ones than gRPC does
        self._call(self._stub.Shutdown, control_pb2.ShutdownRequest(grace_s=grace_s), timeout_s)

    def _call(self, method: Callable[..., _AnswerT], request: object, timeout_s: float) -> _AnswerT:
        try:
            return self._threads.submit(method, request, timeout=timeout_s).result()
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def _translate(self, error: grpc.RpcError) -> ClusterError:
        match error.code():
            case grpc.StatusCode.UNAVAILABLE:
                return ControllerError(
                    f"no controller answers at {self._address}; {self._advise(error.details() or '')}"
                )
            case grpc.StatusCode.INVALID_ARGUMENT:
                return ClusterConfigError(error.details())
            case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.FAILED_PRECONDITION:
                return ControllerError(error.details())
            case grpc.StatusCode.UNIMPLEMENTED:
                return ControllerError(
                    f"{self._address} does not know this command: it is no controller, or an older one"
                )
        return ControllerError(f"the controller at {self._address}: {error.code().name}: {error.details()}")

    def _advise(self, details: str) -> str:
        if "refused" in details.lower():
            return "is `weft serve` running?"
        if self._tls is None:
            wanted = (
                "WEFT_CONTROL_TLS_CERT, _KEY and _CA, or the options that stand for them"  # each command's own names
            )
            return f"is `weft serve` running? With inner_tls it wants {wanted} ({details})"
        return f"is `weft serve` running, with inner_tls and certificates of these authorities? ({details})"
