"""A GPU whose streams run late, or early: that it tells right orders from wrong ones, and CUDA's own files on it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.attention_cases import to_device
from helpers.fake_flashinfer import FakeFlashInfer
from helpers.lazy_cuda import DEVICE, EARLY, POISON, DeviceTensor, LazyCuda, lazy_cuda
from helpers.lazy_decoder import GraphedKernels, load_at_once
from helpers.paged_layout import make_meta
from helpers.tiny_models import tiny_model
from torch import Tensor

from parallel.device.cuda import CudaDevice
from parallel.device.select import select_device
from parallel.errors import DeviceError, GraphCaptureError
from parallel.kernels.base import AttentionParams, Kernels, LayerCache
from parallel.kernels.cuda_graphs import CudaGraphs
from parallel.kernels.cuda_pieces import Cut, call_at_once
from parallel.kernels.flashinfer_attention import FlashInfer
from parallel.kernels.int8_linear import Int8Linear
from parallel.kernels.reference import ReferenceKernels


@pytest.fixture
def cuda() -> Iterator[LazyCuda]:
    with lazy_cuda() as cuda:
        yield cuda


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, device=DEVICE)


def test_the_host_sees_what_it_waited_for(cuda: LazyCuda) -> None:
    x = ones(2) + 1
    host = torch.empty(2, pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    assert not copied.query()
    assert host.tolist() != [2.0, 2.0]
    copied.synchronize()
    assert host.tolist() == [2.0, 2.0]
    assert (x.sum().item(), cuda.num_waits) == (4.0, 2)


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_sees_what_it_waited_for(cuda: LazyCuda, waits: bool) -> None:
    side = torch.cuda.Stream()
    x = ones(2) * 3
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        assert (y.tolist() == [4.0, 4.0]) is waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_is_early_overwrites_what_is_still_read(waits: bool) -> None:
    with lazy_cuda(early=["others"]):
        side = torch.cuda.Stream()
        x = ones(2)
        torch.cuda.synchronize()
        y = x + 1
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.fill_(7.0)
        assert (y.tolist() == [2.0, 2.0]) is waits


@pytest.mark.parametrize("is_kept", [True, False])
def test_memory_that_another_stream_reads_is_overwritten_when_it_is_given_back(cuda: LazyCuda, is_kept: bool) -> None:
    side = torch.cuda.Stream()
    x = ones(2)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    kept = x if is_kept else None
    del x
    gc.collect()
    torch.cuda.synchronize()
    side.synchronize()
    with torch.cuda.stream(side):
        assert (y.tolist() == [2.0, 2.0]) is is_kept
    del kept


def test_pinned_memory_is_read_when_the_copy_runs(cuda: LazyCuda) -> None:
    pinned, paged = torch.ones(2).pin_memory(), torch.ones(2)
    copies = [host.to(DEVICE, non_blocking=True) for host in (pinned, paged)]
    waits = cuda.num_waits
    pinned.fill_(9.0)
    paged.fill_(9.0)
    assert [copy.tolist() for copy in copies] == [[1.0, 1.0], [1.0, 1.0]], "the copy of what is not pinned waited"
    assert waits == 1
    late = pinned.to(DEVICE, non_blocking=True)
    pinned.fill_(5.0)
    assert late.tolist() == [5.0, 5.0]


def test_tensors_of_the_host_are_refused_beside_those_of_the_device(cuda: LazyCuda) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        ones(2) + torch.ones(2)


def record(run: Callable[[Cut], tuple[Tensor, Tensor]]) -> Any:
    return CudaGraphs().record(lambda cut=call_at_once: run(cut), None)


@pytest.mark.parametrize("early", EARLY)
def test_a_replay_reads_what_is_there_now(early: tuple[str, ...]) -> None:
    with lazy_cuda(early=early):
        x, kept = ones(2), torch.zeros(2, device=DEVICE)
        between: list[float] = []

        def run(cut: Cut) -> tuple[Tensor, Tensor]:
            doubled = x * 2
            cut(lambda: kept.copy_(doubled))
            return kept + 1, doubled

        recording = record(run)
        for value in (3.0, 4.0):
            x.fill_(value)
            recording.replay()
            between.append(recording.result[0].clone().tolist()[0])
        assert between == [7.0, 9.0]


@pytest.mark.parametrize("wait", [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: torch.cuda.synchronize()])
def test_what_waits_cannot_be_recorded(cuda: LazyCuda, wait: Callable[[Tensor], Any]) -> None:
    x = ones(2)

    def run(cut: Cut) -> tuple[Tensor, Tensor]:
        wait(x)
        return x, x

    with pytest.raises(GraphCaptureError, match="not permitted when stream is capturing"):
        record(run)


def test_what_comes_after_a_refused_recording_sees_what_it_had_begun(cuda: LazyCuda) -> None:
    x = ones(2)

    def run(cut: Cut) -> tuple[Tensor, Tensor]:
        x.fill_(5.0)
        raise DeviceError("lengths are needed")

    with pytest.raises(DeviceError):
        record(run)
    assert x.tolist() == [5.0, 5.0]


def test_what_a_graph_reads_must_be_kept(cuda: LazyCuda) -> None:
    inputs = [ones(2)]

    def run(cut: Cut) -> tuple[Tensor, Tensor]:
        return inputs[0] + 1, inputs[0] + 2

    recording = record(run)
    recording.replay()
    assert recording.result[0].tolist() == [2.0, 2.0]
    inputs.clear()
    gc.collect()
    recording.replay()
    assert recording.result[0].tolist() != [2.0, 2.0]


def test_graphs_that_share_memory_keep_their_results(cuda: LazyCuda) -> None:
    """What is in between is used by the next one; a result is not while somebody has it."""
    graphs, x = CudaGraphs(), ones(2)

    def run(cut: Cut = call_at_once) -> tuple[Tensor, Tensor]:
        inner = x * 2
        return inner + 1, inner + 2

    first = graphs.record(run, None)
    second = graphs.record(run, first.memory)
    first.replay()
    second.replay()
    assert [tensor.tolist()[0] for tensor in (*first.result, *second.result)] == [3.0, 4.0, 3.0, 4.0]


def test_the_device_is_found_and_its_limits_are_told(cuda: LazyCuda) -> None:
    device = select_device("auto")
    assert isinstance(device, CudaDevice)
    assert (device.torch_device, device.collective_backend) == (DEVICE, "nccl")
    assert device.default_dtype(torch.bfloat16) is torch.bfloat16
    assert device.total_memory_bytes() > device.free_memory_bytes() > 0
    with pytest.raises(DeviceError, match="GPU 1 asked for; this process sees 1"):
        CudaDevice(1)


def test_marks_and_copies_make_nobody_wait(cuda: LazyCuda) -> None:
    device = CudaDevice()
    begin = device.mark()
    x = ones(2) * 3
    end = device.mark()
    wait = device.start_copy([x, x[:0], x[:, None].expand(2, 3)])
    del x
    assert end.seconds_since(begin) is None
    assert cuda.num_waits == 0
    assert [copy.tolist() for copy in wait()] == [[3.0, 3.0], [], [[3.0] * 3] * 2]
    assert end.seconds_since(begin) == pytest.approx(2e-3), "two operations"


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 32), (16, 32), (32, 32), (40, 40), (41, 48)])
def test_integer_products_have_as_many_rows_as_the_gpu_wants(
    cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch, num_tokens: int, num_rows: int
) -> None:
    """On CUDA more than 16, and a multiple of 8."""
    shapes = []
    multiply = torch._int_mm

    def note(x: Tensor, weight: Tensor) -> Tensor:
        shapes.append(len(x))
        return multiply(x, weight)

    monkeypatch.setattr(torch, "_int_mm", note)
    weight, x = torch.randn(16, 24), torch.randn(num_tokens, 24)
    expected = Int8Linear(weight, None)(x)
    assert torch.equal(Int8Linear(weight.to(DEVICE), None)(x.to(DEVICE)).cpu(), expected)
    assert shapes[-1] == num_rows


class PinnedPlans(FakeFlashInfer):
    """Plans that go to the device as the library's do: by way of pinned memory that each wrapper has once."""

    def __init__(self, cuda: LazyCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        return _PinnedPlan(self._cuda, lambda: FakeFlashInfer().BatchDecodeWithPagedKVCacheWrapper(*args, **options))

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any) -> Any:  # noqa: N802
        return _PinnedPlan(self._cuda, lambda: FakeFlashInfer().BatchPrefillWithPagedKVCacheWrapper(*args))


class _PinnedPlan:
    def __init__(self, cuda: LazyCuda, make: Callable[[], Any]) -> None:
        self._cuda, self._make = cuda, make
        self._plans: list[tuple[Any, Any]] = []
        self._number = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._number_there = self._number.to(DEVICE)
        weakref.finalize(self, self._number.fill_, POISON)  # it is not torch that copies it, and keeps it until then

    def plan(self, *args: Any, **options: Any) -> None:
        self._number[0] = len(self._plans)
        self._kept = args  # until the next plan
        self._plans.append((tuple(arg.elem if isinstance(arg, DeviceTensor) else arg for arg in args), options))
        self._number_there.copy_(self._number, non_blocking=True)

    def run(self, q: Any, halves: Any, *, out: Any) -> None:
        assert isinstance(self._number_there, DeviceTensor)
        make, plans, number = self._make, self._plans, self._number_there.elem
        elems = q.elem, tuple(half.elem for half in halves), out.elem

        def work() -> None:
            library, (args, options) = make(), plans[int(number)]
            library.plan(*args, **options)
            library.run(*elems[:2], out=elems[2])

        self._cuda.launch(work)


@pytest.mark.parametrize("early", EARLY)
def test_flashinfer_has_the_plan_of_its_own_step_though_the_host_is_ahead(early: tuple[str, ...]) -> None:
    params = AttentionParams(scale=0.1)
    kinds = (8, 64), (16, 128)  # the second wants a larger workspace, and all wrappers anew
    steps = [[(1, 9), (1, 32), (4, 40)], [(1, 10), (1, 33), (6, 46)], [(1, 11), (1, 34)], [(1, 12), (1, 35)]]
    caches = [LayerCache(*torch.randn(2, 30, 16, 2, head_dim).half()) for _, head_dim in kinds]
    metas = [make_meta(spans, block_size=16, num_blocks=30, seed=seed) for seed, spans in enumerate(steps)]
    queries = [[torch.randn(m.query_starts_host[-1], *kind).half() for kind in kinds] for m in metas]
    expected = [
        ReferenceKernels().attention(q, cache, meta, params)
        for meta, of in zip(metas, queries, strict=True)
        for q, cache in zip(of, caches, strict=True)
    ]
    with lazy_cuda(early=early) as cuda:
        library = PinnedPlans(cuda)
        attend = FlashInfer(library, DEVICE, torch.cuda.Event(), num_multiprocessors=700)
        there = [LayerCache(*(half.to(DEVICE) for half in cache[:2])) for cache in caches]
        inputs = [
            (to_device(meta, DEVICE), [q.to(DEVICE) for q in of]) for meta, of in zip(metas, queries, strict=True)
        ]
        results = [attend(q, cache, meta, params) for meta, of in inputs for q, cache in zip(of, there, strict=True)]
        actual = [result.cpu() for result in results]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["bloom", "gpt_oss", "deepseek_v3"])
def test_a_decoder_records_its_steps_and_keeps_nothing_on_the_host(name: str) -> None:
    """Biases by position; windows, sinks and experts; latents. Nothing waits but what brings the inputs there."""
    steps = [[(1, 4), (12, 30)], [(1, 5), (3, 33), (5, 5)], [(1, 6), (1, 34), (1, 6)]]

    @torch.inference_mode()
    def run(device: torch.device, kernels: Kernels) -> list[Tensor]:
        decoder = load_at_once(tiny_model(name), device, kernels)
        memory = torch.randn(60 * 16 * decoder.cache_entry.num_elements, generator=torch.Generator().manual_seed(1))
        caches = [decoder.cache_entry.lay_out(memory.to(device, copy=True), 16) for _ in decoder.layer_indices]
        groups, results = decoder.layer_groups.group_of_layer, []
        for spans in steps:
            metas = [make_meta(spans, block_size=16, num_blocks=60, seed=seed) for seed in range(max(groups) + 1)]
            there = [to_device(meta, device) for meta in metas]
            positions = torch.cat([torch.arange(context - query, context) for query, context in spans]).to(device)
            hidden = decoder(positions * 7 % 100, positions, caches, [there[group] for group in groups])
            results.append(hidden.clone())
        if device == DEVICE:
            assert decoder.num_recorded == 1, "one of up to 16 tokens, in pieces"
        return [result.cpu() for result in results]

    expected = run(torch.device("cpu"), ReferenceKernels())
    with lazy_cuda():
        actual = run(DEVICE, GraphedKernels())
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
