"""The operator's end of weft.v1.Control: what `weft status`, `weft stop` and a starting service ask the controller."""

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from cluster.errors import ControllerError


class ControlClient:
    """A connection to one controller; close it, or use it in a `with`. Every call has a deadline."""

    def __init__(self, address: str, *, timeout_s: float = 10.0) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
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
        try:
            return self._stub.GetStatus(control_pb2.GetStatusRequest(), timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def shut_down(self, grace_s: float) -> None:
        """Stop everything; returns when it has stopped. Raises ControllerError."""
        try:
            request = control_pb2.ShutdownRequest(grace_s=grace_s)
            self._stub.Shutdown(request, timeout=grace_s + self._timeout_s)
        except grpc.RpcError as error:
            raise self._translate(error) from error

    def _translate(self, error: grpc.RpcError) -> ControllerError:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return ControllerError(f"no controller answers at {self._address}; is `weft serve` running?")
        return ControllerError(f"the controller at {self._address}: {error.code().name}: {error.details()}")
