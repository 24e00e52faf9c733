"""Memory that weights share: apart from each other, on boundaries, and given back. New memory that is taken early."""

import gc
import mmap
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel import available_memory, host_memory
from parallel.host_memory import HugePages, forget, forget_storage, populate_when_idle

PAGE = mmap.PAGESIZE
TIMEOUT_S = 240.0
"""Idle cores may be rare."""


def test_tensors_lie_one_after_the_other_on_cache_lines() -> None:
    memory = HugePages()
    tensors = [memory.empty(size, torch.bfloat16) for size in (100, 3, 5000)]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors] == [0, 256, 320]
    assert tensors[0].data_ptr() % (2 << 20) == 0
    assert [tensor.float().mean().item() for tensor in tensors] == [0, 1, 2]
    assert [len(tensor) for tensor in tensors] == [100, 3, 5000]


def test_what_no_piece_has_room_for_gets_its_own_and_the_next_tensor_begins_another() -> None:
    memory = HugePages()
    first, large, small = (memory.empty(size, torch.int8) for size in (1 << 20, 80 << 20, 1))
    assert first.data_ptr() % (2 << 20) == large.data_ptr() % (2 << 20) == small.data_ptr() % (2 << 20) == 0
    large[-1] = small[0] = 1


def test_memory_is_given_back_with_the_last_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = []

    class Counted(mmap.mmap):
        def __init__(self, *args: object, **kwargs: object) -> None:
            alive.append(id(self))

        def __del__(self) -> None:
            alive.remove(id(self))

    monkeypatch.setattr(mmap, "mmap", Counted)
    memory = HugePages()
    kept, dropped = memory.empty(10, torch.int8), memory.empty(10, torch.int8)
    del memory, dropped
    gc.collect()
    assert len(alive) == 1
    del kept
    gc.collect()
    assert not alive


@pytest.fixture
def new_rows() -> torch.Tensor:
    """Of two rows and 40 blocks, in pages of 4 KB that nobody has written."""
    return new_memory(2 * 40 * 64 * PAGE).view(2, 40, -1)


def new_memory(num_bytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def test_what_is_forgotten_is_a_part_or_all_of_the_memory() -> None:
    memory = HugePages().empty(8 * PAGE, torch.uint8).fill_(1).view(8, PAGE)
    forget(memory[2:4])
    assert memory.sum(1).eq(PAGE).tolist() == [True, True, False, False, True, True, True, True]
    forget_storage(memory[7])
    assert not memory.any()


def populate(rows_RBX: torch.Tensor) -> None:
    thread = populate_when_idle(rows_RBX, lambda: True)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def num_pages_there(x: torch.Tensor) -> int:
    """Of those that x has, what the system has given out: the top bit of an entry in this file."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(x.data_ptr() // PAGE * 8)
        entries = pages.read(x.nbytes // PAGE * 8)
    return sum(entry >> 7 for entry in entries[7::8])


def test_new_memory_is_taken_before_it_is_written(new_rows: torch.Tensor) -> None:
    assert num_pages_there(new_rows) == 0
    populate(new_rows)
    assert num_pages_there(new_rows) == 2 * 40 * 64
    assert not new_rows.any()


def test_the_first_blocks_of_all_rows_are_taken_first_and_none_of_memory_that_is_gone(
    new_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised: list[tuple[int, int]] = []
    kept = {"rows": new_rows.view(2, 40, -1)}
    is_begun = threading.Event()

    def advise(first: int, size: int, advice: int) -> None:
        assert is_begun.wait(TIMEOUT_S)  # till then whoever began it has the rows
        advised.append((first - new_rows.data_ptr(), size))
        if len(advised) == 4:
            kept.clear()

    monkeypatch.setattr(host_memory, "_advise_pages", advise)
    thread = populate_when_idle(kept["rows"], lambda: True)
    is_begun.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    block, row = 64 * PAGE, 40 * 64 * PAGE
    piece = 2 << 20
    assert advised == [(0, piece), (row, piece), (8 * block, piece), (row + 8 * block, piece)]


def test_none_is_taken_while_a_step_runs_and_the_rest_after_it(
    new_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for each other leave their cores, and get them back when a page is cleared."""
    advised: list[int] = []
    rests = iter([True, True, False, False, False])
    num_taken: list[int] = []

    def is_resting() -> bool:
        num_taken.append(len(advised))
        return next(rests, True)

    monkeypatch.setattr(host_memory, "_advise_pages", lambda first, size, advice: advised.append(first))
    thread = populate_when_idle(new_rows, is_resting)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert num_taken[:8] == [0, 1, 2, 2, 2, 2, 3, 4]
    assert len(set(advised)) == len(advised) == 10


def test_memory_that_goes_while_a_step_runs_ends_it() -> None:
    kept = {"rows": new_memory(PAGE).view(1, 1, -1)}
    thread = populate_when_idle(kept["rows"], lambda: False)
    kept.clear()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_process_that_ends_waits_for_one_piece_and_leaves_the_rest(
    new_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ends a daemon wherever it is; within torch that aborts the process."""
    advised: list[int] = []
    monkeypatch.setattr(host_memory, "_advise_pages", lambda first, size, advice: advised.append(first))
    monkeypatch.setattr(host_memory, "main_thread", lambda: SimpleNamespace(is_alive=lambda: len(advised) < 3))
    thread = populate_when_idle(new_rows, lambda: True)
    assert not thread.daemon
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert len(advised) == 3


def test_scarce_memory_is_left_to_who_writes_it(new_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_SCARCE", 1.1)
    populate(new_rows)
    assert num_pages_there(new_rows) == 0


def test_what_a_container_lacks_is_left_too(
    new_rows: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ends the process in a container that takes more than it may have."""
    monkeypatch.setattr(available_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("900001")
    populate(new_rows)
    assert num_pages_there(new_rows) == 0
    (tmp_path / "memory.current").write_text("900000")
    populate(new_rows)
    assert num_pages_there(new_rows) == 2 * 40 * 64
