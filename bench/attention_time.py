"""How long attention takes in a step of one sequence, by the length of its context: of one token, or a chunk of some.

Every layer has a cache of its own, so that none finds its keys in a cache of the device because it just read them. On a
GPU the step is recorded as a CUDA graph, as the engine does: the host has no part in the time.
"""

import torch
from torch import Tensor

from bench.load.hardware import best_s, recorded
from parallel.description import DecoderDescription
from parallel.device.base import Device
from parallel.errors import ModelError
from parallel.kernels.base import AttentionMeta, AttentionParams, CacheEntry
from parallel.kernels.select import select_kernels

_BLOCK_SIZE = 16


@torch.inference_mode()
def time_attention(
    description: DecoderDescription, device: Device, dtype: torch.dtype, context_len: int, num_new: int = 1
) -> float:
    """Seconds of all layers' attention of so many new tokens, the last of the context; the best of some rounds.
    Windows, soft caps and the like are left out.

    Raises ModelError: the model keeps latents.
    """
    if description.latent_kv is not None:
        raise ModelError("attention over latents is not measured; allowed: models with keys and values")
    kernels = select_kernels(device.torch_device, dtype)
    num_blocks = -(-context_len // _BLOCK_SIZE)
    entry = CacheEntry(num_heads=description.num_kv_heads, head_dim=description.head_dim, dtype=dtype)
    caches = [
        entry.lay_out(
            torch.randn(num_blocks * _BLOCK_SIZE * entry.num_elements, dtype=dtype, device=device.torch_device),
            _BLOCK_SIZE,
        )
        for _ in range(description.num_layers)
    ]
    q_TNH = torch.randn(num_new, description.num_heads, description.head_dim, dtype=dtype, device=device.torch_device)
    meta = _meta(context_len, num_new, device)
    params = AttentionParams(scale=description.head_dim**-0.5)

    def attend() -> Tensor:
        for cache in caches:
            out_TNH = kernels.attention(q_TNH, cache, meta, params)
        return out_TNH

    return best_s(device, recorded(attend) if device.works_by_itself else attend)


def _meta(context_len: int, num_new: int, device: Device) -> AttentionMeta:
    """Describe the last tokens of a context. A recorded step has no lengths on the host (see cuda_graphs.py)."""
    where = device.torch_device
    num_blocks = -(-context_len // _BLOCK_SIZE)
    return AttentionMeta(
        query_starts=torch.tensor([0, num_new], dtype=torch.int32, device=where),
        context_lens=torch.tensor([context_len], dtype=torch.int32, device=where),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=where)[None],
        slot_mapping=torch.arange(context_len - num_new, context_len, device=where),
        num_decodes=int(num_new == 1),
        max_query_len=num_new,
        max_context_len=context_len,
        query_starts_host=[] if device.works_by_itself else [0, num_new],
        context_lens_host=[] if device.works_by_itself else [context_len],
    )
