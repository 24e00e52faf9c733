"""How many slots of the blocks that sequences hold are empty, on lengths from a real service."""

import gzip
import json
from itertools import islice
from pathlib import Path

from helpers.scheduling import ScheduledModel

BLOCK_SIZE = 16


def test_less_than_two_percent_of_the_slots_in_use_are_empty(shared: Path) -> None:
    scheduled = ScheduledModel(
        num_blocks=8192,
        block_size=BLOCK_SIZE,
        max_context=20_000,
        max_num_batched_tokens=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    with gzip.open(shared / "traces" / "azure_2023_conv.jsonl.gz", "rt") as lines:
        calls = [json.loads(line) for line in islice(lines, 50)]
    sequences = [
        scheduled.submit(str(index), [1] * call["input_length"], max_tokens=call["output_length"], ignore_eos=True)
        for index, call in enumerate(calls)
    ]
    held = used = 0
    while scheduled.scheduler.has_unfinished:
        scheduled.step()
        held += sum(len(sequence.block_table) for sequence in sequences) * BLOCK_SIZE
        used += sum(sequence.num_computed_tokens for sequence in sequences if sequence.block_table)
    assert held > 1_000_000
    assert 1 - used / held < 0.02
