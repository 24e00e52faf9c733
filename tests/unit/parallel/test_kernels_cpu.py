"""The fast CPU kernels mean what the reference means, over random paged layouts.

Tolerances: float32 differs by the order of summation only; bf16 and fp16 results are rounded once more than the
reference's at most, so a few units in the last place of the largest value (2**-8 and 2**-11 of it).
"""

import weakref
from dataclasses import replace

import pytest
import torch
from helpers.paged_layout import make_layout, meta_of_one, without_unseen_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from parallel.description import Activation
from parallel.kernels.base import AttentionMeta, AttentionParams, Kernels, LayerCache
from parallel.kernels.cpu_linear import OneDnnLinear, pack_linear
from parallel.kernels.reference import ReferenceKernels, ReferenceLinear

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCES)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().max())))


def paged_layout(
    spans: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, LayerCache, AttentionMeta]:
    """Random queries, and a cache for sequences of (query, context) lengths; see `make_layout`."""
    layout = make_layout(spans, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    q = torch.randn(layout.meta.query_starts_host[-1], num_heads, head_dim, generator=torch.Generator().manual_seed(0))
    return q.to(dtype), layout.cache, layout.meta


spans_strategy = st.lists(
    st.integers(1, 90)
    .flatmap(lambda context: st.tuples(st.sampled_from([1, 1, 2, 7, context]), st.just(context)))
    .map(lambda span: (min(span), span[1])),
    min_size=1,
    max_size=9,
)


@settings(max_examples=60, deadline=None)
@given(
    spans=spans_strategy,
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    head_dim=st.sampled_from([8, 32]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 5, 64]),
    dtype=st.sampled_from(DTYPES),
)
def test_attention_equals_reference(
    kernels: Kernels,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    q, cache, meta = paged_layout(
        spans, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    params = AttentionParams(scale=head_dim**-0.5, sliding_window=window)
    expected = ReferenceKernels().attention(q, cache, meta, params)
    assert_close(kernels.attention(q, cache, meta, params), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_chunk_after_a_cached_prefix_equals_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    spans = [(1, 700), (1, 30), (1, 690), (600, 900), (300, 300)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    for window in (None, 128):
        params = AttentionParams(scale=0.2, sliding_window=window)
        expected = ReferenceKernels().attention(q, cache, meta, params)
        assert_close(kernels.attention(q, cache, meta, params), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 32])
def test_soft_cap_equals_reference(kernels: Kernels, dtype: torch.dtype, head_dim: int) -> None:
    spans = [(1, 20), (8, 20)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=4, dtype=dtype)
    params = AttentionParams(scale=1.0, soft_cap=3.0)
    expected = ReferenceKernels().attention(q, cache, meta, params)
    uncapped = ReferenceKernels().attention(q, cache, meta, AttentionParams(scale=1.0))
    assert_close(kernels.attention(q, cache, meta, params), expected)
    assert not torch.allclose(expected, uncapped, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_kernels_object_serves_layers_with_different_windows_and_steps(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    for spans in ([(1, 40), (1, 8), (5, 5)], [(1, 41), (1, 9), (1, 6)]):
        q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
        for window in (None, 6, None):
            params = AttentionParams(scale=0.25, sliding_window=window)
            assert_close(
                kernels.attention(q, cache, meta, params), ReferenceKernels().attention(q, cache, meta, params)
            )


@pytest.mark.parametrize("window", [1, 6, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_of_alternating_groups_read_their_own_blocks_within_the_window(
    kernels: Kernels, dtype: torch.dtype, window: int
) -> None:
    spans = [(1, 40), (1, 8), (1, 33), (5, 5), (7, 50)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    sliding = without_unseen_blocks(meta, window, block_size=4)  # block 0 holds NaN
    for _ in range(2):
        for own, size in ((meta, None), (sliding, window)):
            params = AttentionParams(scale=0.25, sliding_window=size)
            assert_close(kernels.attention(q, cache, own, params), ReferenceKernels().attention(q, cache, meta, params))


def test_nothing_of_a_step_is_kept_when_the_next_one_has_come(kernels: Kernels) -> None:
    q, cache, meta = paged_layout(
        [(1, 40), (1, 7), (3, 9)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float32
    )
    # sequences that go on have the query starts of the step before
    metas = [replace(meta, context_lens=meta.context_lens.clone(), context_lens_host=[40, 7, 9]) for _ in range(5)]
    kept = [weakref.ref(meta.context_lens) for meta in metas]
    while metas:
        kernels.attention(q, cache, metas.pop(0), AttentionParams(scale=0.25))
    assert [ref() is not None for ref in kept[:-1]] == [False] * 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_the_other_sequences(kernels: Kernels, dtype: torch.dtype) -> None:
    spans = [(1, 33), (1, 33), (1, 35), (1, 20)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    params = AttentionParams(scale=0.25)
    together = kernels.attention(q, cache, meta, params)
    for row in range(len(spans)):
        assert_close(
            kernels.attention(q[row : row + 1], cache, meta_of_one(meta, row), params), together[row : row + 1]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_norms_equal_reference(kernels: Kernels, dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(1)
    x, residual, weight = (3 * torch.randn(*shape).to(dtype) for shape in ((num_tokens, 96), (num_tokens, 96), (96,)))
    assert_close(kernels.rms_norm(x, weight, 1e-5), ReferenceKernels().rms_norm(x, weight, 1e-5))
    expected = ReferenceKernels().add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    actual = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms_equal_reference(kernels: Kernels, dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(1)
    x, residual, weight = (3 * torch.randn(*shape).to(dtype) for shape in ((5, 96), (5, 96), (96,)))
    bias = torch.randn(96).to(dtype) if has_bias else None
    assert_close(kernels.layer_norm(x, weight, bias, 1e-5), ReferenceKernels().layer_norm(x, weight, bias, 1e-5))
    expected = ReferenceKernels().add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5)
    actual = kernels.add_layer_norm(x.clone(), residual.clone(), weight, bias, 1e-5)
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 7, 900])
def test_norm_of_a_part_of_the_heads_is_that_of_all(kernels: Kernels, num_tokens: int, dtype: torch.dtype) -> None:
    """Each of two ranks has half of the heads; queries, keys and values are one tensor."""
    torch.manual_seed(4)
    heads = torch.randn(2, num_tokens, 3 + 2 + 2, 24).to(dtype)
    weights = torch.randn(2, 3, 24).to(dtype), torch.randn(2, 2, 24).to(dtype)
    parts = [of_rank.split((3, 2, 2), dim=1)[:2] for of_rank in heads]
    wholes = [torch.cat(halves, dim=1).flatten(1) for halves in zip(*parts, strict=True)]
    expected = [
        ReferenceKernels().rms_norm(whole, weight.flatten(), 1e-5)
        for whole, weight in zip(wholes, weights, strict=True)
    ]
    squares = kernels.sum_squares(*parts[0]) + kernels.sum_squares(*parts[1])
    assert squares.dtype is torch.float32
    for x, weight, squares_T, whole in zip(parts[1], weights, squares.unbind(1), expected, strict=True):
        num_summed = 2 * weight[1].numel()
        actual = kernels.norm_part(x, squares_T, weight[1], num_summed=num_summed, eps=1e-5)
        assert_close(actual, whole.unflatten(1, (-1, 24))[:, len(weight[1]) :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_a_float32_weight(kernels: Kernels, dtype: torch.dtype) -> None:
    """Gemma's weights are 1 + what is stored, which half precision would round."""
    torch.manual_seed(2)
    x, residual, weight = torch.randn(5, 32).to(dtype), torch.randn(5, 32).to(dtype), 1 + torch.randn(32) / 100
    assert_close(kernels.rms_norm(x, weight, 1e-6), ReferenceKernels().rms_norm(x, weight, 1e-6))
    expected = ReferenceKernels().add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    for actual, wanted in zip(kernels.add_rms_norm(x, residual, weight, 1e-6), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [48, 41])
def test_activated_equals_reference(kernels: Kernels, dtype: torch.dtype, activation: Activation, size: int) -> None:
    torch.manual_seed(4)
    x = torch.randn(7, size).to(dtype)
    x[0, :7] = torch.tensor([30.0, -30.0, 300.0, -300.0, 3e4, -3e4, torch.nan])
    expected = ReferenceKernels().activated(activation)(x.clone())
    actual = kernels.activated(activation)(x.clone())
    assert actual[0, 6].isnan()
    actual[0, 6] = expected[0, 6] = 0.0
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_gates_of_rows_equal_reference(kernels: Kernels, dtype: torch.dtype, num_tokens: int) -> None:
    torch.manual_seed(4)
    y, x = torch.randn(num_tokens, 2, 96).to(dtype).unbind(1)  # rows that are not dense
    weight = torch.randn(1, 96).to(dtype)
    expected = ReferenceKernels().pack_gate(weight.clone())(y.clone(), x)
    assert_close(kernels.pack_gate(weight)(y, x), expected)
    assert_close(y, expected)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_part_of_each_head_is_rotated(
    kernels: Kernels, dtype: torch.dtype, num_tokens: int, is_interleaved: bool
) -> None:
    """As for latents: the rest of the heads stays as it is."""
    generator = torch.Generator().manual_seed(0)
    heads, row = (torch.randn(num_tokens, *shape, generator=generator).to(dtype) for shape in ((3, 96), (288,)))
    angles = torch.randn(num_tokens, 16, generator=generator)
    q, k = heads[..., 64:], row[:, 256:].unsqueeze(1)
    expected = ReferenceKernels().rotary(q, k, angles.cos(), angles.sin(), is_interleaved=is_interleaved)
    rest = heads[..., :64].clone(), row[:, :256].clone()
    for actual, wanted in zip(
        kernels.rotary(q, k, angles.cos(), angles.sin(), is_interleaved=is_interleaved), expected, strict=True
    ):
        assert_close(actual, wanted)
    assert torch.equal(heads[..., :64], rest[0])
    assert torch.equal(row[:, :256], rest[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_some_columns_are_normed(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 288, generator=generator).to(dtype), torch.randn(256, generator=generator).to(dtype)
    expected = ReferenceKernels().rms_norm(x[:, 32:], weight, 1e-6)
    assert_close(kernels.rms_norm(x[:, 32:], weight, 1e-6), expected)
    assert_close(kernels.rms_norm(x[:, 32:][:1], weight, 1e-6), expected[:1])


@pytest.mark.parametrize("num_tokens", [1, 3, 17, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_matrix_for_each_head_equals_reference(kernels: Kernels, dtype: torch.dtype, num_tokens: int) -> None:
    """Parts of heads, matrices as they lie and transposed, and sizes that panels do not divide."""
    for num_heads, num_in, num_out in ((3, 64, 160), (5, 352, 32), (2, 48, 20)):
        generator = torch.Generator().manual_seed(num_out)
        x = torch.randn(num_tokens, num_heads, num_in + 32, generator=generator).to(dtype)[..., :num_in]
        weight = (torch.randn(num_heads, num_in, num_out, generator=generator) * num_in**-0.5).to(dtype)
        expected = ReferenceKernels().pack_heads(weight)(x)
        for as_stored in (weight.clone(), weight.transpose(1, 2).contiguous().transpose(1, 2)):
            linear = kernels.pack_heads(as_stored)
            assert_close(linear(x), expected)
        assert linear(x[:0]).shape == expected[:0].shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("size", [48, 41])
def test_gated_equals_reference(kernels: Kernels, dtype: torch.dtype, activation: Activation, size: int) -> None:
    torch.manual_seed(4)
    gate_up = torch.randn(7, 2 * size).to(dtype)
    gate_up[0, :6] = torch.tensor([30.0, -30.0, 300.0, -300.0, 3e4, -3e4])
    expected = ReferenceKernels().gated(activation)(gate_up.clone())
    assert_close(kernels.gated(activation)(gate_up.clone()), expected)


@pytest.mark.parametrize("is_by_distance", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_key_bias_equals_reference(kernels: Kernels, dtype: torch.dtype, is_by_distance: bool) -> None:
    spans = [(1, 9), (1, 30), (6, 20), (12, 12)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    params = AttentionParams(scale=0.25, key_bias_NP=torch.randn(4, 64), is_bias_by_distance=is_by_distance)
    assert_close(kernels.attention(q, cache, meta, params), ReferenceKernels().attention(q, cache, meta, params))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_sinks_equals_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    spans = [(1, 9), (1, 30), (6, 20), (12, 12)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=2, head_dim=16, block_size=4, dtype=dtype)
    params = AttentionParams(scale=0.25, sliding_window=7, sinks_N=torch.randn(4))
    assert_close(kernels.attention(q, cache, meta, params), ReferenceKernels().attention(q, cache, meta, params))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_latents_equals_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    spans = [(1, 9), (1, 30), (6, 20), (12, 12)]
    q, cache, meta = paged_layout(spans, num_heads=4, num_kv_heads=1, head_dim=16, block_size=4, dtype=dtype)
    latents = LayerCache(cache.k_BPKH, cache.k_BPKH)
    params = AttentionParams(scale=0.25)
    assert_close(kernels.attention(q, latents, meta, params), ReferenceKernels().attention(q, latents, meta, params))


def test_norm_of_zeros_is_zero_and_eps_counts(kernels: Kernels) -> None:
    assert kernels.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).abs().max() == 0
    tiny = torch.full((1, 8), 1e-3)
    for eps in (1e-6, 1e-2):
        assert_close(kernels.rms_norm(tiny, torch.ones(8), eps), ReferenceKernels().rms_norm(tiny, torch.ones(8), eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_like_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    """Qwen3 norms each head: the last dim of a [T, N, H] tensor. Cohere's heads each have their own weight."""
    torch.manual_seed(2)
    x, weight, own_weights = torch.randn(5, 4, 32).to(dtype), torch.randn(32).to(dtype), torch.randn(4, 32).to(dtype)
    assert_close(kernels.rms_norm(x, weight, 1e-6), ReferenceKernels().rms_norm(x, weight, 1e-6))
    for weights in (weight, own_weights):
        for bias in (None, weights.flip(0)):
            expected = ReferenceKernels().layer_norm(x, weights, bias, 1e-6)
            assert_close(kernels.layer_norm(x, weights, bias, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("rotated", [16, 8])
def test_rotary_equals_reference(kernels: Kernels, dtype: torch.dtype, is_fused: bool, rotated: int) -> None:
    torch.manual_seed(3)
    qkv = torch.randn(6, (4 + 2 + 2) * 32).to(dtype)
    q, k = qkv[:, : 4 * 32].unflatten(1, (4, 32)), qkv[:, 4 * 32 : 6 * 32].unflatten(1, (2, 32))
    if not is_fused:
        q, k = q.contiguous(), k.contiguous()
    for _ in range(2):  # a second step has other positions
        angles = torch.rand(6, rotated) * 6
        cos, sin = angles.cos(), angles.sin()
        expected = ReferenceKernels().rotary(q.clone(), k.clone(), cos, sin, is_interleaved=False)
        turned = kernels.rotary(q.clone() if not is_fused else q, k, cos, sin, is_interleaved=False)
        for actual, wanted in zip(turned, expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_equals_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    gate_up = torch.randn(7, 2 * 48).to(dtype)
    assert_close(kernels.silu_mul(gate_up.clone()), ReferenceKernels().silu_mul(gate_up.clone()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_write_cache_equals_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    qkv = torch.randn(5, 8 * 16).to(dtype)
    k, v = qkv[:, 4 * 16 : 6 * 16].unflatten(1, (2, 16)), qkv[:, 6 * 16 :].unflatten(1, (2, 16))
    slots = torch.tensor([3, 17, 4, 30, 0])
    caches = [
        LayerCache(torch.zeros(8, 4, 2, 16, dtype=dtype), torch.zeros(8, 4, 2, 16, dtype=dtype)) for _ in range(2)
    ]
    kernels.write_cache(k, v, caches[0], slots)
    ReferenceKernels().write_cache(k, v, caches[1], slots)
    assert torch.equal(caches[0].k_BPKH, caches[1].k_BPKH)
    assert torch.equal(caches[0].v_BPKH, caches[1].v_BPKH)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_out", "num_in"), [(24, 40), (1024, 768)])
def test_packed_linear_equals_reference(
    kernels: Kernels, dtype: torch.dtype, has_bias: bool, num_out: int, num_in: int
) -> None:
    torch.manual_seed(6)
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if has_bias else None
    packed, plain = kernels.pack_linear(weight.clone(), bias), ReferenceKernels().pack_linear(weight.clone(), bias)
    for num_tokens in (1, 3, 33):
        x = torch.randn(num_tokens, num_in).to(dtype)
        assert_close(packed(x), plain(x))
        wide = torch.randn(num_tokens, 2 * num_in).to(dtype)
        assert_close(packed(wide[:, num_in:]), plain(wide[:, num_in:]))  # a slice of a fused output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_out", "num_in"), [(96, 64), (64, 48), (40, 64), (320, 1024)])
def test_shared_linear_equals_reference_and_copies_nothing(
    kernels: Kernels, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    torch.manual_seed(6)
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype)
    original = weight.clone()
    shared = kernels.pack_head(weight, None, is_shared=True)
    for num_tokens in (1, 2, 3, 4, 7, 16, 17, 33, 48, 65):
        x = torch.randn(num_tokens, 2 * num_in).to(dtype)[:, num_in:]
        result = shared(x)
        assert_close(result.to(dtype), F.linear(x, original))
        if result.dtype is not dtype:  # not rounded, then, for any number of rows
            assert result.dtype is torch.float32
            assert torch.equal(result, torch.cat([shared(rows) for rows in x.split(1)]))
    weight.zero_()
    assert shared(x).abs().max() == 0
    bias = torch.randn(num_out).to(dtype)
    assert_close(kernels.pack_head(weight, bias, is_shared=True)(x).to(dtype), bias.expand(len(x), -1))


def test_layout_follows_dtype_and_size() -> None:
    assert isinstance(pack_linear(torch.zeros(16, 16), None), ReferenceLinear)
    assert isinstance(pack_linear(torch.zeros(16, 16, dtype=torch.float64), None), ReferenceLinear)
    if torch.backends.mkldnn.is_available():
        assert isinstance(pack_linear(torch.zeros(1024, 1024), None), OneDnnLinear)
