"""The autoscaler in virtual time: delays, bounds, reasons, zero, and a day of a real service."""

import gzip
import json
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaler import Autoscaler, AutoscalerConfig, Decision, Observation
from cluster.errors import ClusterConfigError
from cluster.scaling import LOOK_S

TRACE = Path(__file__).parents[4] / "shared" / "traces" / "servegen_m_small_clients.jsonl.gz"
CONFIG = AutoscalerConfig(target_requests=10, window_s=10, idle_s=60)


def look(
    time_s: float, *, ready: int = 1, running: int = 0, waiting: int = 0, kv: float = 0.0, on_time: str = "0/0"
) -> Observation:
    num_on_time, num_finished = (int(part) for part in on_time.split("/"))
    return Observation(
        time_s=time_s,
        num_ready=ready,
        num_running=running,
        num_waiting=waiting,
        kv_usage=kv,
        num_finished=num_finished,
        num_on_time=num_on_time,
    )


def decide(
    observations: list[Observation],
    wanted: int,
    config: AutoscalerConfig = CONFIG,
    *,
    least: int = 1,
    most: int = 8,
) -> Decision:
    autoscaler = Autoscaler(config, min_replicas=least, max_replicas=most)
    *_, decision = (autoscaler.decide(each, wanted) for each in observations)
    return decision


def test_load_scales_up_after_the_delay_and_says_why() -> None:
    busy = [look(time_s, running=20, waiting=5) for time_s in range(16)]
    assert decide(busy[:15], 1).replicas == 1
    assert decide(busy, 1) == Decision(replicas=3, reason="25.0 requests at 10 a replica")


def test_a_burst_shorter_than_the_delay_moves_nothing() -> None:
    burst = [look(time_s, running=50 if 20 <= time_s < 25 else 5) for time_s in range(40)]
    for stop in range(1, 41):
        assert decide(burst[:stop], 1).replicas == 1


def test_a_lull_shorter_than_the_delay_moves_nothing_and_a_longer_one_does() -> None:
    lull = [look(time_s, ready=3, running=28 if time_s < 50 else 2) for time_s in range(400)]
    assert decide(lull[:340], 3).replicas == 3
    assert decide(lull, 3).replicas == 1


def test_nothing_shrinks_before_the_observations_reach_back_far_enough() -> None:
    assert decide([look(time_s, ready=3) for time_s in range(200)], 3).replicas == 3


def test_what_is_kept_does_not_grow_with_a_delay() -> None:
    day = replace(CONFIG, downscale_delay_s=86_400, upscale_delay_s=86_400)
    autoscaler, rng = Autoscaler(day, min_replicas=1, max_replicas=8), random.Random(0)
    for time_s in range(0, 40_000, 10):
        assert autoscaler.decide(look(time_s, ready=3, running=rng.randint(0, 90)), 3).replicas == 3
        assert max(len(autoscaler._most._asked), len(autoscaler._least._asked), len(autoscaler._window)) <= 8


def test_the_most_of_a_delay_is_forgotten_with_the_delay() -> None:
    loads = [*[25] * 10, *[15] * 30, *[5] * 200]
    autoscaler = Autoscaler(replace(CONFIG, downscale_delay_s=100, window_s=1), min_replicas=1, max_replicas=8)
    wanted, changes = 3, []
    for time_s, load in enumerate(loads):
        decision = autoscaler.decide(look(time_s, ready=3, running=load), wanted)
        if decision.replicas != wanted:
            changes.append((time_s, decision.replicas))
            wanted = decision.replicas
    assert changes == [(110, 2), (140, 1)]


def test_full_kv_blocks_scale_up() -> None:
    full = [look(time_s, ready=2, running=4, kv=0.95) for time_s in range(30)]
    assert decide(full, 2) == Decision(replicas=3, reason="95% of the KV blocks in use")


def test_load_that_is_just_the_target_of_so_many_replicas_asks_for_no_more() -> None:
    """21 / 0.7 is 30.000000000000004, and 10 * (0.9 - 0.6) is 3.0000000000000004."""
    just = [look(time_s, running=21) for time_s in range(30)]
    assert decide(just, 1, replace(CONFIG, target_requests=0.7), most=64).replicas == 30
    late = [look(time_s, ready=10, running=4, on_time="6/10") for time_s in range(30)]
    assert decide(late, 10, replace(CONFIG, target_goodput=0.9), most=64).replicas == 13


def test_missed_latency_targets_scale_up_by_what_is_missed() -> None:
    late = [look(time_s, ready=4, running=4, on_time="3/6") for time_s in range(30)]
    assert decide(late, 4) == Decision(replicas=6, reason="50% of the requests on time")
    assert decide(late, 4, replace(CONFIG, target_goodput=0.0)).replicas == 4


def test_requests_that_end_while_no_replica_is_ready_are_no_rate_of_one() -> None:
    """A replica that drains is not READY, and serves on."""
    drains = [look(time_s, ready=0, waiting=25, on_time="0/6") for time_s in range(30)]
    assert decide(drains, 1) == Decision(replicas=3, reason="25.0 requests at 10 a replica")


def test_requests_that_are_on_time_let_a_part_of_the_replicas_go_at_a_time() -> None:
    """Else the first look that no longer counts those that were late would let all go that latency has brought."""
    served = [look(time_s, ready=8, running=2, on_time="6/6") for time_s in range(400)]
    assert decide(served, 8) == Decision(replicas=6, reason="100% of the requests on time")
    assert decide([replace(each, num_ready=2) for each in served], 2).replicas == 1
    assert decide(served, 8, replace(CONFIG, target_goodput=0.0)).replicas == 1
    assert decide([replace(each, num_finished=0) for each in served], 8).replicas == 1


def test_even_load_that_only_latency_speaks_of_settles() -> None:
    """Twenty requests that four replicas serve in time and three do not."""
    config = AutoscalerConfig(window_s=10, upscale_delay_s=6, downscale_delay_s=60, idle_s=60)
    autoscaler, wanted, numbers = Autoscaler(config, min_replicas=1, max_replicas=8), 1, list[int]()
    for time_s in range(0, 5 * 3600, 2):
        seen = look(time_s, ready=wanted, running=20, on_time="4/4" if wanted >= 4 else "1/4")
        wanted = autoscaler.decide(seen, wanted).replicas
        numbers.append(wanted)
    assert set(numbers[200:7000]) == {4}
    assert 3 in numbers[7000:], "it is tried again, for requests may cost less by now"


def numbers_under(rate: Callable[[int], float], *, late_s: range = range(0)) -> list[int]:
    """Return the number of replicas at every look, where each ends three requests a second and starts in half a minute.

    Args:
        rate: requests a second, which come at random.
        late_s: when all are late, however few there are.
    """
    autoscaler, rng = Autoscaler(AutoscalerConfig(), min_replicas=1, max_replicas=16), random.Random(0)
    wanted, starting, waiting, numbers = 1, deque[int](), 0, list[int]()
    for time_s in range(0, 3 * 3600, 2):
        while starting and starting[0] <= time_s:
            starting.popleft()
        ready = wanted - len(starting)
        waiting += sum(rng.random() < rate(time_s) / 15 for _ in range(30))
        ended = min(waiting, 6 * ready)
        waiting -= ended
        on_time = 0 if waiting > 3 * ready or time_s in late_s else ended
        decision = autoscaler.decide(look(time_s, ready=ready, waiting=waiting, on_time=f"{on_time}/{ended}"), wanted)
        starting.extend([time_s + 30] * (decision.replicas - wanted))
        for _ in range(min(len(starting), wanted - decision.replicas)):
            starting.pop()
        wanted = decision.replicas
        numbers.append(wanted)
    return numbers


@pytest.mark.parametrize(("rate", "fewest"), [(5, 2), (8, 3), (10, 4)])
def test_even_load_of_few_replicas_is_not_tried_with_fewer_again_and_again(rate: int, fewest: int) -> None:
    numbers = numbers_under(lambda _: rate)[1800:]
    assert sum(before != after for before, after in pairwise(numbers)) <= 2
    assert set(numbers) <= {fewest, fewest + 1}


def test_replicas_go_when_fewer_requests_come_than_were_late() -> None:
    numbers = numbers_under(lambda time_s: 8 if time_s < 3600 else 1)
    assert numbers[1700] >= 3
    assert numbers[-1] == 1


def test_requests_that_were_late_for_another_reason_keep_few_replicas_more() -> None:
    """Sixteen are there in the end, and late as well; as many a second on each of four were so before."""
    numbers = numbers_under(lambda _: 8, late_s=range(3600, 3780))
    assert max(numbers) == 16
    assert numbers[-1] <= 5


def test_rate_that_was_late_is_forgotten_when_a_higher_one_is_on_time() -> None:
    config = AutoscalerConfig(window_s=10, upscale_delay_s=6, downscale_delay_s=60, target_requests=1)
    few_late = [look(time_s, running=1, on_time="0/4") for time_s in range(0, 40, 2)]
    busy = [look(time_s, ready=4, running=4, on_time="20/20") for time_s in range(40, 200, 2)]
    quiet = [look(time_s, ready=4, on_time="16/16") for time_s in range(200, 300, 2)]
    assert decide([*few_late, *quiet], 4, config).replicas == 4
    assert decide([*few_late, *busy, *quiet], 4, config).replicas == 3


def test_requests_that_are_here_ask_for_more_than_those_that_were_late() -> None:
    busy = [look(time_s, ready=2, running=70, on_time="3/6") for time_s in range(30)]
    assert decide(busy, 2) == Decision(replicas=7, reason="70.0 requests at 10 a replica")


def test_requests_of_an_older_number_of_replicas_do_not_count() -> None:
    """Else the requests that were late before a replica came would ask for one more, and one more."""
    late = [look(time_s, ready=4, running=4, on_time="0/6") for time_s in range(30)]
    grown = [look(30 + time_s, ready=8, running=4, on_time="6/6") for time_s in range(4)]
    config = replace(CONFIG, upscale_delay_s=0.0)
    assert decide(late, 4, config, most=64).replicas == 8
    assert decide(late + grown, 8, config, most=64).replicas == 8


def test_blocks_that_an_older_number_of_replicas_used_do_not_count() -> None:
    """Else a replica that has come to help would ask for the next one."""
    full = [look(time_s, ready=1, running=4, kv=1.0) for time_s in range(30)]
    grown = [look(30 + time_s, ready=2, running=4, kv=0.7) for time_s in range(4)]
    config = replace(CONFIG, upscale_delay_s=0.0)
    assert decide(full, 1, config).replicas == 2
    assert decide(full + grown, 2, config).replicas == 2


def test_few_requests_prove_nothing() -> None:
    assert decide([look(time_s, on_time="0/1") for time_s in range(16)], 1).replicas == 1


def test_idle_model_goes_to_no_replica_and_back_with_the_first_request() -> None:
    config = replace(CONFIG, downscale_delay_s=20)
    quiet = [look(0, running=1), *[look(time_s) for time_s in range(1, 62)]]
    assert decide(quiet[:60], 1, config, least=0).replicas == 1
    assert decide(quiet, 1, config, least=0) == Decision(replicas=0, reason="no request for 60 s")
    assert decide([*quiet, look(62, ready=0)], 0, config, least=0).replicas == 0
    held = decide([*quiet, look(62, ready=0, waiting=1)], 0, config, least=0)
    assert held == Decision(replicas=1, reason="1 requests wait for the first replica")
    assert decide(quiet, 1, config, least=1).replicas == 1
    assert decide(quiet[1:50], 1, config, least=0).replicas == 1, "what was before is not known"


def test_number_out_of_bounds_is_brought_back_at_once() -> None:
    assert decide([look(0)], 20).replicas == 8
    assert decide([look(0)], 0).replicas == 1
    assert decide([look(time_s, running=10_000) for time_s in range(40)], 1).replicas == 8


def test_a_window_has_its_latest_observation_however_short_it_is() -> None:
    autoscaler = Autoscaler(replace(CONFIG, window_s=1e-11), min_replicas=1, max_replicas=8)
    assert autoscaler.decide(look(1e7, running=0), 1).replicas == 1  # where a clock has no such small steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_kv_usage": 0.0}, "target_kv_usage is 0.0; allowed: 1e-06 to 1"),
        ({"target_requests": 1e-320}, "target_requests is 1e-320; allowed: at least 1e-06"),
        ({"target_goodput": 1.5}, "target_goodput is 1.5; allowed: 0 to 1"),
        ({"upscale_delay_s": -1.0}, "upscale_delay_s is -1.0; allowed: at least 0"),
        ({"idle_s": math.inf}, "idle_s is inf; allowed: a finite number"),
        ({"target_ttft_s": 0.0}, "target_ttft_s is 0.0; allowed: more than 0"),
        ({"target_requests": math.nan}, "target_requests is nan"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        AutoscalerConfig(**changes)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    loads=st.lists(st.integers(0, 200), min_size=1, max_size=60),
    wanted=st.integers(0, 20),
    min_replicas=st.integers(0, 3),
)
def test_any_load_keeps_the_bounds_and_a_steady_one_settles(loads: list[int], wanted: int, min_replicas: int) -> None:
    config = replace(CONFIG, downscale_delay_s=30, idle_s=40)
    autoscaler = Autoscaler(config, min_replicas=min_replicas, max_replicas=8)
    changes = []
    for time_s, load in enumerate(loads + [loads[-1]] * 120):
        decision = autoscaler.decide(look(time_s, ready=wanted, running=load), wanted)
        assert min_replicas <= decision.replicas <= 8
        assert (decision.replicas != wanted) == bool(decision.reason)
        if decision.replicas != wanted:
            changes.append(time_s)
            wanted = decision.replicas
    steady = min(max(math.ceil(loads[-1] / 10), min_replicas), 8)
    assert wanted == steady
    assert not changes or changes[-1] < len(loads) + 110


@pytest.mark.skipif(not TRACE.exists(), reason="../shared/traces is absent")
def test_a_day_of_a_real_service_is_served_with_far_fewer_replica_hours() -> None:
    """Replicas take a minute to start; hardly a request waits, at part of the cost of always having enough."""
    rates = day_of_arrivals()
    peak, service_s, capacity = max(rates), 6.0, 10
    scale = 40 * capacity / service_s / peak  # the busiest moment needs some 40 replicas
    config = AutoscalerConfig(target_requests=0.7 * capacity)
    autoscaler, step_s = Autoscaler(config, min_replicas=2, max_replicas=64), 10
    wanted, starting, ready, waiting = 30, deque[int](), 30, 0.0
    replica_s = late = total = 0.0
    num_changes = 0
    for time_s in range(0, 24 * 3600, step_s):
        while starting and starting[0] <= time_s:
            starting.popleft()
            ready += 1
        arriving = rates[time_s // 600] * scale * step_s
        served = min(waiting + arriving, ready * capacity * step_s / service_s)
        waiting += arriving - served
        total += arriving
        late += min(arriving, waiting)
        running = served * service_s / step_s
        usage = running / capacity / ready
        seen = look(time_s, ready=ready, running=round(running), waiting=round(waiting), kv=usage)
        decision = autoscaler.decide(seen, wanted)
        num_changes += decision.replicas != wanted
        starting.extend([time_s + 60] * (decision.replicas - wanted))
        for _ in range(wanted - decision.replicas):
            if starting:
                starting.pop()
            else:
                ready -= 1
        wanted = decision.replicas
        replica_s += (ready + len(starting)) * step_s
    most = max(math.ceil(rate * scale * service_s / (0.7 * capacity)) for rate in rates)
    assert late < 0.01 * total
    assert replica_s < 0.75 * most * 24 * 3600
    assert num_changes < 24 * 12


def day_of_arrivals() -> list[float]:
    """Requests per second of all clients together, for each of the 144 windows of ten minutes."""
    rates = [0.0] * 144
    with gzip.open(TRACE, "rt") as lines:
        for line in lines:
            for start_s, rate, *_ in json.loads(line)["windows"]:
                if start_s < 24 * 3600:
                    rates[int(start_s) // 600] += rate
    return rates


def test_a_model_whose_requests_end_between_looks_is_not_idle() -> None:
    served = [look(time_s, on_time="1/1") for time_s in range(0, 200, 2)]
    assert decide(served, 1, least=0).replicas == 1
    quiet = [look(time_s) for time_s in range(200, 262, 2)]
    assert decide(served + quiet, 1, least=0) == Decision(replicas=0, reason="no request for 60 s")


def test_the_last_replica_goes_alone() -> None:
    config = replace(CONFIG, downscale_delay_s=100, idle_s=10)
    assert decide([look(time_s, ready=3) for time_s in range(60)], 3, config, least=0).replicas == 3


def test_blocks_that_are_used_as_they_should_be_ask_for_no_more() -> None:
    full = [look(time_s, ready=3, running=4, kv=0.7) for time_s in range(30)]
    assert decide(full, 3, replace(CONFIG, target_kv_usage=0.7)).replicas == 3


@pytest.mark.parametrize("window_s", [0.5, 10.0])
@pytest.mark.parametrize("gap_s", [1.7, LOOK_S + 0.004, 2 * LOOK_S + 0.004])
def test_looks_at_odd_times_reach_back_far_enough(gap_s: float, window_s: float) -> None:
    config = replace(CONFIG, downscale_delay_s=20, idle_s=900, window_s=window_s)
    assert decide([look(gap_s * i, ready=1) for i in range(600)], 1, config, least=0, most=2).replicas == 0
