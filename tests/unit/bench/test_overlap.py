"""The stand-in for a GPU gives the tokens that it would give without planning ahead, and only when it is done."""

from dataclasses import replace

import pytest
from helpers.engines import request, run

from bench.queued_device import QueuedDevice, build_queued_engine
from cluster.models import DEFAULT_MODEL, resolve_model
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.stats import RankStats


def run_on(device: QueuedDevice, config: EngineConfig) -> dict[str, list[int]]:
    engine = build_queued_engine(config, device, RankStats())
    requests = [request(str(i), range(i + 5, 2 * i + 9), max_tokens=8 + i, ignore_eos=True) for i in range(12)]
    outcomes = run(engine, requests)
    engine.close()
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


def test_planned_ahead_the_stand_in_feeds_the_same_tokens() -> None:
    config = EngineConfig(
        model=str(resolve_model(DEFAULT_MODEL)),
        cache=CacheConfig(num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=5, async_scheduling=False),
    )
    expected = run_on(QueuedDevice(0, 0), config)
    ahead = replace(config, scheduler=replace(config.scheduler, async_scheduling=None))
    assert run_on(QueuedDevice(0, 0), ahead) == expected
    assert len({tuple(token_ids) for token_ids in expected.values()}) > 6


def test_result_of_a_queued_step_is_not_there_before_the_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    slept: list[float] = []
    monkeypatch.setattr("bench.queued_device.time.perf_counter", lambda: now_s)
    monkeypatch.setattr("bench.queued_device.time.sleep", slept.append)
    device = QueuedDevice(2.0, 0.0)
    begin = device.mark()
    device.queue_step()
    device.queue_step()
    wait, end = device.start_copy([]), device.mark()
    assert end.seconds_since(begin) is None
    wait()
    assert slept == [4.0]
    now_s = 14.0
    assert end.seconds_since(begin) == 4.0
