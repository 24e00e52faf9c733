"""A scheduler that drives the fake model, with several plans in flight, and the record of what its requests got."""

from collections import deque
from functools import partial
from typing import Any

from weft.recording import FrameSink

from helpers.fake_model import FakeModel
from workers.config import SchedulerConfig
from workers.kv_cache_manager import KVCacheManager
from workers.plan import ModelOutput, StepPlan
from workers.recording import RecordingScheduler
from workers.request import FinishReason, Request, RequestId, SamplingParams
from workers.scheduler import Scheduler, TokenOutput
from workers.sequence import Sequence


def make_request(name: str, prompt: list[int], *, generated: tuple[int, ...] = (), **fields: Any) -> Request:
    """Build a request; `fields` are those of SamplingParams, or priority, cache_salt and deadline_s."""
    own = {key: fields.pop(key) for key in ("priority", "cache_salt", "deadline_s") if key in fields}
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        generated_token_ids=generated,
        sampling=SamplingParams(**fields),
        **own,
    )


def prompt(num_tokens: int, first: int = 1) -> list[int]:
    """Return so many token ids that follow each other."""
    return list(range(first, first + num_tokens))


def shares(plan: StepPlan | None) -> list[tuple[int, int, int]]:
    """Return slot, start and tokens of each share."""
    assert plan is not None
    return [(share.slot, share.start, share.num_tokens) for share in plan.scheduled]


class ScheduledModel:
    """Scheduler and model together. `launch` puts one plan in flight, `collect` takes the output of the oldest."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_in_flight: int = 1,
        looks_ahead: bool = False,
        max_context: int = 1000,
        eos_token_ids: frozenset[int] = frozenset(),
        enable_prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        num_host_blocks: int = 0,
        sink: FrameSink | None = None,
        **config: Any,
    ) -> None:
        settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **config}
        self.config = SchedulerConfig(**settings)
        self.cache = KVCacheManager.with_pool(
            num_blocks,
            block_size=block_size,
            hash_key=b"test",
            windows=windows,
            max_tokens_in_flight=self.config.max_chunk_tokens * max_in_flight,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.pool = self.cache.pool
        self.host = self.pool.host
        make_scheduler = Scheduler if sink is None else partial(RecordingScheduler, sink=sink)
        self.scheduler = make_scheduler(
            self.config,
            self.cache,
            max_context=max_context,
            eos_token_ids=eos_token_ids,
            max_in_flight=max_in_flight,
            looks_ahead=looks_ahead,
        )
        self.model = FakeModel(block_size, windows)
        self.now_s = 0.0
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason | str] = {}
        self.flights: deque[tuple[StepPlan, ModelOutput]] = deque()

    def submit(self, name: str, prompt: list[int], **fields: Any) -> Sequence:
        """Add a request as `make_request` builds it."""
        return self.add(make_request(name, prompt, **fields))

    def add(self, request: Request) -> Sequence:
        """Add a request and open its record."""
        sequence = self.scheduler.add(request, self.now_s)
        self.tokens[request.request_id] = list(request.generated_token_ids)
        return sequence

    def abort(self, name: str) -> Sequence | None:
        """Abort a request and record its end."""
        sequence = self.scheduler.abort(RequestId(name), self.now_s)
        if sequence is not None:
            self._end(sequence.request_id, FinishReason.ABORT)
        return sequence

    def launch(self) -> StepPlan | None:
        """Schedule one plan."""
        for sequence in self.scheduler.expire(self.now_s):
            self._end(sequence.request_id, FinishReason.ABORT)
        plan = self.scheduler.schedule(self.now_s)
        if plan is not None:
            self.flights.append((plan, self.model.run(plan)))
        return plan

    def collect(self) -> list[TokenOutput]:
        """Update the scheduler with the output of the oldest plan in flight."""
        plan, output = self.flights.popleft()
        outputs = self.scheduler.update(plan, output, self.now_s)
        for token_output in outputs:
            self._record(token_output)
        return outputs

    def step(self) -> list[TokenOutput]:
        """Fill the pipeline, then collect once."""
        while self.launch() is not None:
            pass
        return self.collect() if self.flights else []

    def run(self, max_steps: int = 1000) -> None:
        """Step until everything has ended, checking integrity after each step."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return
            self.step()
            self.scheduler.check_integrity()
        raise AssertionError(f"unfinished after {max_steps} steps")

    def _record(self, token_output: TokenOutput) -> None:
        request_id = token_output.sequence.request_id
        assert request_id not in self.ends, f"{request_id} gets output after its end"
        if token_output.error is not None:
            assert token_output.token_id is None
            assert token_output.finish is None
            self._end(request_id, str(token_output.error))
            return
        assert token_output.token_id is not None
        self.tokens[request_id].append(token_output.token_id)
        if token_output.finish is not None:
            self._end(request_id, token_output.finish.reason)

    def _end(self, request_id: str, how: FinishReason | str) -> None:
        assert request_id not in self.ends, f"{request_id} ends twice"
        self.ends[request_id] = how
