"""Attention by FlashAttention 3, where it is installed and the GPU is of the kind it was made for (Hopper).

It is reached through torch's varlen attention, which takes block tables from torch 2.12 or 2.13 on, when this
implementation is activated. Checked on a CPU up to the call only (shapes and arguments); not yet run on a GPU.
"""

import importlib.util
import inspect
import logging

import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache

logger = logging.getLogger(__name__)

_PACKAGE = "flash_attn_interface"
_HOPPER = 9


class FlashAttention:
    """FlashAttention 3, through torch. One per process; make it with `find`."""

    name = "flash-attention"

    def __init__(self) -> None:
        from torch.nn.attention.varlen import varlen_attn  # takes seconds, for which no other process should wait

        self._attend = varlen_attn

    @classmethod
    def find(cls, device: torch.device) -> "FlashAttention | None":
        """Activate it in torch; None where it is not installed, the device is another one, or torch is too old."""
        if importlib.util.find_spec(_PACKAGE) is None:
            return None
        if torch.cuda.get_device_capability(device)[0] != _HOPPER:
            return None
        if not torch_takes_block_tables():
            logger.warning("%s is installed, but torch %s hands it no block tables", _PACKAGE, torch.__version__)
            return None
        from torch.nn.attention import activate_flash_attention_impl

        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            logger.warning("%s is installed, but torch cannot use it: %s", _PACKAGE, error)
            return None
        return cls()

    def takes(self, q_TNH: Tensor, meta: AttentionMeta, params: AttentionParams) -> bool:
        """Whether the kernel has what a layer wants.

        Not windows: it reads whole tiles of keys, and so entries of block tables that lie before the window.
        """
        is_plain = params.is_plain and params.sliding_window is None
        head_dim = q_TNH.shape[-1]
        return is_plain and q_TNH.dtype in (torch.float16, torch.bfloat16) and head_dim % 8 == 0 and head_dim <= 256

    def __call__(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`; for what it `takes`."""
        out_TNH = self._attend(
            q_TNH,
            cache.k_BPKH,
            cache.v_BPKH,
            meta.query_starts,
            None,
            meta.max_query_len,
            meta.max_context_len,
            scale=params.scale,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=meta.context_lens,
            block_table=meta.block_tables,
        )
        assert isinstance(out_TNH, Tensor), "nothing else was asked for"
        return out_TNH.contiguous()


def torch_takes_block_tables() -> bool:
    """Whether torch's varlen attention has what a paged cache needs: that of 2.11 does not."""
    from torch.nn.attention.varlen import varlen_attn  # see `FlashAttention`

    return {"enable_gqa", "seqused_k", "block_table"} <= inspect.signature(varlen_attn).parameters.keys()
