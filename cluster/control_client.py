"""The operator's end of weft.v1.Control: what the commands and a starting service ask of the controller."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from cluster.errors import ClusterConfigError, ClusterError, ControllerError
from router.tls import InnerTls, connect_blocking

_CHANGE_TIMEOUT_S = 600.0
"""Limit of one change: a model that comes from a hub may be fetched first."""


class ControlClient:
    """A connection to one controller; close it, or use it in a `with`. Every call has a deadline."""

    def __init__(self, address: str, *, tls: InnerTls | None = None, timeout_s: float = 10.0) -> None:
        """Connect, with TLS where the controller has it. Raises RouterConfigError when a TLS file cannot be read."""
        self._address = address
        self._timeout_s = timeout_s
        self._tls = tls
        self._channel = connect_blocking(address, tls, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = ControlStub(self._channel)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def status(self) -> control_pb2.GetStatusResponse:
        """Return the state of models, groups and routers. Raises ControllerError."""
        with self._translated():
            return self._stub.GetStatus(control_pb2.GetStatusRequest(), timeout=self._timeout_s)

    def apply(self, settings: Mapping[str, Any], *, dry_run: bool) -> Sequence[control_pb2.Change]:
        """Want exactly the models of a cluster file; return what that changes.

        Raises:
            ClusterConfigError: a setting is unknown or wrong.
            ControllerError: a model cannot be had or split as wanted, or nobody answers.
        """
        request = control_pb2.ApplyRequest(settings_json=json.dumps(settings, default=str), dry_run=dry_run)
        with self._translated():
            return self._stub.Apply(request, timeout=_CHANGE_TIMEOUT_S).changes

    def scale(self, model: str, replicas: int) -> int:
        """Want so many replicas; return how many were wanted before. Raises as `apply`."""
        request = control_pb2.ScaleRequest(model=model, replicas=replicas)
        with self._translated():
            return self._stub.Scale(request, timeout=self._timeout_s).previous_replicas

    def rollout(self, model: str, settings: Mapping[str, Any], *, undo: bool = False) -> control_pb2.RolloutResponse:
        """Replace a model's groups, or go back. Raises as `apply`."""
        text = json.dumps(settings, default=str) if settings else ""
        request = control_pb2.RolloutRequest(model=model, settings_json=text, undo=undo)
        with self._translated():
            return self._stub.Rollout(request, timeout=_CHANGE_TIMEOUT_S)

    def drain(self, target: str, *, grace_s: float | None = None, undo: bool = False) -> control_pb2.DrainResponse:
        """Take a replica or a node out of service, or a node into it again. Raises ControllerError."""
        request = control_pb2.DrainRequest(target=target, grace_s=grace_s, undo=undo)
        with self._translated():
            return self._stub.Drain(request, timeout=self._timeout_s)

    def read_logs(self, target: str, offsets: Mapping[str, int], *, tail_bytes: int) -> Sequence[control_pb2.LogChunk]:
        """Return what logs hold after these offsets; without an offset, from `tail_bytes` before the end.

        Raises ControllerError.
        """
        request = control_pb2.ReadLogsRequest(target=target, offsets=offsets, tail_bytes=tail_bytes)
        with self._translated():
            return self._stub.ReadLogs(request, timeout=2 * self._timeout_s).chunks

    def read_metrics(self, addresses: Iterable[str]) -> Mapping[str, bytes]:
        """Return the metrics pages at these addresses of `status`, by way of the controller.

        Those that do not answer are missing. Raises ControllerError.
        """
        request = control_pb2.ReadMetricsRequest(addresses=addresses)
        with self._translated():
            return {each.address: each.page for each in self._stub.ReadMetrics(request, timeout=2 * self._timeout_s)}

    def shut_down(self, grace_s: float) -> None:
        """Stop everything; returns when it has stopped. Raises ControllerError."""
        with self._translated():
            request = control_pb2.ShutdownRequest(grace_s=grace_s)
            self._stub.Shutdown(request, timeout=grace_s + self._timeout_s)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
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
            return f"is `weft serve` running? With inner_tls it wants --tls-cert, --tls-key and --tls-ca ({details})"
        return f"is `weft serve` running, with inner_tls and certificates of these authorities? ({details})"
