"""What one rank counts, as Prometheus reads it. Imports no torch.

A rank's metrics come from a listener of its own, so that one that hangs still tells which step it is at.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.defaults import RANK_METRICS_PORTS
from cluster.process_collector import ProcessCollector
from router.errors import RouterConfigError
from router.metrics_listener import MetricsListener
from workers.stats import RankStats


def listen_for_metrics(host: str) -> MetricsListener:
    """Return a listener at the first free one of the ranks' ports, or where all are taken at any free port."""
    for port in RANK_METRICS_PORTS:
        with suppress(RouterConfigError):
            return MetricsListener(host, port)
    return MetricsListener(host)


class RankCollector(ProcessCollector):
    """Turns a rank's statistics into metric families."""

    def __init__(self, stats: RankStats, *, loaded_ratio: Callable[[], float], labels: Mapping[str, str]) -> None:
        """Args: `loaded_ratio` tells how much of the rank's weights is loaded, 0 to 1."""
        super().__init__(labels)
        self._stats = stats
        self._loaded_ratio = loaded_ratio

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        return (*self._steps(), *self._device(), *self._setup(), *self._collectives())

    def _steps(self) -> Iterable[Metric]:
        stats = self._stats
        return (
            self._gauge("weft_rank_loaded_ratio", "Part of the weights that is loaded.", self._loaded_ratio()),
            self._counter("weft_rank_steps", "Steps that the rank has done its part of.", stats.num_steps),
            self._counter("weft_rank_busy_seconds", "Time in them, waiting for other ranks included.", stats.busy_s),
            self._counter(
                "weft_rank_model_busy_seconds", "Time in which the rank's model computes.", stats.model_busy_s
            ),
            self._counter(
                "weft_rank_model_idle_seconds",
                "Time between its computations in which the scheduler had work all along.",
                stats.model_idle_s,
            ),
            self._counter(
                "weft_rank_model_read_bytes",
                "The least that the model had to read in its busy time: weights, keys and values.",
                stats.model_read_bytes,
            ),
            self._counter(
                "weft_rank_model_flops",
                "The operations that the model had to do in its busy time.",
                stats.model_flops,
            ),
        )

    def _device(self) -> Iterable[Metric]:
        if (peak_memory_bytes := self._stats.peak_memory_bytes) is not None:
            yield self._gauge(
                "weft_rank_peak_memory_bytes",
                "The most that the rank has held since its start: resident on a CPU, allocated on a GPU.",
                peak_memory_bytes(),
            )
        if self._stats.energy_j is not None and (energy_j := self._stats.energy_j()) is not None:
            yield self._counter("weft_rank_energy_joules", "Of the rank's GPU since its driver was loaded.", energy_j)

    def _setup(self) -> Iterable[Metric]:
        stats = self._stats
        if info := stats.info:
            described = GaugeMetricFamily(
                "weft_rank_info", "What the rank computes with; always 1.", labels=(*self._names, *info)
            )
            described.add_metric((*self._values, *info.values()), 1)
            yield described
        yield self._gauge(
            "weft_rank_recorded_steps", "Sizes of steps that were recorded as CUDA graphs.", stats.num_recorded_steps
        )
        yield self._gauge("weft_rank_recording_seconds", "How long that took.", stats.recording_s)

    def _collectives(self) -> Iterable[Metric]:
        calls = self._counters_by("weft_rank_collectives", "Collectives and sends, by axis and kind.", "axis", "kind")
        wait = self._counters_by("weft_rank_collective_seconds", "Time that the rank's host spent in them.", "axis")
        for name, axis in self._stats.axes.items():
            wait.add_metric((*self._values, name), axis.wait_s)
            for kind, number in dict(axis.counts).items():
                calls.add_metric((*self._values, name, kind), number)
        return (calls, wait)
