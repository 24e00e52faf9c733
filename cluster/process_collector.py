"""What the metrics of the processes of a replica have in common: each sample has the labels of its process."""

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class ProcessCollector(Collector):
    """Makes the metric families of a process; what is in them is up to who derives from it."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._names = tuple(labels)
        self._values = tuple(labels.values())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = self._counters_by(name, text)
        family.add_metric(self._values, value)
        return family

    def _counters_by(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        """Return a family without samples, which have these labels too."""
        return CounterMetricFamily(name, text, labels=(*self._names, *labels))
