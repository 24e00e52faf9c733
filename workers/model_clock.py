"""How long a rank's model computes, and reads what; how long it stands still while its scheduler has work."""

from collections import deque
from typing import NamedTuple

from parallel.device.base import Device, Mark
from workers.stats import RankStats


class StepCost(NamedTuple):
    """What the model has to do in the call of a step."""

    read_bytes: float
    flops: float


class _Call(NamedTuple):
    begin: Mark
    end: Mark
    previous_end: Mark | None
    """The end of the call before; None where the scheduler had no work in between."""
    cost: StepCost


class ModelClock:
    """Times the model's calls on the device, without waiting for it. One thread."""

    def __init__(self, device: Device, stats: RankStats) -> None:
        self._device = device
        self._stats = stats
        self._begin: Mark | None = None
        self._end: Mark | None = None
        self._calls: deque[_Call] = deque()  # that the device may not have come to yet

    def begin(self) -> None:
        """Mark where the model's call of a step begins on the device."""
        self._begin = self._device.mark()

    def end(self, *, follows: bool, cost: StepCost) -> None:
        """Mark where the call ends; `follows`: there was work all the time since the end of the call before."""
        assert self._begin is not None, "begun"
        end = self._device.mark()
        self._calls.append(_Call(self._begin, end, self._end if follows else None, cost))
        self._end = end
        self._settle()

    def _settle(self) -> None:
        """Count the calls that the device is done with."""
        while self._calls:
            begin, end, previous_end, cost = self._calls[0]
            busy_s = end.seconds_since(begin)
            if busy_s is None:
                return
            self._calls.popleft()
            self._stats.model_busy_s += busy_s
            self._stats.model_read_bytes += cost.read_bytes
            self._stats.model_flops += cost.flops
            if previous_end is not None:
                self._stats.model_idle_s += begin.seconds_since(previous_end) or 0.0
