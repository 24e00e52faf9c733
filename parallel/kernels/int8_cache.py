"""The paged cache in 8 bits, in plain torch: the definition that the compiled kernels are tested against.

A token's key, and its value, is int8 with a float32 scale for each head: symmetric, the largest magnitude is 127, as
quantize_rows of int8_linear.py says. It is rounded when it is written, so whoever reads it, in whatever step, reads
the same bits. A block keeps its scales behind its integers, and is a piece of memory like any other to whoever copies
or counts blocks:

    one block of keys or values    [P, K, H] int8 | [K, P] float32

Shape letters as in base.py. KIVI, arXiv:2402.02750, has finer scales for keys; a scale per token needs no second pass.
"""

import torch
from torch import Tensor

from parallel.kernels.choice import SCALE_BYTES
from parallel.kernels.int8_linear import quantize_rows


def lay_out_half(memory: Tensor, block_size: int, num_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """(integers [B, P, K, H], scales [B, P, K]), views into the flat int8 memory of the keys or of the values."""
    num_integers = block_size * num_heads * head_dim
    blocks = memory.view(-1, num_integers + block_size * num_heads * SCALE_BYTES)
    integers = blocks[:, :num_integers].view(-1, block_size, num_heads, head_dim)
    scales = blocks.view(torch.float32)[:, num_integers // SCALE_BYTES :].view(-1, num_heads, block_size)
    return integers, scales.transpose(1, 2)


def write_half(x_TKH: Tensor, integers_BPKH: Tensor, scales_BPK: Tensor, slots_T: Tensor) -> None:
    """Round each token's heads, and store them at its slot."""
    num_tokens, num_heads, head_dim = x_TKH.shape
    integers, scales = quantize_rows(x_TKH.reshape(-1, head_dim))
    place = split_slots(slots_T, integers_BPKH)
    integers_BPKH[place] = integers.view(num_tokens, num_heads, head_dim)
    scales_BPK[place] = scales.view(num_tokens, num_heads)


def split_slots(slots: Tensor, half_BPKH: Tensor) -> tuple[Tensor, Tensor]:
    """(blocks, places in them) of slots: blocks are not neighbours here, so slots do not count them through."""
    block_size = half_BPKH.shape[1]
    return slots // block_size, slots % block_size
