"""A cache in 8 bits in the whole engine: its bits do not depend on who wrote them, when, or beside what."""

from typing import Any

import pytest
import torch
from helpers.engines import anonymous_tokens, cached_cells, engine_over, exact_config, in_group, request, run
from helpers.gloo_pool import GlooPool
from helpers.tiny_models import tiny_model

from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine import Engine
from workers.errors import EngineConfigError
from workers.executor import Executor
from workers.rank import lead_group

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE = 4
MAX_CONTEXT = 96
PROMPTS = [[(7 * i + 13 * j) % 140 + 3 for j in range(41)] for i in range(5)]
"""Each fills ten blocks and begins an eleventh."""


def _config(
    name: str,
    *,
    tp: int = 1,
    pp: int = 1,
    chunk: int | None = None,
    num_blocks: int = 200,
    dtype: str = "int8",
    **cache: Any,
) -> EngineConfig:
    return exact_config(
        tiny_model(name),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, dtype=dtype, **cache),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256, prefill_chunk_tokens=chunk),
        tp=tp,
        pp=pp,
        max_context=MAX_CONTEXT,
    )


def _engine(executor: Executor, config: EngineConfig) -> Engine:
    return engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=152, max_context=MAX_CONTEXT)


def _serve(executor: Executor, config: EngineConfig, rounds: int = 1) -> list[list[list[int]]]:
    """The tokens of all prompts, sent together, in each round."""
    engine = _engine(executor, config)
    served = []
    for number in range(rounds):
        requests = [request(f"{number}-{i}", prompt, max_tokens=20) for i, prompt in enumerate(PROMPTS)]
        outcomes = run(engine, requests)
        served.append([outcomes[each.request_id].token_ids for each in requests])
    if rounds > 1 and config.cache.enable_prefix_caching:
        assert engine.stats.num_cached_tokens >= 40 * len(PROMPTS) * (rounds - 1)
    return served


@pytest.mark.parametrize("name", ["llama", "gemma2-caps"])
def test_tokens_are_the_same_in_chunks_and_from_cached_prefixes(name: str) -> None:
    plain = _config(name, enable_prefix_caching=False)
    expected = _serve(lead_group(plain), plain)[0]
    for config in (
        _config(name),
        _config(name, chunk=7),
        _config(name, chunk=1, enable_prefix_caching=False),
    ):
        assert all(served == expected for served in _serve(lead_group(config), config, rounds=2))


def test_evicted_blocks_come_back_bit_for_bit_with_their_scales() -> None:
    config = _config("llama", num_blocks=20, host_cache_bytes=32 << 20)
    executor = lead_group(config)
    engine = _engine(executor, config)
    computed = []
    for number in range(2):
        for i, prompt in enumerate(PROMPTS):
            run(engine, [request(f"{number}-{i}", prompt, max_tokens=6)])
            cells = cached_cells(engine, executor, prompt)
            if number == 0:
                computed.append(cells)
            assert all(map(torch.equal, cells, computed[i]))
    assert {half.dtype for half in computed[0]} == {torch.int8, torch.float32}
    assert engine.stats.num_host_tokens >= 4 * 40


def _check_group(executor: Executor, config: EngineConfig) -> list[list[list[int]]]:
    return _serve(executor, config, rounds=2)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_every_split_gives_the_tokens_of_one_rank(gloo_pool: GlooPool, tp: int, pp: int) -> None:
    alone = _config("llama")
    expected = _serve(lead_group(alone), alone)[0]
    split = _config("llama", tp=tp, pp=pp)
    assert in_group(gloo_pool, split, _check_group, timeout_s=200) == [expected, expected]


def test_8_bits_are_used() -> None:
    found = {}
    for dtype in ("auto", "int8"):
        config = _config("llama", dtype=dtype)
        engine = _engine(lead_group(config), config)
        outcome = run(engine, [request("a", PROMPTS[0], max_tokens=1, logprobs=1)])
        found[dtype] = next(iter(outcome.values())).logprobs[0].top[0][1]
    assert found["auto"] != found["int8"]
    assert found["auto"] == pytest.approx(found["int8"], abs=0.1)


def test_keys_that_are_values_stay_as_they_are() -> None:
    with pytest.raises(EngineConfigError, match=r"dtype is 'int8', and the model keeps latents .*; allowed: 'auto'"):
        lead_group(_config("deepseek_v2"))
