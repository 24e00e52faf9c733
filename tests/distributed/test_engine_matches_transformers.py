"""The whole engine, from requests to text, on every shape of group: greedy tokens are those of transformers.

The functions whose names begin with `_` run in the leader of a group, a worker of the pool; an assertion that fails
there fails the test.
"""

import functools
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
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
from helpers.gloo_pool import GlooPool, RankFailedError
from helpers.tiny_models import FAMILIES, load_original, tiny_model
from weft.tokenizer.load import load_tokenizer

from parallel.families.registry import describe_model
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine import Engine
from workers.engine_builder import read_eos_token_ids
from workers.errors import GroupFailedError
from workers.executor import Executor
from workers.model_runner import ModelRunner, StepWork
from workers.overlap import Lookahead
from workers.plan import StepPlan
from workers.request import FinishReason, Request, RequestId
from workers.tokenizer import load_token_table

SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
BLOCK_SIZE = 8
VARIANTS = [(True, BLOCK_SIZE), (True, 7), (False, BLOCK_SIZE), (False, 7), (False, None), (True, None)]
"""(prefix cache on, tokens of a prompt in a step)"""
HARDEST = [(True, 7), (True, None)]
"""Chunks that end within blocks; whole prompts, all but new at first and all of them cached then.

The scheduler cuts prompts, and knows no family: groups of ranks see the other ways for one model.
"""
NUM_TOKENS = 64
NUM_TOKENS_SPLIT = 24
"""Of a group of ranks: what is split is heads and layers, whatever the position."""
CLEAR_GAP = 0.01
"""Between the two most probable tokens: a smaller one may fall either way in another order of additions."""
WITHIN_S = 15.0
"""In which a broken group is noticed: some seconds, more where others want the cores."""


def config_of(folder: Path, shape: tuple[int, int] = (1, 1), *, is_async: bool = False, **changes: Any) -> EngineConfig:
    config = exact_config(
        folder,
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=512),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, async_scheduling=is_async),
        tp=shape[0],
        pp=shape[1],
    )
    return replace(config, **changes)


def engine_of(executor: Executor, config: EngineConfig, **options: Any) -> Engine:
    """An engine for the model in the config's folder, with its tokenizer if it has one."""
    folder = Path(config.model)
    description = describe_model(folder)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    tokens = load_token_table(folder) if has_tokenizer else anonymous_tokens()
    return engine_over(
        executor,
        config,
        tokens=tokens,
        vocab_size=description.vocab_size,
        eos_token_ids=read_eos_token_ids(folder, tokens) if has_tokenizer else frozenset(),
        max_context=description.max_context,
        **options,
    )


# The same tokens as transformers


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", ["stories260K", "TinyStories-656K", "stories3M"])
def test_real_models_write_the_golden_texts(
    gloo_pool: GlooPool, shared: Path, model: str, shape: tuple[int, int]
) -> None:
    if (model, shape) == ("stories3M", (4, 1)):
        pytest.skip("6 heads do not divide over 4 ranks")
    folder = shared / "models" / model
    variants = VARIANTS if shape == (1, 1) or model == "stories260K" else HARDEST
    in_group(gloo_pool, config_of(folder, shape), _check_variants, golden_cases(folder), variants, timeout_s=300)


def test_256_tokens_are_those_of_a_model_without_a_cache(gloo_pool: GlooPool, shared: Path) -> None:
    folder = shared / "models" / "stories260K"
    prompts = [prompt for prompt, _, _ in golden_cases(folder)[:4]]
    written = in_group(gloo_pool, config_of(folder), _write, prompts, timeout_s=300)
    original = load_original(folder)
    for prompt, output in zip(prompts, written, strict=True):
        assert len(output) == 256
        with torch.no_grad():
            logits = original(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits[torch.arange(256), output]
        assert (chosen >= logits.amax(dim=-1) - CLEAR_GAP).all()


def _write(executor: Executor, config: EngineConfig, prompts: list[list[int]]) -> list[list[int]]:
    requests = [request(str(i), prompt, max_tokens=256, ignore_eos=True) for i, prompt in enumerate(prompts)]
    outcomes = run(engine_of(executor, config), requests)
    return [outcomes[item.request_id].token_ids for item in requests]


def test_four_stages_write_the_golden_texts(gloo_pool: GlooPool, shared: Path) -> None:
    """Five layers over four stages; up to four batches are in flight."""
    folder = shared / "models" / "stories260K"
    in_group(gloo_pool, config_of(folder, (1, 4)), _check_variants, golden_cases(folder), HARDEST, timeout_s=300)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_write_the_tokens_of_transformers(
    gloo_pool: GlooPool, family: str, shape: tuple[int, int]
) -> None:
    variants = VARIANTS if shape == (1, 1) else HARDEST
    config = config_of(tiny_model(family), shape)
    in_group(gloo_pool, config, _check_variants, random_cases(family), variants, timeout_s=300)


Case = tuple[list[int], list[int], str | None]
"""Prompt, greedy output, its text."""


def golden_cases(folder: Path) -> list[Case]:
    """Six short prompts and a long one, decided clearly at every token; at least 64 tokens, or up to the stop."""
    tokenizer = load_tokenizer(folder).tokenizer
    with open(folder / "golden_greedy.jsonl") as lines:
        records = [json.loads(line) for line in lines]
    clear = [record for record in records if record["min_top1_top2_logprob_gap"] >= CLEAR_GAP]
    short = [record for record in clear if len(record["prompt_ids"]) < 100][:6]
    long = [record for record in clear if len(record["prompt_ids"]) >= 100][:1]
    assert len(short) == 6
    cases: list[Case] = []
    for record in short + long:
        prompt, output, text = record["prompt_ids"], record["output_ids"], None
        if len(output) <= NUM_TOKENS:
            text = tokenizer.decode(prompt + output).removeprefix(tokenizer.decode(prompt))  # with its first space
            assert text.strip() == record["text"].strip()
        cases.append((prompt, output[:NUM_TOKENS], text))
    return cases


@functools.cache
def random_cases(family: str) -> list[Case]:
    """Prompts of many lengths, continued greedily by transformers."""
    original = load_original(tiny_model(family))
    torch.set_num_threads(1)  # two would wait for each other where other processes want the cores
    generator = torch.Generator().manual_seed(0)
    cases: list[Case] = []
    for length in (1, 7, 8, 33, 90):
        prompt = torch.randint(3, 319, (1, length), generator=generator)
        with torch.no_grad():
            output = original.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
            )
        cases.append((prompt[0].tolist(), output[0, length:].tolist(), None))
    assert all(len(output) == NUM_TOKENS for _, output, _ in cases)
    return cases


def _check_variants(
    executor: Executor, config: EngineConfig, cases: list[Case], variants: list[tuple[bool, int | None]]
) -> None:
    num_tokens = NUM_TOKENS if config.parallel.world_size == 1 else NUM_TOKENS_SPLIT
    requests = [request(str(i), prompt, max_tokens=num_tokens) for i, (prompt, _, _) in enumerate(cases)]
    for cached, chunk in variants:
        engine = engine_of(executor, config, enable_prefix_caching=cached, prefill_chunk_tokens=chunk)
        for is_repeated in (False, True) if (cached, chunk) == (True, None) else (False,):
            outcomes = run(engine, requests)
            for i, (_, token_ids, text) in enumerate(cases):
                outcome = outcomes[str(i)]
                assert outcome.token_ids == token_ids[:num_tokens], (cached, chunk, i)
                assert text is None or len(token_ids) > num_tokens or outcome.text == text
            assert (engine.stats.num_cached_tokens > 0) >= is_repeated


# The same tokens whatever else is in the batch


@pytest.mark.parametrize(("shape", "is_async"), [((1, 1), False), ((1, 1), True), ((2, 1), True), ((2, 2), False)])
def test_mixed_requests_equal_the_same_requests_alone(
    gloo_pool: GlooPool, shared: Path, shape: tuple[int, int], is_async: bool
) -> None:
    folder = shared / "models" / "stories3M"
    config = config_of(folder, shape, is_async=is_async)
    in_group(gloo_pool, config, _check_mixed, mixed_requests(folder), timeout_s=300)


def mixed_requests(folder: Path) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "top_k": 40, "seed": 2},
        {"temperature": 1.2, "top_p": 0.9, "seed": 3},
        {"temperature": 1.0, "min_p": 0.05, "seed": 4, "repetition_penalty": 1.2},
        {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7, "presence_penalty": 0.3, "stop": ("the",)},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 3, "min_tokens": 30},
    ]
    prompts = [prompt for prompt, _, _ in golden_cases(folder)]
    return [
        request(str(i), prompts[i % len(prompts)], **{"max_tokens": 20 + 3 * i, **kinds[i % len(kinds)]})
        for i in range(14)
    ]


def _check_mixed(executor: Executor, config: EngineConfig, requests: list[Request]) -> None:
    assert (executor.lookahead is Lookahead.ALWAYS) == config.scheduler.async_scheduling
    together = run(engine_of(executor, config, prefill_chunk_tokens=50), requests)
    alone = engine_of(executor, config)
    for item in requests:
        expected = run(alone, [item])[item.request_id]
        assert_same(together[item.request_id], expected)


def assert_same(outcome: Outcome, expected: Outcome) -> None:
    assert outcome.token_ids == expected.token_ids
    assert outcome.text == expected.text
    assert outcome.finish is not None
    assert expected.finish is not None
    assert outcome.finish.reason == expected.finish.reason
    assert [entry.token_id for entry in outcome.logprobs] == [entry.token_id for entry in expected.logprobs]
    assert [entry.logprob for entry in outcome.logprobs] == pytest.approx(
        [entry.logprob for entry in expected.logprobs], abs=1e-4
    )


@pytest.mark.parametrize(("shape", "is_async"), [((1, 1), True), ((1, 2), False)])
def test_preempted_requests_get_the_same_tokens(
    gloo_pool: GlooPool, shared: Path, shape: tuple[int, int], is_async: bool
) -> None:
    folder = shared / "models" / "stories260K"
    config = config_of(folder, shape, is_async=is_async)
    in_group(gloo_pool, config, _check_preemption, mixed_requests(folder), timeout_s=300)


def _check_preemption(executor: Executor, config: EngineConfig, requests: list[Request]) -> None:
    expected = run(engine_of(executor, config), requests)
    engine = engine_of(LimitedExecutor(executor, 45), config)  # 360 tokens; the requests want five times that
    outcomes = run(engine, requests)
    assert engine.stats.num_preemptions > 0
    for item in requests:
        assert_same(outcomes[item.request_id], expected[item.request_id])


@pytest.mark.parametrize("shape", [(1, 1), (2, 1)])
def test_a_request_goes_on_from_every_position(gloo_pool: GlooPool, shared: Path, shape: tuple[int, int]) -> None:
    folder = shared / "models" / "TinyStories-656K"
    in_group(gloo_pool, config_of(folder, shape), _check_failover, mixed_requests(folder)[:7], timeout_s=300)


def _check_failover(executor: Executor, config: EngineConfig, requests: list[Request]) -> None:
    """Each request, cut after each token, goes on in an engine that has never seen it."""
    whole: dict[str, Outcome] = {item.request_id: Outcome() for item in requests}
    texts: dict[tuple[str, int], str] = {}
    engine = engine_of(executor, config)
    for item in requests:
        engine.add_request(item)
    while engine.has_work:
        for output in engine.step().outputs:
            outcome = whole[output.request_id]
            outcome.add(output)
            texts[output.request_id, len(outcome.token_ids)] = outcome.text
    rest = [
        replace(
            item,
            request_id=RequestId(f"{item.request_id}-{split}"),
            generated_token_ids=tuple(whole[item.request_id].token_ids[:split]),
        )
        for item in requests
        for split in range(1, len(whole[item.request_id].token_ids), 1 if item is requests[-1] else 5)
    ]
    outcomes = run(engine_of(executor, config), rest)
    for item in rest:
        name = item.request_id.split("-")[0]
        split = len(item.generated_token_ids)
        assert [*item.generated_token_ids, *outcomes[item.request_id].token_ids] == whole[name].token_ids
        assert texts[name, split] + outcomes[item.request_id].text == whole[name].text


# Endings


@pytest.mark.parametrize("shape", [(1, 1), (2, 2)])
def test_abort_frees_blocks_when_its_steps_return(gloo_pool: GlooPool, shared: Path, shape: tuple[int, int]) -> None:
    folder = shared / "models" / "stories260K"
    in_group(gloo_pool, config_of(folder, shape), _check_abort, mixed_requests(folder))


def _check_abort(executor: Executor, config: EngineConfig, requests: list[Request]) -> None:
    engine = engine_of(executor, config)
    for item in requests:
        engine.add_request(item)
    for _ in range(10):
        engine.step()
    assert engine.load.num_running > 5
    engine.abort_all()
    outputs = [output for _ in range(executor.max_in_flight) for output in engine.step().outputs]
    finishes = [output.finish for output in outputs if output.finish is not None]
    assert [finish.reason for finish in finishes] == [FinishReason.ABORT] * len(finishes)
    assert engine.load.num_free_blocks == engine.load.num_blocks
    assert not engine.has_work


BROKEN = [((2, 1), False), ((2, 1), True), ((1, 2), False), ((1, 3), False)]
"""Groups of which rank 1 breaks: one of two in a stage, the last stage, the one between two others."""


@pytest.mark.parametrize(("shape", "is_async"), BROKEN)
def test_a_killed_rank_fails_the_group_within_seconds(
    gloo_pool: GlooPool, shared: Path, shape: tuple[int, int], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / "models" / "stories260K"
    config = config_of(folder, shape, is_async=is_async)
    monkeypatch.setattr("helpers.engines.be_rank", _be_rank_that_dies)
    seconds, message = in_group(gloo_pool, config, _fail_in_the_middle, may_die=True)
    # a busy machine may tell rank 0 of the broken collective long before of the broken connection
    assert "rank 1 died, hangs or is cut off" in message or "a peer died" in message
    assert seconds < WITHIN_S


@pytest.mark.parametrize(("shape", "is_async"), BROKEN)
def test_a_hung_rank_fails_the_group_after_the_step_timeout(
    gloo_pool: GlooPool, shared: Path, shape: tuple[int, int], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(shared / "models" / "stories260K", shape, is_async=is_async, step_timeout_s=1.0)
    monkeypatch.setattr("helpers.engines.be_rank", _be_rank_that_hangs)
    seconds, _ = in_group(gloo_pool, config, _fail_in_the_middle)
    assert seconds < WITHIN_S


def _fail_in_the_middle(executor: Executor, config: EngineConfig) -> tuple[float, str]:
    """Step until the group fails; how long the failing step took, and what it said."""
    engine = engine_of(executor, config)
    engine.add_request(request("a", [1, 2, 3], max_tokens=200))
    while True:
        start_s = time.monotonic()
        try:
            engine.step()
        except GroupFailedError as error:
            return time.monotonic() - start_s, str(error)


def _be_rank_that_dies(rank: int, *args: Any) -> Any:
    return _be_rank_with_a_last_step(rank, lambda: os.kill(os.getpid(), signal.SIGKILL), *args)


def _be_rank_that_hangs(rank: int, *args: Any) -> Any:
    return _be_rank_with_a_last_step(rank, lambda: time.sleep(3), *args)


def _be_rank_with_a_last_step(rank: int, act: Any, *args: Any) -> Any:
    from helpers.engines import be_rank

    if rank == 0:
        return be_rank(rank, *args)
    with pytest.MonkeyPatch.context() as patch:
        original = ModelRunner.prepare

        def prepare_until(self: ModelRunner, plan: StepPlan) -> StepWork:
            if rank == 1 and plan.number == 10:
                act()
            return original(self, plan)

        patch.setattr(ModelRunner, "prepare", prepare_until)
        try:
            return be_rank(rank, *args)
        except Exception as error:  # the group ends, and this rank with it
            return repr(error)


def test_a_rank_that_cannot_load_fails_the_start_with_its_reason(
    gloo_pool: GlooPool, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(shared / "models" / "stories260K", (2, 1))
    monkeypatch.setattr("helpers.engines.be_rank", _be_rank_without_model)
    with pytest.raises(RankFailedError, match=r"GroupFailedError: rank 1 failed: ConfigError: .*nowhere"):
        in_group(gloo_pool, config, _fail_in_the_middle)


def _be_rank_without_model(rank: int, config: EngineConfig, *args: Any) -> Any:
    from helpers.engines import be_rank

    return be_rank(rank, replace(config, model="nowhere") if rank else config, *args)
