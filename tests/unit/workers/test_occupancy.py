"""Slots are full while requests wait: outputs of uneven lengths take fewer steps than batches that end together."""

import random

import pytest
from helpers.scheduling import ScheduledModel

NUM_SLOTS = 16


def draw_lengths(num: int) -> list[int]:
    """Outputs with a heavy tail: half of them have fewer than 20 tokens, the longest has 400."""
    rng = random.Random(0)
    return [min(int(11 * rng.paretovariate(1.2)), 400) for _ in range(num)]


@pytest.mark.parametrize(("looks_ahead", "chunk"), [(False, None), (True, None), (False, 8)])
def test_slots_are_full_while_requests_wait(looks_ahead: bool, chunk: int | None) -> None:
    lengths = draw_lengths(200)
    served = ScheduledModel(
        num_blocks=4000,
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=128,
        prefill_chunk_tokens=chunk,
        looks_ahead=looks_ahead,
        max_in_flight=1 + looks_ahead,
        enable_prefix_caching=False,
    )
    for index, length in enumerate(lengths):
        served.submit(str(index), [index % 90] * (1 + index % 30), max_tokens=length, ignore_eos=True)
    occupancy: list[float] = []
    num_steps = 0
    while served.scheduler.has_unfinished:
        is_backlog = served.scheduler.num_waiting > 0
        while (plan := served.launch()) is not None:
            num_steps += 1
            if is_backlog:
                occupancy.append(len(plan.scheduled) / NUM_SLOTS)
        served.collect()

    assert len(occupancy) > 100
    assert sum(occupancy) / len(occupancy) >= 0.95
    batches = [lengths[start : start + NUM_SLOTS] for start in range(0, len(lengths), NUM_SLOTS)]
    assert num_steps * 2 < sum(max(batch) for batch in batches), "batches that end with their longest output"
