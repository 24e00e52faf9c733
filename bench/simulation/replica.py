"""One replica in virtual time: the real scheduler and block pool, and steps that take as long as a formula says.

What it tells the routers is what cluster/replica_server.py sends: after each step a frame with outputs, cache events
and load, to every router. The next token is a function of the prompt and the position, so that a request which moves
goes on with the tokens that it would have had.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from grpc import StatusCode

from bench.simulation.step_cost import Pipeline, StepCost
from bench.simulation.virtual_time import VirtualTime
from router.prefix_index import ReplicaId
from workers.config import SchedulerConfig
from workers.errors import InvalidRequestError, QueueFullError
from workers.kv_cache_manager import KVCacheManager
from workers.plan import ModelOutput, StepPlan
from workers.request import FinishReason, Request, RequestId
from workers.scheduler import Scheduler

HASH_KEY = b"simulation"
_NUM_TOKEN_IDS = 32_000


def token_at(prompt: Sequence[int], position: int) -> int:
    """Return the token that every replica generates at this place of the output of a prompt."""
    return (prompt[-1] * 31 + len(prompt) * 7 + position) % _NUM_TOKEN_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What all replicas of a simulation are."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cost: StepCost = field(default_factory=StepCost)
    num_blocks: int = 8000
    block_size: int = 16
    num_stages: int = 1
    """Stages of the pipeline, and plans in flight."""
    network_s: float = 2e-4
    """Time of a message between a router and a replica, one way."""

    @property
    def max_context(self) -> int:
        """Tokens of one sequence that the whole pool can hold, and the last one, which is never computed."""
        return self.num_blocks * self.block_size + 1


class Output(NamedTuple):
    """What a frame has for one request: a token, or why it failed."""

    request_id: str
    token_id: int | None = None
    is_last: bool = False
    failed: StatusCode | None = None


class Frame(NamedTuple):
    """What one step changed, for one router."""

    outputs: Sequence[Output]
    stored: Sequence[bytes]
    evicted: Sequence[bytes]
    num_requests: int
    num_pending_tokens: int
    is_draining: bool


class Stream(Protocol):
    """The router's end: router.SimulatedLink."""

    def receive(self, frame: Frame) -> None:
        """Take a frame."""

    def lose(self, reason: str) -> None:
        """Take note that the replica is gone."""


class _InFlight(NamedTuple):
    plan: StepPlan
    part_s: float
    """What it takes in a stage."""
    leaves_s: tuple[float, ...]
    """When it leaves each."""

    def rest_s(self, now_s: float) -> float:
        """Return the time that a stage, in the mean, still works on it."""
        return sum(min(self.part_s, max(0.0, left_s - now_s)) for left_s in self.leaves_s) / len(self.leaves_s)


class SimulatedReplica:
    """One life of a group. It makes steps as long as it has requests and lives."""

    def __init__(self, replica_id: ReplicaId, settings: ReplicaSettings, time: VirtualTime) -> None:
        self.replica_id = replica_id
        self.settings = settings
        self.is_alive = True
        self.is_draining = False
        self.busy_s = 0.0
        """Time in steps of a stage, in the mean, the rest of those in flight included."""
        self.num_steps = 0
        self.cache = KVCacheManager.with_pool(settings.num_blocks, block_size=settings.block_size, hash_key=HASH_KEY)
        self.pool = self.cache.pool
        self.scheduler = Scheduler(
            settings.scheduler,
            self.cache,
            max_context=settings.max_context,
            eos_token_ids=frozenset(),
            max_in_flight=settings.num_stages,
        )
        self._time = time
        self._ready_s = time.now_s
        self._ended_s: float | None = None
        self._streams: list[Stream] = []
        self._owners: dict[RequestId, tuple[Stream, int]] = {}  # and at how many tokens it ends
        self._slots: dict[int, tuple[Sequence[int], int]] = {}  # prompt, and the position of the next token
        self._pipeline = Pipeline(settings.num_stages)
        self._in_flight: deque[_InFlight] = deque()
        self._on_stopped: Callable[[], None] | None = None

    @property
    def lived_s(self) -> float:
        """Time since it was READY, until its end."""
        return (self._time.now_s if self._ended_s is None else self._ended_s) - self._ready_s

    def connect(self, stream: Stream) -> None:
        """Send a router its first frame: all blocks that are here, and the load."""
        self._streams.append(stream)
        stream.receive(self._frame((), self.pool.resident_hashes(), ()))

    def submit(self, stream: Stream, request: Request, num_out: int) -> None:
        """Take a request that ends with its `num_out`-th token, or refuse it."""
        if not self.is_alive:
            return  # its stream breaks, and says so
        try:
            if self.is_draining:
                self._refuse(stream, request, StatusCode.UNAVAILABLE)
                return
            self.scheduler.add(request, self._time.now_s)
        except QueueFullError:
            self._refuse(stream, request, StatusCode.RESOURCE_EXHAUSTED)
        except InvalidRequestError:
            self._refuse(stream, request, StatusCode.INVALID_ARGUMENT)
        else:
            self._owners[request.request_id] = stream, num_out
            if not self._in_flight:
                self._launch()

    def drain(self, grace_s: float, on_stopped: Callable[[], None]) -> None:
        """Take nothing new; when all requests have ended, or after a while, end."""
        self.is_draining = True
        self._on_stopped = on_stopped
        self._send({}, (), ())
        if self._owners:
            self._time.after(grace_s, self._stop)
        else:
            self._stop()

    def die(self) -> None:
        """End at once, with all requests."""
        if self.is_alive:
            self.is_alive = False
            self._ended_s = self._time.now_s
            self.busy_s -= sum(step.rest_s(self._ended_s) for step in self._in_flight)
            for stream in self._streams:
                self._time.after(self.settings.network_s, lambda stream=stream: stream.lose("it died"))  # type: ignore[misc]

    def _stop(self) -> None:
        if self.is_alive:
            self.die()
            assert self._on_stopped is not None
            self._on_stopped()

    # Steps

    def _launch(self) -> None:
        """Keep the stages busy, as the engine does: what comes meanwhile waits until the oldest step is done."""
        now_s = self._time.now_s
        while (plan := self.scheduler.schedule(now_s)) is not None:
            duration_s = self.settings.cost.duration_s(plan)
            step = _InFlight(plan, duration_s / self.settings.num_stages, self._pipeline.enter(now_s, duration_s))
            self._in_flight.append(step)
            self.num_steps += 1
            self.busy_s += step.part_s
        if self._in_flight:
            self._time.at(self._in_flight[0].leaves_s[-1], self._land)
        else:
            assert not self.scheduler.has_unfinished, "requests wait for nothing"

    def _land(self) -> None:
        if not self.is_alive:
            return
        now_s = self._time.now_s
        plan = self._in_flight.popleft().plan
        outputs: dict[Stream, list[Output]] = {}
        for token in self.scheduler.update(plan, self._run_model(plan), now_s):
            sequence = token.sequence
            stream, num_out = self._owners[sequence.request_id]
            is_last = sequence.finish is not None or sequence.num_output_tokens >= num_out
            if is_last:
                del self._owners[sequence.request_id]
                if sequence.finish is None:
                    self.scheduler.finish(sequence, FinishReason.STOP, now_s)
            outputs.setdefault(stream, []).append(Output(sequence.request_id, token.token_id, is_last))
        self._send(outputs, *self.pool.take_events())
        self._launch()
        if self.is_draining and not self._owners:
            self._stop()

    def _run_model(self, plan: StepPlan) -> ModelOutput:
        """Sample as a rank does: from what the plans say of each slot."""
        for new in plan.new:
            num_prompt = new.num_prompt_tokens
            self._slots[new.slot] = new.token_ids[:num_prompt], len(new.token_ids) - num_prompt
        slots, token_ids = plan.scheduled.sampling_slots, []
        for slot in slots:
            prompt, position = self._slots[slot]
            self._slots[slot] = prompt, position + 1
            token_ids.append(token_at(prompt, position))
        return ModelOutput(plan.number, slots, token_ids)

    # Frames

    def _refuse(self, stream: Stream, request: Request, code: StatusCode) -> None:
        self._send({stream: [Output(request.request_id, is_last=True, failed=code)]}, (), ())

    def _send(self, outputs: dict[Stream, list[Output]], stored: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        frame = self._frame((), stored, evicted)
        frames = [(stream, frame._replace(outputs=outputs.get(stream, ()))) for stream in self._streams]

        def arrive() -> None:
            for stream, frame in frames:
                stream.receive(frame)

        self._time.after(self.settings.network_s, arrive)

    def _frame(self, outputs: Sequence[Output], stored: Sequence[bytes], evicted: Sequence[bytes]) -> Frame:
        scheduler = self.scheduler
        return Frame(
            outputs=outputs,
            stored=stored,
            evicted=evicted,
            num_requests=scheduler.num_running + scheduler.num_waiting,
            num_pending_tokens=scheduler.num_pending_tokens,
            is_draining=self.is_draining,
        )
