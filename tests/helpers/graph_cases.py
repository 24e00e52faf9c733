"""A small decoder whose steps run as graphs, beside the same one with the reference's kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from helpers.attention_cases import to_device
from helpers.paged_layout import make_meta
from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.kernels.base import AttentionMeta, Kernels, LayerCache
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.random_model import write_random_model

BLOCK_SIZE, NUM_BLOCKS = 16, 100
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
}
STEPS = (
    ((1, 4), (9, 9), (20, 30)),
    ((1, 5), (1, 10), (1, 31)),
    ((1, 600), (1, 11), (1, 32), (1, 1), (1, 7)),
    ((1, 6), (1, 12), (1, 33)),
    ((1, 7), (12, 40), (4, 4)),
    ((40, 100),),
    ((1, 8), (1, 13), (3, 103)),
    ((1, 35),),
)
"""(query, context) of the sequences of each step: four that decode, in three sizes, and four with chunks, in three."""


def check_decoder(
    kernels: Kernels, folder: Path, device: torch.device, *, tolerance: float, tp: Axis | None = None
) -> Decoder:
    """Raises AssertionError where the hidden states of a step are not those of the reference; returns the decoder."""
    write_random_model(folder, CONFIG, 0, torch.float32)
    mesh = Mesh(tp=tp or Axis(), pp=Axis())
    decoders = [
        load_decoder(folder, mesh=mesh, device=device, dtype=torch.float32, kernels=of)
        for of in (kernels, ReferenceKernels())
    ]
    caches = [_filled_caches(decoder) for decoder in decoders]
    for spans in STEPS:
        meta = make_meta(spans, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
        fast, slow = (_run(decoder, of, meta) for decoder, of in zip(decoders, caches, strict=True))
        torch.testing.assert_close(fast, slow, rtol=tolerance, atol=tolerance)
    return decoders[0]


@torch.inference_mode()
def _run(decoder: Decoder, caches: Sequence[LayerCache], meta: AttentionMeta) -> Tensor:
    starts, contexts = meta.query_starts_host, meta.context_lens_host
    ranges = [torch.arange(end - (starts[s + 1] - starts[s]), end) for s, end in enumerate(contexts)]
    positions = torch.cat(ranges).to(decoder.device)
    metas = [to_device(meta, decoder.device)] * decoder.num_local_layers
    return decoder(positions * 7 % 128, positions, caches, metas).cpu()


def _filled_caches(decoder: Decoder) -> list[LayerCache]:
    generator = torch.Generator().manual_seed(1)
    size = NUM_BLOCKS * BLOCK_SIZE * decoder.cache_entry.num_elements
    memories = [torch.randn(size, generator=generator).to(decoder.device) for _ in range(decoder.num_local_layers)]
    return [decoder.cache_entry.lay_out(memory, BLOCK_SIZE) for memory in memories]
