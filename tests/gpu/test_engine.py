"""An engine on a GPU gives the tokens of one on a CPU, with recorded steps and without."""

import random
from dataclasses import replace
from typing import Any

import pytest
from helpers.engines import request, run

from cluster.models import DEFAULT_MODEL, PACKAGED
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine_builder import build_engine

pytestmark = pytest.mark.gpu

CONFIG = EngineConfig(
    model=str(PACKAGED[DEFAULT_MODEL]),
    device="cuda",
    dtype="float32",
    cache=CacheConfig(num_blocks=2000),
    scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=300),
)
NUM_REQUESTS = 24


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, list[int]]:
    return _serve(device="cpu", kernels="reference")


@pytest.mark.parametrize("changes", [{}, {"max_cudagraph_capture_size": 0}, {"compile": True}], ids=str)
def test_tokens_are_those_of_a_cpu(on_cpu: dict[str, list[int]], changes: dict[str, Any]) -> None:
    assert _serve(**changes) == on_cpu


def _serve(**changes: Any) -> dict[str, list[int]]:
    """Greedy tokens of prompts of 5 to 396 tokens, some with a common prefix: chunks, decodes, and steps of both."""
    engine = build_engine(replace(CONFIG, **changes))
    generator = random.Random(3)
    prefix = [generator.randrange(5, 1000) for _ in range(70)]
    prompts = [[generator.randrange(5, 1000) for _ in range(5 + 17 * i)] for i in range(NUM_REQUESTS)]
    requests = [
        request(f"r{i}", [*prefix, *prompt] if i % 3 == 0 else prompt, max_tokens=8 + 3 * i)
        for i, prompt in enumerate(prompts)
    ]
    try:
        return {name: outcome.token_ids for name, outcome in run(engine, requests).items()}
    finally:
        engine.close()
