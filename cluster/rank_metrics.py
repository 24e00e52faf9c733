"""What one rank counts, as Prometheus reads it. Imports no torch.

A rank's metrics come from a listener of its own, so that one that hangs still tells which step it is at.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.stats import RankStats


class RankCollector(Collector):
    """Turns a rank's statistics into metric families."""

    def __init__(self, stats: RankStats, *, loaded_ratio: Callable[[], float], labels: Mapping[str, str]) -> None:
        """Args: `loaded_ratio` tells how much of the rank's weights is loaded, 0 to 1."""
        self._stats = stats
        self._loaded_ratio = loaded_ratio
        self._names = tuple(labels)
        self._values = tuple(labels.values())

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        loaded = GaugeMetricFamily("weft_rank_loaded_ratio", "Part of the weights that is loaded.", labels=self._names)
        loaded.add_metric(self._values, self._loaded_ratio())
        steps = self._counter("weft_rank_steps", "Steps that the rank has done its part of.")
        steps.add_metric(self._values, self._stats.num_steps)
        busy = self._counter("weft_rank_busy_seconds", "Time in them, waiting for other ranks included.")
        busy.add_metric(self._values, self._stats.busy_s)
        model_busy = self._counter("weft_rank_model_busy_seconds", "Time in which the rank's model computes.")
        model_busy.add_metric(self._values, self._stats.model_busy_s)
        model_idle = self._counter(
            "weft_rank_model_idle_seconds", "Time between its computations in which the scheduler had work all along."
        )
        model_idle.add_metric(self._values, self._stats.model_idle_s)
        model_read = self._counter(
            "weft_rank_model_read_bytes",
            "The least that the model had to read in its busy time: weights, keys and values.",
        )
        model_read.add_metric(self._values, self._stats.model_read_bytes)
        model_flops = self._counter(
            "weft_rank_model_flops", "The operations that the model had to do in its busy time."
        )
        model_flops.add_metric(self._values, self._stats.model_flops)
        counters = (steps, busy, model_busy, model_idle, model_read, model_flops)
        return (loaded, *counters, *self._device(), *self._setup(), *self._collectives())

    def _device(self) -> Iterable[Metric]:
        if (peak_memory_bytes := self._stats.peak_memory_bytes) is not None:
            peak = GaugeMetricFamily(
                "weft_rank_peak_memory_bytes",
                "The most that the rank has held since its start: resident on a CPU, allocated on a GPU.",
                labels=self._names,
            )
            peak.add_metric(self._values, peak_memory_bytes())
            yield peak
        if self._stats.energy_j is not None and (energy_j := self._stats.energy_j()) is not None:
            energy = self._counter("weft_rank_energy_joules", "Of the rank's GPU since its driver was loaded.")
            energy.add_metric(self._values, energy_j)
            yield energy

    def _setup(self) -> Iterable[Metric]:
        if info := self._stats.info:
            described = GaugeMetricFamily(
                "weft_rank_info", "What the rank computes with; always 1.", labels=(*self._names, *info)
            )
            described.add_metric((*self._values, *info.values()), 1)
            yield described
        recorded = GaugeMetricFamily(
            "weft_rank_recorded_steps", "Sizes of steps that were recorded as CUDA graphs.", labels=self._names
        )
        recorded.add_metric(self._values, self._stats.num_recorded_steps)
        yield recorded
        took = GaugeMetricFamily("weft_rank_recording_seconds", "How long that took.", labels=self._names)
        took.add_metric(self._values, self._stats.recording_s)
        yield took

    def _collectives(self) -> Iterable[Metric]:
        calls = self._counter("weft_rank_collectives", "Collectives and sends, by axis and kind.", "axis", "kind")
        wait = self._counter("weft_rank_collective_seconds", "Time that the rank's host spent in them.", "axis")
        for name, axis in self._stats.axes.items():
            wait.add_metric((*self._values, name), axis.wait_s)
            for kind, number in dict(axis.counts).items():
                calls.add_metric((*self._values, name, kind), number)
        return (calls, wait)

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, text, labels=(*self._names, *labels))
