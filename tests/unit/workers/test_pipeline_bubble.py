"""The stages of a pipeline are at work: what they idle of their time stays below one of the batches in flight."""

import pytest
from helpers.scheduling import ScheduledModel

TOKENS_A_SECOND = 64.0
"""Beside a second that each step takes in each stage whatever it computes: weights are read."""


def bubble(num_stages: int, *, num_requests: int, prompt_tokens: int, output_tokens: int) -> float:
    """Return the share of the time in which stages idle, each beginning a step when the one before it has done it."""
    served = ScheduledModel(
        num_blocks=20_000,
        block_size=16,
        max_context=9_000,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_in_flight=num_stages,
        enable_prefix_caching=False,
    )
    for index in range(num_requests):
        token_ids = [(7 * index + i) % 90 for i in range(prompt_tokens)]
        served.submit(str(index), token_ids, max_tokens=output_tokens, ignore_eos=True)
    free_s = [0.0] * num_stages
    busy_s = now_s = 0.0
    ends_s: list[float] = []
    while served.scheduler.has_unfinished:
        while (plan := served.launch()) is not None:
            step_s = 1 + sum(share.num_tokens for share in plan.scheduled) / TOKENS_A_SECOND
            end_s = now_s
            for stage in range(num_stages):
                end_s = free_s[stage] = max(end_s, free_s[stage]) + step_s
            busy_s += num_stages * step_s
            ends_s.append(end_s)
        now_s = ends_s.pop(0)
        served.collect()
    return 1 - busy_s / (num_stages * now_s)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize(
    ("num_requests", "prompt_tokens", "output_tokens"),
    [(32, 50, 200), (16, 700, 50), (64, 200, 100), (1, 6_000, 2), (4, 4_000, 8)],
    ids=["chats", "long-prompts", "many", "one-document", "documents"],
)
def test_stages_idle_less_than_one_of_the_batches_in_flight_takes(
    num_stages: int, num_requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    share = bubble(num_stages, num_requests=num_requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    assert share < 1 / num_stages


def test_stages_that_decode_as_many_as_they_are_never_idle() -> None:
    assert bubble(4, num_requests=4, prompt_tokens=1, output_tokens=400) < 0.02
