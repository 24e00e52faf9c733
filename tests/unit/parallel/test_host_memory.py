"""Memory that weights share: apart from each other, on boundaries, and given back. New memory that is taken early."""

import gc
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel import control_groups, host_memory
from parallel.errors import DeviceError
from parallel.host_memory import HugePages, TakePages, forget, forget_storage, populate_when_idle
from parallel.kernels.native.build import build_library
from parallel.kernels.native.library import load_taking

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


@pytest.fixture(scope="module")
def take() -> TakePages:
    try:
        found = load_taking(build_library())
    except DeviceError as error:
        pytest.skip(str(error))
    assert found is not None, "this is Linux"
    return found


def populate(rows_RBX: torch.Tensor, take: TakePages) -> None:
    thread = populate_when_idle(rows_RBX, lambda: True, take)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def num_pages_there(x: torch.Tensor) -> int:
    """Of those that x has, what the system has given out: the top bit of an entry in this file."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(x.data_ptr() // PAGE * 8)
        entries = pages.read(x.nbytes // PAGE * 8)
    return sum(entry >> 7 for entry in entries[7::8])


def test_new_memory_is_taken_before_it_is_written(new_rows: torch.Tensor, take: TakePages) -> None:
    assert num_pages_there(new_rows) == 0
    populate(new_rows, take)
    assert num_pages_there(new_rows) == 2 * 40 * 64
    assert not new_rows.any()


def test_only_threads_without_python_have_the_lowest_priority(take: TakePages) -> None:
    """One of Python's that is put aside for seconds keeps everybody else waiting for Python's lock."""
    idle, of_python = set[int](), set[int]()

    def look() -> bool:
        of_python.add(threading.get_native_id())
        return True

    def take_and_look(first: int, size: int, page: int) -> None:
        with ThreadPoolExecutor(1) as others:
            taking = others.submit(take, first, size, page)
            while not taking.done():
                idle.update(tid for tid in threads() if scheduler_of(tid) == os.SCHED_IDLE)

    deadline = time.monotonic() + TIMEOUT_S
    while not idle and time.monotonic() < deadline:
        rows_RBX = new_memory(32 << 20).view(1, 1, -1)
        populate_when_idle(rows_RBX, look, take_and_look).join(TIMEOUT_S)
    assert idle
    assert of_python
    assert not idle & of_python


def threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def scheduler_of(tid: int) -> int:
    """0 of a thread that has ended since."""
    try:
        return os.sched_getscheduler(tid)
    except ProcessLookupError:
        return 0


def test_the_first_blocks_of_all_rows_are_taken_first_and_none_of_memory_that_is_gone(new_rows: torch.Tensor) -> None:
    taken: list[tuple[int, int]] = []
    kept = {"rows": new_rows.view(2, 40, -1)}
    is_begun = threading.Event()

    def take(first: int, size: int, page: int) -> None:
        assert is_begun.wait(TIMEOUT_S)  # till then whoever began it has the rows
        taken.append((first - new_rows.data_ptr(), size))
        if len(taken) == 4:
            kept.clear()

    thread = populate_when_idle(kept["rows"], lambda: True, take)
    is_begun.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    block, row = 64 * PAGE, 40 * 64 * PAGE
    piece = 2 << 20
    assert taken == [(0, piece), (row, piece), (8 * block, piece), (row + 8 * block, piece)]


def test_none_is_taken_while_a_step_runs_and_the_rest_after_it(new_rows: torch.Tensor) -> None:
    """Ranks that wait for each other leave their cores, and get them back when a page is cleared."""
    taken: list[int] = []
    rests = iter([True, True, False, False, False])
    num_taken: list[int] = []

    def is_resting() -> bool:
        num_taken.append(len(taken))
        return next(rests, True)

    thread = populate_when_idle(new_rows, is_resting, lambda first, size, page: taken.append(first))
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert num_taken[:8] == [0, 1, 2, 2, 2, 2, 3, 4]
    assert len(set(taken)) == len(taken) == 10


def test_memory_that_goes_while_a_step_runs_ends_it() -> None:
    kept = {"rows": new_memory(PAGE).view(1, 1, -1)}
    thread = populate_when_idle(kept["rows"], lambda: False, lambda first, size, page: None)
    kept.clear()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_process_that_ends_waits_for_one_piece_and_leaves_the_rest(
    new_rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ends a daemon wherever it is; within torch that aborts the process."""
    taken: list[int] = []
    monkeypatch.setattr(host_memory, "main_thread", lambda: SimpleNamespace(is_alive=lambda: len(taken) < 3))
    thread = populate_when_idle(new_rows, lambda: True, lambda first, size, page: taken.append(first))
    assert not thread.daemon
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert len(taken) == 3


def test_scarce_memory_is_left_to_who_writes_it(
    new_rows: torch.Tensor, take: TakePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_SCARCE", 1.1)
    populate(new_rows, take)
    assert num_pages_there(new_rows) == 0


def test_what_a_container_lacks_is_left_too(
    new_rows: torch.Tensor, take: TakePages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system ends the process in a container that takes more than it may have."""
    monkeypatch.setattr(control_groups, "_MOUNT", tmp_path)
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("900001")
    populate(new_rows, take)
    assert num_pages_there(new_rows) == 0
    (tmp_path / "memory.current").write_text("900000")
    populate(new_rows, take)
    assert num_pages_there(new_rows) == 2 * 40 * 64
