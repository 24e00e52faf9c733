"""From what a service's ranks count before and after a load to how well they used their machines. Pure arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass

from bench.errors import BenchError


class RanksUnknownError(BenchError):
    """What the ranks did is not known; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounters:
    """One rank at one moment: what it is, and its totals since its start."""

    node: str
    """Address of its node."""
    device: str
    """"cpu" or "cuda"."""
    dtype: str
    quantization: str
    busy_s: float
    """Time in which its model computed."""
    read_bytes: float
    """The least that its model had to read in that time."""
    flops: float | None
    """The operations that its model had to do; None, here and below: it does not tell."""
    peak_memory_bytes: float | None
    energy_j: float | None
    """Energy that its GPU took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What one GPU, or the CPUs of one node, can do."""

    read_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    unknown: str = ""
    """Why one of the values is not known."""

    @property
    def is_known(self) -> bool:
        """Whether both values are known."""
        return self.read_bytes_per_s is not None and self.flops_per_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilization:
    """What the ranks of a model did during a load, whoever sent it. None: not known."""

    num_ranks: int
    busy_share: float
    """Share of the load's time in which a rank's model computed; mean of the ranks."""
    read_bytes_per_s: float | None
    """What a rank reads while its model computes, mean of the ranks."""
    flops_per_s: float | None
    """What a rank computes while its model does, mean of the ranks."""
    mbu: float | None
    """What the ranks had to read, over what memory gives in the time of the load."""
    flop_utilization: float | None
    """The operations that they had to do, over those that matrix products do in that time."""
    peak_memory_bytes: float | None
    """The most that any of the ranks has held since its start: resident on a CPU, allocated on a GPU."""
    energy_j: float | None
    """Energy that the ranks' GPUs took."""


def compare(
    before: Mapping[str, RankCounters], after: Mapping[str, RankCounters], *, duration_s: float, peak: Peak
) -> Utilization:
    """Return what the ranks did between two looks, in a load that took so long.

    Raises:
        RanksUnknownError: they are not the same ones.
    """
    if before.keys() != after.keys():
        changed = ", ".join(sorted(before.keys() ^ after.keys()))
        raise RanksUnknownError(f"ranks came or went during the load: {changed}")
    busy_s = _grown(before, after, "busy_s") or 0.0
    read_bytes, flops = _grown(before, after, "read_bytes"), _grown(before, after, "flops")
    device_s = _num_devices(after) * duration_s
    memory = [rank.peak_memory_bytes for rank in after.values() if rank.peak_memory_bytes is not None]
    return Utilization(
        num_ranks=len(after),
        busy_share=busy_s / (len(after) * duration_s),
        read_bytes_per_s=_ratio(read_bytes, busy_s),
        flops_per_s=_ratio(flops, busy_s),
        mbu=_ratio(_ratio(read_bytes, device_s), peak.read_bytes_per_s),
        flop_utilization=_ratio(_ratio(flops, device_s), peak.flops_per_s),
        peak_memory_bytes=max(memory) if len(memory) == len(after) else None,
        energy_j=_grown(before, after, "energy_j"),
    )


def _num_devices(ranks: Mapping[str, RankCounters]) -> int:
    """Count GPUs, one for each rank; on CPUs nodes, for the ranks of a node share its memory and cores."""
    on_cpu = {rank.node for rank in ranks.values() if rank.device == "cpu"}
    return len(on_cpu) + sum(rank.device != "cpu" for rank in ranks.values())


def _grown(before: Mapping[str, RankCounters], after: Mapping[str, RankCounters], name: str) -> float | None:
    """Return a counter's growth over all ranks; None where one does not tell."""
    first, last = ([getattr(ranks[key], name) for key in after] for ranks in (before, after))
    return None if None in first or None in last else sum(last) - sum(first)


def _ratio(value: float | None, of: float | None) -> float | None:
    return None if value is None or not of else value / of
