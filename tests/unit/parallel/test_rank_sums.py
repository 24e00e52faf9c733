"""Sums over ranks in memory that they share: ranks that are threads of this process, of every library."""

import mmap
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.kernels.native.library import AllReduces, load_all_reduces
from parallel.kernels.native.rank_sums import NativeAllReduce
from parallel.kernels.native.tape import CannotRecordError, Recorder, Tape
from parallel.local_exchange import LocalExchange
from parallel.mesh import Axis

SLOT_BYTES = 512 << 10


@pytest.fixture(scope="module")
def all_reduces(library: Path) -> AllReduces:
    return load_all_reduces(library) or pytest.skip("this system shares no memory")


@pytest.fixture
def sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _ranks(all_reduces: AllReduces, size: int, sockets: ExitStack, num_threads: int = 1) -> list[NativeAllReduce]:
    peers: list[dict[int, socket.socket]] = [{} for _ in range(size)]
    for one, other in combinations(range(size), 2):
        peers[one][other], peers[other][one] = (sockets.enter_context(end) for end in socket.socketpair())
    memory = mmap.mmap(-1, size * all_reduces.rank_bytes)
    axes = [Axis(size=size, rank=rank, local=LocalExchange(rank, peers[rank], 30.0)) for rank in range(size)]
    return [NativeAllReduce(all_reduces.sums, memory, axis, Recorder(), num_threads) for axis in axes]


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * rank + numel)).to(dtype)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_of_all_ranks_in_their_order(
    all_reduces: AllReduces, size: int, num_threads: int, sockets: ExitStack
) -> None:
    ranks = _ranks(all_reduces, size, sockets, num_threads)
    for rank in ranks:  # the chunks' numbers pass 2^32 on the way
        rank.ranks.num_put = 2**32 - 3
        assert rank._memory is not None
        first = rank.ranks.rank * all_reduces.rank_bytes
        rank._memory[first : first + 4] = (2**32 - 3).to_bytes(4, "little")
    for dtype in all_reduces.sums:
        slot = SLOT_BYTES // dtype.itemsize
        for numel in (1, 33, 5000, 40_000, slot, 2 * slot + 7):
            values = [_values(rank, numel, dtype) for rank in range(size)]
            expected = torch.zeros(numel)
            for value in values:
                expected += value.float()
            with ThreadPoolExecutor(size) as pool:
                for total in pool.map(NativeAllReduce.sum, ranks, values):
                    assert torch.equal(total, expected.to(dtype))
    assert len({rank.ranks.num_put for rank in ranks}) == 1


def test_rank_that_is_gone_is_told_at_once(all_reduces: AllReduces, sockets: ExitStack) -> None:
    ranks = _ranks(all_reduces, 2, sockets)
    sockets.close()
    with pytest.raises(ConnectionError, match="another rank is gone"):
        ranks[0].sum(torch.ones(4))


def test_only_whole_rows_are_recorded(all_reduces: AllReduces, sockets: ExitStack) -> None:
    ranks = _ranks(all_reduces, 2, sockets)[0].ranks
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    tape = Tape(x, [], [])
    tape.all_reduce(x, ranks)
    tape.all_reduce(x.view(torch.float32), ranks)
    assert [(operation.size, operation.flag) for operation in tape.operations] == [(128, False), (64, True)]
    with pytest.raises(CannotRecordError, match="a sum over ranks of"):
        tape.all_reduce(x[:, :64], ranks)


def test_tensors_that_are_not_dense_are_left_to_others(all_reduces: AllReduces, sockets: ExitStack) -> None:
    rank = _ranks(all_reduces, 2, sockets)[0]
    assert rank.takes(torch.ones(4, 4))
    assert not rank.takes(torch.ones(4, 4)[:, :2])
    assert not rank.takes(torch.ones(4, dtype=torch.int64))
