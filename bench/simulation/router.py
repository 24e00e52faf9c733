"""One router in virtual time: the real admission, placing, policy, prefix index, load estimate, breaker and counting.

What is simulated here is what lies between them in router/dispatch.py, router/flight.py and router/replica.py: tasks,
streams and messages. Clients have no deadlines and give nothing up.
"""

import random
import time as cpu
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from grpc import StatusCode
from weft.v1 import control_pb2, inference_pb2, replica_pb2

from bench.simulation.replica import HASH_KEY, Frame, Output, SimulatedReplica
from bench.simulation.virtual_time import VirtualTime
from router.breaker import Breaker
from router.call import GenerateCall
from router.config import RouterConfig
from router.demand import Demand, growth
from router.errors import OverloadedError, RouterError
from router.metrics import RouterMetrics
from router.places import Places
from router.placing import Placing
from router.prefix_index import ReplicaId
from router.prefix_policy import make_policy
from router.replica_book import LinkState, ReplicaBook
from router.route import Chosen, Route, ServedModel
from workers.request import Request, RequestId, SamplingParams

MODEL = "m"
_CALL = GenerateCall(model=MODEL, sampling=inference_pb2.SamplingParams())
"""What the router's metrics see of every call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """What a client sends."""

    prompt: tuple[int, ...]
    num_out: int
    """Tokens after which it ends."""


class SimulatedFlight:
    """One request from its arrival to its one outcome; what dispatch.py and flight.py do with it."""

    def __init__(
        self, number: int, call: SimulatedCall, router: "SimulatedRouter", on_end: Callable[["SimulatedFlight"], None]
    ) -> None:
        self.number = number
        self.call = call
        self.generated: list[int] = []
        self.arrived_s = self.last_s = router.time.now_s
        self.first_s: float | None = None
        self.outcome = ""
        """How it ended, in the words of router/metrics.py; empty: it goes on."""
        self.num_moves = 0
        """Times that it went on elsewhere because its replica broke or left."""
        self._router = router
        self._on_end = on_end
        self._placing = Placing(router.config.failover, MODEL, lambda: router.places.retry_after_s)
        self._meter = router.metrics.request(_CALL)
        self._ticket: int | None = None
        self._hashes: Sequence[bytes] | None = None
        self._num_parts = 0
        self._is_answered = False

    @property
    def ttft_s(self) -> float | None:
        """Time from its arrival to its first token; None: there is none yet."""
        return None if self.first_s is None else self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each further token."""
        if self.first_s is None or len(self.generated) < 2:
            return None
        return (self.last_s - self.first_s) / (len(self.generated) - 1)

    def begin(self) -> None:
        """Enter the queue of the router."""
        router = self._router
        self._meter.begin(router.route)
        try:
            self._ticket = router.places.enter()
        except OverloadedError as error:
            self._end(error.code.name.lower())
            return
        router.route.held.add(self)
        if router.places.start(self._ticket):
            self.start()
        else:
            router.waiting[self._ticket] = self

    def start(self) -> None:
        """Go on with a place in flight."""
        self._meter.start()
        self._placing.seek(self._router.time.now_s)
        self.seek()

    def seek(self) -> None:
        """Look for a replica, now or, where there is none, again later."""
        router, now_s = self._router, self._router.time.now_s
        router.route.held.add(self)
        if self._hashes is None:
            self._hashes = router.route.hash_blocks((*self.call.prompt, *self.generated), "")
        try:
            links = self._placing.find(router.route, now_s)
        except RouterError as error:
            self._end(error.code.name.lower())
            return
        if links:
            self._submit(links, self._hashes)
        else:
            router.let_wait(self, self._placing.wait_s(now_s))

    def receive(self, link: "SimulatedLink", output: Output) -> None:
        """Take what the replica sent for it."""
        if output.failed is not None:
            self._after_refusal(link.replica_id, output.failed)
            return
        assert output.token_id is not None
        now_s = self._router.time.now_s
        if not self._is_answered:
            self._is_answered = True
            self._placing.note_tokens()
            self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s
        self.generated.append(output.token_id)
        self._meter.receive(1)
        if output.is_last:
            self._end("stop")

    def lose(self, link: "SimulatedLink", reason: str, *, was_leaving: bool) -> None:
        """Go on elsewhere, unless too many replicas broke."""
        self._hashes = None
        try:
            self._placing.note_loss(link.replica_id, reason, was_leaving=was_leaving)
        except RouterError as error:
            self._end(error.code.name.lower())
            return
        self.num_moves += 1
        self._placing.seek(self._router.time.now_s)
        self.seek()

    def _submit(self, links: Sequence["SimulatedLink"], hashes: Sequence[bytes]) -> None:
        num_tokens = len(self.call.prompt) + len(self.generated)
        choice = self._router.choose(links, hashes, num_tokens)
        self._num_parts += 1
        self._is_answered = False
        request = Request(
            request_id=RequestId(f"{self.number}/{self._num_parts}"),
            prompt_token_ids=self.call.prompt,
            generated_token_ids=tuple(self.generated),
            sampling=SamplingParams(max_tokens=1 << (self.call.num_out - 1).bit_length()),
        )
        choice.link.send(self, request, num_tokens - choice.num_cached_tokens)
        self._router.route.held.discard(self)

    def _after_refusal(self, replica_id: ReplicaId, code: StatusCode) -> None:
        match code:
            case StatusCode.RESOURCE_EXHAUSTED:
                self._placing.note_full(replica_id)
            case StatusCode.UNAVAILABLE:
                self._placing.note_leaving(replica_id)
            case _:
                self._end(code.name.lower())
                return
        self._placing.seek(self._router.time.now_s)
        self.seek()

    def _end(self, outcome: str) -> None:
        assert not self.outcome, f"request {self.number} ended twice: {self.outcome}, {outcome}"
        self.outcome = outcome
        self._hashes = None
        self._router.route.held.discard(self)
        if self._ticket is not None:
            self._router.give_back(self._ticket)
        is_on_time = self._meter.end(outcome, is_finished=outcome == "stop")
        if is_on_time is not None:
            self._router.route.note_served(is_on_time=is_on_time)
        self._on_end(self)


class SimulatedLink(ReplicaBook):
    """The router's end of one replica, in place of router/replica.py."""

    def __init__(self, replica: SimulatedReplica, router: "SimulatedRouter") -> None:
        super().__init__(
            replica.replica_id,
            index=router.route.index,
            breaker=Breaker(router.config.breaker),
            on_change=router.note_change,
        )
        self._replica = replica
        self._router = router
        self._flights: dict[str, SimulatedFlight] = {}

    def send(self, flight: SimulatedFlight, request: Request, num_pending_tokens: int) -> None:
        """Send a request."""
        time, network_s = self._router.time, self._replica.settings.network_s
        assert self.state is LinkState.READY
        self._flights[request.request_id] = flight
        self.note_submit(request.request_id, num_pending_tokens, time.now_s)
        time.after(network_s, partial(self._replica.submit, self, request, flight.call.num_out))

    def receive(self, frame: Frame) -> None:
        """Stream of replica.py: what ReplicaLink does with a frame."""
        if self.state is LinkState.CLOSED:
            return
        is_first = self.state is LinkState.CONNECTING
        if is_first:
            self.note_snapshot(frame.stored)
        elif frame.stored or frame.evicted:
            self.note_blocks(frame.stored, frame.evicted)
        ended = [self._deliver(output) for output in frame.outputs]
        self.note_load(frame.num_requests, frame.num_pending_tokens, is_draining=frame.is_draining)
        if is_first:
            self.note_ready()
        for flight, output in ended:  # as their tasks, which run when the frame was taken
            flight.receive(self, output)

    def lose(self, reason: str) -> None:
        """Stream of replica.py: the replica is gone, and its requests are handed back."""
        flights, self._flights = self._flights, {}
        was_leaving = self.is_leaving
        self.breaker.fail(self._router.time.now_s)
        self.note_disconnected()
        self.state = LinkState.CLOSED
        for flight in flights.values():
            flight.lose(self, reason, was_leaving=was_leaving)

    def _deliver(self, output: Output) -> tuple[SimulatedFlight, Output]:
        flight = self._flights[output.request_id]
        failed_code = None if output.failed is None else output.failed.value[0]
        self.note_output(output.request_id, failed_code, self._router.time.now_s)
        if output.is_last:
            self.note_end(output.request_id)
            del self._flights[output.request_id]
        return flight, output


class SimulatedRouter:
    """One router of one model."""

    def __init__(self, config: RouterConfig, time: VirtualTime, rng: random.Random) -> None:
        self.config = config
        self.time = time
        self.places = Places(config.admission)
        self.waiting: dict[int, SimulatedFlight] = {}
        """Requests by their tickets, until they have their places in flight."""
        self.metrics = RouterMetrics(config.metrics, time.clock)
        served = ServedModel(name=MODEL, path="", max_context=0)
        self.route: Route[SimulatedLink] = Route(served, make_policy(config.policy, config.prefix, rng))
        self.routing_cpu_s = 0.0
        """CPU time of choosing replicas."""
        self.num_choices = 0
        self._seeking: dict[SimulatedFlight, int] = {}
        self._num_waits = 0
        self._told = Demand(num_held=0, num_finished=0, num_on_time=0)

    def give_back(self, ticket: int) -> None:
        """A request has ended: who waits longest gets its place."""
        self.waiting.pop(ticket, None)
        following = self.places.leave(ticket, self.time.now_s)
        if following is not None:
            self.time.after(0, self.waiting.pop(following).start)

    def apply(self, replicas: Sequence[SimulatedReplica], draining: frozenset[ReplicaId]) -> None:
        """Follow membership, as Directory.apply does."""
        wanted = {replica.replica_id: replica for replica in replicas}
        links = self.route.links
        for replica_id in [each for each in links if each not in wanted]:
            self.route.remove(replica_id).note_retired()
        for replica_id, replica in wanted.items():
            if replica_id not in links:
                self._join(replica)
            links[replica_id].note_dismissed(replica_id in draining)
        self.look_again()

    def choose(self, links: Sequence[SimulatedLink], hashes: Sequence[bytes], num_tokens: int) -> Chosen[SimulatedLink]:
        """Choose among links, and note how long that takes."""
        start_s = cpu.process_time()
        choice = self.route.choose(links, hashes, num_tokens)
        self.routing_cpu_s += cpu.process_time() - start_s
        self.num_choices += 1
        return choice

    def let_wait(self, flight: SimulatedFlight, wait_s: float) -> None:
        """Let a request look again when something changes, or in a while."""
        self._num_waits += 1
        number = self._seeking[flight] = self._num_waits

        def look() -> None:
            if self._seeking.get(flight) == number:
                del self._seeking[flight]
                flight.seek()

        self.time.after(wait_s, look)

    def note_change(self) -> None:
        """A link takes requests now that did not, or the other way round."""
        self.route.note_change()
        self.look_again()

    def look_again(self) -> None:
        """Something changed for those that look for a replica."""
        for flight in list(self._seeking):
            if self._seeking.pop(flight, None) is not None:
                self.time.after(0, flight.seek)

    def report(self) -> list[control_pb2.ModelDemand]:
        """Return what is told the controller."""
        told, self._told = self._told, self.route.demand
        return [growth(MODEL, told, self._told)]

    def _join(self, replica: SimulatedReplica) -> None:
        link = SimulatedLink(replica, self)
        self.route.add(link)
        settings = replica.settings
        self.route.accept(
            replica_pb2.Snapshot(
                replica_id=replica.replica_id,
                block_size=settings.block_size,
                hash_key=HASH_KEY,
                max_context=settings.max_context,
            )
        )
        replica.connect(link)
