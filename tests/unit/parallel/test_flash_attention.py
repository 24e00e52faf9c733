"""When FlashAttention is taken, and that torch accepts what it is called with; it runs on a GPU only."""

import dataclasses
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.paged_layout import make_meta
from torch._subclasses.fake_tensor import FakeTensorMode

from parallel.kernels.base import AttentionParams, LayerCache
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.flash_attention import FlashAttention, torch_takes_block_tables
from parallel.kernels.reference import ReferenceKernels

PLAIN = AttentionParams(scale=0.1)


def queries(head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(3, 4, head_dim, dtype=dtype)


@pytest.mark.parametrize(
    ("q", "params", "expected"),
    [
        (queries(), PLAIN, True),
        (queries(80), PLAIN, True),
        (queries(84), PLAIN, False),
        (queries(576), PLAIN, False),
        (queries(dtype=torch.float32), PLAIN, False),
        (queries(), dataclasses.replace(PLAIN, sliding_window=100), False),
        (queries(), dataclasses.replace(PLAIN, soft_cap=30.0), False),
        (queries(), dataclasses.replace(PLAIN, sinks_N=torch.zeros(4)), False),
    ],
)
def test_it_takes_plain_attention_of_half_precision(q: torch.Tensor, params: AttentionParams, expected: bool) -> None:
    meta = make_meta([(1, 9)], block_size=16, num_blocks=9)
    assert FlashAttention().takes(q, meta, params) is expected


@pytest.mark.skipif(not torch_takes_block_tables(), reason="needs a torch whose varlen attention has block tables")
def test_torch_accepts_the_call() -> None:
    """Tensors without values: the schema and shapes are checked, nothing is computed."""
    meta = make_meta([(1, 9), (4, 40)], block_size=16, num_blocks=9)
    with FakeTensorMode() as mode:
        names = ("query_starts", "context_lens", "block_tables", "slot_mapping")
        fake = dataclasses.replace(meta, **{name: mode.from_tensor(getattr(meta, name)) for name in names})
        cache = LayerCache(*(torch.empty(9, 16, 2, 64, dtype=torch.bfloat16) for _ in range(2)))
        q = torch.empty(5, 4, 64, dtype=torch.bfloat16)
        assert FlashAttention()(q, cache, fake, PLAIN).shape == q.shape


def _attend_in_torch(q_TNH, k_BPKH, v_BPKH, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, **kwargs):  # type: ignore[no-untyped-def]
    """What torch says of `varlen_attn`: the last query sees the last key, and a window has no end that is negative."""
    assert (cu_seq_k, kwargs.pop("enable_gqa")) == (None, True)
    (left, right), lengths, tables = (kwargs.pop(name) for name in ("window_size", "seqused_k", "block_table"))
    out_TNH, heads_of_one = torch.empty_like(q_TNH), q_TNH.shape[1] // k_BPKH.shape[2]
    for i, length in enumerate(lengths.tolist()):
        begin, end = cu_seq_q[i : i + 2].tolist()
        assert not kwargs
        assert end - begin <= max_q
        assert length <= max_k
        k_LNH, v_LNH = (
            cache[tables[i].long()].flatten(0, 1)[:length].repeat_interleave(heads_of_one, 1)
            for cache in (k_BPKH, v_BPKH)
        )
        ahead = torch.arange(length) - torch.arange(length - (end - begin), length)[:, None]
        is_seen = ((ahead <= right) | (right < 0)) & ((-ahead <= left) | (left < 0))
        scores = torch.einsum("qnh,lnh->nql", q_TNH[begin:end] * scale, k_LNH).masked_fill(~is_seen, -torch.inf)
        out_TNH[begin:end] = torch.einsum("nql,lnh->qnh", scores.softmax(-1), v_LNH)
    return out_TNH


def test_the_call_asks_for_what_attention_means() -> None:
    torch.manual_seed(0)
    meta = make_meta([(1, 9), (4, 40), (7, 7)], block_size=16, num_blocks=9)
    cache, q = LayerCache(*torch.randn(2, 9, 16, 2, 64)), torch.randn(12, 4, 64)
    attention = FlashAttention()
    attention._attend = _attend_in_torch
    expected = ReferenceKernels().attention(q, cache, meta, PLAIN)
    assert torch.allclose(attention(q, cache, meta, PLAIN), expected, atol=1e-5)


def test_what_is_not_installed_is_no_error() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    assert FlashAttention.find(torch.device("cuda")) is None
    kernels = CudaKernels(torch.device("cuda"))
    assert kernels._library is None
    assert kernels.attention_backend == ("torch" if kernels._attention is None else "triton")


def _varlen_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=0):  # type: ignore[no-untyped-def]
    raise AssertionError("not to be called")


def test_a_torch_without_block_tables_leaves_attention_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=_varlen_of_2_11))
    assert FlashAttention.find(torch.device("cuda")) is None


@pytest.mark.skipif(not torch_takes_block_tables(), reason="needs a torch whose varlen attention has block tables")
@pytest.mark.parametrize("error", [None, ImportError, OSError, RuntimeError])
def test_it_is_found_on_hopper_where_torch_can_load_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception] | None
) -> None:
    activated = []

    def activate(name: str) -> None:
        activated.append(name)
        if error is not None:
            raise error("undefined symbol")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert FlashAttention.find(torch.device("cuda")) is None, "not before Hopper"
    capability = (9, 0)
    assert (FlashAttention.find(torch.device("cuda")) is None) is (error is not None)
    assert activated == ["FA3"]
    assert ("torch cannot use it: undefined symbol" in caplog.text) is (error is not None)
