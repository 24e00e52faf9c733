"""Launches of all our Triton kernels, compiled for a GPU that is not here as they would be on it, and not run.

For a process of its own in which Triton does not interpret (triton_programs.py): what a launch is compiled for is
remembered. Numbers and pointers are those of the launchers, so that what Triton makes of them (a 1 is a constant, and
so is what divides by 16) is compiled too. Letters as in parallel/kernels/base.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from helpers.sampling_cases import make_edits
from parallel.kernels import triton_attention, triton_elementwise, triton_int8_linear, triton_launch, triton_sampling
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.sampling import NOISE, Draws, LastTokens
from parallel.kernels.triton_grouped_linear import triton_grouped_linear
from parallel.kernels.triton_linear import multiply_row, multiply_row_gated

_MOST_BLOCKS = 2**31 - 1, 2**16 - 1, 2**16 - 1
"""The largest grid."""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The attention of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rotated: int
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def heads(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values: views into one product."""
        num_all = self.num_heads + 2 * self.num_kv_heads
        all_heads = torch.zeros(num_tokens, num_all, self.head_dim, dtype=self.dtype)
        q, k, v = all_heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), 1)
        return q, k, v

    def cache(self) -> LayerCache:
        """A few blocks."""
        shape = 2, 3, self.block_size, self.num_kv_heads, self.head_dim
        return LayerCache(*torch.zeros(shape, dtype=self.dtype))

    def attend(self, num_decodes: int, num_chunks: int, num_tokens: int, context: int, **params: Any) -> None:
        """A step of so many decodes, and chunks with the other tokens, contexts up to this."""
        num_seqs = num_decodes + num_chunks
        meta = AttentionMeta(
            query_starts=_int32(num_seqs + 1),
            context_lens=_int32(num_seqs),
            block_tables=_int32(num_seqs, -(-context // self.block_size)),
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=num_decodes,
            max_query_len=num_tokens,
            max_context_len=context,
            query_starts_host=[],
            context_lens_host=[],
        )
        triton_attention.triton_attention(
            self.heads(num_tokens)[0], self.cache(), meta, AttentionParams(scale=self.head_dim**-0.5, **params)
        )


_USUAL = _Layer(num_heads=32, num_kv_heads=8, head_dim=128, num_rotated=64)
_WIDE = _Layer(num_heads=8, num_kv_heads=4, head_dim=256, num_rotated=128)
_WIDE_32 = _Layer(num_heads=32, num_kv_heads=1, head_dim=256, num_rotated=128, dtype=torch.float32)
_FALCON = _Layer(num_heads=71, num_kv_heads=1, head_dim=64, num_rotated=32)
_ODD = _Layer(num_heads=3, num_kv_heads=3, head_dim=24, num_rotated=5, block_size=5, dtype=torch.float16)


@contextmanager
def compiling(capability: int, shared_bytes: int) -> Iterator[set[str]]:
    """Until it is closed, a launch compiles for a GPU of this capability, whose programs can have so much shared
    memory; what it gives are the names of the kernels.

    A launch raises what Triton's compiler raises, and AssertionError where that is not enough, or its grid too large.
    """
    compile_and_run = JITFunction.run
    names: set[str] = set()

    def launch(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        built = compile_and_run(kernel, *args, grid=grid, warmup=True, **options)  # not run
        name = kernel.fn.__name__
        assert built.metadata.shared <= shared_bytes, (name, built.metadata.shared, options)
        assert all(0 < num <= most for num, most in zip(grid, _MOST_BLOCKS, strict=False)), (name, grid)
        names.add(name)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(driver, "_active", _Gpu(capability))
        monkeypatch.setattr(JITFunction, "run", launch)
        monkeypatch.setattr(triton_launch, "_can_start_early", lambda _: capability >= 90)  # older ones have no such
        monkeypatch.setattr(triton_attention, "_shared_bytes", lambda _: shared_bytes)
        yield names


def launch_all() -> None:
    """Launch each kernel in the ways that models and requests bring up."""
    launch_attention()
    for layer in (_USUAL, _WIDE_32, _FALCON, _ODD):
        _norm_rotate_and_write(layer)
    for num_in, num_inner, dtype in ((4096, 14336, torch.bfloat16), (900, 2500, torch.float16)):
        for has_bias in (False, True):
            _multiply(num_in, num_inner, dtype, has_bias=has_bias)
    _multiply(512, 96, torch.float32, has_bias=True)
    for num_experts, num_in, dtype in ((128, 2880, torch.bfloat16), (1, 50, torch.float16), (8, 512, torch.float32)):
        for num_rows in (1, 17 * num_experts):
            weights = torch.empty(num_experts, num_in, num_in, dtype=dtype)
            triton_grouped_linear(torch.zeros(num_rows, num_in, dtype=dtype), weights, _int32(num_experts))
    for vocab_size in (128_256, 50_257):
        _sample(vocab_size)


def launch_attention() -> None:
    """Decodes and chunks, whole and cut, with few programs and with many."""
    for num_seqs, context in ((1, 300), (256, 300), (1, 4096), (256, 8192)):
        _USUAL.attend(num_seqs, 0, num_seqs, context)
    _USUAL.attend(0, 2, 4096, 4096)
    _USUAL.attend(100, 1, 164, 8192)
    for window in (None, 128):
        _USUAL.attend(2, 1, 40, 8192, sliding_window=window, sinks_N=torch.zeros(_USUAL.num_heads))
    _USUAL.attend(2, 1, 40, 8192, key_bias_NP=torch.zeros(_USUAL.num_heads, 8192), is_bias_by_distance=True)
    for window in (None, 4096):
        _WIDE.attend(2, 1, 40, 8192, sliding_window=window, soft_cap=50.0)
    for layer in (_WIDE_32, _FALCON, _ODD):
        layer.attend(2, 1, 40, 8192)
    _WIDE_32.attend(2, 1, 40, 8192, key_bias_NP=torch.zeros(_WIDE_32.num_heads, 8192))


def launch_largest_attention() -> None:
    """Chunks whose tiles take most memory."""
    for layer in (_USUAL, _WIDE, _WIDE_32, _ODD):
        layer.attend(0, 2, 4096, 8192)


class _Gpu:
    """What Triton asks its driver for before a launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _norm_rotate_and_write(layer: _Layer) -> None:
    q, k, v = layer.heads(4)
    hidden = q.flatten(1)
    size = hidden.shape[1]
    for weight in (torch.zeros(size, dtype=layer.dtype), torch.zeros(size)):
        triton_elementwise.rms_norm(hidden, weight, 1e-5)
        triton_elementwise.rms_norm(hidden.unsqueeze(1), weight, 1e-5)  # all heads as one
        triton_elementwise.add_rms_norm(hidden, hidden.contiguous(), weight, 1e-5)
    for heads in (q, k):
        for shape in (heads.shape[2:], heads.shape[1:]):
            triton_elementwise.rms_norm(heads, torch.zeros(shape, dtype=layer.dtype), 1e-5)
    triton_elementwise.silu_mul(torch.zeros(4, 7 * size, dtype=layer.dtype))
    cos, sin = torch.zeros(2, 4, layer.num_rotated)
    cache, slots = layer.cache(), torch.zeros(4, dtype=torch.int64)
    for is_interleaved in (False, True):
        triton_elementwise.rotary(q, k, cos, sin, is_interleaved=is_interleaved)
        triton_elementwise.rotate_and_write(q, k, v, cos, sin, cache, slots, is_interleaved=is_interleaved)
    half_cos, half_sin = cos[:, ::2].contiguous(), sin[:, ::2].contiguous()  # of a part of each head
    triton_elementwise.rotate_and_write(q, k, v, half_cos, half_sin, cache, slots, is_interleaved=False)
    triton_elementwise.write_cache(k, v, cache, slots)


def _multiply(num_in: int, num_inner: int, dtype: torch.dtype, *, has_bias: bool) -> None:
    """Gate and up, and down, of one row, and of few in 8 bits; of many, what lies around torch's product."""
    for num_from, num_out, is_gated in ((num_in, 2 * num_inner, True), (num_inner, num_in, False)):
        bias = torch.zeros(num_out, dtype=dtype) if has_bias else None
        weight = torch.empty(num_out, num_from, dtype=dtype)
        (multiply_row_gated if is_gated else multiply_row)(torch.zeros(1, num_from, dtype=dtype), weight, bias)
        weight = torch.empty(num_out, num_from, dtype=torch.int8)
        for num_rows in (1, 64):
            rows = triton_int8_linear.quantize_rows(torch.zeros(num_rows, num_from, dtype=dtype))
            scales = torch.zeros(num_out)
            triton_int8_linear.multiply_int8(*rows, weight, scales, bias, dtype=dtype, is_gated=is_gated)
        triton_int8_linear.scale_sums(_int32(72, num_out), torch.zeros(70), scales, bias, dtype=dtype)


def _sample(vocab_size: int) -> None:
    """What rows may want, one after the other."""
    num_rows = 3
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(num_rows, vocab_size, dtype=dtype)
        triton_sampling.choose_in_triton(logits, None)
        triton_sampling.find_in_triton(logits, np.zeros(num_rows, NOISE), vocab_size)
    for top_k, top_p, min_p in ((0.0, 1.0, 0.0), (5.0, 0.9, 0.0), (0.0, 1.0, 0.1)):
        top_ks, top_ps, min_ps = (np.full(num_rows, each) for each in (top_k, top_p, min_p))
        draws = Draws(noise=np.zeros(num_rows, NOISE), top_k=top_ks, top_p=top_ps, min_p=min_ps)
        triton_sampling.choose_in_triton(logits, draws)
    edits = make_edits(num_rows, vocab_size, 1.0)
    none = np.full(num_rows, np.nan, np.float32)
    last = LastTokens(torch.zeros(num_rows, dtype=torch.int64), none, edits.offsets)
    for each in (edits, edits._replace(last=last)):
        triton_sampling.edit_in_triton(logits, each, 0)


def _int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)
