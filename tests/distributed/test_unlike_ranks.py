"""Ranks of one group whose machines are not alike: a device, or a compiler, that others have not."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.engines import anonymous_tokens, be_rank, engine_over, request, run
from helpers.gloo_pool import GlooPool

from parallel.errors import DeviceError
from parallel.random_model import write_random_model
from workers.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from workers.executor import Executor
from workers.rank import Rendezvous

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def _config(model: Path, *, tp: int = 1, pp: int = 1) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        device="cpu",
        num_threads=1,
        step_timeout_s=30.0,
        cache=CacheConfig(block_size=4, num_blocks=64),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        parallel=ParallelConfig(tensor_parallel=tp, pipeline_parallel=pp),
    )


def _generate(executor: Executor, config: EngineConfig, **sampling: Any) -> list[int]:
    engine = engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=4096, max_context=64)
    outcome = run(engine, [request("one", [5, 6, 7, 8], max_tokens=16, ignore_eos=True, **sampling)])["one"]
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


def _avoid_likely_tokens(executor: Executor, config: EngineConfig) -> list[int]:
    """The first tokens of one request after another, each of which forbids those of the ones before."""
    likely: list[int] = []
    for _ in range(12):
        token = _generate(
            executor, config, temperature=0.1, top_k=2, seed=0, stop_token_ids=tuple(likely), min_tokens=16
        )[0]
        likely.append(token)
    return likely


def _be_rank_that_may_lack_a_compiler(rank: int, config: EngineConfig, port: int, without: int) -> list[int] | None:
    with ExitStack() as stack:
        if rank == without:
            stack.enter_context(patch("parallel.kernels.native.build.find_compiler", side_effect=DeviceError("none")))
        tokens: list[int] | None = be_rank(rank, config, port, _avoid_likely_tokens, ())
    return tokens


@pytest.mark.parametrize("without", [0, 1])
def test_a_group_with_a_rank_that_has_no_compiler_computes_in_plain_torch(
    gloo_pool: GlooPool, tmp_path: Path, without: int
) -> None:
    """Compiled kernels beside it would give logits of another dtype, leave others out, and choose other experts."""
    write_random_model(tmp_path / "model", CONFIG, 0, torch.bfloat16)
    config = replace(_config(tmp_path / "model", tp=2), dtype="bfloat16")
    results = []
    for asked, lacking in ((config, without), (replace(config, kernels="cpu"), -1)):
        rendezvous = Rendezvous.open()
        ranks = gloo_pool.call(_be_rank_that_may_lack_a_compiler, asked, rendezvous.port, lacking, ranks=2)
        results.append(ranks[0])
    tokens = results[0]
    assert tokens == results[1]
    assert len({*tokens}) == len(tokens), "what was forbidden did not come up"
    assert {token < 2048 for token in tokens} == {False, True}, "there are some on both ranks"


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
    config = _config(tmp_path / "model", tp=tp, pp=pp)
    results = []
    for wanted in (dtypes, (agreed, agreed)):
        rendezvous = Rendezvous.open()
        results.append(gloo_pool.call(_be_rank_that_wants, config, rendezvous.port, wanted, ranks=2)[0])
    assert results[0] == results[1]
