"""The histogram of gaps between tokens. Tokens that come together have equal gaps, which are counted at once.

That of prometheus_client counts each by itself, which takes a tenth of the CPU of a router that merges all it can.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from weft.buckets import BUCKETS_S


class GapHistogram(Collector):
    """Gaps by model. Counted on one thread and read on another: what is read is a moment's, of each model by itself."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._models: dict[str, Gaps] = {}

    def of(self, model: str) -> "Gaps":
        """Return the gaps of a model; its series begins here."""
        return self._models.setdefault(model, Gaps())

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return the one family that there is."""
        family = HistogramMetricFamily(self._name, self._text, labels=("model",))
        for model, gaps in list(self._models.items()):
            buckets = zip((*map(str, BUCKETS_S), "+Inf"), accumulate(gaps.counts), strict=True)
            family.add_metric((model,), list(buckets), gaps.sum_s)
        return (family,)


class Gaps:
    """Those of one model."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        """Gaps up to each bound and above the one before, then those above all."""
        self.sum_s = 0.0

    def add(self, gap_s: float, times: int) -> None:
        """Count a gap so many times."""
        self.counts[bisect_left(BUCKETS_S, gap_s)] += times
        self.sum_s += gap_s * times
