"""Any mix of requests, aborts, deadlines and steps on a small pool: each request ends once, with its own tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from helpers.fake_model import VOCAB_SIZE, run_alone
from helpers.scheduling import ScheduledModel, make_request
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from weft.recording import Recorder

from bench.simulation.quiet_loggers import only_errors
from bench.simulation.replay import replay_file
from workers.config import SchedulingPolicy
from workers.errors import InvalidRequestError, QueueFullError
from workers.plan import StepPlan
from workers.request import FinishReason, Request
from workers.sequence import Sequence

MAX_CONTEXT = 40
EOS_TOKEN_IDS = frozenset(range(0, VOCAB_SIZE, 24))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with only_errors("workers.roster"):  # it warns of each preemption
        yield


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of a pipeline divide prompts as short as these."""
    monkeypatch.setattr("workers.scheduler._MIN_PART", 4)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A request to be made."""

    shared: int
    own: list[int]
    num_said: int
    """Tokens that end the prompt, and that the model gives after those before: others may be computing them."""
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    priority: int
    patience_s: int | None
    num_done: int
    """Tokens that were generated elsewhere."""
    is_failing: bool

    def build(self, name: str, now_s: float) -> Request:
        """Make the request, with the tokens that it has already unless they end it."""
        prompt = [7] * self.shared + self.own
        if self.num_said:
            prompt += run_alone(make_request(name, prompt, max_tokens=self.num_said))
        fields: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "min_tokens": min(self.min_tokens, self.max_tokens),
            "ignore_eos": self.ignore_eos,
            "priority": self.priority,
            "deadline_s": None if self.patience_s is None else now_s + self.patience_s,
        }
        request = make_request(name, prompt, **fields)
        done = expected_tokens(request)[: self.num_done]
        if len(done) == self.max_tokens or set(done) & EOS_TOKEN_IDS:
            return request
        return make_request(name, prompt, generated=tuple(done), **fields)


drawn_requests = st.builds(
    Drawn,
    shared=st.integers(0, 8),
    own=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    num_said=st.sampled_from([0, 0, 1, 4]),
    max_tokens=st.integers(1, 24),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    priority=st.integers(0, 2),
    patience_s=st.sampled_from([None, None, None, 3, 20]),
    num_done=st.sampled_from([0, 0, 0, 1, 3]),
    is_failing=st.sampled_from([False] * 9 + [True]),
)


def expected_tokens(request: Request) -> list[int]:
    return run_alone(request, eos_token_ids=EOS_TOKEN_IDS, max_context=MAX_CONTEXT)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler with the fake model, which checks every plan and every cache cell it reads."""

    @initialize(
        num_blocks=st.integers(6, 14),
        block_size=st.integers(1, 4),
        plans=st.sampled_from([(1, False), (2, False), (3, False), (2, True), (2, True), (2, True)]),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        prefill_chunk_tokens=st.none() | st.integers(1, 6),
        enable_prefix_caching=st.booleans(),
        policy=st.sampled_from(SchedulingPolicy),
        promote_after_s=st.sampled_from([None, 0.0, 5.0]),
        num_host_blocks=st.sampled_from([0, 0, 1, 3, 8, 40]),
        windows=st.sampled_from([(None,), (None,), (5,), (1,), (2, 9), (None, 3), (None, None, 4, 7), (None, 12)]),
    )
    def build(
        self,
        *,
        num_blocks: int,
        windows: tuple[int | None, ...],
        max_num_seqs: int,
        extra_budget: int,
        plans: tuple[int, bool],
        **settings: Any,
    ) -> None:
        max_in_flight, looks_ahead = plans
        self.folder = TemporaryDirectory()
        self.recorder = Recorder(Path(self.folder.name) / "decisions", max_bytes=1 << 24)
        self.served = ScheduledModel(
            num_blocks=num_blocks * len(windows),
            windows=windows,
            max_context=MAX_CONTEXT,
            eos_token_ids=EOS_TOKEN_IDS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_waiting=8,
            max_in_flight=max_in_flight,
            looks_ahead=looks_ahead,
            sink=self.recorder,
            **settings,
        )
        self.max_in_flight, self.looks_ahead = max_in_flight, looks_ahead
        self.block_size = self.served.cache.block_size
        self.num_groups = len(self.served.model.windows)
        self.requests: dict[str, Request] = {}
        self.sequences: list[Sequence] = []
        self.num_drawn = 0
        self.resident: set[bytes] = set()

    @rule(batch=st.lists(drawn_requests, min_size=1, max_size=4))
    def add(self, batch: list[Drawn]) -> None:
        for drawn in batch:
            request = drawn.build(str(self.num_drawn), self.served.now_s)
            self.num_drawn += 1
            if self.is_accepted(request) and drawn.is_failing:
                self.served.model.failing_prompts.add(request.prompt_token_ids)

    def is_accepted(self, request: Request) -> bool:
        served = self.served
        try:
            self.sequences.append(served.add(request))
        except QueueFullError:
            assert served.scheduler.num_waiting >= served.config.max_waiting
            return False
        except InvalidRequestError:
            num_tokens = min(len(request.prompt_token_ids) + request.sampling.max_tokens, MAX_CONTEXT)
            assert num_tokens - 1 > served.cache.layout.max_sequence_tokens(MAX_CONTEXT)
            assert (num_tokens - 1) * self.num_groups > (served.cache.num_blocks - self.num_groups) * self.block_size
            return False
        self.requests[request.request_id] = request
        return True

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        has_ended = name in self.served.ends
        assert (self.served.abort(name) is None) == has_ended

    @rule()
    def launch(self) -> None:
        served = self.served
        for sequence in served.scheduler.expire(served.now_s):
            served._end(sequence.request_id, FinishReason.ABORT)
        ready = [sequence for sequence in self.sequences if sequence.slot >= 0 and not sequence.num_in_flight]
        decodes = [sequence for sequence in ready if sequence.num_tokens - sequence.num_computed_tokens == 1]
        num_running = served.scheduler.num_running
        num_preemptions = served.scheduler.counters.num_preemptions
        plan = served.launch()
        if plan is not None:
            self.check_budget(plan)
        is_settling = bool(served.flights) and (self.looks_ahead or served.scheduler._must_settle)
        if plan is not None or (len(served.flights) < self.max_in_flight and not is_settling):
            has_preempted = served.scheduler.counters.num_preemptions > num_preemptions
            self.check_decodes(plan, decodes, num_running, has_preempted=has_preempted)

    def check_budget(self, plan: StepPlan) -> None:
        config = self.served.config
        lengths = [share.num_tokens for share in plan.scheduled]
        assert 0 < sum(lengths) <= config.max_num_batched_tokens
        assert max(lengths) <= (config.prefill_chunk_tokens or config.max_num_batched_tokens)

    def check_decodes(
        self, plan: StepPlan | None, decodes: list[Sequence], num_running: int, *, has_preempted: bool
    ) -> None:
        """A decode is left out only for want of blocks, or because it belongs to the next plan in flight: it and others
        of one token, which may be the last of a prompt, are as many as each plan takes.
        """
        skipped = [sequence for sequence in decodes if sequence.slot >= 0 and not sequence.num_in_flight]
        if has_preempted or self.served.cache.num_free_blocks < self.num_groups:
            num_slots = self.block_size / self.num_groups  # for each number in a table
            full = [s for s in skipped if s.num_computed_tokens == len(s.block_table) * num_slots]
            assert len(full) == len(skipped) or self.max_in_flight > 1
        else:
            num_single = plan.scheduled.nums_tokens.count(1) if plan else 0
            assert num_single >= min(len(decodes), -(-num_running // self.max_in_flight))

    @precondition(lambda self: self.served.flights)
    @rule()
    def collect(self) -> None:
        self.served.collect()

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.served.now_s += seconds

    @rule(num_steps=st.integers(1, 12))
    def run_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for _ in range(self.max_in_flight):
                self.launch()
            if self.served.flights:
                self.served.collect()

    @invariant()
    def nothing_contradicts(self) -> None:
        self.served.scheduler.check_integrity()

    @invariant()
    def events_lead_to_what_is_resident(self) -> None:
        stored, evicted = self.served.pool.take_events()
        self.resident = (self.resident | set(stored)) - set(evicted)
        assert self.resident == set(self.served.pool.resident_hashes())

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        served = self.served
        served.run(max_steps=3000)
        assert served.ends.keys() == self.requests.keys(), "a request has no end"
        for name, request in self.requests.items():
            self.check_tokens(request, served.tokens[name], served.ends[name])
        assert served.cache.num_free_blocks == served.cache.num_blocks
        assert not served.scheduler.has_unfinished
        assert served.scheduler.num_pending_tokens == 0
        self.check_counters()
        self.check_recording()

    def check_counters(self) -> None:
        counters, sequences = self.served.scheduler.counters, self.sequences
        assert all(0 <= sequence.num_cached_tokens <= sequence.num_prompt_tokens for sequence in sequences)
        assert counters.num_cached_tokens == sum(sequence.num_cached_tokens for sequence in sequences)
        assert counters.num_host_tokens <= counters.num_cached_tokens

    def check_recording(self) -> None:
        self.recorder.close()
        outcome = replay_file(self.recorder.path)
        self.folder.cleanup()
        assert outcome.difference is None
        assert sum(outcome.calls.values()) >= len(self.requests), "everything is in it"

    def check_tokens(self, request: Request, tokens: list[int], end: FinishReason | str) -> None:
        expected = expected_tokens(request)
        if end is FinishReason.ABORT or request.prompt_token_ids in self.served.model.failing_prompts:
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            sampling = request.sampling
            is_stop = tokens[-1] in EOS_TOKEN_IDS and not sampling.ignore_eos and len(tokens) > sampling.min_tokens
            assert end is (FinishReason.STOP if is_stop else FinishReason.LENGTH)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=120, stateful_step_count=30, derandomize=True, deadline=None)
