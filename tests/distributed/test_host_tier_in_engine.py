"""The host tier in the whole engine: prompts that evict each other's blocks come back from the host, bit for bit."""

from typing import Any

import pytest
import torch
from helpers.engines import (
    LimitedExecutor,
    anonymous_tokens,
    cached_cells,
    engine_over,
    exact_config,
    in_group,
    request,
    run,
)
from helpers.gloo_pool import GlooPool
from helpers.tiny_models import tiny_model

from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine import Engine
from workers.errors import EngineConfigError
from workers.executor import Executor
from workers.rank import lead_group
from workers.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
MAX_CONTEXT = 96
PROMPTS = [[(7 * i + 13 * j) % 140 + 3 for j in range(41)] for i in range(5)]
"""Each fills ten blocks and begins an eleventh; the pool has less than two of them need."""
NUM_BLOCKS = 20


def _config(name: str, *, host_cache_bytes: int = 32 << 20, tp: int = 1, pp: int = 1) -> EngineConfig:
    return exact_config(
        tiny_model(name),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, host_cache_bytes=host_cache_bytes),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        tp=tp,
        pp=pp,
        max_context=MAX_CONTEXT,
    )


def _engine(executor: Executor, config: EngineConfig) -> Engine:
    return engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=152, max_context=MAX_CONTEXT)


def _requests(round_number: int, **sampling: Any) -> list[Request]:
    options = {"max_tokens": 6, **sampling}
    return [request(f"{round_number}-{i}", prompt, **options) for i, prompt in enumerate(PROMPTS)]


def _serve_in_turn(engine: Engine, requests: list[Request]) -> list[list[int]]:
    return [run(engine, [each])[each.request_id].token_ids for each in requests]


def test_evicted_blocks_come_back_bit_for_bit() -> None:
    config = _config("llama")
    executor = lead_group(config)
    engine = _engine(executor, config)
    computed = []
    for each, prompt in zip(_requests(0), PROMPTS, strict=True):
        run(engine, [each])
        computed.append(cached_cells(engine, executor, prompt))
    assert engine.stats.num_cached_tokens == engine.stats.num_loaded_blocks == 0

    for each, prompt, cells in zip(_requests(1), PROMPTS, computed, strict=True):
        outcome = run(engine, [each])[each.request_id]
        assert outcome.finish is not None
        assert outcome.finish.usage.cached_tokens == 40, "all full blocks of the prompt"
        assert all(map(torch.equal, cached_cells(engine, executor, prompt), cells))
    stats = engine.stats
    assert stats.num_cached_tokens == 5 * 40
    assert stats.num_host_tokens == stats.num_loaded_blocks * BLOCK_SIZE >= 4 * 40
    load = engine.load
    assert 0 < stats.num_saved_blocks == load.num_used_host_blocks < load.num_host_blocks


@pytest.mark.parametrize("name", ["llama", "gemma2-caps", "deepseek_v2"])
def test_tokens_are_those_without_a_tier(name: str) -> None:
    """Also with layers that see a window, and with latents. Last all at once: they lose blocks to each other."""
    executor = lead_group(_config(name))
    results = []
    for num_host_blocks in (0, 7, executor.num_host_blocks):
        few = LimitedExecutor(executor, executor.num_blocks)
        few.num_host_blocks = num_host_blocks
        engine = _engine(few, _config(name))
        rounds = [_serve_in_turn(engine, _requests(0)), _serve_in_turn(engine, _requests(1))]
        outcomes = run(engine, _requests(2, max_tokens=30))
        results.append([*rounds, [outcomes[each.request_id].token_ids for each in _requests(2)]])
        assert (engine.stats.num_loaded_blocks > 0) == (num_host_blocks > 7), "seven slots are too few for a prefix"
        assert (engine.stats.num_saved_blocks > 0) == (num_host_blocks > 0)
        assert engine.load.num_used_host_blocks <= num_host_blocks
    assert results[0] == results[1] == results[2]


def _check_group(executor: Executor, config: EngineConfig) -> list[Any]:
    engine = _engine(executor, config)
    rounds = [_serve_in_turn(engine, _requests(i)) for i in range(2)]
    return [*rounds, engine.stats.num_host_tokens, executor.num_host_blocks]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_every_rank_keeps_its_own_part(gloo_pool: GlooPool, tp: int, pp: int) -> None:
    alone = _config("llama", host_cache_bytes=0)
    expected = _serve_in_turn(_engine(lead_group(alone), alone), _requests(0))
    config = _config("llama", tp=tp, pp=pp)
    first, second, num_host_tokens, num_host_blocks = in_group(gloo_pool, config, _check_group, timeout_s=200)
    assert first == second == expected
    assert num_host_tokens >= 4 * 40
    assert num_host_blocks > 50


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    config = _config("llama", host_cache_bytes=100)
    with pytest.raises(EngineConfigError, match="host_cache_bytes is 100; allowed: 0, or a block of"):
        lead_group(config)
