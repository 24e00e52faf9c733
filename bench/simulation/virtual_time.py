"""Virtual time: what is to happen, in order. Events of one moment happen in the order in which they were asked for."""

import heapq
from collections.abc import Callable


class VirtualTime:
    """A clock that stands still while an event happens, and jumps to the next one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def clock(self) -> float:
        """Return the time, as `time.monotonic` does."""
        return self.now_s

    def at(self, time_s: float, event: Callable[[], None]) -> None:
        """Let something happen at a time, not before now."""
        heapq.heappush(self._events, (max(time_s, self.now_s), self._num_asked, event))
        self._num_asked += 1

    def after(self, delay_s: float, event: Callable[[], None]) -> None:
        """Let something happen in a while."""
        self.at(self.now_s + delay_s, event)

    def every(self, period_s: float, event: Callable[[], None]) -> None:
        """Let something happen after each period, for ever."""

        def happen() -> None:
            event()
            self.after(period_s, happen)

        self.after(period_s, happen)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let everything happen until it is over."""
        while not is_over():
            assert self._events, "nothing happens any more, and it is not over"
            self.now_s, _, event = heapq.heappop(self._events)
            event()
