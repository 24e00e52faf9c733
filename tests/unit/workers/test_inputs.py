"""A plan becomes the tensors that its words say, whatever the mix of chunks and decodes."""

import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers.plans import make_plan

from workers.device_tables import DeviceTables
from workers.inputs import InputBuilder
from workers.plan import NewSequence, ScheduledSequence, ScheduledSequences, StepPlan
from workers.request import SamplingParams
from workers.slots import Slots

BLOCK = 4


def builder(num_slots: int = 8, max_context: int = 64) -> InputBuilder:
    return InputBuilder(num_slots=num_slots, max_context=max_context, block_size=BLOCK, device=torch.device("cpu"))


def new(slot: int, token_ids: list[int]) -> NewSequence:
    return NewSequence(slot, token_ids, len(token_ids), SamplingParams(), [])


def test_chunks_and_decodes_are_packed_one_after_the_other() -> None:
    inputs = builder()
    inputs.build(
        make_plan(0, [], [new(2, [10, 11, 12]), new(5, [20, 21, 22, 23, 24, 25, 26])], [
            ScheduledSequence(2, 0, 3, [], [7], True),
            ScheduledSequence(5, 0, 2, [], [3], False),
        ])
    )  # fmt: skip
    step = inputs.build(
        make_plan(1, [], [], [
            ScheduledSequence(2, 3, 1, [99], [], True),
            ScheduledSequence(5, 2, 4, [], [9], False),
        ])
    )  # fmt: skip
    assert step.token_ids.tolist() == [99, 22, 23, 24, 25]
    assert step.positions.tolist() == [3, 2, 3, 4, 5]
    assert step.metas[0].query_starts.tolist() == step.metas[0].query_starts_host == [0, 1, 5]
    assert step.metas[0].context_lens.tolist() == step.metas[0].context_lens_host == [4, 6]
    assert step.metas[0].block_tables.tolist() == [[7, 0], [3, 9]]
    assert step.metas[0].slot_mapping.tolist() == [7 * 4 + 3, 3 * 4 + 2, 3 * 4 + 3, 9 * 4, 9 * 4 + 1]
    assert (step.metas[0].num_decodes, step.metas[0].max_query_len, step.metas[0].max_context_len) == (1, 4, 6)
    assert step.sample_rows is not None
    assert step.sample_rows.tolist() == [0]
    assert step.sample_slots.tolist() == [2]
    assert step.sample_positions.tolist() == [4]
    assert step.token_ids.dtype == step.positions.dtype == step.metas[0].slot_mapping.dtype == torch.int64
    assert (
        step.metas[0].query_starts.dtype
        == step.metas[0].context_lens.dtype
        == step.metas[0].block_tables.dtype
        == torch.int32
    )


def test_tokens_that_the_leader_does_not_know_yet_are_named_by_slot() -> None:
    inputs = builder()
    inputs.build(
        make_plan(0, [], [new(2, [10, 11, 12]), new(5, [20, 21, 22])], [
            ScheduledSequence(5, 0, 2, [], [3], False),
            ScheduledSequence(2, 0, 3, [], [7], True),
        ])
    )  # fmt: skip
    ahead = inputs.build(
        make_plan(1, [], [], [ScheduledSequence(5, 2, 1, [], [], True), ScheduledSequence(2, 3, 1, [], [], True)])
    )
    later = inputs.build(
        make_plan(2, [], [], [ScheduledSequence(5, 3, 1, [], [], True), ScheduledSequence(2, 4, 1, [99], [8], True)])
    )

    assert (ahead.fed_rows.tolist(), ahead.fed_slots.tolist()) == ([1], [2])
    assert ahead.token_ids[0] == 22
    assert (later.fed_rows.tolist(), later.fed_slots.tolist()) == ([0, 1], [5, 2])
    assert later.positions.tolist() == [3, 4]
    assert inputs._slots.tokens[2, :4].tolist() == [10, 11, 12, 99]


def test_a_batch_of_decodes_needs_no_row_index() -> None:
    inputs = builder()
    step = inputs.build(
        make_plan(0, [], [new(0, [1]), new(1, [2])], [
            ScheduledSequence(0, 0, 1, [], [5], True), ScheduledSequence(1, 0, 1, [], [6], True)
        ])
    )  # fmt: skip
    assert step.sample_rows is None
    assert step.metas[0].num_decodes == 2


def test_a_one_token_chunk_that_does_not_sample_keeps_the_row_index() -> None:
    step = builder().build(make_plan(0, [], [new(0, [1, 2])], [ScheduledSequence(0, 0, 1, [], [5], False)]))
    assert step.sample_rows is not None
    assert step.sample_rows.tolist() == []


def test_a_slot_taken_again_forgets_tokens_and_blocks() -> None:
    inputs = builder()
    inputs.build(make_plan(0, [], [new(0, list(range(12)))], [ScheduledSequence(0, 0, 12, [], [1, 2, 3], True)]))
    step = inputs.build(
        make_plan(1, [0], [new(0, [50, 51]), new(1, list(range(9)))], [
            ScheduledSequence(0, 0, 2, [], [8], True), ScheduledSequence(1, 0, 9, [], [4, 5, 6], True)
        ])
    )  # fmt: skip
    assert step.token_ids.tolist()[:2] == [50, 51]
    assert step.metas[0].block_tables.tolist() == [[8, 0, 0], [4, 5, 6]]


def test_rows_learn_as_many_tokens_as_they_are_told() -> None:
    draw, slots = random.Random(4), Slots(num_slots=12, max_context=400, block_size=BLOCK, num_groups=1)
    told: list[list[int]] = [[] for _ in range(12)]
    for number in range(100):
        shares = []
        for slot in draw.sample(range(12), draw.randint(1, 12)):
            learnt = [100 * number + i for i in range(draw.randint(0, 2))]
            told[slot] += learnt
            shares.append(ScheduledSequence(slot, 0, 1, learnt, [], True))
        slots.add_tokens(ScheduledSequences.of(shares))
    assert slots.num_tokens.tolist() == [len(tokens) for tokens in told]
    assert [slots.tokens[slot, : len(tokens)].tolist() for slot, tokens in enumerate(told)] == told


def test_random_plans_equal_a_plain_reading_of_them() -> None:
    """Follow random sequences through many steps, computing every number token by token."""
    rng = random.Random(0)
    inputs = builder(num_slots=8, max_context=64)
    known: dict[int, list[int]] = {}
    tables: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    next_block = 1
    for number in range(300):
        news, removed = [], []
        for slot in range(8):
            if slot in known and (len(known[slot]) > 55 or rng.random() < 0.05):
                removed.append(slot)
                del known[slot]
            if slot not in known and rng.random() < 0.4:
                known[slot] = [rng.randrange(1000) for _ in range(rng.randrange(1, 30))]
                news.append(new(slot, list(known[slot])))
                tables[slot], computed[slot] = [], 0
        shares = []
        for slot in sorted(known, key=lambda slot: len(known[slot]) - computed[slot] > 1):
            added: list[int] = []
            if computed[slot] == len(known[slot]):
                added = [rng.randrange(1000)]
                known[slot] += added
            left = len(known[slot]) - computed[slot]
            num = 1 if left == 1 else rng.randrange(2, left + 1)
            end = computed[slot] + num
            blocks = list(range(next_block, next_block + -(-end // BLOCK) - len(tables[slot])))
            next_block += len(blocks)
            tables[slot] += blocks
            shares.append(ScheduledSequence(slot, computed[slot], num, added, blocks, end == len(known[slot])))
            computed[slot] = end
        if not shares:
            continue
        step = inputs.build(make_plan(number, removed, news, shares))
        places = [(share.slot, share.start + i) for share in shares for i in range(share.num_tokens)]
        assert step.token_ids.tolist() == [known[slot][position] for slot, position in places]
        assert step.positions.tolist() == [position for _, position in places]
        assert step.metas[0].slot_mapping.tolist() == [
            tables[slot][position // BLOCK] * BLOCK + position % BLOCK for slot, position in places
        ]
        for share, row in zip(shares, step.metas[0].block_tables.tolist(), strict=True):
            table = tables[share.slot]
            assert row == (table + [0] * len(row))[: len(row)]
        assert step.metas[0].num_decodes == sum(share.num_tokens == 1 for share in shares)
        rows = range(len(places)) if step.sample_rows is None else step.sample_rows.tolist()
        assert [places[row] for row in rows] == [(s.slot, s.start + s.num_tokens - 1) for s in shares if s.samples]


def test_each_group_of_layers_has_tables_and_slots_of_its_own() -> None:
    inputs = InputBuilder(num_slots=4, max_context=64, block_size=BLOCK, device=torch.device("cpu"), num_groups=2)
    inputs.build(
        make_plan(0, [], [new(1, list(range(6))), new(2, [9])], [
            ScheduledSequence(2, 0, 1, [], [5, 6], True),
            ScheduledSequence(1, 0, 6, [], [7, 8, 9, 10], True),
        ])
    )  # fmt: skip
    step = inputs.build(
        make_plan(1, [], [], [
            ScheduledSequence(2, 1, 1, [3], [], True),
            ScheduledSequence(1, 6, 3, [1, 2, 3], [11, 12], True),
        ])
    )  # fmt: skip
    assert step.token_ids.tolist() == [3, 1, 2, 3]
    first, second = step.metas
    assert first.block_tables.tolist() == [[5, 0, 0], [7, 9, 11]]
    assert second.block_tables.tolist() == [[6, 0, 0], [8, 10, 12]]
    assert first.block_tables.is_contiguous()
    assert second.block_tables.is_contiguous()
    assert first.slot_mapping.tolist() == [5 * 4 + 1, 9 * 4 + 2, 9 * 4 + 3, 11 * 4]
    assert second.slot_mapping.tolist() == [6 * 4 + 1, 10 * 4 + 2, 10 * 4 + 3, 12 * 4]
    assert first.query_starts is second.query_starts
    assert first.context_lens is second.context_lens
    step = inputs.build(make_plan(2, [1], [new(1, [4])], [ScheduledSequence(1, 0, 1, [], [3, 4], True)]))
    assert inputs._slots.tables[1, :3].tolist() == [[3, 4], [0, 0], [0, 0]]


def decoding(num_groups: int) -> Iterator[StepPlan]:
    """Five sequences that decode for long, at times with a token that only ranks know; some end, and one is new."""
    rng = random.Random(num_groups)
    blocks = count(1)
    known = {slot: [rng.randrange(1000) for _ in range(rng.randrange(1, 12))] for slot in (4, 1, 6, 3, 0)}
    entries, ends = dict.fromkeys(known, 0), {slot: len(tokens) for slot, tokens in known.items()}
    news = [new(slot, list(tokens)) for slot, tokens in known.items()]
    added: dict[int, list[int]] = {slot: [] for slot in known}
    for number in range(90):
        shares = []
        for slot in known:
            start = 0 if any(slot == item.slot for item in news) else ends[slot] - 1
            num_new = -(-ends[slot] // BLOCK) - entries[slot]
            entries[slot] += num_new
            table = [next(blocks) for _ in range(num_new * num_groups)]
            shares.append(ScheduledSequence(slot, start, ends[slot] - start, added[slot], table, True))
        shares.sort(key=lambda share: share.num_tokens > 1)
        yield make_plan(number, [], news, shares)
        news = []
        num_learnt = {30: 0, 60: 2}.get(number, 1)  # in between only ranks know the last token
        added = {slot: [rng.randrange(1000) for _ in range(num_learnt)] for slot in known}
        if number in (20, 45, 70):
            gone = rng.choice(list(known))
            del known[gone], added[gone], ends[gone]
            if number == 70:
                known[gone], ends[gone], entries[gone] = [5, 6], 1, 0
                news, added[gone] = [new(gone, [5, 6])], []
        ends = {slot: end + 1 for slot, end in ends.items()}


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_steps_made_from_the_one_before_equal_those_made_anew(num_groups: int, looks_ahead: bool) -> None:
    goes_on, anew = (
        InputBuilder(num_slots=8, max_context=128, block_size=BLOCK, device=torch.device("cpu"), num_groups=num_groups)
        for _ in range(2)
    )
    num_kept = 0
    for plan in decoding(num_groups):
        tables = goes_on._decodes._last and goes_on._decodes._last.inputs.metas[0].block_tables
        anew._decodes.end()
        seen, expected = goes_on.build(plan), anew.build(plan)
        num_kept += seen.metas[0].block_tables is tables
        for inputs in (seen, expected):
            inputs.token_ids[inputs.fed_rows] = 0  # anything
        assert_equal(seen, expected)
        if looks_ahead:
            goes_on.look_ahead()
            assert_equal(seen, expected)  # it may be under way
    assert num_kept > 50
    goes_on._decodes.end()
    assert (goes_on._slots.tokens == anew._slots.tokens).all()
    assert (goes_on._slots.num_tokens == anew._slots.num_tokens).all()
    assert (goes_on._slots.tables == anew._slots.tables).all()


def test_lengths_are_one_object_in_all_groups_of_a_step_and_in_no_other_step() -> None:
    """By it kernels tell steps apart."""
    inputs = InputBuilder(num_slots=8, max_context=128, block_size=BLOCK, device=torch.device("cpu"), num_groups=2)
    steps = [inputs.build(plan).metas for plan in decoding(2)]
    lengths = [meta.context_lens_host for metas in steps for meta in metas]
    assert all(first.context_lens_host is second.context_lens_host for first, second in steps)
    assert len({id(each) for each in lengths}) == len(steps)


def assert_equal(seen: Any, expected: Any) -> None:
    """Dataclasses of tensors, arrays, numbers and lists of these."""
    assert type(seen) is type(expected)
    if is_dataclass(seen):
        for field in fields(seen):
            assert_equal(getattr(seen, field.name), getattr(expected, field.name))
    elif isinstance(seen, list) and seen and is_dataclass(seen[0]):
        for pair in zip(seen, expected, strict=True):
            assert_equal(*pair)
    elif isinstance(seen, torch.Tensor):
        assert (seen.dtype, seen.tolist()) == (expected.dtype, expected.tolist())
    else:
        assert np.array_equal(seen, expected)


def test_what_goes_to_a_gpu_does_not_grow_with_the_longest_context(monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes: list[int] = []

    def copy(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
        num_bytes.append(array.nbytes)
        return torch.from_numpy(array)

    monkeypatch.setattr("workers.inputs.to_device", copy)
    monkeypatch.setattr("workers.inputs.DeviceTables", tables_on_host)
    for length in (40, 4000):
        inputs = InputBuilder(num_slots=8, max_context=8192, block_size=BLOCK, device=torch.device("cuda"))
        lengths = {slot: length if slot == 3 else 9 for slot in range(8)}
        news = [new(slot, [1] * length) for slot, length in lengths.items()]
        shares = [
            ScheduledSequence(slot, 0, length, [], [5] * (length // BLOCK + 1), True)
            for slot, length in lengths.items()
        ]
        inputs.build(make_plan(0, [], news, shares))
        inputs.build(
            make_plan(
                1, [], [], [ScheduledSequence(slot, length, 1, [7], [], True) for slot, length in lengths.items()]
            )
        )
    _, short, _, long = num_bytes
    assert long == short


def tables_on_host(**sizes: Any) -> DeviceTables:
    """As they would be on a device that is not there."""
    return DeviceTables(**sizes | {"device": torch.device("cpu")})


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_step_goes_to_a_gpu_in_one_copy_whose_parts_begin_at_16_bytes(
    monkeypatch: pytest.MonkeyPatch, num_groups: int
) -> None:
    """A device that is not there, so that what would be copied can be looked at."""
    copied: list[torch.Tensor] = []

    def copy(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
        copied.append(torch.from_numpy(array))
        return copied[-1]

    monkeypatch.setattr("workers.inputs.to_device", copy)
    monkeypatch.setattr("workers.inputs.DeviceTables", tables_on_host)
    there, here = (
        InputBuilder(num_slots=8, max_context=128, block_size=BLOCK, device=torch.device(kind), num_groups=num_groups)
        for kind in ("cuda", "cpu")
    )
    for number, plan in enumerate(decoding(num_groups), 1):
        seen, expected = there.build(plan), here.build(plan)
        for inputs in (seen, expected):
            inputs.token_ids[inputs.fed_rows] = 0  # anything
        assert_equal(seen, expected)
        assert len(copied) == number
        assert all(meta.block_tables.is_contiguous() for meta in seen.metas)
        tables = {meta.block_tables.data_ptr() for meta in seen.metas}
        assert not any(place % 16 for place in tables)
        tensors = [*tensors_of(seen), *(tensor for meta in seen.metas for tensor in tensors_of(meta))]
        for tensor in (tensor for tensor in tensors if tensor.data_ptr() not in tables):
            offset = tensor.data_ptr() - copied[-1].data_ptr()
            assert 0 <= offset <= copied[-1].nbytes - tensor.nbytes
            assert offset % 16 == 0


def tensors_of(values: Any) -> Iterator[torch.Tensor]:
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, torch.Tensor) and value.numel():
            yield value
