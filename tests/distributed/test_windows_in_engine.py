"""Models with sliding windows in the whole engine, with caches that would not hold a sequence whole.

Prompts are several windows long. What no sequence holds and no prefix can use is filled with NaN after every step, so
that a token that attends to a block that was given back spoils its logits, and the request fails.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.engines import (
    LimitedExecutor,
    anonymous_tokens,
    engine_over,
    exact_config,
    in_group,
    request,
    run,
    runner_of,
)
from helpers.gloo_pool import GlooPool
from helpers.tiny_models import load_original, tiny_model

from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine import Engine, StepResult
from workers.executor import Executor
from workers.rank import lead_group
from workers.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 5
MAX_CONTEXT = 125
PROMPT = [11 * i % 149 + 3 for i in range(70)]

ALL_SLIDE = {"mistral-window": 24, "phi3-partial": 12}
"""Models, and the window of all their layers."""
ALTERNATE = {"gemma2-caps": 32, "gpt_oss": 34, "qwen2-window": 42, "cohere2": 40}
"""Models with two, two, three and three groups of layers, and hardly the blocks for one sequence of MAX_CONTEXT."""


def _config(name: str, *, num_blocks: int, tp: int = 1, pp: int = 1) -> EngineConfig:
    return exact_config(
        tiny_model(name),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=13),
        tp=tp,
        pp=pp,
        max_context=MAX_CONTEXT,
    )


def _engine(executor: Executor, config: EngineConfig, **options: Any) -> Engine:
    return engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=152, max_context=MAX_CONTEXT, **options)


def _poison(engine: Engine, executor: Executor) -> Callable[[StepResult], None]:
    """After a step, fill what is neither held nor known."""

    def fill(_: StepResult) -> None:
        pool = engine._pool
        unused = [block for block in pool._free if pool._hash_of[block] is None]
        for cache in runner_of(executor)._caches:
            cache.k_BPKH[unused] = torch.nan
            cache.v_BPKH[unused] = torch.nan

    return fill


@torch.inference_mode()
def _assert_greedy(name: str, asked: Request, token_ids: list[int]) -> None:
    """Every token is the original's choice after those before it."""
    original: Any = load_original(tiny_model(name))
    tokens = [*asked.prompt_token_ids, *token_ids]
    logits = original(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, len(asked.prompt_token_ids) - 1 :]
    assert token_ids == logits.argmax(dim=-1).tolist()


def _rounds() -> list[list[Request]]:
    """One long prompt; it again, with others that leave it after 8, 41 and 70 tokens; then some that grow together."""
    others = [PROMPT[:8] + [5] * 30, [*PROMPT[:41], 4, 3], [*PROMPT, 7, 6, 5]]
    return [
        [request("first", PROMPT, max_tokens=50)],
        [request(str(i), prompt, max_tokens=40) for i, prompt in enumerate([PROMPT, *others])],
        [request(str(i), PROMPT[i : i + 4], max_tokens=60) for i in range(4)],
    ]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("name", [*ALL_SLIDE, *ALTERNATE])
def test_a_cache_smaller_than_a_sequence_changes_no_token(name: str, enable_prefix_caching: bool) -> None:
    num_blocks = ALTERNATE.get(name, 11)
    config = _config(name, num_blocks=num_blocks)
    executor = lead_group(config)
    assert num_blocks < 25 * len(executor.windows), "it would hold a sequence whole"
    engine = _engine(executor, config, enable_prefix_caching=enable_prefix_caching)
    assert engine.max_context == MAX_CONTEXT
    for requests in _rounds():
        outcomes = run(engine, requests, each_step=_poison(engine, executor))
        for asked in requests:
            assert outcomes[asked.request_id].error is None
            _assert_greedy(name, asked, outcomes[asked.request_id].token_ids)
    assert engine.stats.num_preemptions > 0
    assert (engine.stats.num_cached_tokens > 0) == enable_prefix_caching
    assert engine.load.num_free_blocks == num_blocks


def _check(executor: Executor, config: EngineConfig, num_blocks: int) -> list[list[tuple[Request, list[int]]]]:
    """Runs in the leader of the group."""
    engine = _engine(LimitedExecutor(executor, num_blocks), config)
    results = []
    for requests in _rounds():
        outcomes = run(engine, requests)
        results.append([(asked, outcomes[asked.request_id].token_ids) for asked in requests])
    return results


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["gemma2-caps", "cohere2"])
def test_any_shape_changes_no_token(gloo_pool: GlooPool, name: str, tp: int, pp: int) -> None:
    config = _config(name, num_blocks=100, tp=tp, pp=pp)
    for results in in_group(gloo_pool, config, _check, 40, timeout_s=200):
        for asked, token_ids in results:
            _assert_greedy(name, asked, token_ids)


@pytest.mark.parametrize(("name", "window"), ALL_SLIDE.items())
def test_a_long_generation_holds_a_window(name: str, window: int) -> None:
    """121 tokens are generated; held are the blocks that the next one sees and the block that it begins."""
    config = _config(name, num_blocks=64)
    engine = _engine(lead_group(config), config)
    owned: list[int] = []

    run(
        engine,
        [request("a", PROMPT[:4], max_tokens=MAX_CONTEXT - 4)],
        each_step=lambda result: owned.append(result.load.num_blocks - result.load.num_free_blocks),
    )

    assert max(owned) == -(-(window - 1) // BLOCK_SIZE) + 1 < 25
