"""Worker processes that Ray starts ahead, so that the next rank of a node finds Python, torch and the engine there.

When a group is READY, Ray is asked to start a worker process for each rank of it, on the rank's node. `prepare`, which
such a process runs before it takes work, imports the engine, and notes in Ray's key-value store that a spare waits.
Whoever forms ranks looks for these notes and asks for processes of the same kind; Ray then hands out those that wait.
The kind is told by environment variables, and one of them by the code: a spare never becomes a rank of other code than
it has imported. What goes wrong (a spare has died, say) makes a start slower, and nothing else.
"""

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.experimental import internal_kv

logger = logging.getLogger(__name__)

_OWN_PACKAGES = ("cluster", "parallel", "router", "weft", "workers")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KIND = "WEFT_SPARE"
_HOOK: str = ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR
_NAMESPACE = b"weft"
_RPC_TIMEOUT_S = 5.0
_MARGIN_S = 10.0
"""A spare that is about to end is not counted: whoever counts it asks for it a moment later."""
_SOON_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareKind:
    """Which ranks a spare can become."""

    num_threads: int
    lifetime_s: float
    """After which it ends if nobody has taken it."""

    @property
    def name(self) -> str:
        """Another one for other code, threads or lifetime."""
        return f"{code_id()}-{self.num_threads}-{self.lifetime_s:g}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its process, beside those of Ray's node."""
        variables = engine_variables(self.num_threads) | {_KIND: self.name, _HOOK: f"{__name__}.{prepare.__name__}"}
        if roots := _roots():
            variables["PYTHONPATH"] = os.pathsep.join(roots)
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """What a spare knows of itself."""

    kind: str
    key: bytes
    since_s: float
    is_over: threading.Event


_wait: _Wait | None = None


def engine_variables(num_threads: int) -> dict[str, str]:
    """Return the environment variables of a rank that are read once, when torch and numpy are imported."""
    # Threads without work leave their cores to the router and the clients on them (docs/performance.md).
    wait_policy = os.environ.get("OMP_WAIT_POLICY", "passive")
    return dict.fromkeys(_THREADS, str(num_threads)) | {"OMP_WAIT_POLICY": wait_policy}


def spare_options(node_id: str, kind: SpareKind, *, num_ranks: int) -> dict[str, Any]:
    """Return the actor options by which so many ranks on a node become spares that wait there; none if they are fewer.

    Blocks for a round trip to Ray's head.
    """
    keys = internal_kv._internal_kv_list(_prefix(node_id, kind.name), namespace=_NAMESPACE)
    now_s = time.time()
    num_waiting = sum(float(key.rpartition(b"/")[2]) > now_s for key in keys)
    return {"runtime_env": {"env_vars": kind.variables}} if num_waiting >= num_ranks else {}


def leave_spares(node_ids: Sequence[str], kind: SpareKind) -> None:
    """Let Ray start a spare on each of these nodes, which may repeat. What goes wrong is only logged.

    Blocks for a moment.
    """
    _prestart(node_ids, kind.lifetime_s, kind.variables)


def leave_plain_spares(node_ids: Sequence[str], *, lifetime_s: float) -> None:
    """The same with processes that have nothing but Python and Ray, as a controller and a router begin with."""
    _prestart(node_ids, lifetime_s, {})


def prepare() -> None:
    """Make the process that Ray has just started a spare. Raises nothing, for Ray would end the process."""
    try:
        from cluster.rank_actor import import_engine  # what imports this module must not pay for it

        import_engine(0)
        kind = os.environ[_KIND]
        if kind.partition("-")[0] != code_id():
            logger.warning("this process is no spare: its code is not the one that was asked for")
            return
        _begin_to_wait(kind, float(kind.rpartition("-")[2]))
    except Exception:
        logger.exception("this process is no spare")


def take_spare() -> None:
    """Note that this process has become a rank, whether it was a spare or not. Blocks for a round trip if it was."""
    global _wait
    wait, _wait = _wait, None
    if wait is None:
        return
    wait.is_over.set()
    if time.monotonic() - wait.since_s < _SOON_S:  # Ray has just started it for this rank: those it knew of are gone
        node_id = ray.get_runtime_context().get_node_id()
        internal_kv._internal_kv_del(_prefix(node_id, wait.kind), del_by_prefix=True, namespace=_NAMESPACE)
    else:
        internal_kv._internal_kv_del(wait.key, namespace=_NAMESPACE)


@cache
def code_id() -> str:
    """Return what tells the code that is here from any other: what our files say, and which packages are installed."""
    digest = sha256()
    for package in _OWN_PACKAGES:
        for folder in _folders(package):
            for file in sorted(folder.rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    for place in sorted({folder.parent for package in ("ray", "torch") for folder in _folders(package)}):
        digest.update("\n".join(sorted(info.name for info in place.glob("*.dist-info"))).encode())
    return digest.hexdigest()[:16]


def _begin_to_wait(kind: str, lifetime_s: float) -> None:
    global _wait
    prefix = _prefix(ray.get_runtime_context().get_node_id(), kind)
    key = prefix + f"{os.getpid()}/{time.time() + lifetime_s - _MARGIN_S:.0f}".encode()
    _wait = _Wait(kind=kind, key=key, since_s=time.monotonic(), is_over=threading.Event())
    threading.Thread(target=_end_unless_taken, args=(_wait, lifetime_s), daemon=True, name="spare").start()
    internal_kv._internal_kv_put(key, b"", namespace=_NAMESPACE)


def _end_unless_taken(wait: _Wait, lifetime_s: float) -> None:
    if not wait.is_over.wait(lifetime_s):
        internal_kv._internal_kv_del(wait.key, namespace=_NAMESPACE)
        os.kill(os.getpid(), signal.SIGTERM)


def _prefix(node_id: str, kind: str) -> bytes:
    return f"spare/{node_id}/{kind}/".encode()


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


def _roots() -> list[str]:
    """Where our packages lie, if that is no place where Python looks by itself, as with a checkout."""
    roots = [folder.parent for package in _OWN_PACKAGES for folder in _folders(package)]
    return [str(root) for root in dict.fromkeys(roots) if root.name not in ("site-packages", "dist-packages")]


def _prestart(node_ids: Sequence[str], lifetime_s: float, variables: Mapping[str, str]) -> None:
    try:
        addresses = {node["NodeID"]: f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in ray.nodes()}
        for node_id, count in Counter(node_ids).items():
            _ask_node(addresses[node_id], count, lifetime_s, variables)
    except Exception as error:  # an interface between Ray's own processes, which may change
        logger.info("Ray starts no process ahead: %s: %s", type(error).__name__, error)


def _ask_node(address: str, count: int, lifetime_s: float, variables: Mapping[str, str]) -> None:
    """Ask Ray's node as Ray's own processes do before they send it work: there is no public function for it."""
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.utils import get_runtime_env_info
    from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
    from ray.runtime_env import RuntimeEnv

    messages: Any = node_manager_pb2  # it makes its classes when it is imported
    languages: Any = common_pb2
    request = messages.PrestartWorkersRequest(
        language=languages.PYTHON, num_workers=count, keep_alive_duration_secs=max(1, int(lifetime_s))
    )
    if variables:
        request.runtime_env_info.CopyFrom(get_runtime_env_info(RuntimeEnv(env_vars=dict(variables))))
    with init_grpc_channel(address) as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_RPC_TIMEOUT_S)
