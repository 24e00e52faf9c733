"""What one replica counts, as Prometheus reads it. The engine fills plain numbers; here they get names.

Names begin with weft_ and end in their unit. Gauges and counters are read when somebody asks, so none is ever stale.
"""

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from weft.buckets import BUCKETS_S

from cluster.process_collector import ProcessCollector
from workers.engine import EngineLoad
from workers.request import FinishReason
from workers.stats import EngineStats, Observations

_BUCKETS_SEQUENCES = tuple(float(1 << power) for power in range(11))
_BUCKETS_TOKENS = tuple(float(1 << power) for power in range(15))


class EngineCollector(ProcessCollector):
    """Turns an engine's statistics into metric families. Safe to call from several threads."""

    def __init__(
        self,
        stats: EngineStats,
        *,
        load: Callable[[], EngineLoad],
        num_cached_blocks: Callable[[], int],
        block_size: int,
        labels: Mapping[str, str],
    ) -> None:
        super().__init__(labels)
        self._stats = stats
        self._load = load
        self._num_cached_blocks = num_cached_blocks
        self._block_size = block_size
        self._lock = threading.Lock()  # observations can be taken once, and scrapes may overlap
        self._histograms = {
            "weft_ttft_seconds": _Histogram("From a request's arrival at the engine to its first token.", stats.ttft_s),
            "weft_itl_seconds": _Histogram("Gaps between a request's tokens.", stats.itl_s),
            "weft_queue_seconds": _Histogram("From a request's arrival to its first step.", stats.queue_s),
            "weft_e2e_seconds": _Histogram("From a request's arrival at the engine to its end.", stats.e2e_s),
            "weft_step_seconds": _Histogram("From the submission of a step to its output.", stats.step_s),
            "weft_step_sequences": _Histogram("Sequences in a step.", stats.step_sequences, _BUCKETS_SEQUENCES),
            "weft_step_tokens": _Histogram("Tokens in a step, all sequences.", stats.step_tokens, _BUCKETS_TOKENS),
        }

    def take_observations(self) -> None:
        """Sort new observations into their buckets. Call it now and then: the engine keeps a bounded number of them."""
        with self._lock:
            for histogram in self._histograms.values():
                histogram.take()

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        self.take_observations()
        return [*self._gauges(), *self._counters(), *self._histogram_families()]

    def _gauges(self) -> list[Metric]:
        load = self._load()
        used = 1 - load.num_free_blocks / load.num_blocks
        return [
            self._gauge("weft_requests_running", "Requests in the running batch.", load.num_running),
            self._gauge("weft_requests_waiting", "Requests in the engine's queue.", load.num_waiting),
            self._gauge("weft_pending_tokens", "Tokens not yet computed.", load.num_pending_tokens),
            self._gauge("weft_kv_usage_ratio", "Blocks in use by requests, of all; cached ones count as free.", used),
            self._gauge("weft_kv_blocks", "Blocks in the pool.", load.num_blocks),
            self._gauge("weft_kv_cached_blocks", "Blocks that a prefix can be found in.", self._num_cached_blocks()),
            self._gauge("weft_kv_block_size_tokens", "Tokens in a block.", self._block_size),
            self._gauge("weft_kv_host_blocks", "Blocks that the host tier can hold.", load.num_host_blocks),
            self._gauge("weft_kv_host_used_blocks", "Blocks that the host tier holds.", load.num_used_host_blocks),
        ]

    def _counters(self) -> list[Metric]:
        stats = self._stats
        finished = self._counters_by("weft_requests_finished", "Requests that ended well, by how.", "reason")
        for reason in FinishReason:  # also those not seen yet: `rate` misses what a series begins with
            finished.add_metric((*self._values, reason.value), stats.num_finished[reason])
        cached = self._counters_by("weft_cached_tokens", "Prompt tokens found in the prefix cache, by where.", "source")
        cached.add_metric((*self._values, "device"), stats.num_cached_tokens - stats.num_host_tokens)
        cached.add_metric((*self._values, "host"), stats.num_host_tokens)
        return [
            finished,
            cached,
            self._counter("weft_requests_failed", "Requests that failed while they ran.", stats.num_failed),
            self._counter("weft_requests_refused", "Requests that were never accepted.", stats.num_refused),
            self._counter("weft_prompt_tokens", "Prompt tokens of accepted requests.", stats.num_prompt_tokens),
            self._counter("weft_generation_tokens", "Tokens sampled and accepted.", stats.num_generation_tokens),
            self._counter("weft_computed_tokens", "Tokens that went through the model.", stats.num_computed_tokens),
            self._counter(
                "weft_recomputed_tokens", "Tokens computed again after a preemption.", stats.num_recomputed_tokens
            ),
            self._counter("weft_preemptions", "Times a running request gave up its blocks.", stats.num_preemptions),
            self._counter("weft_kv_saved_blocks", "Blocks copied to the host tier.", stats.num_saved_blocks),
            self._counter("weft_kv_loaded_blocks", "Blocks copied back from it.", stats.num_loaded_blocks),
            self._counter("weft_steps", "Steps of the engine.", stats.num_steps),
            self._counter("weft_busy_seconds", "Time with a step in flight.", stats.busy_s),
        ]

    def _histogram_families(self) -> list[Metric]:
        with self._lock:
            return [histogram.family(name, self._names, self._values) for name, histogram in self._histograms.items()]


class _Histogram:
    """Observations of one kind, sorted into buckets."""

    def __init__(self, text: str, observations: Observations, bounds: Sequence[float] = BUCKETS_S) -> None:
        self._text = text
        self._observations = observations
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def take(self) -> None:
        for value in self._observations.take():
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def family(self, name: str, label_names: tuple[str, ...], label_values: tuple[str, ...]) -> Metric:
        buckets = zip((*map(str, self._bounds), "+Inf"), accumulate(self._counts), strict=True)
        family = HistogramMetricFamily(name, self._text, labels=label_names)
        family.add_metric(label_values, list(buckets), self._sum)
        return family
