"""Two ranks on two GPUs, their all-reduces in recorded steps. Not yet run."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import anonymous_tokens, engine_over, in_group, request, run, runner_of
from helpers.gloo_pool import GlooPool

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.families.registry import describe_model
from parallel.kernels.cuda_graphs import GraphedLayers
from workers.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from workers.engine import Engine
from workers.errors import GroupFailedError
from workers.executor import Executor
from workers.model_runner import ModelRunner, StepWork
from workers.plan import StepPlan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

CONFIG = EngineConfig(
    model=str(PACKAGED[DEFAULT_MODEL]),
    device="cuda",
    dtype="float32",
    cache=CacheConfig(memory_fraction=0.3),
    scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
    parallel=ParallelConfig(tensor_parallel=2),
)
TIMEOUT_S = 600.0


def test_recorded_steps_give_what_ranks_give_without() -> None:
    """Both groups also come to their end: NCCL waits for graphs that were not dropped."""
    recorded, called = (_serve_in_group(replace(CONFIG, max_cudagraph_capture_size=size)) for size in (256, 0))
    for (tokens, logprobs), (wanted_tokens, wanted_logprobs) in zip(recorded, called, strict=True):
        assert tokens == wanted_tokens
        assert logprobs == pytest.approx(wanted_logprobs, abs=5e-3)


Served = list[tuple[list[int], list[float]]]
"""Tokens and log-probabilities of each request."""


def _serve_in_group(config: EngineConfig) -> Served:
    with GlooPool() as pool:
        served: Served = in_group(pool, config, _serve, timeout_s=TIMEOUT_S)
    return served


def _serve(executor: Executor, config: EngineConfig) -> Served:
    """Five greedy requests, so that steps have one to five sequences."""
    layers: Any = runner_of(executor)._decoder._run
    assert isinstance(layers, GraphedLayers) == (config.max_cudagraph_capture_size > 0)
    prompts = {f"r{i}": [1, *range(40 + i, 60 + 7 * i)] for i in range(5)}
    requests = [
        request(name, prompt, max_tokens=8 * (i + 1), logprobs=1) for i, (name, prompt) in enumerate(prompts.items())
    ]
    outcomes = run(_engine(executor, config), requests)
    return [(outcomes[name].token_ids, [entry.logprob for entry in outcomes[name].logprobs]) for name in prompts]


def _engine(executor: Executor, config: EngineConfig) -> Engine:
    description = describe_model(Path(config.model))
    return engine_over(
        executor,
        config,
        tokens=anonymous_tokens(),
        vocab_size=description.vocab_size,
        max_context=description.max_context,
    )


def test_a_rank_that_dies_does_not_leave_the_other_in_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader fails, or torch's watchdog ends its process: then there is no answer, but it does not hang."""
    monkeypatch.setenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")  # the watchdog waits four of them
    monkeypatch.setattr("helpers.engines.be_rank", _be_rank_that_dies)
    with GlooPool() as pool:
        message = in_group(pool, replace(CONFIG, step_timeout_s=30.0), _fail, timeout_s=TIMEOUT_S, may_die=True)
    assert message is None or "rank" in message


def _fail(executor: Executor, config: EngineConfig) -> str:
    engine = _engine(executor, config)
    engine.add_request(request("a", [1, 2, 3], max_tokens=200))
    try:
        while engine.has_work:
            engine.step()
    except GroupFailedError as error:
        return str(error)
    raise AssertionError("the group went on without a rank")


def _be_rank_that_dies(rank: int, *args: Any) -> Any:
    from helpers.engines import be_rank

    original = ModelRunner.prepare

    def prepare_until(self: ModelRunner, plan: StepPlan) -> StepWork:
        if rank == 1 and plan.number == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "prepare", prepare_until)
        return be_rank(rank, *args)
