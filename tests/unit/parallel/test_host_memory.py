"""Memory that weights share: apart from each other, on the boundaries that kernels want, and given back."""

import gc
import mmap

import pytest
import torch

from parallel.host_memory import HugePages


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
