"""Ranks of one group whose machines are not alike: a device, or a compiler, that others have not."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.engines import anonymous_tokens, be_rank, engine_over, request, run
from helpers.gloo_pool import GlooPool

from parallel.random_model import write_random_model
from workers.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from workers.executor import Executor
from workers.rank import Rendezvous

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _generate(executor: Executor, config: EngineConfig) -> list[int]:
    engine = engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=256, max_context=64)
    outcome = run(engine, [request("one", [5, 6, 7, 8], max_tokens=16, ignore_eos=True)])["one"]
    assert outcome.error is None
    return outcome.token_ids


def _be_rank_that_wants(
    rank: int, config: EngineConfig, port: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> list[int] | None:
    """A rank on a device of its own kind, which makes this of the checkpoint's dtype; the leader's tokens."""
    with (
        patch("parallel.kernels.select.multiplies", lambda *_: False),
        patch("parallel.device.cpu.CpuDevice.default_dtype", lambda *_: dtypes[rank]),
    ):
        tokens: list[int] | None = be_rank(rank, config, port, _generate, ())
    return tokens


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("dtypes", "agreed"),
    [
        ((torch.bfloat16, torch.float16), torch.float16),
        ((torch.float16, torch.bfloat16), torch.float16),
        ((torch.float32, torch.bfloat16), torch.float32),
        ((torch.float16, torch.float32), torch.float32),
    ],
)
def test_ranks_take_the_dtype_that_all_their_devices_have(
    gloo_pool: GlooPool, tmp_path: Path, tp: int, pp: int, dtypes: tuple[torch.dtype, torch.dtype], agreed: torch.dtype
) -> None:
    write_random_model(tmp_path / "model", CONFIG, 0, torch.bfloat16)
    config = EngineConfig(
        model=str(tmp_path / "model"),
        device="cpu",
        num_threads=1,
        step_timeout_s=30.0,
        cache=CacheConfig(block_size=4, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        parallel=ParallelConfig(tensor_parallel=tp, pipeline_parallel=pp),
    )
    results = []
    for wanted in (dtypes, (agreed, agreed)):
        rendezvous = Rendezvous.open()
        results.append(gloo_pool.call(_be_rank_that_wants, config, rendezvous.port, wanted, ranks=2)[0])
    assert results[0] == results[1]
