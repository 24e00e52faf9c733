"""A GPU for tests on a CPU: what is queued runs as late as it may, or as early, and freed memory is overwritten.

    host      launch ── launch ── record ── launch ─────────────── event.synchronize()
    stream    (nothing runs)                                       runs up to the event, and of other streams only
                                                                   what it was told to wait for

On a real GPU work that lacks a wait mostly comes out right. Here it reads what was there before (`POISON` where nothing
was written yet), for a stream runs only when it must, or, if it is one of those that are early, as soon as it may.

    what is caught                                            how
    a stream does not wait for another, or the host for one   what is read was not written yet
    memory is given back while another stream uses it         it is overwritten, in the stream that it came from
    pinned memory is written while it is copied from          a copy reads it when it runs, not when it is queued
    a graph waits, or copies from the host                    RuntimeError while it is recorded
    a graph reads what is not kept for it                     that is overwritten when it is given back
    a host's tensor is used beside the device's               RuntimeError, as torch has it

Tensors of the device have the device `cuda:0`; `elem` is their memory. Every operation of torch's runs, as it does on a
CPU, when its stream comes to it. Kernels that are not torch's are queued with `launch`. What is not caught: that new
memory is another stream's old one, for no address comes twice while work on it is queued.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
EARLY: Sequence[tuple[str, ...]] = (), ("main",), ("others",)
"""Which streams to try as early ones: orders that a program with all its waits gives the same results in."""
POISON = 0x7F
"""Each byte of memory that nobody has written: of floats about the largest, of integers far outside of any index."""

Work = Callable[[], None]
aten = torch.ops.aten
_WAITING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten.is_nonzero.default,
}
"""Operations whose result, or its size, the host has to know."""
_EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}


class _Memory:
    """What one allocation is known by: tensors that are views of it share this."""


class DeviceTensor(Tensor):
    """A tensor on the device."""

    elem: Tensor
    memory: _Memory

    @staticmethod
    def __new__(cls, elem: Tensor, memory: _Memory) -> "DeviceTensor":
        with torch.inference_mode(mode=False):  # views of such tensors may be taken anywhere
            made = Tensor._make_wrapper_subclass(
                cls,
                elem.shape,
                strides=elem.stride(),
                storage_offset=elem.storage_offset(),
                dtype=elem.dtype,
                device=DEVICE,
            )
        made.elem, made.memory = elem, memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the class
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("used outside of the `LazyCuda` that made it")

    def data_ptr(self) -> int:
        """Where it begins."""
        return self.elem.data_ptr()

    # What torch refuses in Python already, for a device that it was not built for:

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
        copied: Tensor = aten.copy_.default(self, source, non_blocking)
        return copied

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        view, tensors = _take_apart(self, index)
        return aten.index.Tensor(view, tensors) if tensors else view

    def __setitem__(self, index: Any, value: Any) -> None:
        view, tensors = _take_apart(self, index)
        if not isinstance(value, Tensor):
            value = torch.tensor(value, dtype=self.dtype, device=DEVICE) if tensors else aten.full_like(view, value)
        if tensors:
            aten.index_put_.default(view, tensors, value)
        else:
            aten.copy_.default(view, value)


class Stream:
    """Runs what is queued in it, in order."""

    device = DEVICE

    def __init__(self, cuda: "LazyCuda", *, is_early: bool) -> None:
        self._cuda = cuda
        self._is_early = is_early
        self._queue: deque[Work] = deque()
        self.num_queued = self.num_run = 0

    def queue(self, work: Work) -> None:
        self._queue.append(work)
        self.num_queued += 1
        if self._is_early:
            self.run(self.num_queued)

    def run(self, number: int) -> None:
        """Everything up to the work of this number."""
        with _disable_current_modes(), torch.inference_mode():
            while self.num_run < number:
                self.num_run += 1
                self._queue.popleft()()

    def synchronize(self) -> None:
        self._cuda.refuse_while_recording("synchronize")
        self._cuda.finish(self, self.num_queued)

    def wait_event(self, event: "Event") -> None:
        self._cuda.refuse_while_recording("wait_event")
        if event.place is not None:
            stream, number = event.place
            self.queue(lambda: stream.run(number))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> "Event":
        event = Event(self._cuda)
        event.record(self)
        return event


class Event:
    """A place in a stream."""

    def __init__(self, cuda: "LazyCuda") -> None:
        self._cuda = cuda
        self.place: tuple[Stream, int] | None = None
        self._is_over_at = 0

    def record(self, stream: Stream | None = None) -> None:
        self._cuda.refuse_while_recording("record")
        stream = stream or self._cuda.current_stream()

        def pass_by() -> None:
            self._is_over_at = self._cuda.num_run

        stream.queue(pass_by)
        self.place = stream, stream.num_queued

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._cuda.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.place is None or self.place[0].num_run >= self.place[1]

    def synchronize(self) -> None:
        self._cuda.refuse_while_recording("synchronize")
        if self.place is not None:
            self._cuda.finish(*self.place)

    def elapsed_time(self, end: Self) -> float:
        """A millisecond for each operation."""
        if not (self.query() and end.query()):
            raise RuntimeError("device not ready")
        return float(end._is_over_at - self._is_over_at)


class Pool:
    """Memory of graphs; what is free in it may be used by each graph that is recorded from then on."""

    def __init__(self) -> None:
        self.free: list[Tensor] = []


class Graph:
    """What was queued while it was recorded; the same work on the same memory in each replay."""

    def __init__(self, cuda: "LazyCuda") -> None:
        self._cuda = cuda
        self.works: list[Work] = []
        self.pool = Pool()

    def replay(self) -> None:
        self._cuda.refuse_while_recording("replay")
        for work in self.works:
            self._cuda.launch(work)


class LazyCuda(TorchDispatchMode):
    """The device, in the place of `torch.cuda` while it is entered. One thread.

    Args:
        early: streams that run as soon as they may: "main", the one that work is queued in by default, and "others".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, early: Sequence[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_run = 0
        """Operations so far."""
        self.num_waits = 0
        """Of the host."""
        self._are_others_early = "others" in early
        self._streams = [Stream(self, is_early="main" in early)]
        self._current = self._streams.copy()
        self._recorded: Graph | None = None
        self._pinned: list[Tensor] = []  # as long as this lives, so that no address comes twice
        self.registered: dict[int, range] = {}
        """Memory of the host that is pinned, by where it begins."""
        torch._C._ensureCUDADeviceGuardSet()
        for name, value in {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
            "mem_get_info": lambda device=None: (1 << 30, 1 << 31),
            "max_memory_allocated": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "cudart": lambda: SimpleNamespace(
                cudaHostRegister=self._register, cudaHostUnregister=self.registered.__delitem__
            ),
            "Stream": self._new_stream,
            "Event": lambda enable_timing=False: Event(self),
            "CUDAGraph": lambda: Graph(self),
            "graph_pool_handle": Pool,
            "graph": self._graph,
            "stream": self._stream,
            "current_stream": self.current_stream,
            "synchronize": self.synchronize,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(Tensor, "pin_memory", lambda x: self._pin(x))

    def current_stream(self, device: object = None) -> Stream:
        return self._current[-1]

    def synchronize(self, device: object = None) -> None:
        self.refuse_while_recording("synchronize")
        for stream in self._streams:
            self.finish(stream, stream.num_queued)

    def finish(self, stream: Stream, number: int) -> None:
        """Let the host wait."""
        self.num_waits += 1
        stream.run(number)

    def refuse_while_recording(self, what: str) -> None:
        if self._recorded is not None:
            raise RuntimeError(f"{what}: operation not permitted when stream is capturing")

    def launch(self, work: Work) -> None:
        """Queue work on the memory of tensors in the current stream, or record it."""

        def run() -> None:
            self.num_run += 1
            work()

        if self._recorded is not None:
            self._recorded.works.append(run)
            return
        self.current_stream().queue(run)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        has_tensor = any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs)))
        to = kwargs.get("device")
        if not has_tensor and (to is None or torch.device(to).type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func is aten._to_copy.default and not (has_tensor and (to is None or torch.device(to).type == "cuda")):
            return self._move(args[0], kwargs)
        if func is aten.copy_.default and not (isinstance(args[0], DeviceTensor) and isinstance(args[1], DeviceTensor)):
            self._copy(args[0], args[1], non_blocking=kwargs.get("non_blocking", len(args) > 2 and args[2]))
            return args[0]
        return self._on_device(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if is_pinned:
            self._pinned.append(result)
            _overwrite(result)
        return result

    def _on_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        inner = tree_map(self._memory_of, (args, kwargs))
        own_args, own_kwargs = inner[0], {**inner[1], **({"device": "cpu"} if "device" in kwargs else {})}
        own_kwargs.pop("pin_memory", None)
        if func in _WAITING or _has_mask(args):
            self.refuse_while_recording(str(func))
            stream = self.current_stream()
            self.finish(stream, stream.num_queued)
            result = func(*own_args, **own_kwargs)
            return tree_map(lambda leaf: self._new(leaf) if isinstance(leaf, Tensor) and leaf.dim() else leaf, result)
        alias = func._schema.returns[0].alias_info if func._schema.returns else None
        if alias is not None and not alias.is_write:
            memory = next(leaf.memory for leaf in tree_leaves(args) if isinstance(leaf, DeviceTensor))
            return tree_map(lambda view: DeviceTensor(view, memory), func(*own_args, **own_kwargs))
        if alias is not None or not func._schema.returns:
            self.launch(lambda: func(*own_args, **own_kwargs))
            return kwargs.get("out", args[0])
        results = self._allocate_results(func, own_args, own_kwargs)
        if func._schema.name.removeprefix("aten::") not in _EMPTY:
            self._launch_into(results, func, own_args, own_kwargs)
        return results

    def _allocate_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors for what it returns, whose shapes it tells without memory."""
        as_meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        shapes = func(*as_meta[0], **(as_meta[1] | ({"device": "meta"} if "device" in kwargs else {})))
        return tree_map(
            lambda meta: self._new(torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype), is_written=False),
            shapes,
        )

    def _launch_into(self, results: Any, func: Any, args: Any, kwargs: Any) -> None:
        places = [leaf.elem for leaf in tree_leaves(results) if isinstance(leaf, DeviceTensor)]

        def work() -> None:
            made = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for place, tensor in zip(places, made, strict=True):
                place.copy_(tensor)

        self.launch(work)

    def _new(self, elem: Tensor, *, is_written: bool = True) -> DeviceTensor:
        """A tensor with memory of its own, which is overwritten when nobody has it any more."""
        if not is_written:
            _overwrite(elem)
        memory, graph = _Memory(), self._recorded
        pool, stream = None if graph is None else graph.pool, self.current_stream()
        weakref.finalize(memory, self._free, elem, pool, stream).atexit = False
        return DeviceTensor(elem, memory)

    def _free(self, elem: Tensor, pool: Pool | None, stream: Stream) -> None:
        if pool is None:
            stream.queue(lambda: _overwrite(elem))
        elif self._recorded is not None and self._recorded.pool is pool:
            self._recorded.works.append(lambda: _overwrite(elem))
            pool.free.append(elem)
        else:
            pool.free.append(elem)

    def _memory_of(self, leaf: Any) -> Any:
        if isinstance(leaf, DeviceTensor):
            return leaf.elem
        if isinstance(leaf, Tensor):
            if leaf.dim():
                raise RuntimeError(f"Expected all tensors to be on the same device, but found a host's {leaf.shape}")
            return leaf.clone()
        return leaf

    def _move(self, source: Tensor, kwargs: Any) -> Tensor:
        """`Tensor.to` of the other side."""
        dtype, is_async = kwargs.get("dtype") or source.dtype, bool(kwargs.get("non_blocking"))
        if isinstance(source, DeviceTensor):
            there: Tensor = torch.empty_like(source.elem, dtype=dtype)
            self._pinned.append(there)
        else:
            there = self._new(torch.empty_like(source, dtype=dtype), is_written=False)
        self._copy(there, source, non_blocking=is_async)
        return there

    def _copy(self, to: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        """Between host and device."""
        host = source if isinstance(to, DeviceTensor) else to
        is_async = non_blocking and self._is_pinned(host)
        to_elem, source_elem = (side.elem if isinstance(side, DeviceTensor) else side for side in (to, source))
        self.refuse_while_recording("copy between host and device")
        if not is_async and isinstance(to, DeviceTensor):
            source_elem = source_elem.clone()  # it is staged

        def work() -> None:
            to_elem.copy_(source_elem)

        self.launch(work)
        if not is_async:
            self.current_stream().synchronize()

    def _is_pinned(self, x: Tensor) -> bool:
        storage = x.untyped_storage().data_ptr()
        is_own = any(pinned.untyped_storage().data_ptr() == storage for pinned in self._pinned)
        return is_own or any(storage in memory for memory in self.registered.values())

    def _pin(self, x: Tensor) -> Tensor:
        with _disable_current_modes():
            pinned = x.clone()
        self._pinned.append(pinned)
        return pinned

    def _register(self, address: int, num_bytes: int, flags: int) -> int:
        self.registered[address] = range(address, address + num_bytes)
        return 0

    def _new_stream(self, device: object = None) -> Stream:
        self._streams.append(Stream(self, is_early=self._are_others_early))
        return self._streams[-1]

    @contextmanager
    def _stream(self, stream: Stream) -> Iterator[None]:
        self._current.append(stream)
        try:
            yield
        finally:
            self._current.pop()

    @contextmanager
    def _graph(self, graph: Graph, *, pool: Pool, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        self.synchronize()
        graph.pool = pool
        graph.works += [lambda elem=elem: _overwrite(elem) for elem in pool.free]  # type: ignore[misc]
        with self._stream(stream):
            self._recorded = graph
            try:
                yield
            finally:
                self._recorded = None


@contextmanager
def lazy_cuda(*, early: Sequence[str] = ()) -> Iterator[LazyCuda]:
    """The device, until it is closed."""
    with pytest.MonkeyPatch.context() as monkeypatch, LazyCuda(monkeypatch, early=early) as cuda:
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` for a device goes by way of the host
        try:
            yield cuda
        finally:
            torch._C._set_only_lift_cpu_tensors(False)


def _take_apart(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """(the view by numbers and slices, the tensors by which its dims are indexed, if there are any)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    for i, part in enumerate(parts):
        if part is Ellipsis:
            parts[i : i + 1] = [slice(None)] * (x.dim() + 1 - len([part for part in parts if part is not None]))
    tensors: list[Tensor | None] = []
    for part in parts:
        dim = len(tensors)
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
        elif not isinstance(part, Tensor):
            x = x.select(dim, part)
            continue
        tensors.append(part if isinstance(part, Tensor) else None)
    return x, tensors if any(tensor is not None for tensor in tensors) else []


def _overwrite(elem: Tensor) -> None:
    elem.untyped_storage().fill_(POISON)  # type: ignore[attr-defined]


def _has_mask(args: Any) -> bool:
    """Whether rows are chosen by booleans, whose number the host has to know."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(index, Tensor) and index.dtype is torch.bool for index in indices)
