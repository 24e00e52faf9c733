"""Fused and transposed matrices are found row by row where the checkpoint has them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.families.layout import Fusion, Location, grouped_qkv, stacked_gate_up, stacked_qkv
from parallel.families.registry import describe_config

SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 5,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 8,
}
DESCRIPTION = describe_config(SIZES, source="test")


def _rows(fusion: Fusion, part: str) -> list[int]:
    num_rows = fusion.num_groups * fusion.part_rows[part]
    return [row for run in fusion.runs(part, 0, num_rows) for row in run]


def test_stacked_parts_follow_one_another() -> None:
    fusion = stacked_qkv(DESCRIPTION)
    assert [_rows(fusion, part) for part in "qkv"] == [list(range(8)), list(range(8, 12)), list(range(12, 16))]
    assert _rows(stacked_gate_up(DESCRIPTION), "up") == list(range(5, 10))


def test_grouped_parts_take_turns() -> None:
    fusion = grouped_qkv(DESCRIPTION)
    assert _rows(fusion, "q") == [0, 1, 2, 3, 8, 9, 10, 11]
    assert _rows(fusion, "k") == [4, 5, 12, 13]
    assert _rows(fusion, "v") == [6, 7, 14, 15]


@given(
    num_groups=st.integers(1, 4),
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_slice_is_the_slice_of_all_rows(num_groups: int, rows: list[int], data: st.DataObject) -> None:
    fusion = Fusion(num_groups=num_groups, part_rows={str(i): count for i, count in enumerate(rows)})
    parts = {name: _rows(fusion, name) for name in fusion.part_rows}
    assert sorted(row for part in parts.values() for row in part) == list(range(num_groups * sum(rows)))
    name = data.draw(st.sampled_from(sorted(parts)))
    start = data.draw(st.integers(0, len(parts[name])))
    stop = data.draw(st.integers(start, len(parts[name])))
    runs = list(fusion.runs(name, start, stop))
    assert [row for run in runs for row in run] == parts[name][start:stop]
    assert all(runs)


@pytest.mark.parametrize(
    ("location", "shape"),
    [
        (Location(name="w"), (8, 16)),
        (Location(name="w", is_transposed=True), (16, 8)),
        (Location(name="w", fusion=stacked_qkv(DESCRIPTION), part="q"), (16, 16)),
        (Location(name="w", fusion=stacked_qkv(DESCRIPTION), part="q", is_transposed=True), (16, 16)),
        (Location(name="w", expert=1, num_experts=3, is_transposed=True), (3, 16, 8)),
        (Location(name="norms.{row}.weight"), (16,)),
    ],
)
def test_stored_shape(location: Location, shape: tuple[int, ...]) -> None:
    assert location.stored_shape((8, 16)) == shape


def test_rows_may_be_tensors_of_their_own() -> None:
    assert Location(name="norms.{row}.weight").names(2) == ["norms.0.weight", "norms.1.weight"]
    assert Location(name="norm.weight").names(2) == ["norm.weight"]
