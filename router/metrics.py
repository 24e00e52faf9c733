"""What the router counts, in a registry of its own, which metrics_listener.py serves.

Names begin with weft_router_ and end in their unit. Gauges are read when somebody asks, so none is ever stale.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from weft.buckets import BUCKETS_S

from router.call import GenerateCall
from router.config import MetricsConfig
from router.convert import MAX_REQUEST_ID_CHARS
from router.directory import Directory, ModelRoute
from router.gap_histogram import GapHistogram, Gaps
from router.places import Places
from router.replica_book import LinkState
from router.request_log import RequestRecord, log_request
from router.route import Route
from router.tenants import NO_TENANT, TenantNames

_OUTCOMES = (
    *("stop", "length", "abort", "cancelled", "invalid_argument", "rate_limited"),
    *("deadline_exceeded", "resource_exhausted", "unavailable", "internal"),
)
"""How a request to a model can end."""
_FAULTS = ("deadline_exceeded", "resource_exhausted", "unavailable", "internal")
"""Outcomes that are the service's and not the client's doing."""
_SERVED = ("met", "ttft_missed", "tpot_missed")
_RESULTS = (*_SERVED, "failed")
"""How a request did by the targets."""


class RouterMetrics:
    """All metrics of one router. Counting happens on the event loop, reading in the listener's thread."""

    def __init__(self, config: MetricsConfig | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self.config = config or MetricsConfig()
        self.clock = clock
        self.tenants = TenantNames(self.config.max_tenants)
        self.requests = self._counter("requests", "Requests that ended, by how.", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that reached a replica.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens that came from replicas.")
        self.predicted_tokens = self._counter(
            "predicted_cached_tokens", "Prompt tokens that the chosen replica held when the request was routed."
        )
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens that replicas found in their caches.")
        self.choices = self._counter("choices", "Replicas chosen, by why.", "reason")
        self.failovers = self._counter("failovers", "Times a replica broke under a request.")
        self.retries = self._counter("retries", "Times a replica refused a request: it was full or about to leave.")
        self.ttft = self._histogram("ttft_seconds", "From the request's arrival to its first token.")
        self.tpot = self._histogram("tpot_seconds", "Time per output token after the first, mean of a request.")
        self.itl = GapHistogram(
            "weft_router_itl_seconds", "Gaps between a request's tokens; those that come together share it."
        )
        self.registry.register(self.itl)
        self.e2e = self._histogram("e2e_seconds", "From a request's arrival to its end, finished requests only.")
        self.queue = self._histogram("queue_seconds", "From a request's arrival to its place in flight.")
        self.slo_requests = self._counter("slo_requests", "Requests by how they met the targets.", "result")
        self.goodput_tokens = self._counter("goodput_tokens", "Generated tokens of requests that met both targets.")
        self.tenant_requests = self._counter("tenant_requests", "Requests that ended, by tenant.", "tenant", "outcome")
        self.tenant_prompt_tokens = self._counter("tenant_prompt_tokens", "Prompt tokens, by tenant.", "tenant")
        self.tenant_cached_tokens = self._counter("tenant_cached_tokens", "Those found in caches.", "tenant")
        self.tenant_generation_tokens = self._counter("tenant_generation_tokens", "Generated tokens.", "tenant")
        self.tenant_ttft = Summary(
            "weft_router_tenant_ttft_seconds", "To the first token.", ("model", "tenant"), registry=self.registry
        )

    def prepare(self, model: str) -> None:
        """Make a served model's series, at zero: `rate` does not see the event that a series begins with."""
        for outcome in _OUTCOMES:
            self.requests.labels(model, outcome)
        for result in _RESULTS:
            self.slo_requests.labels(model, result)
        for counter in (
            *(self.prompt_tokens, self.generation_tokens, self.predicted_tokens, self.cached_tokens),
            *(self.failovers, self.retries, self.goodput_tokens),
        ):
            counter.labels(model)

    def watch(self, places: Places, directory: Directory) -> None:
        """Report the state of places and directory too."""
        self.registry.register(_StateCollector(self, places, directory))

    def targets_s(self, route: Route[Any]) -> tuple[float, float]:
        """Return a model's targets of TTFT and TPOT."""
        return route.target_ttft_s or self.config.slo_ttft_s, route.target_tpot_s or self.config.slo_tpot_s

    def request(self, call: GenerateCall) -> "RequestMeter":
        """Return the meter of a request that arrives now."""
        return RequestMeter(self, call)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"weft_router_{name}", text, ("model", *labels), registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"weft_router_{name}", text, ("model",), registry=self.registry, buckets=BUCKETS_S)


class RequestMeter:
    """Counts one request from its arrival to its one outcome."""

    def __init__(self, metrics: RouterMetrics, call: GenerateCall) -> None:
        self._metrics = metrics
        self._call = call
        self._arrived_s = metrics.clock()
        self._ttft_s: float | None = None
        self._first_s = self._last_s = self._arrived_s
        self.request_id = call.request_id[:MAX_REQUEST_ID_CHARS]
        self.num_tokens = 0
        """Output tokens that came so far."""
        self._itl: Gaps | None = None
        self._generation_tokens: Counter | None = None
        self.model = ""
        """Empty until the model is known to be served, so that clients cannot make up label values."""
        self.tenant = NO_TENANT
        self.num_prompt_tokens = 0
        """0 until the request is known to be valid, and where another choice of the prompt counts it."""
        self.num_cached_tokens = 0
        """Prompt tokens that replicas found in their caches, as the request's usage tells."""
        self._target_ttft_s, self._target_tpot_s = metrics.config.slo_ttft_s, metrics.config.slo_tpot_s
        self._has_replica = False  # when it arrives

    def begin(self, route: Route[Any]) -> None:
        """Note which model it asks for."""
        call = self._call
        self.model = route.name
        self.tenant = self._metrics.tenants.name(call.tenant, "")
        ttft_s, tpot_s = self._metrics.targets_s(route)
        self._target_ttft_s = ttft_s if call.target_ttft_s is None else call.target_ttft_s
        self._target_tpot_s = tpot_s if call.target_tpot_s is None else call.target_tpot_s
        self._has_replica = route.num_ready > 0

    def accept(self, request_id: str, num_prompt_tokens: int) -> None:
        """Note that its values are allowed; its cache salt has no name before, for it may be anything."""
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.tenant = self._metrics.tenants.name(self._call.tenant, self._call.cache_salt)

    def start(self) -> None:
        """Note that the request got its place in flight."""
        self._metrics.queue.labels(self.model).observe(self._metrics.clock() - self._arrived_s)

    def receive(self, num_tokens: int) -> None:
        """Note tokens that came together."""
        if num_tokens == 0:
            return
        now_s = self._metrics.clock()
        gaps = num_tokens
        if self._itl is None or self._generation_tokens is None:
            self._itl = self._metrics.itl.of(self.model)
            self._generation_tokens = self._metrics.generation_tokens.labels(self.model)
            self._ttft_s = now_s - self._arrived_s
            self._metrics.ttft.labels(self.model).observe(self._ttft_s)
            self._metrics.tenant_ttft.labels(self.model, self.tenant).observe(self._ttft_s)
            self._first_s = self._last_s = now_s
            gaps -= 1  # before the first token there is no gap
        if gaps:
            self._itl.add((now_s - self._last_s) / gaps, gaps)
        self._last_s = now_s
        self.num_tokens += num_tokens
        self._generation_tokens.inc(num_tokens)

    def end(self, outcome: str, *, is_finished: bool) -> bool | None:
        """Note the end; the times of requests that did not finish would say nothing.

        Returns whether the request was served within its targets; None where that says nothing about how many replicas
        there should be: it was not served, or the first one was not there yet.
        """
        metrics = self._metrics
        metrics.requests.labels(self.model, outcome).inc()
        self._count_tenant(outcome)
        e2e_s = metrics.clock() - self._arrived_s
        tpot_s = (self._last_s - self._first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None
        result = self._result(outcome, tpot_s, is_finished=is_finished)
        if metrics.config.log_requests:
            log_request(self._record(outcome, result, tpot_s, e2e_s))
        if result is not None:
            metrics.slo_requests.labels(self.model, result).inc()
        if is_finished:
            self._observe_times(e2e_s, tpot_s)
        if result == "met":
            metrics.goodput_tokens.labels(self.model).inc(self.num_tokens)
        return result == "met" if self._has_replica and result in _SERVED else None

    def _observe_times(self, e2e_s: float, tpot_s: float | None) -> None:
        self._metrics.e2e.labels(self.model).observe(e2e_s)
        if tpot_s is not None:
            self._metrics.tpot.labels(self.model).observe(tpot_s)

    def _result(self, outcome: str, tpot_s: float | None, *, is_finished: bool) -> str | None:
        """Return how the request did by the targets; None when its client ended it, or never began it well."""
        if self._ttft_s is None:
            if outcome == "deadline_exceeded":
                return "ttft_missed"
        elif self._ttft_s > self._target_ttft_s:
            return "ttft_missed"
        if not is_finished:
            return "failed" if outcome in _FAULTS else None
        return "tpot_missed" if tpot_s is not None and tpot_s > self._target_tpot_s else "met"

    def _record(self, outcome: str, result: str | None, tpot_s: float | None, e2e_s: float) -> RequestRecord:
        return RequestRecord(
            request_id=self.request_id,
            model=self.model,
            tenant=self.tenant,
            outcome=outcome,
            result=result,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            generation_tokens=self.num_tokens,
            ttft_s=self._ttft_s,
            tpot_s=tpot_s,
            e2e_s=e2e_s,
            target_ttft_s=self._target_ttft_s,
            target_tpot_s=self._target_tpot_s,
        )

    def _count_tenant(self, outcome: str) -> None:
        metrics, labels = self._metrics, (self.model, self.tenant)
        metrics.tenant_requests.labels(*labels, outcome).inc()
        metrics.tenant_prompt_tokens.labels(*labels).inc(self.num_prompt_tokens)
        metrics.tenant_cached_tokens.labels(*labels).inc(self.num_cached_tokens)
        metrics.tenant_generation_tokens.labels(*labels).inc(self.num_tokens)


class _StateCollector(Collector):
    """What is read from the router's state, in the listener's thread: copies of dicts, single reads of numbers."""

    def __init__(self, metrics: RouterMetrics, places: Places, directory: Directory) -> None:
        self._metrics = metrics
        self._places = places
        self._directory = directory

    def collect(self) -> Iterable[Metric]:
        """Return all of it as it is now."""
        routes = self._directory.routes
        for route in routes:
            self._metrics.prepare(route.name)
        return (*self._own_state(), *self._models_state(routes), *_replicas_state(routes))

    def _own_state(self) -> Iterable[Metric]:
        config = self._places.config
        numbers = (
            ("requests_in_flight", "Requests that replicas work on.", self._places.num_in_flight),
            ("requests_queued", "Requests that wait for a place in flight.", self._places.num_queued),
            ("max_requests_in_flight", "Most requests in flight at once.", config.max_in_flight),
            ("max_requests_queued", "Most requests that may wait; one more is refused.", config.max_queued),
        )
        for name, text, value in numbers:
            family = _gauge(name, text)
            family.add_metric((), value)
            yield family
        cpu = CounterMetricFamily("weft_router_cpu_seconds", "CPU time that the router's process has used.")
        cpu.add_metric((), time.process_time())
        yield cpu

    def _models_state(self, routes: Sequence[ModelRoute]) -> Iterable[GaugeMetricFamily]:
        ready = _gauge("ready_replicas", "Replicas that take requests now.", "model")
        ttft = _gauge("slo_ttft_seconds", "Target of the time to the first token.", "model")
        tpot = _gauge("slo_tpot_seconds", "Target of the time of each further token.", "model")
        for route in routes:
            ttft_s, tpot_s = self._metrics.targets_s(route)
            ready.add_metric((route.name,), sum(link.is_ready for link in list(route.links.values())))
            ttft.add_metric((route.name,), ttft_s)
            tpot.add_metric((route.name,), tpot_s)
        return (ready, ttft, tpot)


def _replicas_state(routes: Sequence[ModelRoute]) -> Iterable[GaugeMetricFamily]:
    ready = _gauge("replica_ready", "1 while a replica takes requests.", "model", "replica")
    requests = _gauge("replica_requests", "Requests on a replica, as the router sees it.", "model", "replica")
    tokens = _gauge("replica_pending_tokens", "Tokens a replica has yet to compute.", "model", "replica")
    blocks = _gauge("replica_indexed_blocks", "KV blocks a replica is known to hold.", "model", "replica")
    for route in routes:
        for link in list(route.links.values()):
            labels = (route.name, link.replica_id)
            ready.add_metric(labels, float(link.is_ready))
            requests.add_metric(labels, link.load.num_requests)
            tokens.add_metric(labels, link.load.num_pending_tokens)
            if link.state is LinkState.READY:  # else nothing is known, which is not none
                blocks.add_metric(labels, route.index.num_blocks(link.replica_id))
    return (ready, requests, tokens, blocks)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"weft_router_{name}", text, labels=labels)
