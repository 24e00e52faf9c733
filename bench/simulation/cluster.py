"""A whole cluster in virtual time: clients, routers, a controller and its replicas, with the modules of production.

    router/       admission, placing, policies, prefix index, load estimate, breaker, the count of what was on time
    workers/      scheduler, KV cache manager, block pool: one of each in every replica
    cluster/      autoscaler, group planning, group lifecycle

Two runs of equal sessions and settings give equal outcomes, whatever machine they run on.
"""

import dataclasses
import itertools
import math
import random
import time as cpu
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.load.calls import Session
from bench.load.statistics import Distribution
from bench.simulation.controller import FleetSettings, SimulatedController
from bench.simulation.replica import ReplicaSettings, SimulatedReplica
from bench.simulation.router import SimulatedCall, SimulatedFlight, SimulatedRouter
from bench.simulation.virtual_time import VirtualTime
from router.config import PolicyName, RouterConfig

_SAMPLE_S = 1.0
"""How often the requests of all replicas are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What is simulated."""

    fleet: FleetSettings
    replica: ReplicaSettings = field(default_factory=ReplicaSettings)
    router: RouterConfig
    """Settings of every router, its policy among them."""
    num_routers: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOutcome:
    """What became of all requests."""

    policy: PolicyName
    ends: dict[str, int]
    """Requests by how they ended: "stop" is well; the others are gRPC's names."""
    duration_s: float
    """From the first arrival to the last end."""
    output_rate: float
    """Tokens a second that came to clients."""
    ttft_s: Distribution | None
    """Time from the arrival at the router to the first token; of requests that ended well, as are the next two."""
    tpot_s: Distribution | None
    completion_s: Distribution | None
    on_time_share: float
    """Part of the requests that were within the targets of TTFT and TPOT, as the routers count them."""
    hit_share: float
    """Part of the prompt tokens that replicas found in their caches."""
    busy_share: float
    """Part of the time in which replicas were in a step, while they were READY."""
    busy_imbalance: float
    """`busy_share` of the busiest replica over the mean."""
    load_imbalance: float
    """Requests on the replica with the most, over the mean of all; both means over time."""
    replica_s: float
    """Time for which replicas held their places, those that start or drain included."""
    most_replicas: int
    last_replicas: int
    num_moves: int
    """Times that a request went on elsewhere because its replica broke or left."""
    num_preemptions: int
    scalings: tuple[tuple[float, int, str], ...]
    idle_failures: tuple[tuple[float, int], ...]
    """The failures that were asked for, and of which no replica died."""
    num_choices: int
    num_steps: int
    route_us: float = dataclasses.field(compare=False)
    """CPU time of choosing a replica, mean."""
    cpu_s: float = dataclasses.field(compare=False)
    """CPU time of the whole simulation."""


class _Record(NamedTuple):
    """What is kept of a request that has ended."""

    outcome: str
    end_s: float
    """Time of the last token."""
    num_tokens: int
    num_moves: int
    ttft_s: float | None
    tpot_s: float | None
    completion_s: float


class SimulatedCluster:
    """One run."""

    def __init__(
        self,
        sessions: Iterator[Session],
        settings: ClusterSettings,
        on_end: Callable[[SimulatedFlight], None] = lambda _: None,
    ) -> None:
        """Sessions begin at their times, which are in order; each call of one when the one before it has ended.

        `on_end` is called with each request that has ended.
        """
        self.time = VirtualTime()
        self._settings = settings
        self._sessions = sessions
        rng = random.Random(settings.seed)
        self.routers = [
            SimulatedRouter(settings.router, self.time, random.Random(rng.getrandbits(64)))
            for _ in range(settings.num_routers)
        ]
        self.controller = SimulatedController(
            settings.fleet,
            self.routers,
            lambda replica_id: SimulatedReplica(replica_id, settings.replica, self.time),
            self.time,
        )
        self._next_router = itertools.cycle(self.routers)
        self._on_end = on_end
        self._records: list[_Record] = []
        self._num_sent = self._num_open = 0
        self._first_s: float | None = None
        self._is_arriving = True
        self._sum_most = self._sum_mean = 0.0

    def run(self) -> ClusterOutcome:
        """Serve all requests to their end."""
        start_s = cpu.process_time()
        self.controller.begin()
        self.time.every(_SAMPLE_S, self._sample)
        self._await_session()
        self.time.run(lambda: not self._num_open and not self._is_arriving)
        return self._summarize(cpu.process_time() - start_s)

    # Clients

    def _await_session(self) -> None:
        session = next(self._sessions, None)
        if session is None:
            self._is_arriving = False
            return
        assert session.at_s is not None
        self.time.at(session.at_s, lambda: self._arrive(session))

    def _arrive(self, session: Session) -> None:
        self._first_s = self.time.now_s if self._first_s is None else self._first_s
        self._num_open += len(session.calls)
        self._call(session, 0)
        self._await_session()

    def _call(self, session: Session, turn: int) -> None:
        def end(flight: SimulatedFlight) -> None:
            self._num_open -= 1
            self._records.append(_record(flight))
            self._on_end(flight)
            if turn + 1 < len(session.calls):
                self.time.after(session.think_s, lambda: self._call(session, turn + 1))

        call = session.calls[turn]
        assert isinstance(call.prompt, tuple)
        sent = SimulatedCall(prompt=call.prompt, num_out=call.num_out)
        flight = SimulatedFlight(self._num_sent, sent, next(self._next_router), end)
        self._num_sent += 1
        flight.begin()

    # The numbers

    def _sample(self) -> None:
        loads = [replica.scheduler.num_running + replica.scheduler.num_waiting for replica in self.controller.ready]
        if loads:
            self._sum_most += max(loads)
            self._sum_mean += sum(loads) / len(loads)

    def _summarize(self, cpu_s: float) -> ClusterOutcome:
        controller, replicas, records = self.controller, self.controller.replicas, self._records
        well = [record for record in records if record.outcome == "stop"]
        assert self._first_s is not None, "there were no requests"
        duration_s = max(record.end_s for record in records) - self._first_s
        counters = [replica.scheduler.counters for replica in replicas]
        shares = [replica.busy_s / replica.lived_s for replica in replicas if replica.lived_s] or [0.0]
        lived_s = math.fsum(replica.lived_s for replica in replicas)
        busy_share = math.fsum(replica.busy_s for replica in replicas) / max(lived_s, 1e-9)
        routes = [router.route for router in self.routers]
        num_choices = sum(router.num_choices for router in self.routers)
        return ClusterOutcome(
            policy=self._settings.router.policy,
            ends=dict(sorted(Counter(record.outcome for record in records).items())),
            duration_s=duration_s,
            output_rate=sum(record.num_tokens for record in records) / max(duration_s, 1e-9),
            ttft_s=Distribution.of(record.ttft_s for record in well),
            tpot_s=Distribution.of(record.tpot_s for record in well),
            completion_s=Distribution.of(record.completion_s for record in well),
            on_time_share=sum(route.num_on_time for route in routes)
            / max(1, sum(route.num_finished for route in routes)),
            hit_share=sum(each.num_cached_tokens for each in counters)
            / max(1, sum(each.num_prompt_tokens for each in counters)),
            busy_share=busy_share,
            busy_imbalance=max(shares) / max(busy_share, 1e-9),
            load_imbalance=self._sum_most / max(self._sum_mean, 1e-9),
            replica_s=controller.replica_s(),
            most_replicas=controller.most_replicas,
            last_replicas=controller.wanted,
            num_moves=sum(record.num_moves for record in records),
            num_preemptions=sum(each.num_preemptions for each in counters),
            scalings=tuple(controller.scalings),
            idle_failures=tuple(controller.idle_failures),
            num_choices=num_choices,
            num_steps=sum(replica.num_steps for replica in replicas),
            route_us=sum(router.routing_cpu_s for router in self.routers) / max(1, num_choices) * 1e6,
            cpu_s=cpu_s,
        )


def _record(flight: SimulatedFlight) -> _Record:
    return _Record(
        outcome=flight.outcome,
        end_s=flight.last_s,
        num_tokens=len(flight.generated),
        num_moves=flight.num_moves,
        ttft_s=flight.ttft_s,
        tpot_s=flight.tpot_s,
        completion_s=flight.last_s - flight.arrived_s,
    )
