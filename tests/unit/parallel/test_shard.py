"""What belongs to which rank."""

from typing import Any

import pytest
import torch

from parallel.description import DecoderDescription, MoeDescription
from parallel.errors import ParallelismError
from parallel.shard import (
    Piece,
    ShardedParameter,
    check_split,
    even_range,
    expert_ranges,
    kv_head_range,
    split_layers,
    vocab_range,
    vocab_rows,
)


def _description(**changes: Any) -> DecoderDescription:
    sizes: dict[str, Any] = {"num_layers": 3, "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 12} | changes
    return DecoderDescription(
        family="llama",
        vocab_size=10,
        hidden_size=12,
        head_dim=2,
        max_context=8,
        norm_eps=1e-5,
        rotaries=(None,) * sizes["num_layers"],
        sliding_windows=(None,) * sizes["num_layers"],
        **sizes,
    )


def test_even_parts_cover_everything_once() -> None:
    assert [even_range(12, rank, 3, what="x") for rank in range(3)] == [range(4), range(4, 8), range(8, 12)]


def test_uneven_parts_are_refused_by_name() -> None:
    with pytest.raises(ParallelismError, match="num_heads is 6, which does not divide over tensor_parallel 4"):
        even_range(6, 0, 4, what="num_heads")


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "heads"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
    ],
)
def test_kv_heads_are_divided_or_replicated(num_kv_heads: int, size: int, heads: list[list[int]]) -> None:
    assert [list(kv_head_range(num_kv_heads, rank, size)) for rank in range(size)] == heads


@pytest.mark.parametrize(("num_kv_heads", "size"), [(3, 2), (2, 3), (3, 4)])
def test_kv_heads_that_do_not_fit_are_refused(num_kv_heads: int, size: int) -> None:
    with pytest.raises(ParallelismError, match="allowed"):
        kv_head_range(num_kv_heads, 0, size)


@pytest.mark.parametrize(("vocab_size", "size"), [(10, 1), (10, 2), (10, 4), (5, 4), (3, 4)])
def test_vocabulary_is_covered_once_within_padded_rows(vocab_size: int, size: int) -> None:
    rows = vocab_rows(vocab_size, size)
    ranges = [vocab_range(vocab_size, rank, size) for rank in range(size)]
    assert [token for part in ranges for token in part] == list(range(vocab_size))
    assert all(len(part) <= rows for part in ranges)
    assert rows * size - vocab_size < size
    assert all(part.start == rank * rows for rank, part in enumerate(ranges) if part)


@pytest.mark.parametrize(
    ("num_layers", "sizes"), [(4, [2, 2]), (5, [3, 2]), (7, [3, 2, 2]), (8, [3, 3, 2]), (3, [1, 1, 1])]
)
def test_early_stages_take_the_remainder(num_layers: int, sizes: list[int]) -> None:
    stages = split_layers(num_layers, len(sizes))
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_stages_have_the_layers_that_they_are_given() -> None:
    assert split_layers(12, 3, (5, 6, 1)) == [range(5), range(5, 11), range(11, 12)]


@pytest.mark.parametrize("partition", [(8,), (4, 4, 4), (8, 5), (12, 0), (13, -1)])
def test_partition_that_is_none_of_these_layers_is_refused(partition: tuple[int, ...]) -> None:
    with pytest.raises(ParallelismError) as refused:
        check_split(_description(num_layers=12), tensor_parallel=1, pipeline_parallel=2, layer_partition=partition)
    assert str(refused.value) == (
        f"layer_partition is {[*partition]}; allowed: a number of layers, at least 1, for each of pipeline_parallel "
        "2 stages, 12 together"
    )


def test_target_is_the_view_that_a_piece_fills() -> None:
    tensor = torch.zeros(4, 6)
    piece = Piece(source="x", full_shape=(4, 12), dim=1, start=3, stop=5, offset=2)
    ShardedParameter(tensor=tensor, pieces=(piece,)).target(piece).fill_(1)
    assert tensor.sum(0).tolist() == [0, 0, 4, 4, 0, 0]


@pytest.mark.parametrize(
    ("changes", "tp", "pp", "message"),
    [
        ({}, 4, 1, "num_heads is 6"),
        ({"num_heads": 8, "num_kv_heads": 4, "intermediate_size": 6}, 4, 1, "intermediate_size is 6"),
        ({"num_kv_heads": 6, "num_heads": 12}, 4, 1, "num_kv_heads is 6"),
        ({}, 1, 4, "pipeline_parallel is 4"),
    ],
)
def test_split_that_cannot_be_is_refused(changes: dict[str, int], tp: int, pp: int, message: str) -> None:
    with pytest.raises(ParallelismError, match=message):
        check_split(_description(**changes), tensor_parallel=tp, pipeline_parallel=pp)


def _moe(**changes: Any) -> MoeDescription:
    return MoeDescription(**{"num_experts": 6, "num_chosen": 2, "intermediate_size": 8, **changes})


def test_expert_ranges_divide_experts_or_their_inner_dims() -> None:
    assert expert_ranges(_moe(), 1, 2, expert_parallel=False) == (range(6), range(4, 8))
    assert expert_ranges(_moe(), 1, 2, expert_parallel=True) == (range(3, 6), range(8))


@pytest.mark.parametrize(
    ("moe", "tp", "expert_parallel", "message"),
    [
        ({}, 4, True, "num_experts is 6, which does not divide over tensor_parallel 4"),
        ({"intermediate_size": 10}, 4, False, "intermediate_size of the experts is 10, which"),
        ({"shared_intermediate_size": 9}, 2, True, "shared_intermediate_size is 9, which"),
        (None, 2, True, "expert_parallel is asked for; allowed: for models with experts"),
    ],
)
def test_experts_that_cannot_be_split_are_refused(
    moe: dict[str, int] | None, tp: int, expert_parallel: bool, message: str
) -> None:
    description = _description(num_heads=8, num_kv_heads=8, moe=None if moe is None else _moe(**moe))
    with pytest.raises(ParallelismError, match=message):
        check_split(description, tensor_parallel=tp, pipeline_parallel=1, expert_parallel=expert_parallel)


def test_size_of_mlps_counts_only_where_there_are_some() -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 8, "intermediate_size": 7}
    check_split(_description(**sizes, moe=_moe()), tensor_parallel=2, pipeline_parallel=1)
    with pytest.raises(ParallelismError, match="intermediate_size is 7"):
        check_split(
            _description(**sizes, moe=_moe(dense_layers=frozenset({0}))), tensor_parallel=2, pipeline_parallel=1
        )


def test_split_that_can_be_is_accepted() -> None:
    check_split(_description(), tensor_parallel=2, pipeline_parallel=3)
