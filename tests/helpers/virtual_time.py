"""An event loop whose clock jumps to the next timer when nothing is left to do: hours pass at once, always alike."""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
    """Waits by moving the clock."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing will ever happen any more: a wait has no end")
        self.now_s += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what was meant for threads in itself, a little later; `rng` says when."""

    def __init__(self, rng: random.Random) -> None:
        self._clock = _JumpingSelector()
        super().__init__(self._clock)
        self._rng = rng

    def time(self) -> float:
        return self._clock.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:  # type: ignore[override]
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.choice((0.0, 0.0, 0.01, 0.5)), run)
        return future


def run_in_virtual_time(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], rng: random.Random) -> T:
    """Run a coroutine function of the loop to its end."""
    loop = VirtualLoop(rng)
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(main(loop))
