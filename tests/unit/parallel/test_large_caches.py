"""Offsets that 32 bits do not hold: a layer of the 134 GB that an H200 keeps may have more than 2**31 numbers."""

import pytest
import torch
from helpers.large_caches import check_past_32_bits
from helpers.triton_programs import interpret

from parallel.kernels.base import CacheEntry, Kernels

NUMBERS = torch.float32, torch.float16, torch.bfloat16
ENTRIES = [
    *(CacheEntry(num_heads=4, head_dim=64, dtype=dtype) for dtype in (*NUMBERS, torch.int8)),
    CacheEntry(num_heads=1, head_dim=64, dtype=torch.bfloat16, is_key_value=True),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.dtype}, {entry.is_key_value}")
def test_a_cpu_finds_keys_past_32_bits(kernels: Kernels, entry: CacheEntry) -> None:
    dtype = torch.bfloat16 if entry.dtype is torch.int8 else entry.dtype
    check_past_32_bits(kernels.write_cache, kernels.attention, dtype, entry)


_PROGRAM = """
import torch
from helpers.large_caches import check_past_32_bits
from parallel.kernels.base import CacheEntry
from parallel.kernels.triton_attention import triton_attention
from parallel.kernels.triton_elementwise import write_cache

check_past_32_bits(
    write_cache, triton_attention, torch.float16, CacheEntry(num_heads=1, head_dim=32, dtype=torch.float16)
)
"""


def test_triton_finds_keys_past_32_bits() -> None:
    interpret(_PROGRAM)
