"""The real control service over a membership that does not change."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from weft.v1 import control_pb2

from cluster.control_server import ControlServer, bind_control_port
from cluster.demand import DemandLedger
from cluster.log_reader import LogReader
from router.tls import InnerTls


class FixedState:
    """Replicas of the model `tiny`, all READY."""

    is_stopping = False

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Args: `addresses` of replicas by their ids."""
        self._addresses = addresses

    def models(self) -> list[control_pb2.ServedModel]:
        return [control_pb2.ServedModel(name="tiny", path="/tiny", max_context=200)]

    def replicas(self) -> list[control_pb2.ReplicaEndpoint]:
        return [
            control_pb2.ReplicaEndpoint(replica_id=replica_id, model="tiny", address=address)
            for replica_id, address in self._addresses.items()
        ]

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        groups = [
            control_pb2.GroupStatus(group_id=replica_id, state=control_pb2.GROUP_STATE_READY)
            for replica_id in self._addresses
        ]
        return [control_pb2.ModelStatus(name="tiny", groups=groups)]

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        return []

    async def node_statuses(self) -> list[control_pb2.NodeStatus]:
        return []


@asynccontextmanager
async def fixed_control(addresses: Mapping[str, str], tls: InnerTls | None = None) -> AsyncIterator[str]:
    """Tell routers of these replicas (id -> address) for the length of the block; yields host:port."""
    server = ControlServer(FixedState(addresses), LogReader("here"), DemandLedger())  # type: ignore[arg-type]
    listener, address = bind_control_port("127.0.0.1", 0, tls)
    await server.start(listener)
    await server.publish()
    try:
        yield address
    finally:
        await server.stop()
