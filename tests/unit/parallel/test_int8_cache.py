"""A cache in 8 bits: what is rounded, where it lies, and that the fast kernels read and write what the reference does.

Tolerances: the compiled kernels have queries and weights as integers of 16 bits, so a result may be off by some 2**-15
of the largest value; bfloat16 is rounded once more, and plain torch rounds the values to the dtype of the model.
"""

from itertools import pairwise

import pytest
import torch
from helpers.paged_layout import make_meta, without_unseen_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, CacheEntry, Kernels, LayerCache
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native.library import Operations
from parallel.kernels.reference import ReferenceKernels

TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
HEADS = [(4, 4), (4, 1), (14, 2), (3, 3)]
SPANS = [(1, 1), (1, 17), (1, 255), (1, 600), (1, 38), (2, 2), (33, 33), (5, 40), (90, 130), (300, 570)]


def empty_cache(num_blocks: int, block_size: int, num_heads: int, head_dim: int) -> tuple[Tensor, LayerCache]:
    """(memory, cache); slots that belong to no token have NaN for scales: reading one spoils the result."""
    entry = CacheEntry(num_heads=num_heads, head_dim=head_dim, dtype=torch.int8)
    memory = torch.full((num_blocks * block_size * entry.num_elements,), -1, dtype=torch.int8)
    return memory, entry.lay_out(memory, block_size)


class Step:
    """Sequences of some (query, context) lengths, all of whose keys and values are written by one of the kernels."""

    def __init__(
        self, spans: list[tuple[int, int]], *, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        spans = sorted(spans, key=lambda span: span[0] != 1)
        self.shape = (sum(-(-context // block_size) for _, context in spans) + 2, block_size, num_kv_heads, head_dim)
        self.meta = make_meta(spans, block_size=block_size, num_blocks=self.shape[0])
        generator = torch.Generator().manual_seed(1)
        num_tokens = sum(context for _, context in spans)
        self.keys, self.values = (
            torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2)
        )
        self.slots = torch.tensor(
            [
                table[i // block_size] * block_size + i % block_size
                for table, (_, context) in zip(self.meta.block_tables.tolist(), spans, strict=True)
                for i in range(context)
            ]
        )

    def write(self, kernels: Kernels) -> tuple[Tensor, LayerCache]:
        memory, cache = empty_cache(*self.shape)
        kernels.write_cache(self.keys, self.values, cache, self.slots)
        return memory, cache

    def queries(self, num_heads: int) -> Tensor:
        shape = (self.meta.query_starts_host[-1], num_heads, self.shape[3])
        return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(self.keys.dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().max())))


def check(kernels: Kernels, step: Step, meta: AttentionMeta, num_heads: int, params: AttentionParams) -> None:
    cache, q = step.write(ReferenceKernels())[1], step.queries(num_heads)
    assert_close(kernels.attention(q, cache, meta, params), ReferenceKernels().attention(q, cache, meta, params))


def test_an_element_is_off_by_half_a_step_at_most() -> None:
    step = Step([(1, 50)], num_kv_heads=3, head_dim=16, block_size=4, dtype=torch.float32)
    _, cache = step.write(ReferenceKernels())
    place = step.slots // 4, step.slots % 4
    for half, scale, x in zip(cache[:2], cache[2:], (step.keys, step.values), strict=True):
        assert scale is not None
        steps = scale[place].unsqueeze(-1)
        torch.testing.assert_close(steps.squeeze(-1), x.abs().amax(-1) / 127)
        assert ((half[place] * steps - x).abs() <= steps * 0.5001).all()
        assert (half[place].abs().amax(-1) == 127).all()


def test_a_head_of_zeros_stays_one_and_large_ones_stay_finite(kernels: Kernels) -> None:
    step = Step([(1, 20)], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    step.values[:, 0] = 0.0
    step.values[7, 1] *= 1e30
    step.keys[3] *= 1e-30
    _, cache = step.write(kernels)
    out = kernels.attention(step.queries(2), cache, step.meta, AttentionParams(scale=0.125))
    assert not out[0, 0].any()
    expected = ReferenceKernels().attention(step.queries(2), cache, step.meta, AttentionParams(scale=0.125))
    assert expected[0, 1].abs().max() > 1e27
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e26)


def test_a_head_that_has_a_nan_spoils_its_own_result_only(kernels: Kernels) -> None:
    step = Step([(1, 20)], num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    step.values[7, 1, 5] = torch.nan
    _, cache = step.write(kernels)
    out = kernels.attention(step.queries(2), cache, step.meta, AttentionParams(scale=0.125))
    assert out[0, 0].isfinite().all()
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize(("block_size", "window", "context"), [(24, None, 40), (16, 27, 261)])
def test_a_sequence_of_nan_spoils_no_other_one_after_it(
    operations: Operations, block_size: int, window: int | None, context: int
) -> None:
    """Runs of tokens that end within a vector: what the thread has behind them is from the sequence before."""
    kernels = NativeCpuKernels(operations, None, 1)
    step = Step([(1, 200), (1, context)], num_kv_heads=2, head_dim=64, block_size=block_size, dtype=operations.dtype)
    step.values[:200] = torch.nan
    _, cache = step.write(kernels)
    out = kernels.attention(step.queries(2), cache, step.meta, AttentionParams(scale=0.125, sliding_window=window))
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_what_is_written_is_the_same_bit_for_bit(kernels: Kernels, dtype: torch.dtype) -> None:
    for head_dim, block_size in ((64, 16), (48, 5), (12, 1)):
        step = Step([(1, 90)], num_kv_heads=3, head_dim=head_dim, block_size=block_size, dtype=dtype)
        step.keys[4] = 0.0
        step.keys[5] = torch.arange(head_dim) - 0.5  # many are half way between two integers
        assert torch.equal(step.write(kernels)[0], step.write(ReferenceKernels())[0])


def test_a_block_is_one_piece_of_memory_with_its_scales_behind() -> None:
    memory, cache = empty_cache(5, 4, 2, 8)
    memory.zero_()
    assert memory.shape == (2 * 5 * 4 * 2 * (8 + 4),)
    assert cache.k_scale_BPK is not None
    cache.k_BPKH[3] = 1
    cache.k_scale_BPK[3] = torch.arange(8.0).view(4, 2)  # by place, then head
    rows = memory.view(2, 5, 4 * 2 * 12)
    assert rows[0, 3, :64].eq(1).all()
    assert rows[0, 3, 64:].view(torch.float32).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    rows[0, 3] = 0
    assert not memory.any()


@pytest.mark.parametrize("head_dim", [64, 128, 48, 12])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_attention_equals_reference(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    for num_heads, num_kv_heads in HEADS:
        step = Step(SPANS, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=dtype)
        check(kernels, step, step.meta, num_heads, AttentionParams(scale=head_dim**-0.5))


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(
        st.integers(1, 300)
        .flatmap(lambda context: st.tuples(st.sampled_from([1, 1, 2, 9, context]), st.just(context)))
        .map(lambda span: (min(span), span[1])),
        min_size=1,
        max_size=6,
    ),
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([None, 1, 7, 70]),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_any_lengths_blocks_and_windows_equal_reference(
    kernels: Kernels,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    step = Step(spans, num_kv_heads=heads[1], head_dim=64, block_size=block_size, dtype=dtype)
    meta = step.meta if window is None else without_unseen_blocks(step.meta, window, block_size=block_size)
    check(kernels, step, meta, heads[0], AttentionParams(scale=0.125, sliding_window=window))


@pytest.mark.parametrize("head_dim", [64, 48])
def test_caps_biases_and_sinks_equal_reference(kernels: Kernels, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(3)
    step = Step(SPANS, num_kv_heads=2, head_dim=head_dim, block_size=16, dtype=torch.float32)
    bias, sinks = torch.randn(6, 600, generator=generator), torch.randn(6, generator=generator)
    for params in (
        AttentionParams(scale=0.2, soft_cap=3.0),
        AttentionParams(scale=0.2, key_bias_NP=bias),
        AttentionParams(scale=0.2, key_bias_NP=bias, is_bias_by_distance=True),
        AttentionParams(scale=0.2, sinks_N=sinks),
        AttentionParams(scale=0.2, sliding_window=100, soft_cap=3.0, key_bias_NP=bias, sinks_N=sinks),
    ):
        check(kernels, step, step.meta, 6, params)


@pytest.mark.parametrize("window", [None, 70, 333])
@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
def test_a_result_does_not_depend_on_the_rest_of_the_step(
    kernels: Kernels, dtype: torch.dtype, window: int | None
) -> None:
    """A chunk by chunks or token by token, and a prefix read for several sequences at once: the same bits."""
    if not isinstance(kernels, NativeCpuKernels):
        pytest.skip("torch groups decodes by their lengths")
    if dtype is not kernels._operations.dtype:
        pytest.skip("these are compiled for other numbers")
    if not kernels._operations.has_dot_products(64, True):
        pytest.skip("this CPU has no dot products of 8 bits; chunks are torch's")
    for num_heads, num_kv_heads in HEADS:
        step = Step([(1, 600)], num_kv_heads=num_kv_heads, head_dim=64, block_size=16, dtype=dtype)
        _, cache = step.write(kernels)
        q = torch.cat([step.queries(num_heads)] * 8)
        params = AttentionParams(scale=0.125, sliding_window=window)
        alone = kernels.attention(q[:1], cache, step.meta, params)
        many = _repeated(step.meta, 8)
        for row in kernels.attention(q, cache, many, params):  # two whole partitions are shared
            assert torch.equal(row, alone[0])
        chunk = make_meta([(40, 600)], block_size=16, num_blocks=step.shape[0])
        q = torch.randn(40, num_heads, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
        slots = [t * 16 + i for t in chunk.block_tables[0].tolist() for i in range(16)][:600]
        kernels.write_cache(step.keys, step.values, cache, torch.tensor(slots))
        together = kernels.attention(q, cache, chunk, params)
        for start, stop in pairwise([0, 1, 3, 10, 40]):
            part = _part(chunk, start, stop)
            assert torch.equal(kernels.attention(q[start:stop].clone(), cache, part, params), together[start:stop])


def _repeated(meta: AttentionMeta, count: int) -> AttentionMeta:
    """The decode of one sequence, as several sequences that share its blocks."""
    context = meta.context_lens_host[0]
    return AttentionMeta(
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lens=meta.context_lens.repeat(count),
        block_tables=meta.block_tables.repeat(count, 1),
        slot_mapping=meta.slot_mapping.repeat(count),
        num_decodes=count,
        max_query_len=1,
        max_context_len=context,
        query_starts_host=list(range(count + 1)),
        context_lens_host=[context] * count,
    )


def _part(meta: AttentionMeta, start: int, stop: int) -> AttentionMeta:
    """Some of the queries of one chunk, as a step of their own."""
    context = meta.context_lens_host[0] - (meta.query_starts_host[-1] - stop)
    return AttentionMeta(
        query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
        context_lens=torch.tensor([context], dtype=torch.int32),
        block_tables=meta.block_tables,
        slot_mapping=meta.slot_mapping[start:stop],
        num_decodes=int(stop - start == 1),
        max_query_len=stop - start,
        max_context_len=context,
        query_starts_host=[0, stop - start],
        context_lens_host=[context],
    )
