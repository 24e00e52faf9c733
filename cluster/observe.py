"""What a running service does, from the metrics of its routers and replicas: rates and percentiles over a window. Pure.

A scrape is read once into plain numbers; counters and histogram buckets of two scrapes are subtracted, so a window
covers exactly what happened between them. Who fetches and shows them is top.py.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from weft.v1 import control_pb2

from cluster.status_view import bounds, last_failure, state_name

_Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One metrics page: every sample by name and labels."""

    samples: Mapping[tuple[str, _Labels], float]

    @classmethod
    def parse(cls, text: str) -> "Page":
        """Read the Prometheus text format. Raises ValueError."""
        families = text_string_to_metric_families(text)
        return cls(
            samples={
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in families
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of this name that have these labels, whatever others they have."""
        wanted = labels.items()
        return sum(value for (each, has), value in self.samples.items() if each == name and wanted <= has)

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the cumulative buckets of a histogram, by upper bound."""
        buckets: dict[float, float] = {}
        wanted = labels.items()
        for (each, has), value in self.samples.items():
            if each == f"{name}_bucket" and wanted <= has:
                bound = float(dict(has)["le"])
                buckets[bound] = buckets.get(bound, 0.0) + value
        return buckets


def parse_pages(pages: Mapping[str, bytes]) -> dict[str, Page]:
    """Read metrics pages by address; what is none, of who has the port of a process that ended, is left out."""
    parsed = {}
    for address, page in pages.items():
        with suppress(ValueError):
            parsed[address] = Page.parse(page.decode())
    return parsed


_EMPTY = Page(samples={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look at the whole cluster."""

    time_s: float
    status: control_pb2.GetStatusResponse
    pages: Mapping[str, Page]
    """Metrics pages by address; those that did not answer are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Percentiles of a latency, in seconds; None: nothing was observed."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """One model over the window, as its clients saw it."""

    name: str
    wanted_replicas: int
    ready_replicas: int
    revision: int
    scales: str
    """"0 to 4" where the number of replicas follows the load; else empty."""
    last_scaling: str
    """The last change of that number and why; empty: none since the controller started."""
    requests_per_s: float | None
    """None, as in the fields below: no router of this controller tells."""
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    hit_rate: float | None
    """Share of the prompt tokens that were cached."""
    ttft_s: Percentiles
    tpot_s: Percentiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank."""

    rank: int
    node: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One group; numbers are None where its metrics did not answer."""

    group_id: str
    replica_id: str
    state: str
    detail: str
    last_failure: str
    """Why it was started again last, where `detail` does not say so."""
    seconds_in_state: float
    restarts: int
    revision: int
    ranks: list[RankView] = field(default_factory=list)
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    output_tokens_per_s: float | None = None
    hit_rate: float | None = None
    preemptions_per_s: float | None = None
    step_s: Percentiles = Percentiles()


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """One router."""

    router_id: str
    alive: bool
    draining: bool
    in_flight: int | None
    queued: int | None
    failovers_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node of the Ray cluster."""

    address: str
    ranks: int
    cpus: float
    free_cpus: float
    gpus: float
    free_gpus: float
    accelerator: str
    drained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that `weft top` shows."""

    uptime_s: float
    window_s: float
    """The time that rates and percentiles span."""
    models: list[ModelView]
    groups: list[GroupView]
    routers: list[RouterView]
    nodes: list[NodeView]


class Window:
    """The observations of the last `length_s`."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._observations: deque[Observation] = deque()

    def add(self, observation: Observation) -> Snapshot:
        """Add an observation, and return what the window shows with it."""
        self._observations.append(observation)
        while len(self._observations) > 2 and self._observations[1].time_s <= observation.time_s - self._length_s:
            self._observations.popleft()
        return take_snapshot(*self._observations)


def take_snapshot(*looks: Observation) -> Snapshot:
    """Return the state at the last of these looks, and what happened since the first one."""
    first, last = looks[0], looks[-1]
    status = last.status
    groups = [group for model in status.models for group in model.groups]
    routers = [_Delta(looks, router.metrics_address) for router in status.routers]
    return Snapshot(
        uptime_s=status.uptime_s,
        window_s=last.time_s - first.time_s,
        models=[_model_view(model, routers) for model in status.models],
        groups=[_group_view(group, _Delta(looks, group.metrics_address)) for group in groups],
        routers=[_router_view(router, delta) for router, delta in zip(status.routers, routers, strict=True)],
        nodes=[_node_view(node, groups) for node in status.nodes],
    )


def percentile(buckets: Mapping[float, float], fraction: float) -> float | None:
    """Return the value below which this fraction of a histogram lies, linear inside a bucket; None when it is empty."""
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = fraction * buckets[bounds[-1]]
    lower, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank:
            if bound == float("inf"):
                return lower  # all that is known: not less
            inside = buckets[bound] - below
            return lower + (bound - lower) * ((rank - below) / inside if inside else 1.0)
        lower, below = bound, buckets[bound]
    return lower


class _Delta:
    """What one metrics page says now, and what has changed since it was first seen; after a restart, since zero.

    What it counted before it was seen may be years old, and is no part of any rate.
    """

    def __init__(self, looks: Sequence[Observation], address: str) -> None:
        last = looks[-1]
        first = next((look for look in looks if address in look.pages), last)
        self.seconds = last.time_s - first.time_s
        self.has_answered = address in last.pages
        self._last = last.pages.get(address, _EMPTY)
        self._first = first.pages.get(address, _EMPTY)

    def now(self, name: str, **labels: str) -> float:
        return self._last.total(name, **labels)

    def grown(self, name: str, **labels: str) -> float:
        grown = self._last.total(name, **labels) - self._first.total(name, **labels)
        return grown if grown >= 0 else self._last.total(name, **labels)

    def rate(self, name: str, **labels: str) -> float:
        return self.grown(name, **labels) / self.seconds if self.seconds > 0 else 0.0

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        last, first = self._last.buckets(name, **labels), self._first.buckets(name, **labels)
        grown = {bound: value - first.get(bound, 0.0) for bound, value in last.items()}
        return grown if all(value >= 0 for value in grown.values()) else last


def _model_view(model: control_pb2.ModelStatus, routers: list[_Delta]) -> ModelView:
    name = model.name
    routers = [router for router in routers if router.has_answered]

    def rate(metric: str) -> float | None:
        if not routers:
            return None
        return sum(router.rate(f"weft_router_{metric}_total", model=name) for router in routers)

    prompt = sum(router.grown("weft_router_prompt_tokens_total", model=name) for router in routers)
    cached = sum(router.grown("weft_router_cached_tokens_total", model=name) for router in routers)
    return ModelView(
        name=name,
        wanted_replicas=model.wanted_replicas,
        ready_replicas=model.ready_replicas,
        revision=model.revision,
        scales=bounds(model),
        last_scaling=model.autoscaling.last_change,
        requests_per_s=rate("requests"),
        output_tokens_per_s=rate("generation_tokens"),
        prompt_tokens_per_s=rate("prompt_tokens"),
        hit_rate=cached / prompt if prompt else None,
        ttft_s=_percentiles(_sum(router.buckets("weft_router_ttft_seconds", model=name) for router in routers)),
        tpot_s=_percentiles(_sum(router.buckets("weft_router_tpot_seconds", model=name) for router in routers)),
    )


def _group_view(group: control_pb2.GroupStatus, delta: _Delta) -> GroupView:
    view = GroupView(
        group_id=group.group_id,
        replica_id=group.replica_id,
        state=state_name(group),
        detail=group.detail,
        last_failure=last_failure(group),
        seconds_in_state=group.seconds_in_state,
        restarts=group.restarts,
        revision=group.revision,
        ranks=[RankView(rank=rank.rank, node=rank.node, pid=rank.pid) for rank in group.ranks],
    )
    if not delta.has_answered:
        return view
    prompt = delta.grown("weft_prompt_tokens_total")
    return replace(
        view,
        running=int(delta.now("weft_requests_running")),
        waiting=int(delta.now("weft_requests_waiting")),
        kv_usage=delta.now("weft_kv_usage_ratio"),
        output_tokens_per_s=delta.rate("weft_generation_tokens_total"),
        hit_rate=delta.grown("weft_cached_tokens_total") / prompt if prompt else None,
        preemptions_per_s=delta.rate("weft_preemptions_total"),
        step_s=_percentiles(delta.buckets("weft_step_seconds")),
    )


def _router_view(router: control_pb2.RouterStatus, delta: _Delta) -> RouterView:
    answered = delta.has_answered
    return RouterView(
        router_id=router.router_id,
        alive=router.alive,
        draining=router.draining,
        in_flight=int(delta.now("weft_router_requests_in_flight")) if answered else None,
        queued=int(delta.now("weft_router_requests_queued")) if answered else None,
        failovers_per_s=delta.rate("weft_router_failovers_total") if answered else None,
    )


def _node_view(node: control_pb2.NodeStatus, groups: list[control_pb2.GroupStatus]) -> NodeView:
    return NodeView(
        address=node.address,
        ranks=sum(rank.node == node.address for group in groups for rank in group.ranks),
        cpus=node.cpus,
        free_cpus=node.free_cpus,
        gpus=node.gpus,
        free_gpus=node.free_gpus,
        accelerator=node.accelerator,
        drained=node.drained,
    )


def _percentiles(buckets: Mapping[float, float]) -> Percentiles:
    return Percentiles(p50=percentile(buckets, 0.5), p90=percentile(buckets, 0.9), p99=percentile(buckets, 0.99))


def _sum(histograms: Iterable[Mapping[float, float]]) -> dict[float, float]:
    total: dict[float, float] = {}
    for histogram in histograms:
        for bound, value in histogram.items():
            total[bound] = total.get(bound, 0.0) + value
    return total
