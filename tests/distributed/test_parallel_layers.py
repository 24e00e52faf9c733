"""Every parallel layer, split over 2 and 4 ranks, equals its `torch.nn` original."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.gloo_pool import GlooPool
from helpers.largest_outputs import check_what_matters
from helpers.sampling_cases import make_edits
from helpers.weights import fill, full_tensor
from torch import Tensor

from parallel.collectives import gather_to_first
from parallel.description import DecoderDescription
from parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from parallel.kernels.linears import Search, Sift
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.sampling import IN_TORCH, NOISE, edit_in_torch, find_in_torch
from parallel.kernels.select import select_kernels
from parallel.layer import LayerContext
from parallel.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear, even_parts
from parallel.mesh import Mesh
from parallel.mlp import MLP

SIZES = (1, 2, 4)
HIDDEN = 16
TOLERANCE = 2e-6  # float32, partial sums in another order


def _context(mesh: Mesh) -> LayerContext:
    return LayerContext(axis=mesh.tp, kernels=ReferenceKernels(), device=torch.device("cpu"), dtype=torch.float32)


def _load(layer: Any, *prefix: str) -> None:
    fill(layer.sharded_parameters(*prefix))
    layer.finish_loading()


def _inputs(num_tokens: int = 5, size: int = HIDDEN) -> Tensor:
    return torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(3))


def _linear(source: str, num_outputs: int, num_inputs: int, *, has_bias: bool) -> torch.nn.Linear:
    """The original of a parallel layer of that name."""
    original = torch.nn.Linear(num_inputs, num_outputs, bias=has_bias).requires_grad_(False)
    original.weight.data = full_tensor(f"{source}.weight", num_outputs, num_inputs)
    if has_bias:
        original.bias.data = full_tensor(f"{source}.bias", num_outputs)
    return original


def _run_column(mesh: Mesh, has_bias: bool) -> tuple[Tensor, dict[str, int]]:
    context = _context(mesh)
    parts = even_parts([("", 24)], context, what="outputs")
    layer = ColumnParallelLinear(HIDDEN, parts, has_bias=has_bias, context=context)
    _load(layer, "column")
    result = layer(_inputs())
    return result, dict(mesh.tp.counts)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tp", SIZES)
def test_column_parallel_outputs_joined_equal_linear(gloo_pool: GlooPool, tp: int, has_bias: bool) -> None:
    results = gloo_pool.run(_run_column, has_bias, tp=tp)
    expected = _linear("column", 24, HIDDEN, has_bias=has_bias)(_inputs())
    torch.testing.assert_close(torch.cat([part for part, _ in results], dim=1), expected, rtol=0, atol=TOLERANCE)
    assert all(counts == {} for _, counts in results)


def _run_row(mesh: Mesh, has_bias: bool) -> tuple[Tensor, int]:
    layer = RowParallelLinear(HIDDEN, 24, has_bias=has_bias, context=_context(mesh))
    _load(layer, "row")
    part = _inputs().chunk(mesh.tp.size, dim=1)[mesh.tp.rank].contiguous()
    return layer(part), mesh.tp.counts["all_reduce"]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("tp", SIZES)
def test_row_parallel_equals_linear_with_one_all_reduce(gloo_pool: GlooPool, tp: int, has_bias: bool) -> None:
    expected = _linear("row", 24, HIDDEN, has_bias=has_bias)(_inputs())
    for result, num_all_reduces in gloo_pool.run(_run_row, has_bias, tp=tp):
        torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE)
        assert num_all_reduces == (tp > 1)


def _run_qkv(mesh: Mesh, num_kv_heads: int) -> tuple[Tensor, int, int]:
    layer = QKVParallelLinear(
        HIDDEN, num_heads=8, num_kv_heads=num_kv_heads, head_dim=4, has_bias=True, context=_context(mesh)
    )
    _load(layer, "attention")
    return layer(_inputs()), len(layer.heads), len(layer.kv_heads)


@pytest.mark.parametrize("num_kv_heads", [8, 4, 2, 1])
@pytest.mark.parametrize("tp", SIZES)
def test_qkv_gives_each_query_head_its_own_key_value_head(gloo_pool: GlooPool, tp: int, num_kv_heads: int) -> None:
    q, k, v = (
        _linear(f"attention.{name}", heads * 4, HIDDEN, has_bias=True)(_inputs()).view(5, heads, 4)
        for name, heads in (("q", 8), ("k", num_kv_heads), ("v", num_kv_heads))
    )
    heads_seen = 0
    for fused, num_heads, num_local_kv_heads in gloo_pool.run(_run_qkv, num_kv_heads, tp=tp):
        local_q, local_k, local_v = fused.view(5, -1, 4).split([num_heads, num_local_kv_heads, num_local_kv_heads], 1)
        for head in range(num_heads):
            original = heads_seen + head
            original_kv = original // (8 // num_kv_heads)
            local_kv = head // (num_heads // num_local_kv_heads)
            torch.testing.assert_close(local_q[:, head], q[:, original], rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(local_k[:, local_kv], k[:, original_kv], rtol=0, atol=TOLERANCE)
            torch.testing.assert_close(local_v[:, local_kv], v[:, original_kv], rtol=0, atol=TOLERANCE)
        heads_seen += num_heads
    assert heads_seen == 8


def _description(vocab_size: int = 37, **options: Any) -> DecoderDescription:
    return DecoderDescription(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        num_layers=1,
        num_heads=4,
        num_kv_heads=4,
        head_dim=4,
        intermediate_size=24,
        max_context=64,
        norm_eps=1e-5,
        rotaries=(None,),
        sliding_windows=(None,),
        **options,
    )


def _run_mlp(mesh: Mesh, mlp_bias: bool) -> tuple[Tensor, int]:
    layer = MLP(_description(mlp_bias=mlp_bias), context=_context(mesh))
    _load(layer, "mlp")
    return layer(_inputs()), mesh.tp.counts["all_reduce"]


@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("tp", SIZES)
def test_mlp_equals_its_original_with_one_all_reduce(gloo_pool: GlooPool, tp: int, mlp_bias: bool) -> None:
    x = _inputs()
    gate, up = (_linear(f"mlp.{name}", 24, HIDDEN, has_bias=mlp_bias) for name in ("gate", "up"))
    expected = _linear("mlp.down", HIDDEN, 24, has_bias=mlp_bias)(F.silu(gate(x)) * up(x))
    for result, num_all_reduces in gloo_pool.run(_run_mlp, mlp_bias, tp=tp):
        torch.testing.assert_close(result, expected, rtol=0, atol=TOLERANCE)
        assert num_all_reduces == (tp > 1)


def _run_embedding(mesh: Mesh, vocab_size: int, token_ids: Tensor) -> tuple[Tensor, int]:
    layer = VocabParallelEmbedding(vocab_size, HIDDEN, context=_context(mesh))
    _load(layer, "embedding")
    assert (layer.lookup(token_ids) is None) == (mesh.tp.size > 1), "one of several ranks does not have all rows"
    return layer(token_ids), mesh.tp.counts["all_reduce"]


@pytest.mark.parametrize(
    "vocab_size", [40, 37, 5, 3]
)  # divides; does not; the last of 4 ranks is nearly, or quite, empty
@pytest.mark.parametrize("tp", SIZES)
def test_embedding_equals_its_original(gloo_pool: GlooPool, tp: int, vocab_size: int) -> None:
    original = torch.nn.Embedding(vocab_size, HIDDEN).requires_grad_(False)
    original.weight.data = full_tensor("embedding.weight", vocab_size, HIDDEN)
    token_ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).repeat(2)
    for result, num_all_reduces in gloo_pool.run(_run_embedding, vocab_size, token_ids, tp=tp):
        assert torch.equal(result, original(token_ids))  # sums with zeros only
        assert num_all_reduces == (tp > 1)


def _run_head(mesh: Mesh, vocab_size: int, is_tied: bool) -> Tensor | None:
    context = _context(mesh)
    embedding = VocabParallelEmbedding(vocab_size, HIDDEN, context=context)
    _load(embedding, "embedding")
    description = _description(vocab_size, tie_embeddings=is_tied)
    head = VocabParallelHead(description, tied=embedding if is_tied else None, context=context)
    _load(head)
    return head(_inputs())


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("vocab_size", [40, 37, 5])
@pytest.mark.parametrize("tp", SIZES)
def test_head_gives_the_first_rank_the_logits_of_its_original(
    gloo_pool: GlooPool, tp: int, vocab_size: int, is_tied: bool
) -> None:
    source = "embedding" if is_tied else "head"
    expected = _linear(source, vocab_size, HIDDEN, has_bias=False)(_inputs())
    logits, *others = gloo_pool.run(_run_head, vocab_size, is_tied, tp=tp)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    assert others == [None] * (tp - 1)


_LARGEST = Search(None)


def _run_search(
    mesh: Mesh, vocab_size: int, options: dict[str, float], search: Search = _LARGEST
) -> tuple[bool, Tensor | None]:
    head = VocabParallelHead(_description(vocab_size, **options), tied=None, context=_context(mesh))
    _load(head)
    x = _inputs()
    x[1] = 0  # all logits are equal
    x[2, 0] = torch.nan
    assert head.draws == head.finds_largest
    return head.draws, head.find(x, search, IN_TORCH) if head.draws else None


@pytest.mark.parametrize("tp", SIZES)
def test_head_finds_the_largest_of_all_ranks_logits(gloo_pool: GlooPool, tp: int) -> None:
    logits = _linear("head", 40, HIDDEN, has_bias=False)(_inputs())
    expected = logits.argmax(-1)
    expected[1], expected[2] = 0, -1
    (finds_largest, token_ids), *others = gloo_pool.run(_run_search, 40, {}, tp=tp)
    assert finds_largest == (tp > 1), "one rank has nothing to gain from it, whose kernels search no product"
    if tp > 1:
        assert torch.equal(token_ids, expected)
    assert others == [(True, None)] * (tp - 1)


@pytest.mark.parametrize("tp", SIZES[1:])
def test_ranks_that_each_draw_from_their_own_logits_draw_what_one_does(gloo_pool: GlooPool, tp: int) -> None:
    x = _inputs()
    x[1], x[2, 0] = 0, torch.nan
    logits = _linear("head", 40, HIDDEN, has_bias=False)(x)
    for seed in range(10):
        noise = np.zeros(len(x), NOISE)
        noise["temperature"] = np.resize([1.0, 0.7, 1.0, 0.0, 3.0], len(x))
        noise["key"] = np.random.default_rng(seed).integers(2**32, size=(len(x), 2), dtype=np.uint32)
        for edits in (None, make_edits(len(x), 40, 1.0)):
            (_, token_ids), *others = gloo_pool.run(_run_search, 40, {}, Search(noise, edits), tp=tp)
            edited = logits.clone()
            if edits is not None:
                edit_in_torch(edited, edits, 0)
            assert torch.equal(token_ids, find_in_torch(edited, noise, 0)[1])
            assert others == [(True, None)] * (tp - 1)


def test_head_is_not_asked_for_the_largest_of_padding_or_of_what_is_rounded_anew(gloo_pool: GlooPool) -> None:
    for vocab_size, options in ((37, {}), (40, {"logit_multiplier": 0.5}), (40, {"logit_soft_cap": 30.0})):
        assert gloo_pool.run(_run_search, vocab_size, options, tp=2) == [(False, None)] * 2


def _run_tied(mesh: Mesh, vocab_size: int, token_ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    device, dtype = torch.device("cpu"), torch.bfloat16
    context = LayerContext(axis=mesh.tp, kernels=select_kernels(device, dtype), device=device, dtype=dtype)
    embedding = VocabParallelEmbedding(vocab_size, 64, context=context)
    _load(embedding, "embedding")
    description = replace(_description(vocab_size, tie_embeddings=True), hidden_size=64)
    head = VocabParallelHead(description, tied=embedding, context=context)
    _load(head)
    x = _inputs(size=64).bfloat16()
    return embedding(token_ids), head(x), head.find(x, Search(None), IN_TORCH) if head.finds_largest else None


@pytest.mark.parametrize("vocab_size", [2048, 2047])
@pytest.mark.parametrize("tp", SIZES)
def test_a_tied_table_that_kernels_lay_out_still_gives_rows(gloo_pool: GlooPool, tp: int, vocab_size: int) -> None:
    weight = full_tensor("embedding.weight", vocab_size, 64).bfloat16()
    token_ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    results = gloo_pool.run(_run_tied, vocab_size, token_ids, tp=tp)
    for rows, _, _ in results:
        assert torch.equal(rows, weight[token_ids])
    logits, largest = results[0][1:]
    torch.testing.assert_close(
        logits.float(), _inputs(size=64).bfloat16().float() @ weight.float().T, rtol=2**-7, atol=0.05
    )
    if largest is not None:
        assert torch.equal(largest, logits.argmax(-1))


def _run_sift(mesh: Mesh, sift: Sift) -> tuple[Tensor | None, Tensor | None]:
    device, dtype = torch.device("cpu"), torch.bfloat16
    context = LayerContext(axis=mesh.tp, kernels=select_kernels(device, dtype), device=device, dtype=dtype)
    head = VocabParallelHead(replace(_description(2048), hidden_size=64), tied=None, context=context)
    _load(head)
    x = _inputs(size=64).bfloat16()
    one = Sift(sift.noise[:1], np.ones(1, np.int32))
    return head(x), head(x, sift) if head.sifts(one) else None


@pytest.mark.parametrize("tp", SIZES)
def test_each_rank_gives_those_of_its_logits_that_may_matter(gloo_pool: GlooPool, tp: int) -> None:
    num_rows = len(_inputs())
    noise = np.zeros(num_rows, NOISE)
    noise["temperature"] = np.resize([1.0, 0.0, 3.0], num_rows)
    noise["key"] = np.random.default_rng(0).integers(2**32, size=(num_rows, 2), dtype=np.uint32)
    sift = Sift(noise, np.resize([1, 5, 3], num_rows).astype(np.int32), make_edits(num_rows, 2048, 1.0))
    (logits, sifted), *others = gloo_pool.run(_run_sift, sift, tp=tp)
    assert others == [(None, None)] * (tp - 1)
    if sifted is None:
        pytest.skip("the kernels of this CPU give all logits")
    assert check_what_matters(sifted, logits, sift).any()


def _run_row_in_bfloat16(mesh: Mesh) -> tuple[Tensor, Tensor | None]:
    mesh.tp.local = None
    context = LayerContext(axis=mesh.tp, kernels=ReferenceKernels(), device=torch.device("cpu"), dtype=torch.bfloat16)
    layer = RowParallelLinear(HIDDEN, 24, has_bias=True, context=context)
    _load(layer, "row")
    part = _inputs().bfloat16().chunk(mesh.tp.size, dim=1)[mesh.tp.rank].contiguous()
    y_TO = layer(part)
    return y_TO, gather_to_first(y_TO, mesh.tp)


def test_half_precision_travels_over_gloo(gloo_pool: GlooPool) -> None:
    results = gloo_pool.run(_run_row_in_bfloat16, tp=4)
    expected = _linear("row", 24, HIDDEN, has_bias=True)(_inputs())
    # inputs, weights and each partial sum are rounded to 8 bits; values of a few units
    torch.testing.assert_close(results[0][0].float(), expected, rtol=0, atol=0.08)
    assert torch.equal(results[0][1], torch.cat([results[0][0]] * 4))
    assert all(torch.equal(result, results[0][0]) for result, _ in results)
