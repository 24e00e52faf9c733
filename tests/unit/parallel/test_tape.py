"""What is put on a tape is what ran: anything else that happens between the kernels spoils it."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from parallel.description import Activation
from parallel.kernels.base import LayerCache
from parallel.kernels.native.structures import Kind, LayerParams, SharedRanks
from parallel.kernels.native.tape import CannotRecordError, OnlyKernels, Recorder, Tape

NUM_TOKENS = 3


def _rows(width: int = 64, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(NUM_TOKENS, width, dtype=dtype)


def _cache() -> LayerCache:
    return cast(LayerCache, object())  # known by its identity


@pytest.mark.parametrize(
    "part",
    [
        lambda x: x[1:],
        lambda x: x[: NUM_TOKENS - 1],
        lambda x: x.view(-1)[: NUM_TOKENS * 32].view(NUM_TOKENS, 32),
        lambda x: x.view(-1, 32)[:NUM_TOKENS],
    ],
    ids=["later rows", "fewer rows", "half of the memory", "rows that are cut in two"],
)
def test_only_whole_columns_of_a_buffer_are_read(part: Callable[[Tensor], Tensor]) -> None:
    x = _rows()
    tape = Tape(x, [], [])
    assert tape.read(x[:, 32:]).column == 32
    with pytest.raises(CannotRecordError, match="is not a part of rows"):
        tape.read(part(x))


def test_a_part_of_a_row_is_no_buffer() -> None:
    tape = Tape(torch.zeros(1, 64), [], [])
    with pytest.raises(CannotRecordError, match="is not a part of rows"):
        tape.write(torch.zeros(1, 128)[:, 64:])


def test_columns_of_wider_numbers_are_counted_in_those_of_x() -> None:
    tape, sums = Tape(_rows(), [], []), _rows(2, torch.float32)
    assert (tape.write(sums).column, tape.widths[1]) == (0, 4)
    place = tape.read(sums[:, 1])
    assert (place.buffer, place.column) == (1, 2)


def test_what_no_kernel_made_is_not_read() -> None:
    x = _rows()
    tape = Tape(x, [], [])
    with pytest.raises(CannotRecordError, match="that no kernel made"):
        tape.gate(x, _rows(128), Activation.SILU)
    assert not tape.operations


def test_only_the_angles_and_caches_of_the_step_are_known() -> None:
    x, caches = _rows(), [_cache(), _cache()]
    angles = [(_rows(8), _rows(8)) for _ in range(2)]
    tape = Tape(x, [(), *angles], caches)  # layers of the first kind do not rotate
    heads = x.view(NUM_TOKENS, 4, 16)
    for cos, _ in angles:
        tape.rotary(heads, cos, is_interleaved=False)
    for cache in caches:
        tape.write_cache(heads, heads, cache)
    assert [operation.index for operation in tape.operations] == [1, 2, 0, 1]
    with pytest.raises(CannotRecordError, match="not those of the step"):
        tape.rotary(heads, _rows(8), is_interleaved=False)
    with pytest.raises(CannotRecordError, match="not that of a layer"):
        tape.write_cache(heads, heads, _cache())
    with pytest.raises(CannotRecordError, match="not that of a layer"):
        tape.attention(heads, heads, _cache(), LayerParams())


def test_ranks_add_up_whole_rows_only() -> None:
    x, sums = _rows(), _rows(2, torch.float32)
    tape, ranks = Tape(x, [], []), SharedRanks()
    tape.write(sums)
    for whole in (x, sums):
        tape.all_reduce(whole, ranks)
    assert [(operation.size, operation.flag) for operation in tape.operations] == [(64, False), (2, True)]
    for part in (x[:, :32], sums[:, :1]):
        with pytest.raises(CannotRecordError, match="a part of rows"):
            tape.all_reduce(part, ranks)


def _compute(do: Callable[[Tensor, Tensor], Any]) -> Tape:
    """A tape of two tensors, and what torch does with them."""
    x, y = _rows(), _rows()
    recorder = Recorder()
    recorder.tape = tape = Tape(x, [], [])
    tape.write(y)
    with OnlyKernels(recorder, tape):
        do(x, y)
    return tape


@pytest.mark.parametrize(
    ("do", "kind"),
    [
        (lambda x, y: x.add_(y), Kind.ADD),
        (lambda x, y: x.add_(torch.empty(64, dtype=x.dtype)), Kind.ADD),
        (lambda x, y: x.mul_(0.5), Kind.SCALE),
        (lambda x, y: x.clamp_(-2.0, 2.0), Kind.CLAMP),
    ],
)
def test_what_torch_may_do_itself_is_recorded(do: Callable[[Tensor, Tensor], Any], kind: Kind) -> None:
    tape = _compute(do)
    assert tape.failure is None
    assert [operation.kind for operation in tape.operations] == [kind]


@pytest.mark.parametrize(
    ("do", "reason"),
    [
        (lambda x, y: x.add_(y, alpha=2), "aten::add_ between"),
        (lambda x, y: x.add_(1.0), "aten::add_ between"),
        (lambda x, y: x.add_(y[:, :1]), "aten::add_ between"),
        (lambda x, y: x.add_(torch.empty(64)), "aten::add_ between"),
        (lambda x, y: x.add_(torch.empty(128, dtype=x.dtype)[::2]), "aten::add_ between"),
        (lambda x, y: x.mul_(y), "aten::mul_ between"),
        (lambda x, y: x.mul_(2), "aten::mul_ between"),
        (lambda x, y: x.clamp_(max=2.0), "numbers clamped"),
        (lambda x, y: x.clamp_(min=-2.0), "aten::clamp_ between"),
        (lambda x, y: torch.cat((x, y)), "aten::cat between"),
        (lambda x, y: x + y, "aten::add between"),
        (lambda x, y: x.copy_(y), "aten::copy_ between"),
        (lambda x, y: x.zero_(), "aten::zero_ between"),
    ],
)
def test_what_else_torch_does_spoils_the_tape(do: Callable[[Tensor, Tensor], Any], reason: str) -> None:
    tape = _compute(do)
    assert tape.failure is not None
    assert reason in tape.failure
    assert not tape.operations


def test_what_is_added_to_each_row_is_no_buffer() -> None:
    def do(x: Tensor, y: Tensor) -> None:
        torch.empty(NUM_TOKENS, NUM_TOKENS, 64, dtype=y.dtype).add_(y)

    assert _compute(do).failure == "aten::add_ between the kernels"


def test_a_spoilt_tape_records_nothing_more_and_keeps_its_reason() -> None:
    def do(x: Tensor, y: Tensor) -> None:
        x.add_(y)
        y.zero_()
        x.copy_(y)
        x.add_(y)

    tape = _compute(do)
    assert tape.failure == "aten::zero_ between the kernels"
    assert len(tape.operations) == 1
