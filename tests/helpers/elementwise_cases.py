"""What the operations between matrix products must do, for any device: used on a GPU and in interpreters."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from parallel.kernels.base import Kernels, LayerCache
from parallel.kernels.reference import ReferenceKernels

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""The reference rounds between two steps of SiLU-mul; the order of sums differs."""

Check = Callable[[Kernels, torch.dtype, torch.device], None]


def elementwise_checks() -> Iterator[Check]:
    """Each raises AssertionError where an operation is not the reference's."""
    yield from (_check_norms, _check_head_norms, _check_silu_mul, _check_rotary, _check_write_cache, _check_both)


def _check_norms(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    for num_tokens, size in ((1, 64), (5, 100), (3, 2050), (0, 16)):
        x, residual = _random(num_tokens, 2, size, dtype=dtype, device=device).unbind(1)  # rows are views
        residual = residual.contiguous()
        for weight in (torch.randn(size, device=device), torch.randn(size, device=device).to(dtype)):
            before = x.clone()
            _assert_close(kernels.rms_norm(x, weight, 1e-5), ReferenceKernels().rms_norm(x, weight, 1e-5))
            assert torch.equal(x, before)
            expected = ReferenceKernels().add_rms_norm(x, residual, weight, 1e-5)
            actual = kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
            _assert_close(actual[0], expected[0])
            assert torch.equal(actual[1], expected[1])


def _check_head_norms(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    heads = _random(4, 6, 24, dtype=dtype, device=device)
    for x in (heads[:, :4], heads[:, 4:]):
        for weight in (torch.randn(24, device=device), torch.randn(x.shape[1], 24, device=device).to(dtype)):
            actual = kernels.rms_norm(x, weight, 1e-6)
            assert actual.is_contiguous()
            _assert_close(actual, ReferenceKernels().rms_norm(x, weight, 1e-6))


def _check_silu_mul(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    for num_tokens, size in ((1, 16), (3, 1500), (0, 8)):
        gate_up = _random(num_tokens, 2 * size, dtype=dtype, device=device)
        _assert_close(kernels.silu_mul(gate_up), ReferenceKernels().silu_mul(gate_up))


def _check_rotary(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    reference = ReferenceKernels()
    for num_heads, num_kv_heads, head_dim, half in ((4, 2, 16, 8), (20, 1, 80, 40), (3, 3, 32, 6)):
        heads = _random(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        values = heads[:, num_heads + num_kv_heads :].clone()
        angles = torch.randn(5, half, device=device)
        for is_interleaved in (False, True):
            q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
            cos, sin = angles.cos(), angles.sin()
            expected = reference.rotary(q.clone(), k.clone(), cos, sin, is_interleaved=is_interleaved)
            turned = kernels.rotary(q, k, cos, sin, is_interleaved=is_interleaved)
            for actual, wanted in zip(turned, expected, strict=True):
                _assert_close(actual, wanted)
            assert torch.equal(v, values)


def _check_write_cache(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    for block_size, num_heads, head_dim in ((16, 2, 64), (5, 3, 400)):
        _, k, v = _random(4, 3 * num_heads, head_dim, dtype=dtype, device=device).chunk(3, 1)
        shape = (6, block_size, num_heads, head_dim)
        slots = torch.tensor([3, 5 * block_size + 1, block_size - 1, 2 * block_size], device=device)
        caches = []
        for writer in (kernels, ReferenceKernels()):
            caches.append(
                LayerCache(
                    torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)
                )
            )
            writer.write_cache(k, v, caches[-1], slots)
        for actual, expected in zip(caches[0][:2], caches[1][:2], strict=True):
            assert torch.equal(actual, expected)


def _check_both(kernels: Kernels, dtype: torch.dtype, device: torch.device) -> None:
    """Rotated and written; the queries are given back."""
    block_size = 5
    for num_heads, num_kv_heads, head_dim, half in ((4, 2, 16, 8), (20, 1, 80, 40), (3, 3, 32, 6), (2, 18, 24, 12)):
        heads = _random(4, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        angles = torch.randn(4, half, device=device)
        slots = torch.tensor([3, 5 * block_size + 1, block_size - 1, 2 * block_size], device=device)
        for is_interleaved in (False, True):
            results = []
            for of in (kernels, ReferenceKernels()):
                q, k, v = heads.clone().split((num_heads, num_kv_heads, num_kv_heads), 1)
                cache = LayerCache(*torch.zeros(2, 6, block_size, num_kv_heads, head_dim, dtype=dtype, device=device))
                q = of.rotate_and_write(
                    *(q, k, v, angles.cos(), angles.sin(), cache, slots), is_interleaved=is_interleaved
                )
                results.append((q, cache))
            (q, cache), (expected_q, expected_cache) = results
            _assert_close(q, expected_q)
            _assert_close(cache.k_BPKH, expected_cache.k_BPKH)
            assert torch.equal(cache.v_BPKH, expected_cache.v_BPKH)


def _random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * 4)
