"""Tries a library's attention once, on a few numbers, before a model relies on it.

That a library can be imported tells little: FlashInfer compiles its kernels when the first step is planned, and finds
only then that there is no compiler, or none that fits. It would be the start of a model that fails, though our own
kernels could have attended.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)

_TOLERANCE = 2e-2
"""Of means of normal numbers in bfloat16, one rounded anew."""


class AttentionLibrary(Protocol):
    """What attends in place of our kernels."""

    name: str

    def __call__(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""


def attends(library: AttentionLibrary, device: torch.device) -> bool:
    """Whether it gives what the reference gives; else the log tells why not. Waits for the device, for minutes where
    the library compiles.
    """
    q_TNH, cache, meta = _make_step(device)
    params = AttentionParams(scale=q_TNH.shape[-1] ** -0.5)
    logger.info("trying %s, which may compile its kernels", library.name)
    expected_TNH = ReferenceKernels().attention(q_TNH, cache, meta, params)
    try:
        is_right = bool(((library(q_TNH, cache, meta, params) - expected_TNH).abs() < _TOLERANCE).all())
    except Exception as error:  # whatever others' compilers and loaders raise
        logger.warning("%s is installed, but does not attend here: %s", library.name, error)
        return False
    if not is_right:
        logger.warning("%s is installed, but its attention is not right here", library.name)
    return is_right


def _make_step(device: torch.device) -> tuple[Tensor, LayerCache, AttentionMeta]:
    """A sequence that decodes and a chunk of another, heads as most models have them: so compiled, they serve these."""
    generator = torch.Generator().manual_seed(0)
    q_TNH = torch.randn(6, 8, 128, generator=generator).to(device, torch.bfloat16)
    halves = torch.randn(2, 6, 16, 2, 128, generator=generator).to(device, torch.bfloat16)
    starts, lengths = [0, 1, 6], [20, 40]
    meta = AttentionMeta(
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32, device=device),
        slot_mapping=torch.zeros(6, dtype=torch.int64, device=device),
        num_decodes=1,
        max_query_len=5,
        max_context_len=40,
        query_starts_host=starts,
        context_lens_host=lengths,
    )
    return q_TNH, LayerCache(halves[0], halves[1]), meta
