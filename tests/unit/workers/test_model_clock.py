"""What is counted of a device that comes to its marks late."""

from dataclasses import dataclass
from typing import Any, Self

import pytest

from workers.model_clock import ModelClock, StepCost
from workers.stats import RankStats


@dataclass
class LateMark:
    at_s: float
    device: "LateDevice"

    def seconds_since(self, earlier: Self) -> float | None:
        return self.at_s - earlier.at_s if self.device.reached_s >= self.at_s else None


@dataclass
class LateDevice:
    """Comes to the given times one after the other."""

    times_s: list[float]
    reached_s: float = 0.0

    def mark(self) -> LateMark:
        return LateMark(self.times_s.pop(0), self)


def make_clock(*times_s: float) -> tuple[ModelClock, LateDevice, RankStats]:
    device, stats = LateDevice(list(times_s)), RankStats()
    unchecked: Any = device  # of a device only the marks are asked for
    return ModelClock(unchecked, stats), device, stats


def call(clock: ModelClock, *, follows: bool, read_bytes: float = 0.0, flops: float = 0.0) -> None:
    clock.begin()
    clock.end(follows=follows, cost=StepCost(read_bytes, flops))


def test_time_between_calls_is_idle_only_where_there_was_work() -> None:
    clock, device, stats = make_clock(1, 3, 3.5, 5, 25, 26)
    device.reached_s = 100
    call(clock, follows=False)
    call(clock, follows=True)
    call(clock, follows=False)
    assert (stats.model_busy_s, stats.model_idle_s) == pytest.approx((4.5, 0.5))


def test_calls_that_the_device_has_not_come_to_count_later() -> None:
    clock, device, stats = make_clock(1, 3, 3.5, 5, 6, 7)
    call(clock, follows=False)
    assert (stats.model_busy_s, stats.model_idle_s) == (0, 0)
    device.reached_s = 4
    call(clock, follows=True)
    assert (stats.model_busy_s, stats.model_idle_s) == (2, 0)
    device.reached_s = 7
    call(clock, follows=True)
    assert (stats.model_busy_s, stats.model_idle_s) == (4.5, 1.5)


def test_what_a_call_reads_and_computes_counts_with_its_time() -> None:
    clock, device, stats = make_clock(1, 3, 4, 5)
    call(clock, follows=False, read_bytes=100, flops=300)
    assert (stats.model_read_bytes, stats.model_flops) == (0, 0)
    device.reached_s = 3
    call(clock, follows=True, read_bytes=7, flops=9)
    assert (stats.model_busy_s, stats.model_read_bytes, stats.model_flops) == (2, 100, 300)
