"""Generates the default model's training text from nothing but the tables and templates beside it.

The same seed gives the same text on every machine. A document is plain text (a story, a record) or a conversation; both
come out as one string with the special tokens written in, ready for the tokenizer.

    python -m cluster.default_model.corpus        prints a few documents
"""

import random
from collections.abc import Iterator

from cluster.default_model.chat import Message, make_conversation
from cluster.default_model.records import make_record
from cluster.default_model.stories import make_story

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""What `render_chat` does, for tokenizer_config.json."""


def documents(seed: int) -> Iterator[str]:
    """Endless training documents: 30 % stories, 66 % conversations (stories and records among them), 4 % records."""
    rng = random.Random(seed)
    while True:
        kind = rng.random()
        if kind < 0.30:
            yield BOS + make_story(rng) + EOS
        elif kind < 0.96:
            yield render_chat(make_conversation(rng)) + EOS
        else:
            yield BOS + make_record(rng)[1] + EOS


def render_chat(messages: list[Message]) -> str:
    """A conversation in the ChatML layout that `CHAT_TEMPLATE` describes."""
    turns = (f"{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n" for message in messages)
    return BOS + "".join(turns)


if __name__ == "__main__":
    for _, document in zip(range(20), documents(0), strict=False):
        print(document, end="\n\n")
