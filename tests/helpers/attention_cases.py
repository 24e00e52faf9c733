"""Steps over a paged cache that tell right attention from wrong, for any device: used on a GPU and in interpreters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from helpers.paged_layout import make_layout, without_unseen_blocks
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.reference import ReferenceKernels

AttentionFunction = Callable[[Tensor, LayerCache, AttentionMeta, AttentionParams], Tensor]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""The order of summation differs, and weights are rounded to the dtype before they meet the values."""
MAX_POSITIONS = 2048


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One call. The cache holds NaN wherever it must not be read, and so do blocks out of sight of a window."""

    name: str
    spans: tuple[tuple[int, int], ...]
    """(query, context) of the sequences."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    has_bias: bool = False
    is_by_distance: bool = False
    has_sinks: bool = False

    def check(self, attention: AttentionFunction, dtype: torch.dtype, device: torch.device) -> None:
        """Raises AssertionError where the result is not the reference's."""
        layout = make_layout(
            self.spans,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            dtype=dtype,
        )
        meta = layout.meta
        if self.window is not None:
            meta = without_unseen_blocks(meta, self.window, block_size=self.block_size)
        generator = torch.Generator().manual_seed(3)
        # as in a decoder, heads are a view into the product of queries, keys and values
        heads = torch.randn(
            meta.query_starts_host[-1], self.num_heads + 2 * self.num_kv_heads, self.head_dim, generator=generator
        )
        q = heads.to(dtype)[:, : self.num_heads]
        params = AttentionParams(
            scale=self.head_dim**-0.5,
            sliding_window=self.window,
            soft_cap=self.soft_cap,
            key_bias_NP=torch.randn(self.num_heads, MAX_POSITIONS, generator=generator) if self.has_bias else None,
            is_bias_by_distance=self.is_by_distance,
            sinks_N=torch.randn(self.num_heads, generator=generator) if self.has_sinks else None,
        )
        expected = ReferenceKernels().attention(q, layout.cache, meta, params)
        actual = attention(
            q.to(device), LayerCache(*(part.to(device) for part in layout.cache[:2])), to_device(meta, device),
            replace(
                params,
                key_bias_NP=None if params.key_bias_NP is None else params.key_bias_NP.to(device),
                sinks_N=None if params.sinks_N is None else params.sinks_N.to(device),
            ),
        )  # fmt: skip
        assert actual.is_contiguous()
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance, msg=self._explain)

    def _explain(self, message: str) -> str:
        return f"{self.name}: {message}"


def attention_cases() -> Iterator[AttentionCase]:
    """Each head size, each feature, and steps of decodes, of chunks, and of both."""
    mixed = ((1, 1), (1, 17), (1, 600), (5, 40), (90, 130), (33, 33), (2, 2))
    for head_dim in (8, 64, 80, 96, 128, 256):
        yield AttentionCase(name=f"head {head_dim}", spans=mixed, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    long = ((1, 1300), (1, 1024), (1, 1025), (1, 3))
    sizes: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64}  # three query heads in a tile of four
    yield AttentionCase(name="partitions", spans=long, **sizes)
    yield AttentionCase(name="no partitions", spans=((1, 512), (1, 300), (1, 5)), **sizes)
    yield AttentionCase(name="one head a group", spans=mixed, num_heads=3, num_kv_heads=3, head_dim=64)
    yield AttentionCase(name="one group", spans=mixed, num_heads=20, num_kv_heads=1, head_dim=64)
    yield AttentionCase(name="odd blocks", spans=mixed, **sizes, block_size=5)
    # the longest fills its partitions, and its last tile of queries is not whole
    yield AttentionCase(name="only chunks", spans=((70, 70), (20, 192)), **sizes)
    for window in (1, 9, 130, 520):
        yield AttentionCase(name=f"window {window}", spans=(*long, *mixed), **sizes, window=window)
    # some queries of a tile see none of the keys that its first ones see
    yield AttentionCase(name="narrow window", spans=((40, 60),), num_heads=1, num_kv_heads=1, head_dim=256, window=9)
    for spans in (long, mixed):
        yield AttentionCase(name="soft cap", spans=spans, **sizes, soft_cap=3.0)
        yield AttentionCase(name="key bias", spans=spans, **sizes, has_bias=True)
        yield AttentionCase(name="bias by distance", spans=spans, **sizes, has_bias=True, is_by_distance=True)
        yield AttentionCase(name="sinks", spans=spans, **sizes, has_sinks=True)
        yield AttentionCase(
            name="all", spans=spans, **sizes, window=530, soft_cap=3.0, has_bias=True, has_sinks=True
        )  # fmt: skip


def to_device(meta: AttentionMeta, device: torch.device) -> AttentionMeta:
    """The same step, there."""
    return replace(
        meta,
        query_starts=meta.query_starts.to(device),
        context_lens=meta.context_lens.to(device),
        block_tables=meta.block_tables.to(device),
        slot_mapping=meta.slot_mapping.to(device),
    )
