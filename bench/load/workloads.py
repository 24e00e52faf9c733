"""The workloads that engines are compared by, as token ids: the same for Weft and for every peer. No torch.

    W1    one request: 128 tokens in, 64 out
    W2    32 requests at once: 32-256 in, 16-128 out
    W3    32 requests that share their first 512 tokens: 32 own, 32 out
    W4    four requests at once, of long prompts: 1,920 in, 64 out

All calls of a workload are sent at once and run to their full length (no end of text), greedily. The lengths are the
same in every round; the tokens depend on the seed, so that a new seed each round leaves a prefix cache nothing to find
from the round before.
"""

import random
from collections.abc import Callable, Mapping

from bench.load.calls import Call, draw_ids


def make_workload(name: str, *, vocab_size: int, seed: int) -> tuple[Call, ...]:
    """Return the calls of this workload. Raises KeyError for another name."""
    return tuple(WORKLOADS[name](random.Random(f"{name} {seed}"), vocab_size))


def _one_stream(rng: random.Random, vocab_size: int) -> list[Call]:
    return [Call(prompt=draw_ids(rng, 128, vocab_size), num_out=64)]


def _mixed(rng: random.Random, vocab_size: int) -> list[Call]:
    ins, outs = _spread(32, 256, 32), _spread(16, 128, 32)
    shuffler = random.Random(1)
    shuffler.shuffle(ins)
    shuffler.shuffle(outs)
    return [
        Call(prompt=draw_ids(rng, num_in, vocab_size), num_out=num_out)
        for num_in, num_out in zip(ins, outs, strict=True)
    ]


def _shared_prefix(rng: random.Random, vocab_size: int) -> list[Call]:
    prefix = draw_ids(rng, 512, vocab_size)
    return [Call(prompt=prefix + draw_ids(rng, 32, vocab_size), num_out=32) for _ in range(32)]


def _long_prompts(rng: random.Random, vocab_size: int) -> list[Call]:
    return [Call(prompt=draw_ids(rng, 1920, vocab_size), num_out=64) for _ in range(4)]


def _spread(low: int, high: int, number: int) -> list[int]:
    """Return numbers from low to high, evenly."""
    return [low + round(index * (high - low) / (number - 1)) for index in range(number)]


WORKLOADS: Mapping[str, Callable[[random.Random, int], list[Call]]] = {
    "W1": _one_stream,
    "W2": _mixed,
    "W3": _shared_prefix,
    "W4": _long_prompts,
}
DEFAULT_WORKLOADS = ("W1", "W2", "W3")
