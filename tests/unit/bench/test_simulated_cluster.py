"""A cluster in virtual time: nothing is lost, whatever fails, and the policies do what they are for."""

import dataclasses
import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode
from typer.testing import CliRunner

from bench.errors import BenchConfigError
from bench.load.calls import Call, Session, draw_ids
from bench.load.dataset_files import TraceLimits
from bench.load.statistics import Distribution
from bench.simulation.cluster import ClusterOutcome, ClusterSettings, SimulatedCluster
from bench.simulation.controller import Autoscaling, FleetSettings
from bench.simulation.replica import Frame, Output, ReplicaSettings, SimulatedReplica, token_at
from bench.simulation.router import SimulatedFlight
from bench.simulation.routing_policies import ClusterOptions, make_arrivals
from bench.simulation.step_cost import StepCost
from bench.simulation.virtual_time import VirtualTime
from cluster.autoscaler import AutoscalerConfig
from cluster.cli import app
from router.config import AdmissionConfig, FailoverConfig, PolicyName, RouterConfig
from router.prefix_index import ReplicaId
from workers.config import SchedulerConfig
from workers.request import Request, RequestId, SamplingParams

SMALL = ReplicaSettings(scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256), num_blocks=120)
EVEN = ReplicaSettings(cost=StepCost(step_s=0.5, token_s=0.0, context_token_s=0.0), network_s=0.125, num_blocks=8)
"""Every step takes half a second, every message an eighth."""
RULES = AutoscalerConfig(target_requests=4, window_s=4, upscale_delay_s=4, downscale_delay_s=20)


def conversations(num_sessions: int, *, rate: float, seed: int = 0) -> Iterator[Session]:
    """Sessions of one to three turns, after one of four system prompts of 20 blocks."""
    rng, at_s = random.Random(seed), 0.0
    prefixes = [draw_ids(rng, 320, 1000) for _ in range(4)]
    for _ in range(num_sessions):
        at_s += rng.expovariate(rate)
        prompt, calls = rng.choice(prefixes), []
        for _ in range(rng.randint(1, 3)):
            prompt += draw_ids(rng, rng.randint(1, 60), 1000)
            calls.append(Call(prompt=prompt, num_out=rng.randint(1, 60)))
        yield Session(calls=tuple(calls), at_s=at_s, think_s=0.5)


class Run(SimulatedCluster):
    """Keeps the requests that have ended."""

    def __init__(self, sessions: Iterator[Session], settings: ClusterSettings) -> None:
        self.flights: list[SimulatedFlight] = []
        super().__init__(sessions, settings, self.flights.append)


def cluster(
    sessions: Iterator[Session],
    policy: PolicyName = PolicyName.PREFIX_AFFINITY,
    *,
    replicas: int = 4,
    num_routers: int = 1,
    replica: ReplicaSettings = SMALL,
    admission: AdmissionConfig | None = None,
    failover: FailoverConfig | None = None,
    **fleet: object,
) -> Run:
    settings = ClusterSettings(
        fleet=dataclasses.replace(FleetSettings(replicas=replicas, start_s=5.0), **fleet),
        replica=replica,
        router=RouterConfig(
            control="simulated",
            policy=policy,
            admission=admission or AdmissionConfig(),
            failover=failover or FailoverConfig(),
        ),
        num_routers=num_routers,
    )
    return Run(sessions, settings)


def check_whole(simulated: Run, outcome: ClusterOutcome) -> None:
    """Every request ended once, with the tokens of an undisturbed run; nothing is held, and routers know each block."""
    assert sum(outcome.ends.values()) == len(simulated.flights)
    for flight in simulated.flights:
        num_out = flight.call.num_out if flight.outcome == "stop" else len(flight.generated)
        assert flight.generated == [token_at(flight.call.prompt, position) for position in range(num_out)]
    for replica in simulated.controller.ready:
        replica.scheduler.check_integrity()
        assert replica.pool.num_free == replica.pool.num_blocks
        num_resident = len(replica.pool.resident_hashes())
        assert {router.route.index.num_blocks(replica.replica_id) for router in simulated.routers} == {num_resident}
    for router in simulated.routers:
        assert (router.places.num_in_flight, router.places.num_queued, router.route.demand.num_held) == (0, 0, 0)
        assert [link.load.num_requests for link in router.route.links.values()] == [0] * len(router.route.links)


def test_numbers_of_a_small_cluster_by_hand() -> None:
    prompt = tuple(range(48))
    turns = Call(prompt=prompt[:32], num_out=3), Call(prompt=prompt, num_out=1)
    sessions = [
        Session(calls=turns, at_s=1.0, think_s=2.0),  # the first replica, 1.125 to 2.625; and 4.875 to 5.375
        Session(calls=(Call(prompt=prompt[:16], num_out=1),), at_s=1.75),  # the second one, 1.875 to 2.375
        Session(calls=(Call(prompt=prompt[32:], num_out=1),), at_s=1.8125),  # the first, when it is free: to 3.125
        Session(calls=(Call(prompt=prompt * 4, num_out=1),), at_s=2.5),  # too long for the second
    ]
    replica = dataclasses.replace(EVEN, scheduler=SchedulerConfig(max_num_seqs=1))

    outcome = cluster(iter(sessions), PolicyName.ROUND_ROBIN, replicas=2, replica=replica).run()

    assert outcome.ends == {"invalid_argument": 1, "stop": 4}
    assert (outcome.duration_s, outcome.output_rate) == (4.5, 6 / 4.5)
    assert (outcome.ttft_s, outcome.tpot_s) == (Distribution.of([0.75, 0.75, 1.4375, 0.75]), Distribution.of([0.5]))
    assert outcome.completion_s == Distribution.of([1.75, 0.75, 1.4375, 0.75])
    assert (outcome.on_time_share, outcome.hit_share) == (2 / 4, 32 / (32 + 16 + 16 + 48))
    assert outcome.busy_share == pytest.approx((2.5 + 0.5) / 5.5 / 2)
    assert outcome.busy_imbalance == pytest.approx(2.5 / 1.5)
    assert outcome.load_imbalance == pytest.approx((2 + 1 + 1) / (1.5 + 0.5 + 0.5)), "at 2 s, 3 s and 5 s"
    assert (outcome.replica_s, outcome.most_replicas, outcome.last_replicas) == (11.0, 2, 2)
    assert (outcome.num_moves, outcome.num_choices, outcome.num_steps) == (0, 5, 6)


def test_numbers_of_a_replica_that_dies_by_hand() -> None:
    """At 2 s, with its second token in flight; it is READY again at 5 s, and is not there to die at 2.5 s."""
    sessions = [
        Session(calls=(Call(prompt=(1,) * 32, num_out=4),), at_s=1.0),  # 1.125 to 2; and 5.125 to 6.625
        Session(calls=(Call(prompt=(2,) * 16, num_out=2),), at_s=9.0),  # 9.125 to 10.125
    ]
    failures = ((2.0, 0), (2.5, 0), (2.75, 1))  # and of the last there is none
    simulated = cluster(
        iter(sessions), PolicyName.ROUND_ROBIN, replicas=1, replica=EVEN, failures=failures, start_s=3.0
    )

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert (outcome.ends, outcome.num_moves, outcome.idle_failures) == ({"stop": 2}, 1, failures[1:])
    assert outcome.completion_s == Distribution.of([5.75, 1.25])
    assert outcome.ttft_s == Distribution.of([0.75, 0.75])
    assert outcome.tpot_s == Distribution.of([5 / 3, 0.5])
    assert outcome.busy_share == pytest.approx((0.875 + 2.5) / (2 + 5.25)), "however short one lived"
    assert (outcome.replica_s, outcome.most_replicas, outcome.num_steps) == (10.25, 1, 7)


@pytest.mark.parametrize(("step_s", "on_time_share"), [(0.125, 0.0), (0.0625, 1.0)])
def test_request_is_on_time_by_the_mean_time_of_its_tokens(step_s: float, on_time_share: float) -> None:
    """The target is 0.1 s."""
    replica = dataclasses.replace(EVEN, cost=StepCost(step_s=step_s, token_s=0.0, context_token_s=0.0))
    session = Session(calls=(Call(prompt=(1,) * 16, num_out=5),), at_s=1.0)
    assert cluster(iter([session]), replicas=1, replica=replica).run().on_time_share == on_time_share


@pytest.mark.parametrize(("num_attempts", "end"), [(1, "internal"), (2, "stop")])
def test_request_under_which_too_many_replicas_broke_is_given_up(num_attempts: int, end: str) -> None:
    session = Session(calls=(Call(prompt=(1,) * 16, num_out=4),), at_s=1.0)
    failover = FailoverConfig(max_attempts=num_attempts)
    simulated = cluster(
        iter([session]), PolicyName.ROUND_ROBIN, replicas=2, replica=EVEN, failures=((2.0, 0),), failover=failover
    )
    outcome = simulated.run()
    check_whole(simulated, outcome)
    assert outcome.ends == {end: 1}


def test_replica_that_dies_again_is_formed_after_a_while() -> None:
    """At 2 s and, READY for a second, at 6 s: from 7 s on its place is held again, and it is READY at 10 s."""
    sessions = [Session(calls=(Call(prompt=(1,) * 16, num_out=1),), at_s=at_s) for at_s in (1.0, 8.0)]
    failures = ((2.0, 0), (6.0, 0))
    simulated = cluster(iter(sessions), replicas=1, replica=EVEN, failures=failures, start_s=3.0)

    outcome = simulated.run()

    assert (outcome.ends, outcome.num_moves, outcome.idle_failures) == ({"stop": 2}, 0, ())
    assert outcome.completion_s == Distribution.of([0.75, 2.75])
    assert outcome.replica_s == 2.0 + 4.0 + 3.75
    assert [replica.replica_id for replica in simulated.controller.replicas] == ["m-0.1", "m-0.2", "m-0.3"]


@pytest.mark.parametrize("policy", PolicyName)
def test_same_seed_gives_the_same_outcome(policy: PolicyName) -> None:
    def run() -> ClusterOutcome:
        rules = Autoscaling(rules=RULES, min_replicas=2, max_replicas=6)
        sessions = conversations(60, rate=6)
        return cluster(sessions, policy, num_routers=2, autoscaling=rules, failures=((4.0, 1),)).run()

    assert run() == run()


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("policy", PolicyName)
def test_requests_of_replicas_that_die_go_on_elsewhere_with_their_tokens(policy: PolicyName, num_stages: int) -> None:
    failures = ((3.0, 0), (3.0, 2), (5.0, 1), (12.0, 0))
    tight = dataclasses.replace(SMALL, num_blocks=60, num_stages=num_stages)
    simulated = cluster(conversations(150, rate=25), policy, num_routers=2, replica=tight, failures=failures)

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert outcome.num_moves > 4
    assert any(flight.num_moves and len(flight.generated) > 1 for flight in simulated.flights)
    assert set(outcome.ends) == {"stop"}
    assert outcome.num_preemptions > 0


def test_a_request_that_cannot_move_fails_when_it_has_waited_long_enough() -> None:
    simulated = cluster(conversations(30, rate=20), replicas=1, failures=((0.5, 0),), start_s=500.0)

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert outcome.ends["internal"] > 0  # it had begun: two minutes
    assert outcome.ends["unavailable"] > 0  # it had not: ten seconds
    assert outcome.num_moves >= outcome.ends["internal"]


def test_what_the_routers_cannot_take_is_refused() -> None:
    simulated = cluster(conversations(80, rate=200), admission=AdmissionConfig(max_in_flight=4, max_queued=6))

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert outcome.ends["resource_exhausted"] > 0
    assert outcome.ends["stop"] >= 10


def test_what_is_beyond_the_places_in_flight_waits_for_one() -> None:
    sessions = [Session(calls=(Call(prompt=(1,) * 16, num_out=1),), at_s=1.0)] * 2
    places = AdmissionConfig(max_in_flight=1)
    outcome = cluster(iter(sessions), replicas=1, replica=EVEN, admission=places).run()
    assert outcome.completion_s == Distribution.of([0.75, 1.5])


@pytest.mark.parametrize("policy", [PolicyName.PREFIX_AFFINITY, PolicyName.POWER_OF_TWO])
def test_sixteen_replicas_behind_a_router_give_sixteen_times_the_tokens(policy: PolicyName) -> None:
    def rate(replicas: int) -> float:
        """Of 16 clients for each replica, which has 8 slots; each sends 6 requests, one after the other."""
        rng = random.Random(0)
        sessions = []
        for _ in range(16 * replicas):
            calls = tuple(Call(prompt=draw_ids(rng, 30, 1000), num_out=16) for _ in range(6))
            sessions.append(Session(calls=calls, at_s=0.0, think_s=0.0))
        simulated = cluster(iter(sessions), policy, replicas=replicas)
        outcome = simulated.run()
        check_whole(simulated, outcome)
        assert outcome.ends == {"stop": 6 * len(sessions)}
        return outcome.output_rate

    assert rate(16) == pytest.approx(16 * rate(1), rel=0.1)


def test_full_replicas_are_passed_over() -> None:
    scheduler = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=256, max_waiting=1)
    replica = dataclasses.replace(SMALL, scheduler=scheduler)
    simulated = cluster(conversations(40, rate=100), PolicyName.ROUND_ROBIN, replica=replica)

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert outcome.ends["resource_exhausted"] > 0
    assert outcome.num_choices > len(simulated.flights)


def test_routers_know_of_each_others_requests_by_what_replicas_tell() -> None:
    sessions = (Session(calls=(Call(prompt=(1,) * 16, num_out=100),), at_s=2.0 * number) for number in range(8))
    simulated = cluster(sessions, PolicyName.LEAST_LOADED, replicas=8, num_routers=2, replica=EVEN)

    outcome = simulated.run()

    assert outcome.ends == {"stop": 8}
    assert [replica.num_steps for replica in simulated.controller.replicas] == [100] * 8, "each has one of the requests"


def test_prefix_affinity_finds_more_in_the_caches_than_round_robin() -> None:
    shares = {
        policy: cluster(conversations(200, rate=15), policy, replicas=8).run().hit_share
        for policy in (PolicyName.PREFIX_AFFINITY, PolicyName.ROUND_ROBIN)
    }

    assert shares[PolicyName.PREFIX_AFFINITY] > shares[PolicyName.ROUND_ROBIN] + 0.05


def bursts() -> Iterator[Session]:
    """Twenty seconds of many, then two minutes of few."""
    at_s = 0.0
    for session in conversations(400, rate=1, seed=4):
        at_s += 1 / 15 if at_s < 20 else 1.5
        yield dataclasses.replace(session, at_s=at_s)
        if at_s > 140:
            return


def test_autoscaler_grows_under_a_burst_and_shrinks_after() -> None:
    rules = Autoscaling(rules=RULES, min_replicas=1, max_replicas=8)
    simulated = cluster(bursts(), replicas=1, autoscaling=rules)

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert outcome.most_replicas > 3
    assert outcome.last_replicas == 1
    assert outcome.scalings[0][0] < 20 < outcome.scalings[-1][0]
    assert outcome.replica_s < outcome.most_replicas * outcome.duration_s
    fixed = cluster(bursts(), replicas=1).run()
    assert outcome.ttft_s is not None
    assert fixed.ttft_s is not None
    assert outcome.ttft_s.p90 < 0.7 * fixed.ttft_s.p90


@pytest.mark.parametrize("start_s", [2.0, 1000.0])
def test_replica_seconds_are_the_places_that_were_wanted_over_time(start_s: float) -> None:
    """They are held from when they are wanted until they are not, whether or not they were READY by then."""
    burst = [Session(calls=(Call(prompt=(1,) * 16, num_out=3),), at_s=1.0)] * 200
    last = Session(calls=(Call(prompt=(1,) * 16, num_out=1),), at_s=100.0)
    rules = Autoscaling(rules=RULES, min_replicas=1, max_replicas=6)
    simulated = cluster(iter([*burst, last]), replicas=1, replica=EVEN, autoscaling=rules, start_s=start_s)

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert (outcome.most_replicas, outcome.last_replicas, outcome.ends) == (6, 1, {"stop": 201})
    assert len(simulated.controller.replicas) == (1 if start_s > 100 else 6)
    assert [replica.replica_id for replica in simulated.controller.ready] == ["m-0.1"]
    ends_s = [*(at_s for at_s, _, _ in outcome.scalings), simulated.time.now_s]
    numbers = [1, *(number for _, number, _ in outcome.scalings)]
    begins_s = [0.0, *ends_s[:-1]]
    held_s = [(end_s - begin_s) * number for begin_s, end_s, number in zip(begins_s, ends_s, numbers, strict=True)]
    assert outcome.replica_s == pytest.approx(sum(held_s))
    assert all(fewer != more for fewer, more in pairwise(numbers))


def test_another_replica_comes_for_one_that_drains_when_more_are_wanted_again() -> None:
    def calls(number: int, num_out: int, at_s: float) -> list[Session]:
        return [Session(calls=(Call(prompt=(1,) * 16, num_out=num_out),), at_s=at_s)] * number

    rules = Autoscaling(rules=RULES, min_replicas=1, max_replicas=2)
    simulated = cluster(
        iter([*calls(2, 110, 1.0), *calls(40, 20, 30.0)]),
        PolicyName.ROUND_ROBIN,
        replicas=2,
        replica=dataclasses.replace(EVEN, num_blocks=800),
        autoscaling=rules,
    )

    outcome = simulated.run()

    check_whole(simulated, outcome)
    (left_s, one, _), (came_s, two, _), *_ = outcome.scalings
    assert (one, two) == (1, 2)
    assert left_s < 30 < came_s < left_s + 30, "while it still drains"
    stayed, drained, new = simulated.controller.replicas
    assert [replica.replica_id for replica in (stayed, drained, new)] == ["m-0.1", "m-1.1", "m-2.1"]
    assert (drained.lived_s, simulated.time.now_s - new.lived_s) == (left_s + 30, came_s + 5)
    assert outcome.num_moves == 1
    assert set(outcome.ends) == {"stop"}


def test_autoscaler_hears_of_the_routers_how_many_requests_were_late() -> None:
    late = (Session(calls=(Call(prompt=(1,) * 16, num_out=3),), at_s=number / 10) for number in range(200))
    rules = Autoscaling(rules=dataclasses.replace(RULES, target_requests=1000), min_replicas=1, max_replicas=2)
    outcome = cluster(late, replicas=1, replica=dataclasses.replace(EVEN, num_blocks=80), autoscaling=rules).run()
    assert [scaling[1:] for scaling in outcome.scalings] == [(2, "0% of the requests on time")]


def test_requests_on_a_replica_that_leaves_too_soon_move_and_it_counts_as_no_break() -> None:
    few = dataclasses.replace(RULES, target_requests=100, target_goodput=0, downscale_delay_s=2)
    rules = Autoscaling(rules=few, min_replicas=1, max_replicas=4)
    simulated = cluster(
        conversations(60, rate=8),
        PolicyName.ROUND_ROBIN,
        autoscaling=rules,
        drain_timeout_s=0.0,
        failover=FailoverConfig(max_attempts=1),
    )

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert outcome.last_replicas == 1
    assert outcome.num_moves > 0
    assert set(outcome.ends) == {"stop"}


def test_a_thousand_replicas_serve() -> None:
    simulated = cluster(conversations(150, rate=600), PolicyName.POWER_OF_TWO, replicas=1000, num_routers=2)

    outcome = simulated.run()

    check_whole(simulated, outcome)
    assert set(outcome.ends) == {"stop"}
    assert outcome.num_preemptions == 0


class Frames:
    """A router's end that notes what comes and when."""

    def __init__(self, time: VirtualTime) -> None:
        self.time = time
        self.frames: list[tuple[float, Frame]] = []
        self.lost_s: float | None = None

    @property
    def outputs(self) -> list[tuple[float, Output]]:
        return [(at_s, output) for at_s, frame in self.frames for output in frame.outputs]

    def receive(self, frame: Frame) -> None:
        self.frames.append((self.time.now_s, frame))

    def lose(self, reason: str) -> None:
        self.lost_s = self.time.now_s


def one_replica(**changes: Any) -> tuple[VirtualTime, Frames, SimulatedReplica]:
    """A replica and a router that is connected to it."""
    time = VirtualTime()
    router, replica = Frames(time), SimulatedReplica(ReplicaId("m-0.1"), dataclasses.replace(EVEN, **changes), time)
    replica.connect(router)
    return time, router, replica


def sixteen(name: str) -> Request:
    """A request of one block."""
    sampling = SamplingParams(max_tokens=4)
    return Request(request_id=RequestId(name), prompt_token_ids=(1,) * 16, sampling=sampling)


@pytest.mark.parametrize(("grace_s", "end_s"), [(9.0, 2.0), (0.5, 1.625)])
def test_replica_that_drains_refuses_what_is_new_and_ends_with_its_requests_or_its_grace(
    grace_s: float, end_s: float
) -> None:
    time, router, replica = one_replica()
    stopped_s: list[float] = []

    time.at(1.0, lambda: replica.submit(router, sixteen("a"), 2))  # to 1.5 and to 2
    time.at(1.125, lambda: replica.drain(grace_s, lambda: stopped_s.append(time.now_s)))
    time.at(1.25, lambda: replica.submit(router, sixteen("b"), 2))
    time.at(2.25, lambda: replica.submit(router, sixteen("c"), 2))
    time.at(20.0, lambda: None)
    time.run(lambda: time.now_s >= 20.0)

    tokens = [token_at((1,) * 16, position) for position in range(2)]
    refused = Output("b", is_last=True, failed=StatusCode.UNAVAILABLE)
    assert router.outputs[:2] == [(1.375, refused), (1.625, Output("a", tokens[0]))]
    assert router.outputs[2:] == ([(2.125, Output("a", tokens[1], is_last=True))] if end_s == 2.0 else [])
    assert (stopped_s, router.lost_s, replica.lived_s) == ([end_s], end_s + 0.125, end_s)


def test_replica_without_requests_drains_at_once() -> None:
    time, router, replica = one_replica()
    stopped_s: list[float] = []
    time.at(1.0, lambda: replica.drain(9.0, lambda: stopped_s.append(time.now_s)))
    time.run(lambda: router.lost_s is not None)
    assert (stopped_s, router.lost_s) == ([1.0], 1.125)
    assert [(at_s, frame.is_draining) for at_s, frame in router.frames] == [(0.0, False), (1.125, True)]


def test_stages_of_a_replica_work_on_a_step_each() -> None:
    """Steps of "a": from 1 to 1.5, with "b" to 2, and to 2.5; of "b", a stage behind it: to 2.75."""
    time, router, replica = one_replica(num_stages=2)
    time.at(1.0, lambda: replica.submit(router, sixteen("a"), 4))
    time.at(1.25, lambda: replica.submit(router, sixteen("b"), 4))  # when the step in flight is done
    time.at(2.375, replica.die)
    time.run(lambda: router.lost_s is not None)
    assert [(at_s, output.request_id) for at_s, output in router.outputs] == [
        (1.625, "a"),
        *[(2.125, "a"), (2.125, "b")],
    ]
    assert replica.num_steps == 4
    assert replica.busy_s == 0.25 + 0.25 + (0.25 + 0.125) / 2 + 0.125 / 2, "of each stage, in the mean"


def test_frames_tell_the_load_and_the_blocks() -> None:
    time, router, replica = one_replica(scheduler=SchedulerConfig(max_num_seqs=1))
    time.at(1.0, lambda: replica.submit(router, sixteen("a"), 2))
    time.at(1.0, lambda: replica.submit(router, sixteen("b"), 1))
    time.run(lambda: len(router.frames) == 4)
    assert [(at_s, frame.num_requests) for at_s, frame in router.frames] == [(0, 0), (1.625, 2), (2.125, 1), (2.625, 0)]
    assert [len(frame.stored) for _, frame in router.frames] == [0, 1, 0, 0]
    assert [bool(frame.num_pending_tokens) for _, frame in router.frames] == [False, True, True, False]


# The requests


def arrivals(**changes: Any) -> list[Session]:
    """Of a cluster of three replicas."""
    options = ClusterOptions(
        **{
            "trace": None,
            "limits": TraceLimits(),
            "num_copies": 1,
            "num_requests": 1200,
            "rate": None,
            "policies": (),
            "num_routers": 1,
            "max_in_flight": 1,
            "fleet": FleetSettings(replicas=3),
            "replica": SMALL,
            "seed": 0,
            **changes,
        }
    )
    return list(make_arrivals(options))


@pytest.mark.parametrize(("rate", "duration_s"), [(None, 200), (30.0, 40)])
def test_conversations_come_at_the_rate_of_their_requests_and_share_prefixes(
    rate: float | None, duration_s: float
) -> None:
    sessions = arrivals(rate=rate)
    assert sum(len(session.calls) for session in sessions) == 1200
    assert sessions[-1].at_s == pytest.approx(duration_s, rel=0.2)
    assert sorted({len(session.calls) for session in sessions[:-1]}) == [2, 3, 4, 5, 6]
    assert len({session.calls[0].prompt[:1024] for session in sessions}) == 16
    assert arrivals(rate=rate) == sessions != arrivals(rate=rate, seed=1)


def test_copies_of_a_trace_lie_side_by_side_with_prompts_of_their_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": time_ms, "input_length": 9, "output_length": 4} for time_ms in (3000, 4000, 7000)]
    trace.write_text("\n".join(map(json.dumps, lines)))

    def times_s(**changes: Any) -> list[float]:
        return [session.at_s for session in arrivals(trace=trace, **changes) if session.at_s is not None]

    assert times_s() == [0.0, 1.0, 4.0]
    assert times_s(num_requests=2) == [0.0, 1.0]
    assert times_s(rate=1.5) == [0.0, 0.5, 2.0]
    copied_s = times_s(num_copies=3, rate=4.5)
    first, second, third = copied_s[:3]
    assert first == 0.0 < second < third <= 0.02, "a hundredth of its time at most"
    assert copied_s == pytest.approx([at_s + shift_s for at_s in (0, 0.5, 2) for shift_s in (first, second, third)])
    sessions = arrivals(trace=trace, num_copies=3, rate=4.5)
    assert len({session.calls[0].prompt for session in sessions}) == 9


# The command


def run_command(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    return result.stdout


def run_line(file: Path, *arguments: str) -> str:
    run_command(*arguments, "--json", str(file))
    return file.read_text()


def test_command_prints_a_table_of_80_columns_and_adds_a_line_of_json(tmp_path: Path) -> None:
    trace, file = tmp_path / "trace.jsonl", tmp_path / "lines"
    lines = [{"timestamp": 500 * i, "input_length": 600, "output_length": 8, "hash_ids": [0, i]} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--trace", str(trace), "--copies", "3", "--rate", "20", "--fail", "1:0", "--autoscale", "2:4"]

    output = run_command("--replicas", "3", *arguments, "--json", str(file))

    heads, _, *rows = (line.split() for line in output.splitlines() if line.strip())
    outcomes = json.loads(file.read_text())["outcomes"]
    assert heads == ["policy", *PolicyName] == ["policy", *(outcome["policy"] for outcome in outcomes)]
    assert ["moved", *(str(outcome["num_moves"]) for outcome in outcomes)] in rows
    assert [outcome["ends"] for outcome in outcomes] == [{"stop": 60}] * 4
    assert outcomes[0]["duration_s"] == pytest.approx(3.0, abs=1.0)
    assert "Warning" not in output


def test_a_failure_of_which_nothing_died_is_told() -> None:
    failures = ["--fail", "0.5:0", "--fail", "900:1"]
    output = run_command("--replicas", "2", "--requests", "10", "--router-policy", "round_robin", *failures)
    assert output.count("Warning") == 1
    assert "Warning: --fail 900:1 did nothing under round_robin: the load had ended" in " ".join(output.split())


@pytest.mark.parametrize(("arguments", "duration_s"), [(["--rate", "20"], 30), ([], 100)])
def test_requests_of_a_trace_without_times_arrive_at_random(
    tmp_path: Path, arguments: list[str], duration_s: float
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps({"input_length": 60, "output_length": 4}) for _ in range(200)))

    flags = ["--replicas", "3", "--router-policy", "round_robin", "--trace", str(trace), "--copies", "3"]
    (outcome,) = json.loads(run_line(tmp_path / "lines", *flags, *arguments))["outcomes"]

    assert outcome["ends"] == {"stop": 600}
    assert outcome["duration_s"] == pytest.approx(duration_s, rel=0.2)


def test_every_routing_policy_is_simulated_unless_told_otherwise(tmp_path: Path) -> None:
    outcomes = json.loads(run_line(tmp_path / "lines", "--replicas", "2", "--requests", "10"))["outcomes"]
    assert [outcome["policy"] for outcome in outcomes] == list(PolicyName)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail", "1:0", "--routers", "2"], "--routers, --fail: allowed with --replicas"),
        (["--replicas", "2", "--router-policy", "best"], "'best'; allowed, with commas: round_robin"),
        (["--replicas", "2", "--autoscale", "0:4"], "'0:4'; allowed: least:most replicas"),
        (["--replicas", "2", "--autoscale", "2"], "'2'; allowed: least:most replicas"),
        (["--replicas", "2", "--autoscale", "one:4"], "'one:4'; allowed: least:most replicas"),
        (["--replicas", "9", "--autoscale", "2:4"], "--replicas is 9; allowed with this --autoscale: 2 to 4"),
        (["--replicas", "2", "--upscale-delay", "9"], "--upscale-delay, --downscale-delay: allowed with --autoscale"),
        (["--replicas", "2", "--deadlines"], "--deadlines, or more than one --policy; allowed: without --replicas"),
        (["--replicas", "2", "--length-scale", "2"], "--copies, --length-scale: allowed with --trace"),
        (
            ["--replicas", "2", "--block-size", "1000000"],
            "of --block-size 1000000; allowed: fewer than",
        ),
        (["--replicas", "2", "--fail", "soon:1"], "'soon:1'; allowed: seconds:replica"),
        (["--replicas", "2", "--fail", "1:2"], "'1:2'; allowed: seconds:replica, such as 60:0; replicas are 0 to 1"),
        (["--replicas", "2", "--autoscale", "1:3", "--fail", "1:3"], "replicas are 0 to 2"),
        (["--replicas", "2", "--copies", "3"], "--copies, --length-scale: allowed with --trace"),
        (["--replicas", "2", "--policy", "fcfs,mlfq"], "more than one --policy; allowed: without --replicas"),
    ],
)
def test_wrong_flags_are_refused_with_those_allowed(arguments: list[str], message: str) -> None:
    with pytest.raises(BenchConfigError, match=message):
        CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def test_request_that_comes_at_the_start_counts_and_its_line_is_json(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    flags = ["--replicas", "2", "--requests", "1", "--rate", "inf"]
    line = json.loads(run_line(tmp_path / "lines", *flags), parse_constant=refuse)
    assert (line["benchmark"], line["arguments"]["rate"]) == ("simulate", "inf")
    assert {outcome["on_time_share"] for outcome in line["outcomes"]} == {1.0}


def test_requests_that_are_refused_before_any_time_has_passed_are_told() -> None:
    flags = ["--replicas", "1", "--requests", "1", "--rate", "inf", "--network-ms", "0", "--num-blocks", "10"]
    rows = [line.split() for line in run_command(*flags, "--router-policy", "round_robin").splitlines()]
    assert all(row in rows for row in (["busy", "0%"], ["TTFT", "p50", "-"], ["completion", "mean", "-"]))
    assert ["ended", "otherwise", "1", "invalid_argument"] in rows
