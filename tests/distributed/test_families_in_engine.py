"""Models of every family, in the whole engine: chunked prompts and prefix hits at odd offsets change no token."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import anonymous_tokens, engine_over, exact_config, in_group, request, run, runner_of
from helpers.gloo_pool import GlooPool
from helpers.tiny_models import DENSE_NAMES, MOE_NAMES, load_original, tiny_model

from parallel.families.registry import describe_model
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.executor import Executor

NUM_TOKENS = 24  # more than three blocks
BLOCK_SIZE = 7
CHUNK = 5
PROMPT = tuple(11 * i % 149 for i in range(33))
PROMPTS = (PROMPT, (*PROMPT[:20], 7, 8, 9), PROMPT[:1])
"""The second shares two blocks and a part of a third with the first."""


@pytest.mark.parametrize("name", [name for name in DENSE_NAMES if "-" not in name])
def test_cached_prefixes_change_no_token(gloo_pool: GlooPool, name: str) -> None:
    _check(gloo_pool, name, _in_four(name))


@pytest.mark.parametrize("name", ["cohere2", "gemma3", "qwen2_moe-dense-layers"])
def test_layers_may_be_divided_unevenly_over_stages(gloo_pool: GlooPool, name: str) -> None:
    num_layers = describe_model(tiny_model(name)).num_layers
    config = _in_four(name, layer_partition=(1, num_layers - 1))
    assert in_group(gloo_pool, config, _num_layers) == 1
    _check(gloo_pool, name, config)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", [name for name in MOE_NAMES if "-" not in name])
def test_cached_prefixes_change_no_token_with_experts(gloo_pool: GlooPool, name: str, expert_parallel: bool) -> None:
    _check(gloo_pool, name, _in_four(name, expert_parallel=expert_parallel))


def _in_four(name: str, **parallel: Any) -> EngineConfig:
    """The settings of a model over two stages of two ranks."""
    config = exact_config(
        tiny_model(name),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        tp=2,
        pp=2,
    )
    return replace(config, parallel=replace(config.parallel, **parallel))


def _check(pool: GlooPool, name: str, config: EngineConfig) -> None:
    written = in_group(pool, config, _run, timeout_s=200)
    original = load_original(tiny_model(name))
    torch.set_num_threads(1)  # two would wait for each other where other processes want the cores
    for prompt, token_ids in zip(PROMPTS[:1] + PROMPTS, written, strict=True):
        assert_greedy(original, prompt, token_ids)


def _num_layers(executor: Executor, config: EngineConfig) -> int:
    """Runs in the leader of the group: the layers of its stage."""
    return runner_of(executor)._decoder.num_local_layers


@torch.inference_mode()
def assert_greedy(original: Any, prompt: Sequence[int], written: Sequence[int]) -> None:
    """Each token is the one that the original finds most probable after those before it."""
    assert len(written) == NUM_TOKENS
    logits = original(torch.tensor([[*prompt, *written]]), use_cache=False).logits[0]
    assert written == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def _run(executor: Executor, config: EngineConfig) -> list[list[int]]:
    """Runs in the leader of the group: what it writes after the first prompt, then after all together."""
    description = describe_model(Path(config.model))
    engine = engine_over(
        executor,
        config,
        tokens=anonymous_tokens(),
        vocab_size=description.vocab_size,
        eos_token_ids=frozenset(),
        max_context=description.max_context,
        prefill_chunk_tokens=CHUNK,
    )
    written = []
    for round_ in (PROMPTS[:1], PROMPTS):  # the second time, the first prompt's blocks are there
        requests = [request(str(i), list(prompt), max_tokens=NUM_TOKENS) for i, prompt in enumerate(round_)]
        outcomes = run(engine, requests)
        written += [outcomes[str(i)].token_ids for i in range(len(round_))]
    assert engine.stats.num_cached_tokens >= 28 + 14
    return written
