"""Weights for layers and decoders without a checkpoint: every full tensor is drawn from its name and shape."""

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from parallel.shard import ShardedParameter


def full_tensor(source: str, *shape: int) -> Tensor:
    """The full tensor of that name, the same in every process: float32, of a size that keeps activations near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(source.encode()))
    if len(shape) == 1:
        return torch.randn(shape, generator=generator) * 0.2 + (0 if source.endswith("bias") else 1)
    return torch.randn(shape, generator=generator).div(shape[1] ** 0.5)


def fill(parameters: Iterable[ShardedParameter]) -> None:
    """Do what a checkpoint loader does, after spoiling everything that the pieces should overwrite."""
    for parameter in parameters:
        for piece in parameter.pieces:
            parameter.target(piece).fill_(torch.nan)
        for piece in parameter.pieces:
            full = full_tensor(piece.source, *piece.full_shape)
            parameter.target(piece).copy_(full.narrow(piece.dim, piece.start, piece.stop - piece.start))
