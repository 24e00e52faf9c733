"""Collectives on gloo: sums, order, counts, and what a dead peer means."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.gloo_pool import GlooPool, RankFailedError

from parallel.collectives import all_reduce, broadcast, gather_to_first
from parallel.errors import CollectiveError, ParallelismError
from parallel.local_exchange import MAX_BYTES, LocalExchange
from parallel.mesh import Axis, Mesh

SIZES = (2, 3, 4)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _sum_on_every_rank(mesh: Mesh, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return all_reduce(_values(mesh.tp.rank, numel, dtype), mesh.tp)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [7, 100_000])  # by local exchange, and by gloo
def test_all_reduce_gives_every_rank_the_same_sum(
    gloo_pool: GlooPool, size: int, dtype: torch.dtype, numel: int
) -> None:
    results = gloo_pool.run(_sum_on_every_rank, numel, dtype, tp=size)
    expected = torch.stack([_values(rank, numel, dtype).double() for rank in range(size)]).sum(0)
    for result in results:
        assert torch.equal(result, results[0])
    # one rounding for each addition; 4 terms of a few units
    torch.testing.assert_close(results[0].double(), expected, rtol=0, atol=16 * torch.finfo(dtype).eps)


def _of_rank(rank: int) -> torch.Tensor:
    """Numbers that do not lie in the order of memory."""
    return (10.0 * rank + torch.arange(6.0)).view(3, 2).t()


def _join_ranks(mesh: Mesh, dim: int) -> torch.Tensor | None:
    return gather_to_first(_of_rank(mesh.tp.rank), mesh.tp, dim)


def _join_ranks_by_gloo(mesh: Mesh, dim: int) -> torch.Tensor | None:
    mesh.tp.local = None
    return _join_ranks(mesh, dim)


@pytest.mark.parametrize("run", [_join_ranks, _join_ranks_by_gloo])
@pytest.mark.parametrize("dim", [0, 1])
def test_gather_joins_in_rank_order_on_the_first(gloo_pool: GlooPool, dim: int, run: Callable[..., Any]) -> None:
    on_first, *on_others = gloo_pool.run(run, dim, tp=3)
    assert torch.equal(on_first, torch.cat([_of_rank(rank) for rank in range(3)], dim))
    assert on_others == [None, None]


def _every_kind(mesh: Mesh) -> tuple[float, dict[str, int]]:
    told = torch.tensor([float(mesh.rank)])
    assert broadcast(told, mesh.tp) is told
    total = all_reduce(all_reduce(torch.ones(1), mesh.tp), mesh.tp)
    assert float(total) == 4.0
    gather_to_first(torch.ones(1), mesh.tp)
    return float(told), dict(mesh.tp.counts)


def _every_kind_by_gloo(mesh: Mesh) -> tuple[float, dict[str, int]]:
    mesh.tp.local = None
    return _every_kind(mesh)


@pytest.mark.parametrize("run", [_every_kind, _every_kind_by_gloo])
def test_kinds_are_counted_on_their_axis(gloo_pool: GlooPool, run: Callable[..., Any]) -> None:
    counts = {"broadcast": 1, "all_reduce": 2, "gather": 1}
    told_of_each_rank = [0.0, 0.0, 2.0, 2.0]  # by the first rank of its stage
    assert gloo_pool.run(run, tp=2, pp=2) == [(told, counts) for told in told_of_each_rank]


def _bytes_by_local_exchange(mesh: Mesh) -> list[int]:
    local, seen = mesh.tp.local, []
    assert local is not None
    add = local.sum

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.nbytes)
        return add(x)

    local.sum = note  # type: ignore[method-assign]
    for numel in (MAX_BYTES // 4, MAX_BYTES // 4 + 1):
        all_reduce(torch.ones(numel), mesh.tp)
        broadcast(torch.ones(numel), mesh.tp)
    return seen


def test_messages_that_a_socket_holds_are_exchanged_locally(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(_bytes_by_local_exchange, tp=2) == [[MAX_BYTES] * 2] * 2


def test_axis_of_one_rank_is_the_identity() -> None:
    axis = Axis()
    x = torch.ones(2)
    assert all_reduce(x, axis) is x
    assert gather_to_first(x, axis) is x
    assert broadcast(x, axis) is x
    assert not axis.counts


def _mesh_place(mesh: Mesh) -> tuple[int, int, int, bool, bool]:
    return mesh.rank, mesh.tp.rank, mesh.pp.rank, mesh.is_first_stage, mesh.is_last_stage


def test_rank_is_stage_times_tp_plus_tensor_rank(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(_mesh_place, tp=2, pp=2) == [
        (0, 0, 0, True, False),
        (1, 1, 0, True, False),
        (2, 0, 1, False, True),
        (3, 1, 1, False, True),
    ]


def _mesh_of_wrong_size(mesh: Mesh) -> str:
    with pytest.raises(ParallelismError) as caught:
        Mesh.from_world(tensor_parallel=2, pipeline_parallel=2)
    return str(caught.value)


def test_mesh_must_fill_the_world(gloo_pool: GlooPool) -> None:
    assert "needs 4 ranks; there are 2" in gloo_pool.run(_mesh_of_wrong_size, tp=2)[0]


_KINDS: dict[str, Callable[[torch.Tensor, Axis], object]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "gather": gather_to_first,
}


def _die_before_the_second(mesh: Mesh, kind: str, dying: int, numel: int) -> str:
    _KINDS[kind](torch.ones(numel), mesh.tp)
    if mesh.tp.rank == dying:
        os._exit(1)
    try:
        _KINDS[kind](torch.ones(numel), mesh.tp)
    except CollectiveError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("numel", [7, 100_000])
@pytest.mark.parametrize(("kind", "dying"), [("all_reduce", 1), ("broadcast", 0), ("gather", 1)])
def test_dead_peer_is_a_collective_error(gloo_pool: GlooPool, kind: str, dying: int, numel: int) -> None:
    """Of a rank that waits for what the other has."""
    messages = gloo_pool.run(_die_before_the_second, kind, dying, numel, tp=2, may_die=True)
    assert messages[dying] is None
    assert messages[1 - dying].startswith(f"{kind} failed on rank {1 - dying} of 2")


def _wait_for_a_late_peer(mesh: Mesh) -> str:
    assert mesh.tp.group is not None
    local = LocalExchange.connect(mesh.tp.group, mesh.tp.rank, 2, timeout_s=0.05)
    assert local is not None
    mesh.tp.local = local
    message = "no error"
    if mesh.tp.rank == 0:
        try:
            all_reduce(torch.ones(3), mesh.tp)
        except CollectiveError as error:
            message = str(error)
    dist.barrier()
    return message


def test_late_peer_is_a_collective_error(gloo_pool: GlooPool) -> None:
    assert "a peer died or took too long" in gloo_pool.run(_wait_for_a_late_peer, tp=2)[0]


def _fail_on(rank: int, bad_rank: int) -> Any:
    if rank == bad_rank:
        raise ValueError("seen by the test")
    return rank


def test_pool_reports_the_rank_that_failed_and_goes_on(gloo_pool: GlooPool) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)rank 1: .*ValueError: seen by the test"):
        gloo_pool.call(_fail_on, 1, ranks=2)
    assert gloo_pool.call(_fail_on, 9, ranks=2) == [0, 1]


def _wait_for_a_late_rank(mesh: Mesh, kind: str) -> float:
    before_s = mesh.tp.wait_s
    if mesh.tp.rank == 1:
        time.sleep(_LATE_S)
    x = torch.ones(4)
    _KINDS[kind](x, mesh.tp)
    return mesh.tp.wait_s - before_s


_LATE_S = 2.0
"""Far more than a busy machine lets the first rank be late by, which counts for a tenth."""


@pytest.mark.parametrize("kind", ["all_reduce", "gather"])
def test_time_spent_waiting_for_others_is_counted(gloo_pool: GlooPool, kind: str) -> None:
    first_s, late_s = gloo_pool.run(_wait_for_a_late_rank, kind, tp=2)
    assert first_s > 0.1 * _LATE_S
    assert 0 < late_s < first_s
