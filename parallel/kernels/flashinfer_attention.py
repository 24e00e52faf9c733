"""Attention by FlashInfer, where it is installed: its paged decode and its paged prefill, planned once a step.

Not yet run on a GPU: tested on a CPU with a stand-in that has the library's signatures. A plan needs the lengths of a
step on the host and is for that step alone, so it cannot be in a recorded graph: such steps, whose metas have no
lengths on the host, are not taken.
"""

import importlib
import importlib.util
import logging
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.host_arrays import to_device

logger = logging.getLogger(__name__)

_PACKAGE = "flashinfer"
_MIN_WORKSPACE_BYTES = 128 << 20
"""Size of the workspace that the library's documentation asks for, which is to be zero at first."""
_ALIGN_BYTES = 16
"""Alignment of each of the parts that a plan takes of the workspace."""
_HEAD_DIMS = (64, 128, 256)
_TENSOR_CORE_GROUP = 4
"""With at least so many query heads per key-value head, decoding is faster as products in tensor cores."""


class _Kind(NamedTuple):
    """What layers have in common that are planned alike."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_size: int
    scale: float
    soft_cap: float | None


class _Wrappers(NamedTuple):
    """The library's two objects, each with a plan of its own."""

    decode: Any
    prefill: Any


class FlashInfer:
    """Attention by the FlashInfer library. One per process; make it with `find`. One thread.

    Args:
        num_multiprocessors: of the device.
        copied: an event. A plan is copied from pinned memory that the wrapper has once; the host may be a step ahead,
            and must not write the next plan there before.
    """

    name = "flashinfer"

    def __init__(
        self,
        library: Any,
        device: torch.device,
        copied: torch.cuda.Event | None = None,
        *,
        num_multiprocessors: int = 1,
    ) -> None:
        self._library = library
        self._copied = copied
        self._num_multiprocessors = num_multiprocessors
        self._workspace = torch.empty(0, dtype=torch.uint8, device=device)
        """Shared by all plans, for one attention runs at a time. As large as the largest kind of layer wants it."""
        self._wrappers: dict[_Kind, list[_Wrappers]] = {}
        """Wrappers of each kind of layer, kept over steps; in a step each group of layers has its own."""
        self._metas: dict[_Kind, list[AttentionMeta]] = {}
        """Metas of the step under way that are planned, in the order of their wrappers."""
        self._lengths: list[int] = []
        """`context_lens_host` of the step under way: all its metas have this one object."""

    @classmethod
    def find(cls, device: torch.device) -> "FlashInfer | None":
        """Return one; None where the library is not installed, or does not load."""
        if importlib.util.find_spec(_PACKAGE) is None:
            return None
        try:
            library = importlib.import_module(_PACKAGE)
            if device.type != "cuda":
                return cls(library, device)
            num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            return cls(library, device, torch.cuda.Event(), num_multiprocessors=num_multiprocessors)
        except (ImportError, OSError, RuntimeError) as error:
            logger.warning("%s is installed, but cannot be used: %s", _PACKAGE, error)
            return None

    def takes(self, q_TNH: Tensor, meta: AttentionMeta, params: AttentionParams) -> bool:
        """Whether the library has what a layer wants.

        Not windows: it may read entries of block tables that lie before the window.
        """
        has_extras = params.sliding_window is not None or params.key_bias_NP is not None or params.sinks_N is not None
        is_known = q_TNH.dtype in (torch.float16, torch.bfloat16) and q_TNH.shape[-1] in _HEAD_DIMS
        return is_known and not has_extras and bool(meta.context_lens_host)

    def __call__(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`; for what it `takes`."""
        wrappers = self._planned(q_TNH, cache, meta, params)
        q_TNH, num_decodes, halves = q_TNH.contiguous(), meta.num_decodes, (cache.k_BPKH, cache.v_BPKH)
        out_TNH = torch.empty_like(q_TNH)
        if num_decodes:
            wrappers.decode.run(q_TNH[:num_decodes], halves, out=out_TNH[:num_decodes])
        if num_decodes < len(q_TNH):
            wrappers.prefill.run(q_TNH[num_decodes:], halves, out=out_TNH[num_decodes:])
        return out_TNH

    def _planned(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> _Wrappers:
        """The wrappers with the plan for this meta, made by the first layer that comes with it."""
        if self._lengths is not meta.context_lens_host:
            self._lengths = meta.context_lens_host
            self._metas.clear()
            if self._copied is not None:
                self._copied.synchronize()
        block_size, num_kv_heads, head_dim = cache.k_BPKH.shape[1:]
        kind = _Kind(q_TNH.shape[1], num_kv_heads, head_dim, q_TNH.dtype, block_size, params.scale, params.soft_cap)
        if kind not in self._wrappers:
            self._make_room(kind)
        metas, wrappers = self._metas.setdefault(kind, []), self._wrappers.setdefault(kind, [])
        for planned, own in zip(metas, wrappers, strict=False):
            if planned is meta:
                return own
        if len(wrappers) == len(metas):
            wrappers.append(self._new_wrappers(kind))
        metas.append(meta)
        _plan(wrappers[len(metas) - 1], kind, meta)
        if self._copied is not None:
            self._copied.record()
        return wrappers[len(metas) - 1]

    def _make_room(self, kind: _Kind) -> None:
        """Have a workspace that is large enough for a kind that is new.

        With a larger one all wrappers are made anew, and those of the step under way planned again. They could be given
        it (`reset_workspace_buffer`), but only beside memory for integers, without the plans that are in theirs.
        """
        num_bytes = workspace_bytes(
            kind.num_heads, kind.num_kv_heads, kind.head_dim, num_multiprocessors=self._num_multiprocessors
        )
        if num_bytes <= len(self._workspace):
            return
        if self._copied is not None and self._wrappers:
            self._copied.synchronize()  # plans are still copied from the memory that goes with their wrappers
        self._wrappers.clear()
        self._metas.clear()
        for size in (0, num_bytes):  # the one is gone before there is the other
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self._workspace.device)

    def _new_wrappers(self, kind: _Kind) -> _Wrappers:
        is_wide = kind.num_heads // kind.num_kv_heads >= _TENSOR_CORE_GROUP
        return _Wrappers(
            self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=is_wide),
            self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"),
        )


def workspace_bytes(num_heads: int, num_kv_heads: int, head_dim: int, *, num_multiprocessors: int) -> int:
    """What any plan for such layers finds room in; a plan raises where it does not.

    Where contexts are split, `PrefillPlan` (include/flashinfer/attention/scheduler.cuh, which also plans decodes in
    tensor cores) keeps of each of so many tiles, for each head, the rows' means in float32 and a sum for each:

        tiles   at most 2 * multiprocessors / kv heads: more are not made by splitting
        rows    128; 64 of heads of 256 (`FA2DetermineCtaTileQ`)

    A head of 128 thus takes 128 KiB a multiprocessor and query head of a group: 66 MiB with groups of 4 on an H100, 264
    with groups of 16. `DecodePlan` has one row in place of 128, and at most 16 tiles in place of 2.
    """
    num_rows = 128 if head_dim < 256 else 64
    num_tiles = 2 * num_multiprocessors // num_kv_heads
    means_bytes = num_heads * num_tiles * num_rows * head_dim * 4
    sums_bytes = num_heads * num_tiles * num_rows * 4
    return max(_MIN_WORKSPACE_BYTES, means_bytes + sums_bytes + 2 * _ALIGN_BYTES)


def _plan(wrappers: _Wrappers, kind: _Kind, meta: AttentionMeta) -> None:
    """Plan decodes and chunks of a step, if there are any. Nothing waits for the device: lengths are on the host."""
    num_decodes, num_seqs = meta.num_decodes, len(meta.context_lens_host)
    sizes = kind.num_heads, kind.num_kv_heads, kind.head_dim, kind.block_size
    common = {
        "sm_scale": kind.scale,
        "logits_soft_cap": kind.soft_cap,
        "q_data_type": kind.dtype,
        "kv_data_type": kind.dtype,
    }
    if num_decodes:
        wrappers.decode.plan(*_pages(meta, range(num_decodes), kind.block_size), *sizes, **common)
    if num_decodes < num_seqs:
        starts = torch.tensor(meta.query_starts_host[num_decodes:], dtype=torch.int32) - num_decodes
        pages = _pages(meta, range(num_decodes, num_seqs), kind.block_size)
        wrappers.prefill.plan(starts, *pages, *sizes, causal=True, **common)


def _pages(meta: AttentionMeta, sequences: range, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(where each sequence's blocks begin, the blocks of all, how full its last one is); the second on the device."""
    lengths = meta.context_lens_host[sequences.start : sequences.stop]
    counts = [-(-length // block_size) for length in lengths]
    starts = list(accumulate(counts, initial=0))
    num_entries = meta.block_tables.shape[1]
    rows = np.repeat(np.array(sequences) * num_entries - np.array(starts[:-1]), counts)
    places = to_device(rows + np.arange(starts[-1]), meta.block_tables.device)
    last = [length - (count - 1) * block_size for length, count in zip(lengths, counts, strict=True)]
    blocks = meta.block_tables.reshape(-1)[places]
    return torch.tensor(starts, dtype=torch.int32), blocks, torch.tensor(last, dtype=torch.int32)
