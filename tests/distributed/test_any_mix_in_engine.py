"""Any mix of requests on a small pool in the whole engine: each ends once, with what it gets alone.

Policies, salts, sampling, penalties, stops, log-probabilities, the host tier, chunks, aborts at any moment and tokens
from elsewhere, all at once and drawn by seed. tests/property has the scheduler alone.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import (
    LimitedExecutor,
    Outcome,
    anonymous_tokens,
    engine_over,
    exact_config,
    in_group,
    request,
    run,
)
from helpers.gloo_pool import GlooPool
from helpers.tiny_models import tiny_model

from bench.simulation.quiet_loggers import only_errors
from parallel.families.registry import describe_model
from workers.config import CacheConfig, EngineConfig, SchedulerConfig, SchedulingPolicy
from workers.engine import Engine
from workers.executor import Executor
from workers.rank import lead_group
from workers.request import FinishReason, Request, RequestId
from workers.tokenizer import load_token_table

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
MAX_CONTEXT = 49
NUM_IDS = 152
"""Tokens of prompts are some of the first of either model's vocabulary."""
EOS_TOKEN_IDS = frozenset({9, 50})


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with only_errors("workers.roster"):  # it warns of each preemption
        yield


def _config(folder: Path, *, looks_ahead: bool, tp: int = 1, pp: int = 1) -> EngineConfig:
    return exact_config(
        folder,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=64, host_cache_bytes=8 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=looks_ahead),
        tp=tp,
        pp=pp,
        max_context=MAX_CONTEXT,
    )


def _engine(executor: Executor, config: EngineConfig) -> Engine:
    has_tokenizer = (Path(config.model) / "tokenizer.json").is_file()
    tokens = load_token_table(Path(config.model)) if has_tokenizer else anonymous_tokens()
    return engine_over(
        executor,
        config,
        tokens=tokens,
        vocab_size=describe_model(Path(config.model)).vocab_size,
        eos_token_ids=EOS_TOKEN_IDS,
        max_context=MAX_CONTEXT,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        prefill_chunk_tokens=config.scheduler.prefill_chunk_tokens,
    )


def _small_engine(executor: Executor, config: EngineConfig, draw: random.Random) -> Engine:
    """One with few blocks and slots, and any settings."""
    num_groups = len(executor.windows)
    few = LimitedExecutor(executor, draw.choice([13, 16, 20]) * num_groups)
    few.num_host_blocks = draw.choice([0, 3, 9, 60])
    max_num_seqs = draw.randint(2, 8)
    scheduler = SchedulerConfig(
        policy=draw.choice(list(SchedulingPolicy)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw.choice([0, 1, 5, 40]),
        prefill_chunk_tokens=draw.choice([None, 1, 3, 7]),
        async_scheduling=config.scheduler.async_scheduling,
        promote_after_s=draw.choice([None, 0.0, 60.0]),
    )
    return _engine(few, replace(config, scheduler=scheduler))


def _draw_request(name: str, bases: list[list[int]], draw: random.Random) -> Request:
    base = draw.choice(bases)
    own = [draw.randrange(3, NUM_IDS) for _ in range(draw.choice([1, 1, 4]))]
    max_tokens = draw.choice([1, 3, 20, 40])
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": draw.choice([0, 0, max_tokens // 2]),
        "ignore_eos": draw.random() < 0.7,
        "stop": draw.choice([(), (), ("a",), ("the", "e ")]),
        "stop_token_ids": draw.choice([(), (), tuple(draw.sample(range(NUM_IDS), 9))]),
        "logprobs": draw.choice([None, None, 2]),
        "repetition_penalty": draw.choice([1.0, 1.0, 1.3]),
        "frequency_penalty": draw.choice([0.0, 0.0, -0.3]),
    }
    if draw.random() < 0.5:
        options |= {"temperature": 0.8, "seed": draw.getrandbits(64), "top_k": draw.choice([0, 5])}
    asked = request(name, base[: draw.randint(0, len(base))] + own, **options)
    return replace(asked, priority=draw.randrange(3), cache_salt=draw.choice(["", "", "salt"]))


class _Mix:
    """Requests that come to an engine, go on elsewhere and are aborted at random."""

    def __init__(self, engine: Engine, draw: random.Random) -> None:
        self.engine = engine
        self.requests: dict[str, Request] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.aborted: set[str] = set()
        self._draw = draw
        self._bases = [[draw.randrange(3, NUM_IDS) for _ in range(24)] for _ in range(2)]

    def serve(self, num_requests: int) -> None:
        """Let so many come, and step until all have ended."""
        engine, draw = self.engine, self._draw
        while engine.has_work or len(self.requests) < num_requests:
            if len(self.requests) < num_requests and draw.random() < 0.6:
                self._add(_draw_request(str(len(self.requests)), self._bases, draw))
                self._go_on_elsewhere()
            engine.launch()
            self._abort_one()
            if draw.random() < 0.5:
                self._take()
            engine.collect()
            self._abort_one()
            self._take()
            engine.check_integrity()

    def _add(self, asked: Request) -> None:
        self.engine.add_request(asked)
        self.requests[asked.request_id] = asked
        self.outcomes[asked.request_id] = Outcome()

    def _go_on_elsewhere(self) -> None:
        name = self._draw.choice(list(self.requests))
        asked, outcome = self.requests[name], self.outcomes[name]
        if self._draw.random() < 0.2 and outcome.token_ids and not asked.generated_token_ids:
            generated = tuple(outcome.token_ids[: self._draw.randint(1, len(outcome.token_ids))])
            self._add(replace(asked, request_id=RequestId(str(len(self.requests))), generated_token_ids=generated))

    def _abort_one(self) -> None:
        if self.requests and self._draw.random() < 0.02:
            name = self._draw.choice(list(self.requests))
            self.aborted.add(name)
            self.engine.abort(RequestId(name))

    def _take(self) -> None:
        for output in self.engine.take_result().outputs:
            self.outcomes[output.request_id].add(output)


def _assert_as_alone(asked: Request, outcome: Outcome, alone: Outcome, *, was_aborted: bool) -> None:
    token_ids = [*asked.generated_token_ids, *outcome.token_ids]
    assert outcome.finish is not None
    assert alone.finish is not None
    if was_aborted and outcome.finish.reason is FinishReason.ABORT:
        assert token_ids == alone.token_ids[: len(token_ids)]
        return
    assert token_ids == alone.token_ids
    assert alone.text == outcome.text or (asked.generated_token_ids and alone.text.endswith(outcome.text))
    assert replace(outcome.finish, usage=alone.finish.usage) == alone.finish
    assert outcome.finish.usage.completion_tokens == len(token_ids)
    values, expected = ([each.logprob for each in one.logprobs] for one in (outcome, alone))
    assert values == pytest.approx(expected[len(asked.generated_token_ids) :], abs=1e-3), "other orders of additions"


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_any_mix_gets_what_each_gets_alone(looks_ahead: bool, shared: Path) -> None:
    config = _config(shared / "models" / "stories260K", looks_ahead=looks_ahead)
    _check(lead_group(config), config, 12)


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_any_mix_gets_it_under_windows_too(looks_ahead: bool) -> None:
    config = _config(tiny_model("gemma2-caps"), looks_ahead=looks_ahead)
    _check(lead_group(config), config, 12)


@pytest.mark.parametrize(("tp", "pp", "looks_ahead"), [(2, 1, True), (1, 2, False)])
def test_any_mix_gets_it_of_two_ranks_too(
    gloo_pool: GlooPool, tp: int, pp: int, looks_ahead: bool, shared: Path
) -> None:
    config = _config(shared / "models" / "stories260K", looks_ahead=looks_ahead, tp=tp, pp=pp)
    in_group(gloo_pool, config, _check, 4, timeout_s=200)


def _check(executor: Executor, config: EngineConfig, num_seeds: int) -> None:
    """Of a group of ranks it runs in the leader."""
    totals: Counter[str] = Counter()
    for seed in range(num_seeds):
        draw = random.Random(seed)
        engine = _small_engine(executor, config, draw)
        mix = _Mix(engine, draw)
        mix.serve(16)

        stats, load, ends = engine.stats, engine.load, [outcome.finish for outcome in mix.outcomes.values()]
        assert load.num_free_blocks == load.num_blocks
        assert sum(stats.num_finished.values()) == len(mix.requests)
        assert stats.num_prompt_tokens == sum(end.usage.prompt_tokens for end in ends if end is not None)
        assert stats.num_cached_tokens == sum(end.usage.cached_tokens for end in ends if end is not None)
        assert stats.num_generation_tokens == sum(len(outcome.token_ids) for outcome in mix.outcomes.values())
        for request_id, asked in mix.requests.items():
            fresh = replace(asked, generated_token_ids=(), priority=0)
            alone = run(_engine(executor, config), [fresh])[request_id]
            _assert_as_alone(asked, mix.outcomes[request_id], alone, was_aborted=request_id in mix.aborted)
        totals += Counter(
            preemptions=stats.num_preemptions, cached=stats.num_cached_tokens, loaded=stats.num_loaded_blocks
        )
    assert totals["preemptions"] > 0
    assert totals["cached"] > 10 * num_seeds
    assert totals["loaded"] > 0
