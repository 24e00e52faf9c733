"""What a benchmark sends: prompts, how much to generate from each, and which wait for which. Plain values, no torch."""

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation, for the model's chat template."""

    messages: tuple[Mapping[str, str], ...]


Prompt = tuple[int, ...] | str | Chat
"""Token ids, text or a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request."""

    prompt: Prompt
    num_out: int
    """Tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Calls of one user: each is sent when the one before it has ended. Most sessions have one."""

    calls: tuple[Call, ...]
    at_s: float | None = None
    """When it began, in seconds from the start of its recorded trace; None: no trace says."""
    think_s: float = 0.0
    """Pause before each call but the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Numbers of tokens (or turns), each as probable as any other."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Draw one of the numbers."""
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def begin_otherwise(prompt: Prompt, word: str) -> Prompt:
    """A prompt like this one that shares no cached prefix with it: `word` comes first, token ids come last first."""
    match prompt:
        case str():
            return f"{word} {prompt}"
        case Chat(messages=(first, *rest)):
            return Chat(messages=({**first, "content": f"{word} {first['content']}"}, *rest))
        case Chat():
            return prompt
        case _:
            return prompt[::-1]


def draw_ids(rng: random.Random, length: int, vocab_size: int) -> tuple[int, ...]:
    """Draw random token ids below `vocab_size`."""
    return tuple(rng.choices(range(vocab_size), k=length))
