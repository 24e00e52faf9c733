"""Steps filled up to a bucket, with a recording that calls the layers again, and what a GPU is told."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers.paged_layout import make_meta
from torch import Tensor

from parallel.errors import CollectiveError, DeviceError, GraphCaptureError
from parallel.kernels.base import AttentionMeta, LayerCache
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.cuda_buckets import StepBucket
from parallel.kernels.cuda_graphs import CudaGraphs, GraphedLayers, Recording, Result
from parallel.kernels.cuda_pieces import Cut, call_at_once
from parallel.mesh import Axis

P, WIDTH = 16, 8


@dataclass
class Layers:
    """Two layers that write their input to the cache and read what the meta leads to; counts its calls."""

    needs_host: bool = False
    num_tokens: list[int] = field(default_factory=list)

    def __call__(
        self,
        x_TE: Tensor,
        angles: Sequence[tuple[Tensor, ...]],
        caches: Sequence[LayerCache],
        metas: Sequence[AttentionMeta],
    ) -> Result:
        if self.needs_host and not metas[0].context_lens_host:
            raise DeviceError("lengths are needed")
        self.num_tokens.append(len(x_TE))
        total = x_TE + sum(table for kind in angles for table in kind)
        for cache, meta in zip(caches, metas, strict=True):
            assert meta.query_starts.diff().max() <= meta.max_query_len
            is_token = meta.slot_mapping >= 0
            cache.k_BPKH.view(-1, WIDTH)[meta.slot_mapping[is_token]] = x_TE[is_token]
            last = (meta.context_lens.long() - 1).clamp(min=0)
            blocks = meta.block_tables.gather(1, last[:, None] // P)[:, 0]
            seen = cache.k_BPKH[blocks, last % P, 0] * meta.context_lens[:, None]
            total = total.clone()
            total[: meta.num_decodes] += seen[: meta.num_decodes]
            for chunk in range(meta.num_decodes, len(meta.context_lens)):
                rows = slice(meta.query_starts[chunk], meta.query_starts[chunk + 1])  # none of one that is not there
                total[rows] += seen[chunk] + 1
        x_TE.zero_()  # layers may overwrite what goes in
        return total, total * 2


def call_again(run: Callable[[], Result], memory: object) -> Recording:
    result = run()

    def replay() -> None:
        for to, tensor in zip(result, run(), strict=True):
            to.copy_(tensor)

    return Recording(replay, result, memory or object())


def new_caches() -> list[LayerCache]:
    return [LayerCache(*torch.randn(2, 300, P, 1, WIDTH)) for _ in range(2)]


def check_step(layers: GraphedLayers, spans: list[tuple[int, int]], caches: list[LayerCache]) -> None:
    """The step gives what the plain layers give, and leaves the same in the caches."""
    metas = [make_meta(spans, block_size=P, num_blocks=300, seed=seed) for seed in (1, 2)]
    num_tokens = sum(query for query, _ in spans)
    x, cos, sin = torch.randn(3, num_tokens, WIDTH)
    wanted_caches = [LayerCache(*(part.clone() for part in cache[:2])) for cache in caches]
    wanted = Layers()(x.clone(), [(cos, sin), ()], wanted_caches, metas)
    actual = layers(x.clone(), [(cos, sin), ()], caches, metas)
    for one, other in zip(
        (*actual, *caches[0][:2], *caches[1][:2]), (*wanted, *wanted_caches[0][:2], *wanted_caches[1][:2]), strict=True
    ):
        assert torch.equal(one, other)


def test_decodes_are_filled_up_and_give_the_same() -> None:
    run, caches = Layers(), new_caches()
    layers = GraphedLayers(run, call_again)
    for contexts in ([3, 40, 100, 7, 9], [600], [1] * 8, [30, 2, 5, 1, 1, 16]):
        check_step(layers, [(1, context) for context in contexts], caches)
    assert set(run.num_tokens) == {8, 1}
    assert len(layers._graphs) == 2  # of eight short ones, and of one longer than 512


def test_chunks_are_recorded_beside_decodes_of_any_number() -> None:
    run, caches = Layers(), new_caches()
    layers = GraphedLayers(run, call_again, records_chunks=True)
    for spans in (
        [(1, 3), (1, 40), (5, 9), (2, 70)],
        [(1, 100), (15, 15)],
        [(4, 4), (3, 60), (2, 2)],  # no decode, and fewer tokens than before
        [(1, 5), (1, 6), (1, 7), (2, 600)],
        [(2, 2)] * 4,
        [(9, 9)] * 8,
        [(1, 30)],
        [(16, 300)],
    ):
        check_step(layers, spans, caches)
    assert set(layers._graphs) == {
        StepBucket(16, 512, 4),
        StepBucket(16, 2048, 4),
        StepBucket(128, 512, 8),
        StepBucket(1, 512),
    }
    check_step(layers, [(2, 2)] * 5, caches)
    assert run.num_tokens[-1] == 10, "as it is: there is room for four"
    check_step(layers, [(1, 4)] * 260, caches)
    assert StepBucket(320, 512, 16) in layers._graphs, "more decodes than those alone are recorded of"


def test_recordings_share_their_block_tables() -> None:
    layers, caches = GraphedLayers(Layers(), call_again, records_chunks=True), new_caches()
    for spans in ([(1, 700), (3, 3)], [(1, 700)], [(1, 30), (2, 9)]):
        check_step(layers, spans, caches)
    tables = [graph.buffers.metas[0].block_tables for graph in layers._graphs.values()]
    assert [table.shape for table in tables] == [(16 + 4, 128), (1, 128), (16 + 4, 32)]
    assert len({table.data_ptr() for table in tables}) == 1


def test_a_result_is_where_it_was_recorded() -> None:
    layers, caches = GraphedLayers(Layers(), call_again), new_caches()
    meta = make_meta([(1, 3)], block_size=P, num_blocks=300)
    first, second = (layers(torch.ones(1, WIDTH), [], caches, [meta, meta]) for _ in range(2))
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]


def test_without_room_for_chunks_they_run_as_they_are() -> None:
    run = Layers()
    layers = GraphedLayers(run, call_again)
    check_step(layers, [(1, 4), (5, 9)], new_caches())
    assert run.num_tokens == [6]
    assert not layers._graphs


def test_new_caches_are_followed() -> None:
    layers = GraphedLayers(Layers(), call_again)
    for caches in (new_caches(), new_caches()):
        check_step(layers, [(1, 4), (1, 9)], caches)
        assert len(layers._graphs) == 1


def test_graphs_share_memory_as_long_as_one_of_them_lives() -> None:
    given: list[object] = []

    def record(run: Callable[[], Result], memory: object) -> Recording:
        given.append(memory)
        return call_again(run, memory)

    layers = GraphedLayers(Layers(), record)
    for caches in (new_caches(), new_caches()):
        for num_seqs in (5, 3, 1):
            check_step(layers, [(1, 4)] * num_seqs, caches)
    first, second, third = given[:3]
    assert first is None, "new memory"
    assert second is third is not None
    assert given[3] is None, "the graphs of other caches are gone, and what they shared with them"
    assert given[4] is given[5] is not second


def test_larger_steps_than_wanted_run_as_they_are() -> None:
    run, caches = Layers(), new_caches()
    layers = GraphedLayers(run, call_again, max_num_seqs=4)
    check_step(layers, [(1, 4)] * 4, caches)
    check_step(layers, [(1, 4)] * 5, caches)
    assert run.num_tokens == [4, 4, 5]  # recorded, replayed; as it is
    assert len(layers._graphs) == 1


def test_layers_that_need_lengths_on_the_host_run_as_they_are() -> None:
    run = Layers(needs_host=True)
    layers = GraphedLayers(run, call_again, records_chunks=True)
    assert layers.records_whole_steps
    for _ in range(2):
        check_step(layers, [(1, 4), (1, 9), (1, 2)], new_caches())
    assert run.num_tokens == [3, 3]
    assert not layers.records_whole_steps
    assert not layers.records_chunks


def test_collectives_of_a_replay_are_counted_as_if_they_were_called() -> None:
    counts: Counter[str] = Counter()

    def run(x_TE: Tensor, *_: object) -> Result:
        counts["all_reduce"] += 2
        return x_TE, x_TE

    def record(run: Callable[[], Result], memory: object) -> Recording:
        run()  # as on a GPU: once to warm up, once to be recorded
        return Recording(lambda: None, run(), memory)

    layers, caches = GraphedLayers(run, record, counts=counts), new_caches()
    meta = make_meta([(1, 3)], block_size=P, num_blocks=300)
    totals = []
    for _ in range(3):
        layers(torch.ones(1, WIDTH), [], caches, [meta, meta])
        totals.append(counts["all_reduce"])
    assert totals == [6, 8, 10]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_tensor_parallel_ranks_record_too(num_ranks: int) -> None:
    kernels, axis = CudaKernels(torch.device("cpu")), Axis(size=num_ranks)
    kernels._attention = kernels._elementwise = object()  # as if there were Triton
    layers = kernels.compile_layers(Layers(), axis)
    assert isinstance(layers, GraphedLayers)
    assert layers._counts is axis.counts


class FakeCuda:
    """In place of torch.cuda: notes in which stream work is queued, and whether it is recorded there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self._place = "main"
        for name in ("Stream", "CUDAGraph", "current_stream", "graph_pool_handle", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def queue(self, what: str) -> None:
        self.events.append(f"{self._place}: {what}")

    def current_stream(self) -> "FakeStream":
        return FakeStream(self, self._place)

    def Stream(self) -> "FakeStream":  # noqa: N802  # as torch has it
        return FakeStream(self, "side")

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:  # noqa: N802
        class Graph:
            replay = staticmethod(lambda: self.queue("replay"))

        return Graph()

    @contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        before, self._place = self._place, stream.name
        try:
            yield
        finally:
            self._place = before

    @contextmanager
    def graph(self, graph: object, *, pool: str, stream: "FakeStream", capture_error_mode: str) -> Iterator[None]:
        before, self._place = self._place, f"{stream.name}, recorded {capture_error_mode} in {pool}"
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904  # as torch does
        finally:
            self._place = before


@dataclass
class FakeStream:
    cuda: FakeCuda
    name: str

    def wait_stream(self, other: "FakeStream") -> None:
        self.cuda.events.append(f"{self.name} waits for {other.name}")


def test_a_step_runs_in_the_stream_of_its_recording_before_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, x = FakeCuda(monkeypatch), torch.ones(1)

    def run(cut: Cut = call_at_once) -> Result:
        cuda.queue("all_reduce")
        return x, x

    recording = CudaGraphs().record(run, None)
    recording.replay()
    assert recording.result == (x, x)
    assert recording.memory == "pool"
    assert cuda.events == [
        "side waits for main",
        "side: all_reduce",  # NCCL connects here
        "main waits for side",
        "side, recorded thread_local in pool: all_reduce",
        "main: replay",
    ]


def test_what_is_between_pieces_is_called_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, x = FakeCuda(monkeypatch), torch.ones(1)

    def run(cut: Cut = call_at_once) -> Result:
        for layer in (1, 2):
            cuda.queue(f"product {layer}")
            cut(lambda layer=layer: cuda.queue(f"attention {layer}"))  # type: ignore[misc]
        cuda.queue("norm")
        return x, x

    recording = CudaGraphs().record(run, "shared")
    place = "side, recorded thread_local in shared"
    layers = ["product 1", "attention 1", "product 2", "attention 2", "norm"]
    assert cuda.events == [
        "side waits for main",
        *[f"side: {what}" for what in layers],
        "main waits for side",
        *[f"{place}: {what}" for what in layers if "attention" not in what],
    ]
    cuda.events.clear()
    recording.replay()
    assert cuda.events == ["main: replay", "main: attention 1", "main: replay", "main: attention 2", "main: replay"]


def test_a_recording_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    calls: list[bool] = []

    def run(cut: Cut = call_at_once) -> Result:
        calls.append(gc.isenabled())
        if len(calls) == 2:
            raise CollectiveError("out of memory")
        return torch.ones(1), torch.ones(1)

    with pytest.raises(GraphCaptureError, match=r"CUDA graph: out of memory; allowed: .*max_cudagraph_capture_size"):
        CudaGraphs().record(run, None)
    assert [*calls, gc.isenabled()] == [True, False, True], "no garbage is collected while it records"


def test_a_run_that_fails_before_the_recording_fails_as_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)

    def run(cut: Cut = call_at_once) -> Result:
        raise CollectiveError("a peer died")

    with pytest.raises(CollectiveError, match="a peer died"):
        CudaGraphs().record(run, None)


def test_a_recording_that_fails_is_no_reason_to_go_on_without() -> None:
    """The other ranks have recorded."""

    def record(run: Callable[[], Result], memory: object) -> Recording:
        raise GraphCaptureError("out of memory")

    layers = GraphedLayers(Layers(), record)
    with pytest.raises(GraphCaptureError):
        check_step(layers, [(1, 4)], new_caches())
