"""When a rank rests between steps. How long steps take that overlap: test_recorded_steps.py."""

from types import SimpleNamespace

import pytest

from workers import step_times
from workers.step_times import StepTimes


def test_a_rank_rests_when_no_step_runs_and_none_has_ended_a_moment_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    times = StepTimes()
    assert times.is_resting()
    first_s, second_s = times.begin(), times.begin()
    clock.now_s = 200.0
    assert not times.is_resting()
    times.end(first_s)
    clock.now_s = 201.0
    assert not times.is_resting()
    times.end(second_s)
    assert not times.is_resting()
    clock.now_s = 201.01
    assert not times.is_resting()
    clock.now_s = 201.03
    assert times.is_resting()
