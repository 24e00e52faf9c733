"""Writes down what a router decides: who is let in, which replica gets a request, what circuit breakers let through.

bench/simulation/replayed_modules.py decides it again. A policy's ties come from a generator of its own, whose seed is
written down; what it was told, and what was chosen, is in each frame.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
from weft.recording import FrameSink

from router.breaker import Breaker
from router.config import AdmissionConfig, BreakerConfig, PolicyName, PrefixPolicyConfig, RouterConfig
from router.errors import OverloadedError
from router.places import Places
from router.policy import Choice, Policy, ReplicaView, RouteRequest
from router.prefix_index import ReplicaId

KIND = "router"


class RouterSetup(msgspec.Struct, frozen=True, kw_only=True):
    """The header: what policies and breakers are made from."""

    router_id: str
    policy: PolicyName
    prefix: PrefixPolicyConfig
    breaker: BreakerConfig
    admission: AdmissionConfig


class PolicyMade(msgspec.Struct, frozen=True, array_like=True, tag="policy"):
    """A model came."""

    now_s: float
    number: int
    """Number by which later frames name the policy."""
    model: str
    seed: int
    """Seed of the policy's random generator."""


class Routed(msgspec.Struct, frozen=True, array_like=True, tag="route"):
    """A request was placed."""

    now_s: float
    number: int
    """Number of the policy."""
    request: RouteRequest
    replicas: list[ReplicaView]
    choice: Choice


class BreakerMade(msgspec.Struct, frozen=True, array_like=True, tag="breaker"):
    """A replica came."""

    now_s: float
    number: int
    """Number by which later frames name the breaker."""
    replica_id: ReplicaId


class BreakerCalled(msgspec.Struct, frozen=True, array_like=True, tag="breaker call"):
    """A breaker was asked, or told how a request went; with its state afterwards."""

    now_s: float
    number: int
    call: str
    """Name of the method."""
    allows: bool | None
    """The answer, where the breaker was asked."""
    num_failures: int
    open_until_s: float | None
    is_probing: bool


class Entered(msgspec.Struct, frozen=True, array_like=True, tag="enter"):
    """A request came to the queue."""

    now_s: float
    ticket: int | None
    retry_after_s: float | None
    """The hint that a refused request was given; None: it was not refused."""


class Started(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """A request asked to be in flight."""

    now_s: float
    ticket: int
    is_in_flight: bool
    """False: it waits."""


class Left(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """A request ended."""

    now_s: float
    ticket: int
    following: int | None
    """Ticket of the request that is in flight in its place; None: none is."""


RouterCall = PolicyMade | Routed | BreakerMade | BreakerCalled | Entered | Started | Left


class RouterRecording:
    """Hands what one router decides to a sink. On its event loop."""

    def __init__(self, setup: RouterSetup, sink: FrameSink, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._setup = setup
        self._sink = sink
        self._clock = clock
        self._num_policies = 0
        self._num_breakers = 0
        sink.begin(KIND, setup)

    def places(self) -> "RecordingPlaces":
        """Return the router's places, with who gets them written down."""
        return RecordingPlaces(self._setup.admission, self._sink, self._clock)

    def policy(self, model: str, seed: int, policy: Policy) -> "RecordingPolicy":
        """Return a new policy, whose generator has this seed, with its choices written down."""
        self._num_policies += 1
        self._sink.write(PolicyMade(self._clock(), self._num_policies, model, seed))
        return RecordingPolicy(self._num_policies, policy, self._sink, self._clock)

    def breaker(self, replica_id: ReplicaId) -> "RecordingBreaker":
        """Return a new breaker, with all that happens to it written down."""
        self._num_breakers += 1
        self._sink.write(BreakerMade(self._clock(), self._num_breakers, replica_id))
        return RecordingBreaker(self._num_breakers, self._setup.breaker, self._sink, self._clock)


def record_router(config: RouterConfig, sink: FrameSink) -> RouterRecording:
    """Return what records a router with this configuration."""
    setup = RouterSetup(
        router_id=config.router_id,
        policy=config.policy,
        prefix=config.prefix,
        breaker=config.breaker,
        admission=config.admission,
    )
    return RouterRecording(setup, sink)


class RecordingPolicy:
    """A policy, and a frame for each choice."""

    def __init__(self, number: int, policy: Policy, sink: FrameSink, clock: Callable[[], float]) -> None:
        self._number = number
        self._policy = policy
        self._sink = sink
        self._clock = clock

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        """Return one of `replicas`, as the policy does."""
        views = list(replicas)
        choice = self._policy.choose(request, views)
        self._sink.write(Routed(self._clock(), self._number, request, views, choice))
        return choice


class RecordingBreaker(Breaker):
    """A breaker, and a frame for each call."""

    def __init__(self, number: int, config: BreakerConfig, sink: FrameSink, clock: Callable[[], float]) -> None:
        super().__init__(config)
        self._number = number
        self._sink = sink
        self._clock = clock

    def allows(self, now_s: float) -> bool:
        """Say whether a request may go to the replica now."""
        allows = super().allows(now_s)
        self._write("allows", now_s, allows=allows)
        return allows

    def begin(self, now_s: float) -> None:
        """Note that a request goes to the replica."""
        super().begin(now_s)
        self._write("begin", now_s)

    def succeed(self) -> None:
        """Note that the replica answered a request."""
        super().succeed()
        self._write("succeed", self._clock())

    def fail(self, now_s: float) -> None:
        """Note that the replica failed."""
        super().fail(now_s)
        self._write("fail", now_s)

    def release(self) -> None:
        """Note an end that says nothing about the replica."""
        super().release()
        self._write("release", self._clock())

    def _write(self, call: str, now_s: float, *, allows: bool | None = None) -> None:
        self._sink.write(
            BreakerCalled(now_s, self._number, call, allows, self._num_failures, self._open_until_s, self._is_probing)
        )


class RecordingPlaces(Places):
    """Places, and a frame for each call."""

    def __init__(self, config: AdmissionConfig, sink: FrameSink, clock: Callable[[], float]) -> None:
        super().__init__(config)
        self._sink = sink
        self._clock = clock

    def enter(self) -> int:
        """Return a new ticket; raises OverloadedError."""
        try:
            ticket = super().enter()
        except OverloadedError as error:
            self._sink.write(Entered(self._clock(), None, error.retry_after_s))
            raise
        self._sink.write(Entered(self._clock(), ticket, None))
        return ticket

    def start(self, ticket: int) -> bool:
        """Whether the request is in flight now."""
        is_in_flight = super().start(ticket)
        self._sink.write(Started(self._clock(), ticket, is_in_flight))
        return is_in_flight

    def leave(self, ticket: int, now_s: float) -> int | None:
        """Take back a ticket; return that of the request which is in flight in its place."""
        following = super().leave(ticket, now_s)
        self._sink.write(Left(now_s, ticket, following))
        return following
