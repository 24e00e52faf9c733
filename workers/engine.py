"""The engine of one replica: requests in, steps, outputs out. Synchronous, one thread; async_engine.py drives it."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from weft.recording import Recorder

from workers.config import EngineConfig
from workers.delivery import Delivery
from workers.detokenizer import IncrementalDetokenizer
from workers.errors import EngineConfigError, EngineError, InvalidRequestError
from workers.executor import Executor
from workers.kv_cache_manager import KVCacheManager
from workers.limits import find_end, stop_ids
from workers.overlap import Lookahead
from workers.plan import StepPlan
from workers.recording import RecordingScheduler
from workers.request import Finish, FinishReason, Request, RequestId, RequestOutput, Usage
from workers.scheduler import Scheduler
from workers.stats import EngineStats
from workers.tokenizer import TokenTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy the engine is, after a step."""

    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    num_pending_tokens: int
    """Tokens still to be computed, over waiting and running requests: prompts, and the output of requests that were
    preempted or began elsewhere. The one token that each decoding request always has is not counted."""
    num_host_blocks: int = 0
    """Blocks that the host tier of the cache can hold."""
    num_used_host_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave: outputs, changes of the prefix cache and load, in one order with those of other steps."""

    outputs: list[RequestOutput]
    stored_block_hashes: list[bytes]
    evicted_block_hashes: list[bytes]
    load: EngineLoad


class _SubmittedPlan(NamedTuple):
    plan: StepPlan
    submitted_s: float


class Engine:
    """Owns the scheduler and the executor. All but `stats` and `now_s` belongs to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        tokens: TokenTable,
        eos_token_ids: frozenset[int],
        max_context: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
    ) -> None:
        """`recorder` writes down what the scheduler decides; it is closed with the engine."""
        self.config = config
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.num_blocks = executor.num_blocks
        self.stats = EngineStats()
        self._executor = executor
        self._tokens = tokens
        self._clock = clock
        cache = KVCacheManager.with_pool(
            executor.num_blocks,
            block_size=config.cache.block_size,
            hash_key=config.hash_key,
            windows=executor.windows,
            max_tokens_in_flight=config.scheduler.max_chunk_tokens * executor.max_in_flight,
            num_host_blocks=executor.num_host_blocks,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self._pool = cache.pool
        # the last token of a sequence is sampled and never computed
        self.max_context = min(max_context, cache.layout.max_sequence_tokens(max_context) + 1)
        if self.max_context < 2:
            raise EngineConfigError(
                f"the context is {self.max_context} tokens, with {self.num_blocks} blocks for {len(executor.windows)} "
                f"groups of layers and max_context {max_context}; allowed: a larger cache or context, for at least 2"
            )
        _tell_room(self.max_context, cache, wanted=max_context)
        self._recorder = recorder
        make_scheduler = Scheduler if recorder is None else partial(RecordingScheduler, sink=recorder)
        self._scheduler = make_scheduler(
            config.scheduler,
            cache,
            max_context=self.max_context,
            eos_token_ids=eos_token_ids,
            max_in_flight=executor.max_in_flight,
            looks_ahead=executor.lookahead is not Lookahead.NEVER,
        )
        self._delivery = Delivery(self._scheduler, self.stats)
        self._submitted: deque[_SubmittedPlan] = deque()
        self._busy_since_s = 0.0  # while a step is in flight: since when its time is in no statistics
        self._events: dict[bytes, bool] = {}  # of collected steps: hash -> whether it was stored, else evicted

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._delivery.is_pending or self._scheduler.has_unfinished

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is now."""
        return EngineLoad(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            num_pending_tokens=self._scheduler.num_pending_tokens,
            num_host_blocks=self._pool.host.num_slots,
            num_used_host_blocks=self._pool.host.num_used,
        )

    def now_s(self) -> float:
        """Return the time on the engine's clock; in any thread."""
        return self._clock()

    def add_request(self, request: Request, *, arrival_s: float | None = None) -> None:
        """Accept a request; from now on it ends with exactly one output that has `finish` or `error`.

        `arrival_s`: when it came, if that was before now: its times count from then.

        Raises:
            InvalidRequestError: it cannot be served as it is.
            QueueFullError: too many wait.
        """
        try:
            self._accept(request, self._clock() if arrival_s is None else arrival_s)
        except EngineError:
            self.stats.num_refused += 1
            raise

    def abort(self, request_id: RequestId) -> None:
        """End a request; its blocks are free within one step. Nothing happens when it has ended already."""
        self._delivery.deliver_all()  # comes before the last output
        sequence = self._scheduler.abort(request_id, self._clock())
        if sequence is not None:
            self._delivery.end(sequence)

    def abort_all(self) -> None:
        """End every request."""
        for request_id in self._delivery.request_ids:
            self.abort(request_id)

    def step(self) -> StepResult:
        """Do one step and return what it gave: `launch`, `collect` and `take_result`.

        A caller that calls the three itself can hand over what a step gave while the next one runs.
        """
        self.launch()
        self.collect()
        return self.take_result()

    def launch(self) -> None:
        """Keep the ranks busy: start as many steps as there can be.

        Raises:
            GroupFailedError: a rank died, hung or diverged; the engine is of no more use.
        """
        now_s = self._clock()
        if not self._submitted:
            self._busy_since_s = now_s
        if self._scheduler.has_expired(now_s):
            self._delivery.deliver_all()  # comes before the last output
            for sequence in self._scheduler.expire(now_s):
                self._delivery.end(sequence)
        while len(self._submitted) < self._executor.max_in_flight:
            waits_to_look_ahead = self._executor.lookahead is Lookahead.WHILE_REQUESTS_WAIT
            if self._submitted and waits_to_look_ahead and not self._scheduler.num_waiting:
                break
            plan = self._scheduler.schedule(self._clock())
            if plan is None:
                break
            self._submitted.append(_SubmittedPlan(plan, self._clock()))
            self._executor.submit(plan)

    def collect(self) -> bool:
        """Wait for the oldest step in flight, so that the next can be planned; whether there was one.

        Raises as `launch`.
        """
        self._delivery.deliver_all()
        if not self._submitted:
            return False
        submitted = self._submitted.popleft()
        output = self._executor.collect()
        now_s = self._clock()
        self._delivery.add(self._scheduler.update(submitted.plan, output, now_s), now_s)
        self._take_events()
        self._note_step(submitted, now_s)
        return True

    def take_result(self) -> StepResult:
        """Return what the steps collected since the last call gave. Nothing that runs waits for it."""
        outputs = self._delivery.take()
        events, self._events = self._events, {}
        stored = [block_hash for block_hash, is_stored in events.items() if is_stored]
        evicted = [block_hash for block_hash, is_stored in events.items() if not is_stored]
        return StepResult(outputs=outputs, stored_block_hashes=stored, evicted_block_hashes=evicted, load=self.load)

    def check(self) -> None:
        """Raise GroupFailedError when a rank is gone; for moments with nothing to do."""
        self._executor.check()

    def rest(self) -> None:
        """Prepare for a while with nothing to do: nothing is lost if the process is killed meanwhile."""
        if self._recorder is not None:
            self._recorder.flush()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other. Slow: for tests."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """End the ranks."""
        if self._recorder is not None:
            self._recorder.close()
        self._executor.close()

    def _accept(self, request: Request, arrival_s: float) -> None:
        if request.request_id in self._delivery:  # its end may not have been delivered yet
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; allowed: a new one")
        self._check_ids("prompt_token_ids", request.prompt_token_ids)
        self._check_ids("generated_token_ids", request.generated_token_ids)
        sampling = request.sampling
        detokenizer = IncrementalDetokenizer(
            self._tokens,
            request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop_str=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )
        finish = self._replay(request, detokenizer) if request.generated_token_ids else None
        if finish is None:
            self._delivery.begin(self._scheduler.add(request, arrival_s), detokenizer)
        else:
            self._delivery.end_at_once(request.request_id, detokenizer.flush(), finish)
        self.stats.num_prompt_tokens += len(request.prompt_token_ids)

    def _check_ids(self, name: str, token_ids: tuple[int, ...]) -> None:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size)
            raise InvalidRequestError(f"{name} contain {wrong}; allowed: 0 to {self.vocab_size - 1}")

    def _replay(self, request: Request, detokenizer: IncrementalDetokenizer) -> Finish | None:
        """Bring the text to where the tokens generated elsewhere had it; return how they ended, if they had.

        A replica may die after it sent the last token and before it said that it was the last.
        """
        token_ids, sampling = request.generated_token_ids, request.sampling
        last = token_ids[-1]
        reason = find_end(
            request,
            len(token_ids),
            last,
            stop_token_ids=stop_ids(sampling, self.eos_token_ids),
            max_num_tokens=self._scheduler.limits.max_num_tokens(request),
        )
        is_stopped = reason is FinishReason.STOP
        detokenizer.resume(token_ids[:-1] if is_stopped and not sampling.include_stop_str_in_output else token_ids)
        usage = Usage(
            prompt_tokens=len(request.prompt_token_ids),
            cached_tokens=0,
            completion_tokens=len(token_ids),
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
        )
        if detokenizer.stop_string is not None:
            return Finish(reason=FinishReason.STOP, usage=usage, stop_string=detokenizer.stop_string)
        if reason is None:
            return None
        return Finish(reason=reason, usage=usage, stop_token_id=last if is_stopped else None)

    def _note_step(self, submitted: _SubmittedPlan, now_s: float) -> None:
        stats, counters = self.stats, self._scheduler.counters
        num_tokens = sum(submitted.plan.scheduled.nums_tokens)
        stats.num_steps += 1
        stats.num_computed_tokens += num_tokens
        stats.step_sequences.add(len(submitted.plan.scheduled))
        stats.step_tokens.add(num_tokens)
        stats.num_preemptions = counters.num_preemptions
        stats.num_recomputed_tokens = counters.num_recomputed_tokens
        stats.num_cached_tokens = counters.num_cached_tokens
        stats.num_host_tokens = counters.num_host_tokens
        stats.num_saved_blocks = self._pool.host.num_saved_blocks
        stats.num_loaded_blocks = self._pool.host.num_loaded_blocks
        stats.step_s.add(now_s - submitted.submitted_s)
        stats.busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s

    def _take_events(self) -> None:
        stored, evicted = self._pool.take_events()
        self._events.update(dict.fromkeys(stored, True))
        self._events.update(dict.fromkeys(evicted, False))


def _tell_room(max_context: int, cache: KVCacheManager, *, wanted: int) -> None:
    if max_context < wanted:
        logger.warning(
            "the context is %d tokens: the KV cache holds no more; wanted: %d, for which it would have to be larger",
            *(max_context, wanted),
        )
    longest = cache.layout.num_blocks_of(max_context - 1)
    logger.info(
        "KV cache: a sequence of %d tokens takes up to %d of %d blocks: room for %.1f at once",
        *(max_context, longest, cache.num_blocks, cache.num_blocks / longest),
    )
