"""A rank's copies between cache and host: every bit, in the order saves then loads, on a CPU and as queued on CUDA."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.lazy_cuda import DEVICE, lazy_cuda
from torch import Tensor

from workers import cuda_host_cache
from workers.config import CacheConfig
from workers.cuda_host_cache import CudaHostCache
from workers.errors import EngineConfigError
from workers.host_cache import HostCache, make_host_cache


def random_rows() -> Tensor:
    """A cache of six rows and eight blocks."""
    return torch.randn(6, 8, 10, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


class NotedStream:
    """Takes note of what waits for what, in the order in which it is queued."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name
        self.device = torch.device("cpu")

    def wait_event(self, event: "NotedEvent") -> None:
        if event.recorded is not None:
            self.notes.append(f"{self.name} waits for {event.recorded}")

    def wait_stream(self, other: "NotedStream") -> None:
        self.notes.append(f"{self.name} waits for all of {other.name}")


class NotedEvent:
    """Knows what was queued last in its stream when it was recorded."""

    def __init__(self) -> None:
        self.recorded: str | None = None

    def record(self, stream: NotedStream) -> None:
        self.recorded = next(note for note in reversed(stream.notes) if note.startswith(f"{stream.name}: "))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What CudaHostCache queues, where CUDA's streams only take notes; copies are carried out at once."""
    notes: list[str] = []
    computing, copying = NotedStream(notes, "model"), NotedStream(notes, "copies")
    current = [computing]

    @contextmanager
    def stream(used: NotedStream) -> Iterator[None]:
        current.append(used)
        yield
        current.pop()

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            notes.append(f"{current[-1].name}: {name}")
            return function(*args, **options)

        return call

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: copying)
    monkeypatch.setattr(torch.cuda, "Event", NotedEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch, "index_select", noting("gather", torch.index_select))
    monkeypatch.setattr(Tensor, "index_copy_", noting("scatter", Tensor.index_copy_))
    monkeypatch.setattr(Tensor, "copy_", noting("copy", Tensor.copy_))
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: x)
    return notes


def assert_copies_every_bit(rows: Tensor, host: HostCache) -> None:
    before = rows.clone()
    host.copy([(2, 0), (5, 3), (7, 1)], [])
    rows[:, [2, 5, 7]] = 0
    host.copy([(0, 0)], [(3, 2), (1, 4), (0, 7)])  # slot 0 is saved to before it is loaded
    assert torch.equal(rows[:, 2], before[:, 5])
    assert torch.equal(rows[:, 4], before[:, 7])
    assert torch.equal(rows[:, 7], before[:, 0])
    assert not rows[:, 5].any()
    assert torch.equal(rows[:, [0, 1, 3, 6]], before[:, [0, 1, 3, 6]])


def test_blocks_come_back_bit_for_bit() -> None:
    rows = random_rows()
    assert_copies_every_bit(rows, make_host_cache(rows, num_slots=4))


@pytest.mark.parametrize("num_at_once", [1, 2, 4])
def test_cuda_copies_every_bit(notes: list[str], monkeypatch: pytest.MonkeyPatch, num_at_once: int) -> None:
    monkeypatch.setattr(cuda_host_cache, "_BUFFER_BYTES", num_at_once * 6 * 10 * 2)
    rows = random_rows()
    assert_copies_every_bit(rows, CudaHostCache(rows, torch.zeros(4, 6, 10, dtype=torch.bfloat16)))


def test_what_had_the_memory_of_the_buffers_before_is_over_when_they_are_filled(notes: list[str]) -> None:
    CudaHostCache(random_rows(), torch.zeros(4, 6, 10, dtype=torch.bfloat16))
    assert notes[-1] == "copies waits for all of model"


def test_cuda_copies_beside_the_model(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's stream alone touches the cache; it waits for a buffer that was filled, never for a slot."""
    monkeypatch.setattr(cuda_host_cache, "_BUFFER_BYTES", 1)
    rows = random_rows()
    host = CudaHostCache(rows, torch.zeros(4, 6, 10, dtype=torch.bfloat16))
    notes.clear()
    host.copy([(0, 0), (1, 1), (2, 2)], [(0, 5)])
    assert notes == [
        *["model: gather", "copies waits for model: gather", "copies: copy"],
        *["model: gather", "copies waits for model: gather", "copies: copy"],
        *["model waits for copies: copy", "model: gather", "copies waits for model: gather", "copies: copy"],
        *["copies: copy", "model waits for copies: copy", "model: scatter"],
    ]


def test_memory_is_no_longer_pinned_when_it_is_given_back() -> None:
    with lazy_cuda() as cuda:
        host = make_host_cache(random_rows().to(DEVICE), num_slots=3)
        (memory,) = cuda.registered.values()
        assert len(memory) == 3 * 6 * 10 * 2
        host.copy([(1, 0)], [])
        waits = cuda.num_waits
        del host
        assert not cuda.registered
        assert cuda.num_waits > waits, "a copy was under way"


@pytest.mark.parametrize("changes", [{"host_cache_bytes": -1}, {"host_cache_bytes": 1, "enable_prefix_caching": False}])
def test_a_tier_without_use_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineConfigError, match="host_cache_bytes"):
        CacheConfig(**changes)
