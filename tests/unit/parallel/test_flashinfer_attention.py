"""What FlashInfer is given, how often it plans, and when it is taken; its own kernels run on a GPU only."""

import dataclasses
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.fake_flashinfer import FakeFlashInfer
from helpers.lazy_cuda import DEVICE, lazy_cuda
from helpers.paged_layout import make_meta

from parallel.errors import DeviceError
from parallel.kernels import flashinfer_attention
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.flash_attention import FlashAttention
from parallel.kernels.flashinfer_attention import FlashInfer
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import has_attention

CPU = torch.device("cpu")
PLAIN = AttentionParams(scale=0.1)
STEPS = (
    [(1, 9), (1, 32), (1, 1), (4, 40), (17, 17)],
    [(1, 10), (1, 33)],
    [(5, 5), (30, 64)],
)
"""(query, context) of the sequences of each step: decodes and chunks, decodes alone, chunks alone."""


def new_cache(num_kv_heads: int = 2, head_dim: int = 64) -> LayerCache:
    return LayerCache(*torch.randn(2, 60, 16, num_kv_heads, head_dim).bfloat16())


def queries(meta: AttentionMeta, num_heads: int = 8, head_dim: int = 64) -> torch.Tensor:
    heads = torch.randn(meta.query_starts_host[-1], num_heads + 4, head_dim).bfloat16()
    return heads[:, :num_heads]  # a view, as in a layer


@pytest.mark.parametrize("params", [PLAIN, dataclasses.replace(PLAIN, soft_cap=5.0)], ids=["plain", "cap"])
def test_it_attends_as_the_reference_and_plans_once_a_step(params: AttentionParams) -> None:
    library = FakeFlashInfer()
    attend = FlashInfer(library, CPU)
    layers = [new_cache() for _ in range(3)]
    for seed, spans in enumerate(STEPS):
        meta = make_meta(spans, block_size=16, num_blocks=60, seed=seed)
        for cache in layers:
            q = queries(meta)
            assert attend.takes(q, meta, params)
            expected = ReferenceKernels().attention(q, cache, meta, params)
            torch.testing.assert_close(attend(q, cache, meta, params), expected, rtol=2e-2, atol=2e-2)
    assert [decode.num_plans for decode in library.decodes] == [2]
    assert [prefill.num_plans for prefill in library.prefills] == [2]
    assert library.decodes[0].use_tensor_cores
    attend(queries(meta), new_cache(num_kv_heads=4), meta, params)
    assert not library.decodes[1].use_tensor_cores, "two heads that share keys and values are too few"


def test_groups_of_layers_and_kinds_of_layers_have_plans_of_their_own() -> None:
    """Two groups alternate, whose blocks differ; of one of them some layers have another scale."""
    library = FakeFlashInfer()
    attend = FlashInfer(library, CPU)
    caches = [new_cache(), new_cache()]
    other = dataclasses.replace(PLAIN, scale=0.3)
    for _ in range(3):
        first = make_meta(STEPS[0], block_size=16, num_blocks=60, seed=1)
        tables = make_meta(STEPS[0], block_size=16, num_blocks=60, seed=2)
        second = dataclasses.replace(first, block_tables=tables.block_tables)
        for cache, meta, params in ((caches[0], first, PLAIN), (caches[1], second, PLAIN)) * 2 + (
            (caches[0], first, other),
        ):
            q = queries(meta)
            expected = ReferenceKernels().attention(q, cache, meta, params)
            torch.testing.assert_close(attend(q, cache, meta, params), expected, rtol=2e-2, atol=2e-2)
    assert [decode.num_plans for decode in library.decodes] == [3, 3, 3]


@pytest.mark.parametrize(
    ("heads", "head_dim", "num_multiprocessors", "spans"),
    [
        ((71, 1), 64, 132, [(1, 2000)] * 4),
        ((32, 2), 128, 108, [(100, 4096)]),
        ((48, 4), 128, 108, [(100, 8192)]),
        ((16, 1), 256, 148, [(64, 8192)]),
        ((32, 8), 128, 132, [(200, 8192)]),
    ],
    ids=["falcon-7b, decodes", "glm-4-9b", "starcoder2-15b", "head size 256", "llama-3-8b"],
)
def test_plans_find_room_on_any_device(
    heads: tuple[int, int], head_dim: int, num_multiprocessors: int, spans: list[tuple[int, int]]
) -> None:
    library = FakeFlashInfer(num_multiprocessors)
    attend = FlashInfer(library, CPU, num_multiprocessors=num_multiprocessors)
    cache = LayerCache(*torch.empty(2, 1, 16, heads[1], head_dim, dtype=torch.bfloat16))
    meta = make_meta(spans, block_size=16, num_blocks=520)
    attend._planned(queries(meta, heads[0], head_dim), cache, meta, PLAIN)
    assert [wrapper.num_plans for wrapper in (*library.decodes, *library.prefills)] in ([1, 0], [0, 1])


def test_a_larger_kind_of_layer_makes_the_workspace_grow() -> None:
    """In the middle of a step, in which the smaller ones go on. What goes with it has been copied before."""
    library, notes = FakeFlashInfer(132), []
    copied: Any = SimpleNamespace(record=lambda: notes.append("recorded"), synchronize=lambda: notes.append("waited"))
    attend = FlashInfer(library, CPU, copied, num_multiprocessors=132)
    small, large = new_cache(), new_cache(num_kv_heads=1)
    for seed, sizes in enumerate(([128 << 20, 264 * 128 * 32 * 65 * 4 + 32], [264 * 128 * 32 * 65 * 4 + 32] * 2)):
        meta = make_meta(STEPS[0], block_size=16, num_blocks=60, seed=seed)
        for cache, num_heads, size in ((small, 8, sizes[0]), (large, 32, sizes[1]), (small, 8, sizes[1])):
            q = queries(meta, num_heads)
            expected = ReferenceKernels().attention(q, cache, meta, PLAIN)
            torch.testing.assert_close(attend(q, cache, meta, PLAIN), expected, rtol=2e-2, atol=2e-2)
            assert len(attend._workspace) == size
    assert [decode.num_plans for decode in library.decodes] == [1, 2, 2]
    assert notes == ["waited", "recorded", "waited", "recorded", "recorded", "waited", "recorded", "recorded"]
    assert library.decodes[1].workspace is library.prefills[2].workspace is attend._workspace


def test_the_workspace_is_zero_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the library's documentation asks for."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, 127, **options))
    library, meta = FakeFlashInfer(), make_meta(STEPS[1], block_size=16, num_blocks=60)
    FlashInfer(library, CPU)._planned(queries(meta), new_cache(), meta, PLAIN)
    assert not library.decodes[0].workspace.any()


def test_a_plan_is_not_written_before_the_last_one_was_copied() -> None:
    library, notes = FakeFlashInfer(), []

    class NotedEvent:
        def record(self) -> None:
            notes.append(("recorded", library.decodes[0].num_plans))

        def synchronize(self) -> None:
            notes.append(("waited", library.decodes[0].num_plans if library.decodes else 0))

    copied: Any = NotedEvent()
    attend, cache = FlashInfer(library, CPU, copied), new_cache()
    for seed in range(2):
        meta = make_meta(STEPS[1], block_size=16, num_blocks=60, seed=seed)
        for _ in range(2):
            attend(queries(meta), cache, meta, PLAIN)
    assert notes == [("waited", 0), ("recorded", 1), ("waited", 1), ("recorded", 2)]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "changes", "expected"),
    [
        (128, torch.bfloat16, {}, True),
        (128, torch.float16, {"soft_cap": 30.0}, True),
        (96, torch.bfloat16, {}, False),
        (128, torch.float32, {}, False),
        (128, torch.bfloat16, {"sliding_window": 100}, False),
        (128, torch.bfloat16, {"sinks_N": torch.zeros(4)}, False),
        (128, torch.bfloat16, {"key_bias_NP": torch.zeros(4, 9)}, False),
    ],
)
def test_it_takes_what_it_has(head_dim: int, dtype: torch.dtype, changes: dict[str, object], expected: bool) -> None:
    q, meta = torch.empty(1, 4, head_dim, dtype=dtype), make_meta([(1, 9)], block_size=16, num_blocks=9)
    attend = FlashInfer(FakeFlashInfer(), CPU)
    assert attend.takes(q, meta, dataclasses.replace(PLAIN, **changes)) is expected  # type: ignore[arg-type]


def test_recorded_steps_have_no_lengths_and_are_not_taken() -> None:
    meta = make_meta([(1, 9)], block_size=16, num_blocks=9)
    recorded = dataclasses.replace(meta, query_starts_host=[], context_lens_host=[])
    assert not FlashInfer(FakeFlashInfer(), CPU).takes(queries(meta), recorded, PLAIN)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """FlashInfer can be imported."""
    library = FakeFlashInfer()
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        setattr(module, name, getattr(library, name))
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return library


def test_where_it_is_installed_it_attends(installed: FakeFlashInfer) -> None:
    meta = make_meta(STEPS[0], block_size=16, num_blocks=60)
    for backend in ("auto", "flashinfer"):
        kernels = CudaKernels(CPU, backend)
        kernels.attention(queries(meta), new_cache(), meta, PLAIN)
        assert kernels.attention_backend == "flashinfer"
    assert [decode.num_plans for decode in installed.decodes] == [1, 1]


def test_flash_attention_goes_before_it(installed: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashAttention, "find", classmethod(lambda cls, device: cls()))
    assert isinstance(CudaKernels(CPU)._library, FlashAttention)
    assert isinstance(CudaKernels(CPU, "flashinfer")._library, FlashInfer)
    assert CudaKernels(CPU).attention_backend == "flash-attention"
    assert CudaKernels(CPU, "auto")._library is not None
    assert has_attention(CPU, "flash-attention")


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (
            "flashinfer",
            "needs the package flashinfer, and what it compiles with; allowed here: auto, flash-attention, triton",
        ),
        ("flash-attention", "needs a Hopper GPU and the package flash_attn_interface; allowed here: auto, flashinfer"),
        ("sdpa", "is 'sdpa'; allowed: auto, flash-attention, flashinfer, triton"),
    ],
)
def test_a_backend_that_cannot_be_had_is_refused(backend: str, message: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine may have it")
    with pytest.raises(DeviceError, match=message):
        CudaKernels(CPU, backend)
    assert not has_attention(CPU, backend)


def test_where_it_is_not_installed_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer_attention.importlib.util, "find_spec", lambda name: None)
    assert FlashInfer.find(CPU) is None
    assert not caplog.text


@pytest.mark.parametrize("error", [ImportError, OSError, RuntimeError])
def test_what_does_not_load_is_left_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    """A shared library that is missing, or made for another torch, is any of these."""

    def refuse(name: str) -> ModuleType:
        raise error("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(flashinfer_attention.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_attention.importlib, "import_module", refuse)
    assert FlashInfer.find(CPU) is None
    assert "flashinfer is installed, but cannot be used: libcudart" in caplog.text


def test_on_a_gpu_it_knows_how_much_a_plan_may_want_and_waits_for_the_one_before(installed: FakeFlashInfer) -> None:
    with lazy_cuda():
        made = FlashInfer.find(DEVICE)
        assert made is not None
        assert made._num_multiprocessors == torch.cuda.get_device_properties(DEVICE).multi_processor_count > 1
        assert made._copied is not None
