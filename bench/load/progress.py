"""Progress bars of benchmarks, while they run."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bench.load.arrivals import Load
from bench.load.records import CallRecord
from bench.load.report import load_name, print_point
from bench.load.serve_values import Point
from bench.load.watcher import OfflineWatcher, ServeWatcher


class _Bars:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # where it would leave an empty line
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _show(self, what: str, total: float | None) -> TaskID:
        if self._task is not None:
            self._progress.stop_task(self._task)
        self._task = self._progress.add_task(what, total=total, note="")
        return self._task


class ServeProgress(_Bars, ServeWatcher):
    """A bar for each load while it runs, and then its numbers."""

    def prepare(self, what: str) -> None:
        """See ServeWatcher."""
        self._show(what, None)

    def begin(self, load: Load | None, num_requests: int | None, duration_s: float | None = None) -> None:
        """See ServeWatcher."""
        end = "" if duration_s is None else f", for {duration_s:g} s"
        self._show("warm-up" if load is None else f"{load_name(load)}{end}", num_requests)
        self._num_failed = 0

    def note(self, record: CallRecord) -> None:
        """See ServeWatcher."""
        assert self._task is not None, "requests end after their load began"
        self._num_failed += record.error is not None
        self._progress.update(self._task, advance=1, note=f"{self._num_failed} failed" if self._num_failed else "")

    def end(self, point: Point) -> None:
        """See ServeWatcher."""
        print_point(self._console, point)


class OfflineProgress(_Bars, OfflineWatcher):
    """A bar for each thing that takes a while."""

    def begin(self, what: str, total: float | None) -> None:
        """See OfflineWatcher."""
        self._show(what, total)

    def reach(self, done: float) -> None:
        """See OfflineWatcher."""
        assert self._task is not None, "something began"
        self._progress.update(self._task, completed=done)
