"""What Ray has for its own processes only: worker processes that are started ahead, and a store of notes about them.

There are no public functions for either, so any of this may be otherwise in the next Ray: whatever goes wrong is a
SpareError, without which spares.py and its callers go on.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from weft.addresses import join_host_port

from cluster.errors import SpareError

_NAMESPACE = b"weft"
_RPC_TIMEOUT_S = 5.0
_KEEP_S = 10**9  # they end by themselves


def hook_variable() -> str:
    """Return the environment variable that names what a worker process runs before it takes work."""
    with _translated():
        from ray._private import ray_constants

        return str(ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR)


def num_started_at_once(node_id: str) -> int:
    """Return how many processes a node starts at a time; it forgets the others that it was asked for."""
    with _translated():
        return max(1, int(_node(node_id)["Resources"].get("CPU", 0)))


def start_ahead(node_id: str, count: int, *, variables: Mapping[str, str], has_parent: bool) -> None:
    """Let a node start processes, which wait for actors with these environment variables.

    Ray's own processes ask so before they send work. Returns when the node has heard of it.

    Args:
        node_id: Ray's name of the node.
        count: how many.
        variables: of their environment.
        has_parent: the actors are created by one that has such variables too. Ray compares them as texts, and writes
            those that it has merged with its parent's without spaces.
    """
    with _translated():
        from ray._private.grpc_utils import init_grpc_channel
        from ray._private.utils import get_runtime_env_info
        from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
        from ray.runtime_env import RuntimeEnv

        node = _node(node_id)
        environment = RuntimeEnv(env_vars=dict(variables))
        messages: Any = node_manager_pb2  # it makes its classes when it is imported
        languages: Any = common_pb2
        request = messages.PrestartWorkersRequest(
            language=languages.PYTHON,
            num_workers=count,
            keep_alive_duration_secs=_KEEP_S,
            runtime_env_info=get_runtime_env_info(environment),
        )
        if has_parent:
            text = json.dumps(environment, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
            request.runtime_env_info.serialized_runtime_env = text
        with init_grpc_channel(_address(node)) as channel:
            node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_RPC_TIMEOUT_S)


def living_nodes() -> set[str]:
    """Return Ray's names of the nodes that are there now. Blocks for a round trip to Ray's head."""
    with _translated():
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def running_pids(node_id: str) -> set[int]:
    """Return the worker processes of a node that run, those included that were started ahead.

    One that was killed is gone within a moment. Blocks for a round trip to the node.
    """
    with _translated():
        from ray._private.grpc_utils import init_grpc_channel
        from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

        messages: Any = node_manager_pb2
        with init_grpc_channel(_address(_node(node_id))) as channel:
            service = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
            return set(service.GetWorkerPIDs(messages.GetWorkerPIDsRequest(), timeout=_RPC_TIMEOUT_S).pids)


def list_notes(prefix: str) -> list[str]:
    """Return the notes whose names begin so. This and the next three block for a round trip to Ray's head."""
    with _store() as store:
        return [key.decode() for key in store._internal_kv_list(prefix.encode(), namespace=_NAMESPACE)]


def read_note(note: str) -> str | None:
    """Return what a note says; None: there is none."""
    with _store() as store:
        value = store._internal_kv_get(note.encode(), namespace=_NAMESPACE)
    return None if value is None else value.decode()


def leave_note(note: str, text: str = "") -> None:
    """Leave a note for every process of the Ray cluster to see, in place of what it said before."""
    with _store() as store:
        store._internal_kv_put(note.encode(), text.encode(), namespace=_NAMESPACE)


def drop_notes(prefix: str) -> None:
    """Drop the notes whose names begin so."""
    with _store() as store:
        store._internal_kv_del(prefix.encode(), del_by_prefix=True, namespace=_NAMESPACE)


def _node(node_id: str) -> dict[str, Any]:
    for node in ray.nodes():
        if node["NodeID"] == node_id and node["Alive"]:
            return dict(node)
    raise LookupError(f"node {node_id} has gone")


def _address(node: dict[str, Any]) -> str:
    return join_host_port(node["NodeManagerAddress"], node["NodeManagerPort"])


@contextmanager
def _store() -> Iterator[Any]:
    with _translated():
        from ray.experimental import internal_kv

        yield internal_kv


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a Ray of another shape may fail in any way
        raise SpareError(f"Ray keeps no processes ready: {type(error).__name__}: {error}") from error
