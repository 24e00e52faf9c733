"""Stands for FlashInfer on a CPU: its two wrappers with the signatures that we call, computing in plain torch.

It reads pages by what was planned, so that a plan which is missing, stale or wrong gives other numbers or an error.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Halves = tuple[Tensor, Tensor]


class FakeFlashInfer:
    """The module, on a device of so many multiprocessors; counts the plans made on each of its wrappers."""

    def __init__(self, num_multiprocessors: int = 1) -> None:
        self._num_multiprocessors = num_multiprocessors
        self.decodes: list[_Decode] = []
        self.prefills: list[_Prefill] = []

    def BatchDecodeWithPagedKVCacheWrapper(  # noqa: N802
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool = False
    ) -> "_Decode":
        self.decodes.append(_Decode(float_workspace_buffer, kv_layout, self._num_multiprocessors))
        self.decodes[-1].use_tensor_cores = use_tensor_cores
        return self.decodes[-1]

    def BatchPrefillWithPagedKVCacheWrapper(  # noqa: N802
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD"
    ) -> "_Prefill":
        self.prefills.append(_Prefill(float_workspace_buffer, kv_layout, self._num_multiprocessors))
        return self.prefills[-1]


class _Wrapper:
    def __init__(self, workspace: Tensor, kv_layout: str, num_multiprocessors: int) -> None:
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"
        self.workspace = workspace
        self._num_multiprocessors = num_multiprocessors
        self.num_plans = 0
        self.use_tensor_cores = False

    def _keep(
        self,
        qo_indptr: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        sm_scale: float,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert {tensor.dtype for tensor in (qo_indptr, indptr, indices, last_page_len)} == {torch.int32}
        assert {tensor.device.type for tensor in (qo_indptr, indptr, last_page_len)} == {"cpu"}, "they are read there"
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1
        assert int(indptr[-1]) == len(indices)
        assert bool(((last_page_len > 0) & (last_page_len <= page_size)).all())
        if self.use_tensor_cores or isinstance(self, _Prefill):
            pages = [end - start for start, end in pairwise(indptr.tolist())]
            queries = [end - start for start, end in pairwise(qo_indptr.tolist())]
            wanted = self._split_bytes(queries, pages, num_qo_heads, num_kv_heads, head_dim, page_size)
            if wanted > len(self.workspace):
                raise RuntimeError(f"Buffer overflow: {wanted} bytes for batch_prefill_tmp_v and _s")
        self.num_plans += 1
        self._bounds = qo_indptr.tolist(), indptr.tolist()
        self._indices, self._last = indices.clone(), last_page_len.tolist()
        self._shape = num_qo_heads, num_kv_heads, head_dim, page_size
        self._scale, self._cap, self._dtypes = sm_scale, logits_soft_cap, (q_data_type, kv_data_type)

    def _split_bytes(
        self, queries: list[int], pages: list[int], num_heads: int, num_kv_heads: int, head_dim: int, page_size: int
    ) -> int:
        """What its `PrefillPlan` takes: the shortest parts of contexts of which there are few enough are looked for."""
        rows = [num * (num_heads // num_kv_heads) for num in queries]
        mean_rows = sum(rows) // len(rows)
        tile = 128 if mean_rows > 64 and head_dim < 256 else 64 if mean_rows > 16 else 16

        def num_tiles(part: int) -> int:
            return sum(-(-num // tile) * -(-length // part) for num, length in zip(rows, pages, strict=True))

        most, part = 2 * self._num_multiprocessors // num_kv_heads, max(1, 128 // page_size)
        while part < max(pages) and num_tiles(part) > most:
            part += 1
        return num_heads * num_tiles(part) * tile * (head_dim + 1) * 4 if part < max(pages) else 0

    def run(self, q: Tensor, paged_kv_cache: Halves, *, out: Tensor) -> Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self._shape
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype) == self._dtypes
        assert q.shape[1:] == (num_heads, head_dim)
        assert keys.shape[1:] == values.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert q.is_contiguous()
        assert out.shape == q.shape
        starts, pages = self._bounds
        assert starts[-1] == len(q)
        for i, last in enumerate(self._last):
            blocks = self._indices[pages[i] : pages[i + 1]].long()
            num_keys = (len(blocks) - 1) * page_size + last
            k, v = (half[blocks].flatten(0, 1)[:num_keys].float() for half in (keys, values))
            k, v = (half.repeat_interleave(num_heads // num_kv_heads, 1) for half in (k, v))
            rows = q[starts[i] : starts[i + 1]].float()
            scores = torch.einsum("qnh,cnh->nqc", rows, k) * self._scale
            if self._cap:
                scores = self._cap * torch.tanh(scores / self._cap)
            hidden = torch.ones(len(rows), num_keys).triu(num_keys - len(rows) + 1).bool()
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[starts[i] : starts[i + 1]] = torch.einsum("nqc,cnh->qnh", weights, v).to(out.dtype)
        return out


class _Decode(_Wrapper):
    def plan(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, *sizes: int, **options: Any) -> None:
        self._keep(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, *sizes, **options)


class _Prefill(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *sizes: int,
        causal: bool = False,
        **options: Any,
    ) -> None:
        assert causal
        self._keep(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, **options)
