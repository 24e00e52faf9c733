"""The reference kernels mean what torch's own functions mean."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.paged_layout import make_layout, without_unseen_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.description import Activation
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.reference import ReferenceKernels

KERNELS = ReferenceKernels()
SPANS = [(1, 1), (1, 23), (1, 16), (5, 5), (9, 30), (33, 33), (4, 64)]
TOLERANCE = 2e-6  # float32, sums in another order


def _randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _visible(query: int, context: int, window: int | None) -> Tensor:
    positions = torch.arange(context)
    own = positions[context - query :, None]
    visible = positions <= own
    return visible if window is None else visible & (positions > own - window)


def _attend_by_torch(q: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    """One sequence: [Q, N, H] over [C, K, H]."""
    return F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.transpose(0, 1),
        v.transpose(0, 1),
        attn_mask=_visible(len(q), len(k), params.sliding_window),
        scale=params.scale,
        enable_gqa=True,
    ).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_attention_equals_torch(window: int | None, num_heads: int, num_kv_heads: int, block_size: int) -> None:
    layout = make_layout(SPANS, num_kv_heads=num_kv_heads, head_dim=8, block_size=block_size)
    starts = layout.meta.query_starts_host
    q = _randn(starts[-1], num_heads, 8)
    params = AttentionParams(scale=0.3, sliding_window=window)

    result = KERNELS.attention(q, layout.cache, layout.meta, params)

    for i, (k, v) in enumerate(zip(layout.keys, layout.values, strict=True)):
        own = slice(starts[i], starts[i + 1])
        torch.testing.assert_close(result[own], _attend_by_torch(q[own], k, v, params), rtol=0, atol=TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(
        st.integers(1, 40).flatmap(lambda context: st.tuples(st.integers(1, context), st.just(context))),
        min_size=1,
        max_size=6,
    ),
    window=st.none() | st.integers(1, 20),
    block_size=st.integers(1, 9),
    seed=st.integers(0, 100),
)
def test_attention_equals_torch_on_any_layout(
    spans: list[tuple[int, int]], window: int | None, block_size: int, seed: int
) -> None:
    layout = make_layout(spans, num_kv_heads=2, head_dim=4, block_size=block_size, seed=seed)
    starts = layout.meta.query_starts_host
    q = _randn(starts[-1], 4, 4, seed=seed)
    params = AttentionParams(scale=0.5, sliding_window=window)
    result = KERNELS.attention(q, layout.cache, layout.meta, params)
    expected = [
        _attend_by_torch(q[starts[i] : starts[i + 1]], layout.keys[i], layout.values[i], params)
        for i in range(len(spans))
    ]
    torch.testing.assert_close(result, torch.cat(expected), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [1, 4, 9, 40])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_nothing_is_read_of_blocks_before_the_window(window: int, block_size: int) -> None:
    layout = make_layout(SPANS, num_kv_heads=2, head_dim=8, block_size=block_size)
    q, bias = _randn(layout.meta.query_starts_host[-1], 4, 8), _randn(4, 64, seed=1)
    params = AttentionParams(scale=0.3, sliding_window=window, key_bias_NP=bias)
    meta = without_unseen_blocks(layout.meta, window, block_size=block_size)

    assert not torch.equal(meta.block_tables, layout.meta.block_tables)
    result = KERNELS.attention(q, layout.cache, meta, params)

    assert torch.equal(result, KERNELS.attention(q, layout.cache, layout.meta, params))
    assert not result.isnan().any()
    for own, keys, values in zip((slice(0, 1), slice(1, 2)), layout.keys, layout.values, strict=False):
        scores = torch.einsum("qnh,cnh->nqc", q[own], keys.repeat_interleave(2, 1)) * 0.3 + bias[:, None, : len(keys)]
        weights = scores.masked_fill(~_visible(1, len(keys), window), float("-inf")).softmax(-1)
        expected = torch.einsum("nqc,cnh->qnh", weights, values.repeat_interleave(2, 1))
        torch.testing.assert_close(result[own], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 20])
def test_queries_in_pieces_attend_as_all_at_once(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout([(1, 9), (33, 50), (5, 5)], num_kv_heads=2, head_dim=8, block_size=4)
    q = _randn(39, 4, 8)
    params = AttentionParams(scale=0.3, sliding_window=window, soft_cap=3.0, sinks_N=_randn(4, seed=1))
    at_once = KERNELS.attention(q, layout.cache, layout.meta, params)
    for num_queries in (0, 4):
        monkeypatch.setattr("parallel.kernels.reference._MOST_SCORE_BYTES", num_queries * 4 * 50 * 4)
        in_pieces = KERNELS.attention(q, layout.cache, layout.meta, params)
        torch.testing.assert_close(in_pieces, at_once, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("context", [35_000, 163_840])
def test_scores_of_a_chunk_stay_bounded_however_long_the_context(context: int) -> None:
    """Latent attention as that of DeepSeek V3 on 8 ranks, of which the memory of keys grows with the context alone."""
    num_heads, head_dim, num_blocks = 16, 576, -(-context // 16)
    meta = AttentionMeta(
        query_starts=torch.empty(2, dtype=torch.int32, device="meta"),
        context_lens=torch.empty(1, dtype=torch.int32, device="meta"),
        block_tables=torch.empty(1, num_blocks, dtype=torch.int32, device="meta"),
        slot_mapping=torch.empty(2048, dtype=torch.int64, device="meta"),
        num_decodes=0,
        max_query_len=2048,
        max_context_len=context,
        query_starts_host=[0, 2048],
        context_lens_host=[context],
    )
    latents = torch.empty(num_blocks, 16, 1, head_dim, dtype=torch.bfloat16, device="meta")
    q = torch.empty(2048, num_heads, head_dim, dtype=torch.bfloat16, device="meta")
    with NotedSizes() as noted:
        out = KERNELS.attention(q, LayerCache(latents, latents), meta, AttentionParams(scale=1.0))
    assert out.shape == q.shape
    keys_bytes = 4 * num_blocks * 16 * head_dim
    assert max(noted.sizes) <= max(256 << 20, keys_bytes)
    assert noted.sizes.count(4 * context * head_dim) == 1, "keys that are values are made once"


class NotedSizes(TorchDispatchMode):
    """Bytes of what each operation makes, views of something else left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view:
            self.sizes.append(result.nbytes)
        return result


def test_soft_cap_bends_the_scores() -> None:
    layout = make_layout([(3, 12)], num_kv_heads=1, head_dim=4, block_size=4)
    q = _randn(3, 1, 4) * 5
    result = KERNELS.attention(q, layout.cache, layout.meta, AttentionParams(scale=1.0, soft_cap=2.0))
    scores = 2.0 * torch.tanh(q[:, 0] @ layout.keys[0][:, 0].T / 2.0)
    weights = scores.masked_fill(~_visible(3, 12, None), float("-inf")).softmax(-1)
    torch.testing.assert_close(result[:, 0], weights @ layout.values[0][:, 0], rtol=0, atol=TOLERANCE)


def test_key_bias_is_added_to_the_scores_of_its_head() -> None:
    layout = make_layout([(3, 12), (1, 5)], num_kv_heads=2, head_dim=4, block_size=4)
    q, bias = _randn(4, 4, 4), _randn(4, 20, seed=1)
    result = KERNELS.attention(q, layout.cache, layout.meta, AttentionParams(scale=0.5, key_bias_NP=bias))
    for own, keys, values in zip((slice(0, 1), slice(1, 4)), layout.keys, layout.values, strict=True):
        visible = _visible(len(q[own]), len(keys), None)
        for head in range(4):
            scores = q[own, head] @ keys[:, head // 2].T * 0.5 + bias[head, : len(keys)]
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            torch.testing.assert_close(result[own, head], weights @ values[:, head // 2], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("window", [None, 5])
def test_sinks_equal_those_of_gpt_oss(window: int | None) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    layout = make_layout([(1, 9), (3, 12), (4, 4)], num_kv_heads=2, head_dim=8, block_size=4)
    q, sinks = _randn(8, 4, 8), _randn(4, seed=1) * 3
    params = AttentionParams(scale=0.5, sliding_window=window, sinks_N=sinks)
    result = KERNELS.attention(q, layout.cache, layout.meta, params)
    starts = layout.meta.query_starts_host
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    for i, (keys, values) in enumerate(zip(layout.keys, layout.values, strict=True)):
        own = slice(starts[i], starts[i + 1])
        mask = torch.zeros(len(q[own]), len(keys)).masked_fill(~_visible(len(q[own]), len(keys), window), -1e9)
        queries, k, v = (x.transpose(0, 1)[None] for x in (q[own], keys, values))
        expected, _ = eager_attention_forward(module, queries, k, v, mask, scaling=0.5)
        torch.testing.assert_close(result[own], expected[0], rtol=0, atol=TOLERANCE)


def test_attention_in_bfloat16_is_rounded_once() -> None:
    layout = make_layout(SPANS, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)
    q = _randn(layout.meta.query_starts_host[-1], 4, 8, dtype=torch.bfloat16)
    result = KERNELS.attention(q, layout.cache, layout.meta, AttentionParams(scale=0.3))
    in_float32 = KERNELS.attention(
        q.float(), LayerCache(*(x.float() for x in layout.cache[:2])), layout.meta, AttentionParams(scale=0.3)
    )
    assert torch.equal(result, in_float32.bfloat16())


def test_attention_refuses_heads_that_do_not_group() -> None:
    layout = make_layout([(1, 1)], num_kv_heads=2, head_dim=4, block_size=4)
    with pytest.raises(ValueError, match="3 query heads over 2"):
        KERNELS.attention(_randn(1, 3, 4), layout.cache, layout.meta, AttentionParams(scale=1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_torch(dtype: torch.dtype) -> None:
    x, weight = _randn(5, 3, 8, dtype=dtype), _randn(8, seed=1, dtype=dtype)
    before = x.clone()
    original = torch.nn.RMSNorm(8, eps=1e-5)
    original.weight.data = weight.float()
    expected = original(x.float()).to(dtype)
    tolerance = TOLERANCE if dtype is torch.float32 else 2**-7
    result = KERNELS.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(result, KERNELS.rms_norm(x.float(), weight.float(), 1e-5).to(dtype)), "rounded once"
    assert torch.equal(x, before)


def test_add_rms_norm_norms_the_rounded_sum() -> None:
    x, residual, weight = (_randn(4, 8, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    weight = weight[0]
    total = x + residual
    expected = KERNELS.rms_norm(total, weight, 1e-5)
    normed, carried = KERNELS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(carried, total)
    assert torch.equal(normed, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_equals_torch(dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = _randn(5, 3, 8, dtype=dtype), _randn(8, seed=1, dtype=dtype)
    bias = _randn(8, seed=2, dtype=dtype) if has_bias else None
    before = x.clone()
    expected = F.layer_norm(x.float(), (8,), weight.float(), None if bias is None else bias.float(), 1e-5).to(dtype)
    tolerance = TOLERANCE if dtype is torch.float32 else 2**-7
    result = KERNELS.layer_norm(x, weight, bias, 1e-5)
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    in_float32 = KERNELS.layer_norm(x.float(), weight.float(), None if bias is None else bias.float(), 1e-5)
    assert torch.equal(result, in_float32.to(dtype)), "rounded once"
    assert torch.equal(x, before)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_heads_may_have_weights_of_their_own(norm: str) -> None:
    x, weights = _randn(5, 3, 8), _randn(3, 8, seed=1)

    def apply(part: Tensor, weight: Tensor) -> Tensor:
        return KERNELS.rms_norm(part, weight, 1e-5) if norm == "rms" else KERNELS.layer_norm(part, weight, None, 1e-5)

    heads = [apply(x[:, head], weights[head]) for head in range(3)]
    assert torch.equal(apply(x, weights), torch.stack(heads, dim=1))


def test_add_layer_norm_norms_the_rounded_sum() -> None:
    x, residual = (_randn(4, 8, seed=seed, dtype=torch.bfloat16) for seed in range(2))
    weight, bias = _randn(8, seed=3, dtype=torch.bfloat16), _randn(8, seed=4, dtype=torch.bfloat16)
    total = x + residual
    expected = KERNELS.layer_norm(total, weight, bias, 1e-5)
    normed, carried = KERNELS.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(carried, total)
    assert torch.equal(normed, expected)


def test_interleaved_rotary_turns_neighbours_and_leaves_the_rest() -> None:
    q, k = _randn(3, 2, 6), _randn(3, 1, 6, seed=1)
    angles = _randn(3, 2, seed=2)
    turned_q, turned_k = KERNELS.rotary(q.clone(), k.clone(), angles.cos(), angles.sin(), is_interleaved=True)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for x, turned in ((q, turned_q), (k, turned_k)):
        pairs = torch.view_as_real(torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2)).contiguous()) * turn)
        expected = torch.cat([pairs.flatten(-2), x[..., 4:]], dim=-1)
        torch.testing.assert_close(turned, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("activation", "original"),
    [
        (Activation.SILU, F.silu),
        (Activation.GELU, F.gelu),
        (Activation.GELU_TANH, lambda x: F.gelu(x, approximate="tanh")),
        (Activation.RELU, F.relu),
    ],
)
def test_gated_multiplies_the_activated_first_half(activation: Activation, original: Any) -> None:
    x = _randn(3, 8)
    torch.testing.assert_close(KERNELS.gated(activation)(x), original(x[:, :4]) * x[:, 4:])


def test_rotary_turns_pairs_and_leaves_the_rest() -> None:
    q, k = _randn(3, 2, 6), _randn(3, 1, 6, seed=1)
    angles = _randn(3, 2, seed=2)
    turned_q, turned_k = KERNELS.rotary(q.clone(), k.clone(), angles.cos(), angles.sin(), is_interleaved=False)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    for x, turned in ((q, turned_q), (k, turned_k)):
        pairs = torch.complex(x[..., :2], x[..., 2:4]) * turn
        expected = torch.cat([pairs.real, pairs.imag, x[..., 4:]], dim=-1)
        torch.testing.assert_close(turned, expected, rtol=0, atol=TOLERANCE)


def test_silu_mul_gates_the_second_half() -> None:
    x = _randn(3, 8)
    torch.testing.assert_close(KERNELS.silu_mul(x), F.silu(x[:, :4]) * x[:, 4:])


def test_write_cache_fills_exactly_the_slots() -> None:
    cache = LayerCache(torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 5))
    k, v = _randn(3, 2, 5), _randn(3, 2, 5, seed=1)
    KERNELS.write_cache(k, v, cache, torch.tensor([11, 0, 6]))
    assert torch.equal(cache.k_BPKH.flatten(0, 1)[[11, 0, 6]], k)
    assert torch.equal(cache.v_BPKH.flatten(0, 1)[[11, 0, 6]], v)
    assert int((cache.k_BPKH.flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == 3


def test_packed_linear_equals_torch() -> None:
    weight, bias, x = _randn(4, 3), _randn(4, seed=1), _randn(2, 3, seed=2)
    assert torch.equal(KERNELS.pack_linear(weight, bias)(x), F.linear(x, weight, bias))
    assert torch.equal(KERNELS.pack_linear(weight, None)(x), F.linear(x, weight))
