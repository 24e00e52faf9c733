"""Objects that hear how a benchmark gets on. These keep it to themselves; progress.py shows it."""

from bench.load.arrivals import Load
from bench.load.records import CallRecord
from bench.load.serve_values import Point


class ServeWatcher:
    """Hears how a serving benchmark gets on."""

    def prepare(self, what: str) -> None:
        """Something begins that comes before the loads, and takes a while."""

    def begin(self, load: Load | None, num_requests: int | None, duration_s: float | None = None) -> None:
        """A load of so many requests (None: nobody knows), sent for so long at most, begins; None: the warm-up."""

    def note(self, record: CallRecord) -> None:
        """A request has ended."""

    def end(self, point: Point) -> None:
        """A load has been measured, or what there is of it where it was interrupted."""


class OfflineWatcher:
    """Hears how an offline benchmark gets on."""

    def begin(self, what: str, total: float | None) -> None:
        """Something begins that takes a while."""

    def reach(self, done: float) -> None:
        """So much of the total is done."""
