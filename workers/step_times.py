"""When a rank is within a step, which another thread may ask."""

import time

_REST_S = 0.02
"""Steps under backlog follow each other sooner."""


class StepTimes:
    """Begins and ends of this rank's steps, of which one may begin before the last has ended. One thread writes."""

    def __init__(self) -> None:
        self._num_within = 0
        self._last_end_s = 0.0

    def begin(self) -> float:
        """Note that a step begins; return when, in seconds of time.perf_counter()."""
        self._num_within += 1
        return time.perf_counter()

    def end(self, begin_s: float) -> float:
        """Note that it has ended; return the seconds that it took, without those that it shares with the one before."""
        end_s = time.perf_counter()
        took_s = end_s - max(begin_s, self._last_end_s)
        self._last_end_s = end_s
        self._num_within -= 1
        return took_s

    def is_resting(self) -> bool:
        """Return whether no step runs, and none has ended a moment ago."""
        return self._num_within == 0 and time.perf_counter() - self._last_end_s > _REST_S
