"""What a rank's model reads and computes in a step: as bench/load/model_cost.py has it of a run, as its part of it."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import make_plan
from helpers.tiny_models import tiny_model

from bench.load.model_cost import ModelCost, Work
from bench.load.records import Usage
from parallel.decoder import Decoder
from parallel.families.registry import describe_config, describe_model
from parallel.kernels.base import AttentionMeta
from parallel.kernels.linears import PackedLinear
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.random_model import write_random_model
from workers.config import CacheConfig, EngineConfig
from workers.executor import Executor
from workers.inputs import InputBuilder
from workers.model_flops import ModelFlops
from workers.model_reads import ModelReads
from workers.plan import NewSequence, ScheduledSequence, StepPlan
from workers.rank import lead_group
from workers.request import SamplingParams
from workers.stats import RankStats

CONFIG = {
    "model_type": "mistral",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
KEY_BYTES = 2 * 2 * 4 * 4
"""Of one token in one layer: keys and values of two heads of four, float32."""


def make_decoder(
    config: dict[str, Any], mesh: Mesh | None = None, *, expert_parallel: bool = False, int8_linears: bool = False
) -> Decoder:
    """Of no weights."""
    return Decoder(
        describe_config({**CONFIG, **config}, source="test"),
        mesh=mesh or Mesh.single(),
        device=torch.device("meta"),
        dtype=torch.float32,
        kernels=ReferenceKernels(),
        expert_parallel=expert_parallel,
        int8_linears=int8_linears,
    )


def run(executor: Executor, plan: StepPlan) -> None:
    executor.submit(plan)
    executor.collect()


def step_meta(*shares: tuple[int, int]) -> AttentionMeta:
    """Of a step of new sequences: (start, tokens) of each."""
    builder = InputBuilder(num_slots=len(shares), max_context=64, block_size=16, device=torch.device("cpu"))
    new = [NewSequence(i, [0] * 64, 64, SamplingParams(), []) for i in range(len(shares))]
    scheduled = [ScheduledSequence(i, start, num, [], [], True) for i, (start, num) in enumerate(shares)]
    return builder.build(make_plan(0, [], new, scheduled)).metas[0]


def step_bytes(decoder: Decoder, *shares: tuple[int, int]) -> float:
    return ModelReads(decoder).step_bytes(step_meta(*shares), num_searched=0)


def step_flops(decoder: Decoder, *shares: tuple[int, int]) -> float:
    """Each sequence samples."""
    return ModelFlops(decoder).step_flops(step_meta(*shares), num_sampled=len(shares))


@pytest.mark.parametrize("config", [{}, {"sliding_window": 4}, EXPERTS], ids=["dense", "window", "experts"])
def test_a_run_counts_what_the_benchmark_says_of_it(config: dict[str, Any], tmp_path: Path) -> None:
    write_random_model(tmp_path, {**CONFIG, **config}, 0, torch.float32)
    stats, sampling = RankStats(), SamplingParams(temperature=0.0)
    executor = lead_group(
        EngineConfig(model=str(tmp_path), dtype="float32", cache=CacheConfig(num_blocks=8)), stats=stats
    )
    try:
        prompt = NewSequence(0, [5, 6, 7, 8, 9, 10], 6, sampling, [])
        run(executor, make_plan(0, [], [prompt], [ScheduledSequence(0, 0, 6, [], [0], True)]))
        for number, start in ((1, 6), (2, 7)):
            run(executor, make_plan(number, [], [], [ScheduledSequence(0, start, 1, [5], [], True)]))
    finally:
        executor.close()
    cost = ModelCost.of(describe_model(tmp_path), torch.float32)
    usage = Usage(prompt_tokens=6, cached_tokens=0, completion_tokens=3)
    work = Work(step_tokens=(6, 1, 1), requests=(usage,))
    assert stats.model_read_bytes == pytest.approx(cost.bytes_read(work))
    assert stats.model_flops == pytest.approx(cost.flops(work))
    assert stats.model_busy_s > 0


def test_attention_over_latents_counts_as_it_is_done() -> None:
    description = describe_model(tiny_model("deepseek_v2"))
    latent = description.latent_kv
    assert latent is not None
    # of each head a score of the latent and of what is rotated, and its part in the sum of latents
    assert description.seen_flops == 2 * description.num_heads * (latent.rank + latent.rotary_dim + latent.rank)
    assert ModelCost.of(description, torch.float32).attention_flops == description.seen_flops


@pytest.mark.parametrize("int8_linears", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_every_step_reads_the_layers_and_the_head(is_tied: bool, int8_linears: bool) -> None:
    """Those of CONFIG; in 8 bits all but the norms."""
    sizes = make_decoder({"tie_word_embeddings": is_tied}, int8_linears=int8_linears).weight_sizes
    linears, head, norms = 2 * (4 * 8 * 8 + 3 * 8 * 16), 32 * 8, (2 * 2 + 1) * 8
    assert (sizes.matrix_elements, sizes.head_elements) == (linears, head)
    assert sizes.always_bytes == (linears + head) * (1 if int8_linears else 4) + norms * 4
    assert sizes.num_parameters == linears + norms + head * (1 if is_tied else 2)
    assert sizes.expert_bytes == 0


@pytest.mark.parametrize("int8_linears", [False, True])
def test_a_step_reads_the_router_whole_and_the_experts_that_are_chosen(int8_linears: bool) -> None:
    """Router, norms and biases are never in 8 bits."""
    config = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
    sizes = make_decoder(config, int8_linears=int8_linears).weight_sizes
    matrix_bytes = 1 if int8_linears else 4
    linears, head, norms = 2 * 4 * 8 * 8, 32 * 8, (2 * 2 + 1) * 8
    router, biases, sinks = 2 * 4 * 8, 2 * (4 + 4 * 8), 2 * 2
    always = (linears + head) * matrix_bytes + (norms + router + biases + sinks) * 4
    assert sizes.always_bytes == always
    assert sizes.expert_bytes == 2 * 4 * (3 * 8 * 16 * matrix_bytes + (2 * 16 + 8) * 4)
    assert sizes.bytes_read(0) == always
    assert sizes.bytes_read(1) == always + sizes.expert_bytes / 2


class ScreenedHead:
    """A head that reads 1,000 bytes less to find the largest outputs of at most two rows."""

    def __init__(self, linear: PackedLinear) -> None:
        self._linear = linear

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """See `PackedLinear`."""
        return self._linear(x_TI)

    def largest(self, x_TI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SearchedLinear`."""
        return self._linear(x_TI).float().max(1)

    def spared_bytes(self, num_rows: int) -> int:
        """See `ScreenedLinear`."""
        return 1000 if 0 < num_rows <= 2 else 0


class ScreeningKernels(ReferenceKernels):
    """Have such heads."""

    def pack_head(self, weight_VE: torch.Tensor, bias_V: torch.Tensor | None, *, is_shared: bool) -> PackedLinear:
        """See `Kernels.pack_head`."""
        return ScreenedHead(super().pack_head(weight_VE, bias_V, is_shared=is_shared))


@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_head_that_only_says_the_largest_counts_as_what_it_reads(
    is_greedy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.rank.select_kernels", lambda *args, **options: ScreeningKernels())
    write_random_model(tmp_path, CONFIG, 0, torch.float32)
    stats, sampling = RankStats(), SamplingParams(temperature=0.0, logprobs=None if is_greedy else 0)
    executor = lead_group(
        EngineConfig(model=str(tmp_path), dtype="float32", cache=CacheConfig(num_blocks=8)), stats=stats
    )
    read: list[float] = []
    try:
        new = [NewSequence(slot, [5, 6, 7, 8], 3, sampling, []) for slot in range(3)]
        first = [ScheduledSequence(slot, 0, 2, [], [slot], False) for slot in range(3)]
        run(executor, make_plan(0, [], new, first))
        read.append(stats.model_read_bytes)
        second = [ScheduledSequence(slot, 2, 1, [], [], slot < 2) for slot in range(3)]
        run(executor, make_plan(1, [], [], second))
        read.append(stats.model_read_bytes - read[0])
        third = [ScheduledSequence(slot, 3, 1, [], [], True) for slot in range(3)]
        run(executor, make_plan(2, [], [], third))
        read.append(stats.model_read_bytes - sum(read))
    finally:
        executor.close()
    always = ModelCost.of(describe_model(tmp_path), torch.float32).weights.always_bytes
    of_keys = [2 * 3 * num * KEY_BYTES for num in (2, 3, 4)]
    assert read == [always + of_keys[0], always + of_keys[1] - (1000 if is_greedy else 0), always + of_keys[2]]


@pytest.mark.parametrize(
    ("shares", "num_seen"),
    [
        ([(2, 1)], 3),
        ([(9, 1), (3, 1)], 4 + 4),
        ([(0, 9)], 9),
        ([(20, 3)], 6),  # the first of them sees 3 tokens before it
        ([(9, 1), (1, 1), (20, 3), (1, 2)], 4 + 2 + 6 + 3),
    ],
)
def test_a_window_bounds_the_keys_that_are_read(shares: list[tuple[int, int]], num_seen: int) -> None:
    decoder = make_decoder({"sliding_window": 4})
    assert step_bytes(decoder, *shares) == decoder.weight_sizes.always_bytes + 2 * num_seen * KEY_BYTES


def test_a_chunk_reads_its_context_once() -> None:
    decoder = make_decoder({})
    assert step_bytes(decoder, (20, 3), (7, 1)) == decoder.weight_sizes.always_bytes + 2 * (23 + 8) * KEY_BYTES


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(("num_tensor", "num_stages"), product((1, 2), (1, 2)))
def test_ranks_read_the_model_together(num_tensor: int, num_stages: int, is_tied: bool) -> None:
    """Norms are read by every tensor-parallel rank, everything else by one."""
    config = {"tie_word_embeddings": is_tied}
    norms = 4 * (2 * 2 * 8 + 8)
    ranks = product(range(num_tensor), range(num_stages))
    meshes = [Mesh(tp=Axis(size=num_tensor, rank=t), pp=Axis(size=num_stages, rank=s)) for t, s in ranks]
    together = sum(step_bytes(make_decoder(config, mesh), (20, 3)) for mesh in meshes)
    assert together == step_bytes(make_decoder(config), (20, 3)) + (num_tensor - 1) * norms


def test_ranks_that_share_experts_read_those_that_they_have() -> None:
    whole = make_decoder(EXPERTS)
    for expert_parallel in (False, True):
        mesh = Mesh(tp=Axis(size=2), pp=Axis())
        half = make_decoder(EXPERTS, mesh, expert_parallel=expert_parallel)
        assert half.weight_sizes.expert_bytes == whole.weight_sizes.expert_bytes / 2
        one, many = (step_bytes(half, (0, num)) - num * 2 * KEY_BYTES / 2 for num in (1, 64))
        assert one == half.weight_sizes.always_bytes + half.weight_sizes.expert_bytes / 2
        assert many == pytest.approx(half.weight_sizes.always_bytes + half.weight_sizes.expert_bytes)


@pytest.mark.parametrize("window", [None, 4, 12, 100])
@pytest.mark.parametrize("shares", [[(2, 1)], [(0, 9)], [(9, 1), (1, 1), (20, 3), (1, 2)], [(3, 1), (2, 7), (11, 2)]])
def test_every_token_computes_with_what_it_sees(window: int | None, shares: list[tuple[int, int]]) -> None:
    decoder = make_decoder({"sliding_window": window})
    num_seen = sum(min(position + 1, window or 64) for start, num in shares for position in range(start, start + num))
    matrices = decoder.weight_sizes.matrix_elements * sum(num for _, num in shares)
    products = 2 * (matrices + decoder.weight_sizes.head_elements * len(shares))
    assert step_flops(decoder, *shares) == products + 2 * num_seen * 4 * 2 * 4


@pytest.mark.parametrize(("num_tensor", "num_stages"), product((1, 2), (1, 2)))
def test_ranks_compute_the_model_together(num_tensor: int, num_stages: int) -> None:
    ranks = product(range(num_tensor), range(num_stages))
    meshes = [Mesh(tp=Axis(size=num_tensor, rank=t), pp=Axis(size=num_stages, rank=s)) for t, s in ranks]
    together = sum(step_flops(make_decoder({}, mesh), (20, 3), (7, 1)) for mesh in meshes)
    assert together == step_flops(make_decoder({}), (20, 3), (7, 1))
