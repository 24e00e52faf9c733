"""`weft warm`: has nodes of a Ray cluster start processes ahead, so that a first service there starts as later ones."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from rich.console import Console

from cluster.errors import SpareError
from cluster.local_ray import join_ray, leave_ray
from cluster.spares import SpareKind, add_spares, num_waiting

_POLL_S = 0.1
_AGAIN_S = 2.0  # a node that is starting others forgets what it was asked for
_HEAD = "node:__internal_head__"
_PURPOSES = {SpareKind.RANK: "ranks", SpareKind.SERVICE: "controller and router"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How many processes are to wait on a node."""

    node_id: str
    address: str
    """Address of the node."""
    kind: SpareKind
    count: int

    def __str__(self) -> str:
        """Say it as in "2 for ranks on 10.0.0.4"."""
        return f"{self.count} for {_PURPOSES[self.kind]} on {self.address}"


def warm(
    console: Console, *, ray_address: str, all_nodes: bool, ranks: int | None, keep_s: float, timeout_s: float
) -> None:
    """Start what is missing, and return when all wait.

    Args:
        console: where to say what waits.
        ray_address: as in ray.init.
        all_nodes: of the Ray cluster; else the node on this machine.
        ranks: how many ranks each node is ready for; None: one for each of its GPUs, or one.
        keep_s: how long they wait for work at least.
        timeout_s: until they wait.

    Raises:
        RayStartError: there is no such Ray cluster.
        SpareError: not all wait in time, or Ray cannot start them.
    """
    join_ray(ray_address, log_to_driver=False)
    try:
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for node in ray.nodes() if node["Alive"]]
        wishes = plan_spares(nodes, here=here, all_nodes=all_nodes, ranks=ranks)
        _fulfil(wishes, keep_s=keep_s, timeout_s=timeout_s)
    finally:
        leave_ray()
    for wish in wishes:
        console.print(f"Waiting: {wish}", highlight=False)


def plan_spares(nodes: Sequence[dict[str, Any]], *, here: str, all_nodes: bool, ranks: int | None) -> list[Wish]:
    """Return what should wait on these nodes, which are as Ray tells them.

    Ranks go where there are CPUs. A service has its controller and its router where `weft serve` runs: on Ray's head,
    or here, where a whole cluster is told to be ready.
    """
    wishes = []
    for node in nodes:
        node_id, resources = node["NodeID"], node["Resources"]
        if not all_nodes and node_id != here:
            continue
        counts = {SpareKind.RANK: ranks or int(resources.get("GPU", 0)) or 1 if resources.get("CPU") else 0}
        if node_id == here and (all_nodes or _HEAD in resources):
            counts[SpareKind.SERVICE] = 2
        address = node["NodeManagerAddress"]
        wishes += [Wish(node_id=node_id, address=address, kind=kind, count=n) for kind, n in counts.items() if n]
    return wishes


def _fulfil(wishes: Sequence[Wish], *, keep_s: float, timeout_s: float) -> None:
    ask_s = time.monotonic()
    give_up_s = ask_s + timeout_s
    while True:
        if time.monotonic() >= ask_s:
            for wish in wishes:
                add_spares(wish.node_id, wish.kind, count=wish.count, lifetime_s=keep_s, give_up_s=give_up_s)
            ask_s = time.monotonic() + _AGAIN_S
        missing = [wish for wish in wishes if num_waiting(wish.node_id, wish.kind) < wish.count]
        if not missing:
            return
        if time.monotonic() > give_up_s:
            names = ", ".join(str(wish) for wish in missing)
            raise SpareError(f"some processes do not wait after {timeout_s:g} s, among: {names}")
        time.sleep(_POLL_S)
