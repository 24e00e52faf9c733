"""Notices that the engine's thread does not come out of a turn. What follows from that is async_engine.py's."""

import asyncio
from collections.abc import Callable

from workers.errors import GroupFailedError

NUM_LOOKS = 10
"""Looks within the longest turn: they are counted, not time, for the whole process may have stood still meanwhile."""


class TurnWatch:
    """Each turn is a `with` block over it, in the engine's thread; all else belongs to the event loop."""

    def __init__(self, longest_turn_s: float | None) -> None:
        """`longest_turn_s`: a turn that lasts longer hangs; None: nobody looks."""
        self.is_hung = False
        self._longest_turn_s = longest_turn_s
        self._num_marks = 0  # odd amid a turn
        self._num_seen_marks = 0
        self._num_looks = 0  # that saw the same turn, after the first
        self._looking: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._num_marks += 1

    def __exit__(self, *_: object) -> None:
        self._num_marks += 1

    def start(self, on_hang: Callable[[GroupFailedError], None]) -> None:
        """Look from now on; when a turn hangs, say so and look no more."""
        if self._longest_turn_s is not None:
            self._looking = asyncio.create_task(self._look_on(self._longest_turn_s, on_hang))

    def cancel(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking.cancel()

    def look(self) -> bool:
        """Whether the turn that is seen now has been for too many looks."""
        marks = self._num_marks
        self._num_looks = self._num_looks + 1 if marks == self._num_seen_marks and marks % 2 else 0
        self._num_seen_marks = marks
        return self._num_looks >= NUM_LOOKS

    async def _look_on(self, longest_turn_s: float, on_hang: Callable[[GroupFailedError], None]) -> None:
        while not self.is_hung:
            await asyncio.sleep(longest_turn_s / NUM_LOOKS)
            self.is_hung = self.look()
        limit = f"{longest_turn_s:g} s"
        on_hang(
            GroupFailedError(f"a step has not ended within {limit}; allowed: smaller steps, a larger step_timeout_s")
        )
