"""The decoder over every mesh shape equals one rank; stages overlap; collectives are as many as promised."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_pool import GlooPool
from helpers.paged_layout import make_meta
from helpers.weights import fill
from torch import Tensor

from parallel.decoder import Decoder
from parallel.description import (
    Activation,
    DecoderDescription,
    LatentKV,
    MoeDescription,
    NormKind,
    NormPlace,
    QKNorm,
    QKNormScope,
    ResidualKind,
    RouterScore,
)
from parallel.errors import CollectiveError, ParallelismError
from parallel.kernels.base import Kernels
from parallel.kernels.inductor import InductorKernels
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import select_kernels
from parallel.mesh import Mesh
from parallel.pipeline import StageLink
from parallel.position_description import Alibi, LearnedPositions, RotaryDescription

CPU = torch.device("cpu")
SHAPES = [(2, 1), (1, 2), (2, 2), (4, 1)]
NUM_LAYERS = 3
BLOCK_SIZE = 4
NUM_BLOCKS = 16
NUM_BATCHES = 5
# float32 sums in another order, through 3 layers; logits of a few units
TOLERANCE = 2e-5
_EXPERTS = {
    "num_kv_heads": 4,
    "moe": MoeDescription(
        num_experts=8,
        num_chosen=3,
        intermediate_size=12,
        score=RouterScore.SIGMOID,
        is_normalized=True,
        num_groups=4,
        num_chosen_groups=2,
        choice_bias=True,
        expert_bias=True,
        shared_intermediate_size=20,
        is_shared_gated=True,
        dense_layers=frozenset({1}),
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_kv_heads": 8},
    "everything": {
        "num_kv_heads": 2,  # replicated over 4 ranks
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": QKNorm(kind=NormKind.RMS, scope=QKNormScope.HEAD),
        "tie_embeddings": True,
        "sliding_windows": (None, 3, None),
    },
    "parallel": {
        "num_kv_heads": 2,
        "residual": ResidualKind.PARALLEL,
        "norm": NormKind.LAYER,
        "alibi": Alibi(slopes=tuple(2.0**-i for i in range(8))),
        "rotaries": (None,) * NUM_LAYERS,
        "learned_positions": LearnedPositions(num_rows=66, offset=2),
        "activation": Activation.GELU,
        "is_mlp_gated": False,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "head_bias": True,
        "embedding_norm": True,
    },
    "after": {
        "num_kv_heads": 2,
        "norm_place": NormPlace.AFTER,
        "norm": NormKind.RMS_PLUS_ONE,
        "qk_norm": QKNorm(kind=NormKind.RMS, scope=QKNormScope.ALL_HEADS),
        "rotaries": (RotaryDescription(dim=4, theta=100.0, is_interleaved=True), None, None),
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "logit_multiplier": 0.5,
        "qkv_clip": 1.0,
        "attention_soft_cap": 2.0,
        "logit_soft_cap": 3.0,
        "attention_scale": 0.5,
        "is_head_normalized": True,
    },
    "experts": _EXPERTS,
    "whole experts": _EXPERTS,
    "sinks": {"num_kv_heads": 2, "has_attention_sinks": True, "sliding_windows": (None, 3, None)},
    "latent": {
        "num_kv_heads": 1,
        "latent_kv": LatentKV(query_rank=10, rank=6, plain_dim=4, rotary_dim=4, value_dim=5, norm_eps=1e-6),
        "rotaries": (RotaryDescription(dim=4, theta=100.0, is_interleaved=True),) * NUM_LAYERS,
        "qkv_bias": True,
        "output_bias": True,
    },
}


def _describe(option: str) -> DecoderDescription:
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 37,
        "hidden_size": 32,
        "num_layers": NUM_LAYERS,
        "num_heads": 8,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_context": 64,
        "norm_eps": 1e-5,
        "rotaries": (RotaryDescription(dim=8, theta=10000.0),) * NUM_LAYERS,
        "sliding_windows": (None,) * NUM_LAYERS,
    }
    return DecoderDescription(**(values | OPTIONS[option]))


def _load(mesh: Mesh, option: str, dtype: torch.dtype = torch.float32, kernels: str = "reference") -> Decoder:
    decoder = Decoder(
        _describe(option),
        mesh=mesh,
        device=CPU,
        dtype=dtype,
        kernels=_kernels(kernels, dtype),
        expert_parallel=option == "whole experts",
    )
    fill(decoder.sharded_parameters())
    decoder.finish_loading()
    return decoder


def _kernels(name: str, dtype: torch.dtype) -> Kernels:
    if name != "traced":
        return select_kernels(CPU, dtype, name)
    return InductorKernels(ReferenceKernels(), CPU, Path(tempfile.gettempdir()), lambda module, _examples: module)


def _run_batches(
    mesh: Mesh, option: str, dtype: torch.dtype = torch.float32, kernels: str = "reference"
) -> tuple[list[Tensor] | None, dict[str, int], dict[str, int]]:
    """Several batches one after the other, no stage waiting for a later one; the last stage's logits, and counts."""
    decoder = _load(mesh, option, dtype, kernels)
    link = StageLink(mesh, hidden_size=32, dtype=dtype, device=CPU)
    results = []
    with torch.inference_mode():
        for batch in range(NUM_BATCHES):
            logits = _run_batch(mesh, decoder, link, batch)
            if logits is not None:
                results.append(logits)
    link.flush()
    return results or None, dict(mesh.tp.counts), dict(mesh.pp.counts)


def _run_batch(mesh: Mesh, decoder: Decoder, link: StageLink, batch: int) -> Tensor | None:
    """Two prompts of lengths of their own, from an empty cache."""
    lengths = (3 + batch, 17)
    num_tokens = sum(lengths)
    meta = make_meta([(length, length) for length in lengths], block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, seed=batch)
    positions = torch.cat([torch.arange(length) for length in lengths])
    entry = decoder.cache_entry
    size = decoder.num_local_layers, NUM_BLOCKS * BLOCK_SIZE * entry.num_elements
    caches = [entry.lay_out(layer, BLOCK_SIZE) for layer in torch.zeros(size, dtype=decoder.dtype)]
    token_ids = torch.randint(37, (num_tokens,), generator=torch.Generator().manual_seed(batch))
    hidden = decoder(
        token_ids if mesh.is_first_stage else link.recv(num_tokens), positions, caches, [meta] * len(caches)
    )
    if mesh.is_last_stage:
        return decoder.logits(hidden)
    link.send(hidden)
    return None


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_decoder_over_any_mesh_equals_one_rank(gloo_pool: GlooPool, option: str, tp: int, pp: int) -> None:
    expected, _, _ = _run_batches(Mesh.single(), option)
    results = gloo_pool.run(_run_batches, option, tp=tp, pp=pp)
    assert expected is not None
    for rank, (logits, _, _) in enumerate(results):
        if rank != (pp - 1) * tp:
            assert logits is None
            continue
        assert len(logits) == NUM_BATCHES
        for one, other in zip(logits, expected, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def test_stages_alone_change_no_bit(gloo_pool: GlooPool) -> None:
    expected, _, _ = _run_batches(Mesh.single(), "everything", torch.bfloat16)
    logits, _, _ = gloo_pool.run(_run_batches, "everything", torch.bfloat16, pp=3)[2]
    assert expected is not None
    assert all(torch.equal(one, other) for one, other in zip(logits, expected, strict=True))


@pytest.mark.parametrize("option", OPTIONS)
def test_fast_kernels_run_split(gloo_pool: GlooPool, option: str) -> None:
    expected, _, _ = _run_batches(Mesh.single(), option)
    logits, _, _ = gloo_pool.run(_run_batches, option, torch.float32, "auto", tp=2, pp=2)[2]
    assert expected is not None
    for one, other in zip(logits, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("option", OPTIONS)
def test_compiled_layers_run_split(gloo_pool: GlooPool, option: str) -> None:
    """Without inductor, operation by operation: the same bits and the same collectives."""
    expected, traced = (
        gloo_pool.run(_run_batches, option, torch.float32, kernels, tp=2, pp=2) for kernels in ("reference", "traced")
    )
    for (logits, *counts), (other_logits, *other_counts) in zip(expected, traced, strict=True):
        assert counts == other_counts
        assert (logits is None) == (other_logits is None)
        for one, other in zip(logits or (), other_logits or (), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    # a norm over all heads needs one more, of two numbers a token
    ("option", "per_layer"),
    [("everything", 2), ("parallel", 1), ("after", 3), ("experts", 2), ("whole experts", 2), ("latent", 2)],
)
@pytest.mark.parametrize(("tp", "pp"), SHAPES)
def test_all_reduces_are_few_per_layer_and_one_for_the_embedding(
    gloo_pool: GlooPool, tp: int, pp: int, option: str, per_layer: int
) -> None:
    results = gloo_pool.run(_run_batches, option, tp=tp, pp=pp)
    layers_of_stage = {1: [3], 2: [2, 1]}[pp]
    for rank, (_, tp_counts, pp_counts) in enumerate(results):
        stage = rank // tp
        expected_tp = {"all_reduce": NUM_BATCHES * (per_layer * layers_of_stage[stage] + (stage == 0))}
        if stage == pp - 1:
            expected_tp["gather"] = NUM_BATCHES
        assert tp_counts == (expected_tp if tp > 1 else {})
        expected_pp = ({"recv": NUM_BATCHES} if stage > 0 else {}) | ({"send": NUM_BATCHES} if stage < pp - 1 else {})
        assert pp_counts == expected_pp


@pytest.mark.parametrize("option", OPTIONS)
def test_every_parameter_is_named_once(option: str) -> None:
    decoder = Decoder(
        _describe(option), mesh=Mesh.single(), device=CPU, dtype=torch.float32, kernels=ReferenceKernels()
    )
    sources = [piece.source for parameter in decoder.sharded_parameters() for piece in parameter.pieces]
    assert len(sources) == len(set(sources))
    assert ("head.weight" in sources) is not decoder.description.tie_embeddings
    assert sources.count("embedding.weight") == 1


def _sources(mesh: Mesh) -> list[str]:
    decoder = Decoder(_describe("everything"), mesh=mesh, device=CPU, dtype=torch.float32, kernels=ReferenceKernels())
    return [piece.source for parameter in decoder.sharded_parameters() for piece in parameter.pieces]


def test_last_stage_reads_a_tied_embedding_of_its_own(gloo_pool: GlooPool) -> None:
    first, last = gloo_pool.run(_sources, pp=2)
    assert first[0] == "embedding.weight"
    assert "embedding.weight" in last
    assert {source.split(".")[1] for source in first if source.startswith("layers")} == {"0", "1"}
    assert {source.split(".")[1] for source in last if source.startswith("layers")} == {"2"}


def _refused(mesh: Mesh) -> str:
    with pytest.raises(ParallelismError) as caught:
        Decoder(_describe("plain"), mesh=mesh, device=CPU, dtype=torch.float32, kernels=ReferenceKernels())
    return str(caught.value)


def test_heads_that_do_not_divide_are_refused(gloo_pool: GlooPool) -> None:
    assert "num_heads is 8, which does not divide over tensor_parallel 3" in gloo_pool.run(_refused, tp=3)[0]


def _send_ahead(mesh: Mesh, num_batches: int) -> list[tuple[int, float]]:
    """The first stage runs ahead as far as it may, dropping its own references; later stages pass everything on."""
    link = StageLink(mesh, hidden_size=64, dtype=torch.bfloat16, device=CPU)
    seen = []
    for batch in range(num_batches):
        if mesh.is_first_stage:
            link.send(torch.full((1 + batch * 100, 64), float(batch), dtype=torch.bfloat16))
            assert len(link._sending) <= mesh.pp.size, "more batches are under way than there are stages"
            continue
        hidden = link.recv(1 + batch * 100)
        assert bool((hidden == hidden[0, 0]).all())
        seen.append((len(hidden), float(hidden[0, 0])))
        if not mesh.is_last_stage:
            link.send(hidden)
    link.flush()
    return seen


def test_batches_in_flight_arrive_whole_and_in_order(gloo_pool: GlooPool) -> None:
    expected = [(1 + batch * 100, float(batch)) for batch in range(20)]
    assert gloo_pool.run(_send_ahead, 20, pp=3) == [[], expected, expected]


def _run_ahead(mesh: Mesh) -> int:
    """The first stage sends as many batches as there are stages, and one more when the oldest is received."""
    link = StageLink(mesh, hidden_size=8, dtype=torch.float32, device=CPU)
    batch = torch.ones(2, 8)
    if mesh.is_first_stage:
        for _ in range(mesh.pp.size):
            link.send(batch)
        dist.barrier()
        dist.barrier()
        link.send(batch)
        dist.barrier()
        link.flush()
    else:
        dist.barrier()
        link.recv(2)
        dist.barrier()
        dist.barrier()
        for _ in range(mesh.pp.size):
            link.recv(2)
    return mesh.pp.counts["send"] + mesh.pp.counts["recv"]


def test_a_stage_waits_for_none_but_the_oldest_of_as_many_batches_as_stages(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(_run_ahead, pp=2, timeout_s=20) == [3, 3]


def _neighbour_dies(mesh: Mesh, dead_stage: int) -> str:
    link = StageLink(mesh, hidden_size=8, dtype=torch.float32, device=CPU)
    if mesh.is_first_stage:
        link.send(torch.ones(2, 8))
    else:
        link.recv(2)
    if mesh.pp.rank == dead_stage:
        link.flush()
        os._exit(1)
    try:
        if mesh.is_first_stage:
            link.send(torch.ones(2, 8))
            link.flush()
        else:
            link.recv(2)
    except CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("dead_stage", "message"), [(0, "stage 1 cannot receive from stage 0"), (1, "stage 0 ")])
def test_dead_neighbour_is_a_collective_error(gloo_pool: GlooPool, dead_stage: int, message: str) -> None:
    results = gloo_pool.run(_neighbour_dies, dead_stage, pp=2, may_die=True)
    assert results[dead_stage] is None
    assert results[1 - dead_stage].startswith(message)
