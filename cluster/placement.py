"""Where a replica group goes: its bundles, and in words why they do not fit. Pure; formation.py asks Ray.

One bundle is one pipeline stage, because a bundle never spans nodes: tensor parallelism stays inside a node by
construction, and stages may lie on different ones. All ranks of a stage share its bundle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from workers.config import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeResources:
    """What one alive node has and what of it is free."""

    node_id: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    address: str = ""
    accelerators: frozenset[str] = frozenset()
    """Types of the node's GPUs."""


ACCELERATOR_PREFIX = "accelerator_type:"
"""A node with GPUs of a type has 1 of the Ray resource of this prefix and that name."""
NODE_ID_LABEL = "ray.io/node-id"

_ACCELERATOR_SHARE = 0.001  # a node has 1: this asks for the type and takes next to nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one group asks of the cluster."""

    parallel: ParallelConfig
    gpus_per_rank: int
    cpus_per_rank: float
    accelerator: str | None = None
    """Type of the GPUs; None: any."""

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of one stage."""
        tensor_parallel = self.parallel.tensor_parallel
        bundle = {"CPU": tensor_parallel * self.cpus_per_rank}
        if self.gpus_per_rank:
            bundle["GPU"] = float(tensor_parallel * self.gpus_per_rank)
        if self.accelerator is not None:
            bundle[f"{ACCELERATOR_PREFIX}{self.accelerator}"] = _ACCELERATOR_SHARE
        return bundle

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of every stage, in order."""
        return [self.bundle for _ in range(self.parallel.pipeline_parallel)]

    @property
    def strategy(self) -> str:
        """Ray's placement strategy: a single stage is packed strictly, several go as near to each other as they can."""
        return "STRICT_PACK" if self.parallel.pipeline_parallel == 1 else "PACK"

    @property
    def default_stream_interval_s(self) -> float:
        """Seconds between messages of one stream: where a CPU computes, they take time from the model. Longer intervals
        give little more (docs/experiments/serving.md)."""
        return 0.0 if self.gpus_per_rank else 0.02

    def stage_of(self, rank: int) -> int:
        """Return the index of the bundle that this rank belongs to."""
        return rank // self.parallel.tensor_parallel


def why_not(placement: Placement, nodes: Sequence[NodeResources]) -> str | None:
    """Say in words why the group does not fit on the free resources; None when it does."""
    if not nodes:
        return "the cluster has no node that takes groups"
    if placement.accelerator is not None:
        present = sorted({name for node in nodes for name in node.accelerators})
        nodes = [node for node in nodes if placement.accelerator in node.accelerators]
        if not nodes:
            return f"needs {placement.accelerator} accelerators; the nodes have {', '.join(present) or 'none'}"
    gpus = placement.parallel.tensor_parallel * placement.gpus_per_rank
    cpus = placement.parallel.tensor_parallel * placement.cpus_per_rank
    for need, unit, free, total in (
        (gpus, "GPUs", [n.free_gpus for n in nodes], [n.gpus for n in nodes]),
        (cpus, "CPUs", [n.free_cpus for n in nodes], [n.cpus for n in nodes]),
    ):
        if need > max(total) + _EPSILON:
            has = f"{max(total):g}" if max(total) else "none"
            return f"needs {need:g} {unit} on one node; the largest node has {has}"
        if need > max(free) + _EPSILON:
            return f"needs {need:g} {unit} on one node; the largest free node has {max(free):g}"
    stages = placement.parallel.pipeline_parallel
    room = sum(_stages_that_fit(node, gpus, cpus) for node in nodes)
    if room < stages:
        return f"needs {stages} stages of {gpus:g} GPUs and {cpus:g} CPUs; free nodes have room for {room}"
    return None


def why_never(placement: Placement, nodes: Sequence[NodeResources]) -> str | None:
    """Say in words why the group would not fit even if these nodes were free; None when it would."""
    return why_not(placement, [replace(node, free_cpus=node.cpus, free_gpus=node.gpus) for node in nodes])


_EPSILON = 1e-6  # Ray counts resources in steps of 1e-4
_UNLIMITED = 2**31  # stages that take nothing: more than any group has


def _stages_that_fit(node: NodeResources, gpus: float, cpus: float) -> int:
    by_cpu = (node.free_cpus + _EPSILON) / cpus if cpus else float("inf")
    by_gpu = (node.free_gpus + _EPSILON) / gpus if gpus else float("inf")
    most = min(by_cpu, by_gpu)
    return _UNLIMITED if most == float("inf") else int(most)
