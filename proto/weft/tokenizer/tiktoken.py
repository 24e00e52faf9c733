"""From a tiktoken vocabulary to a tokenizer: a line for each token, its bytes in base64 and its rank, which is its id.

Such a file does not say how a text is split before pairs are merged, nor which special tokens follow: code does. What
is known of both is kept here, by the name of the file.
"""

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.tokenizer.byte_level import CHAR_OF_BYTE, as_chars
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.merges import derive_merges


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the code of a model says that its file leaves out."""

    pattern: str
    """Matches each part of a text within which pairs are merged."""
    is_nfc: bool = False
    """The text is composed first."""
    special: tuple[str, ...] = ()
    """Special tokens after the last rank, where no JSON file of the folder names any."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_QWEN = _Kind(
    pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    is_nfc=True,
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205))),
)
_LLAMA3 = _Kind(
    pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *(f"<|reserved_special_token_{n}|>" for n in range(3, 248)),
    ),
)
_O200K = _Kind(
    pattern="|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    )
)

KINDS: Mapping[str, _Kind] = {
    "qwen.tiktoken": _QWEN,
    "tokenizer.model": _LLAMA3,
    "cl100k_base.tiktoken": _Kind(pattern=_LLAMA3.pattern),
    "o200k_base.tiktoken": _O200K,
}
"""What is known, by the name of the file."""

_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+")


def is_tiktoken(data: bytes) -> bool:
    """Return whether a file is such a vocabulary, from its first line."""
    return _LINE.fullmatch(data[:4096].split(b"\n", 1)[0].rstrip()) is not None


def convert_tiktoken(data: bytes, *, name: str, names: Mapping[int, str]) -> Tokenizer:
    """Return the tokenizer of a vocabulary.

    Args:
        data: the file.
        name: what it is called.
        names: the tokens whose place the folder's JSON files give.

    Raises:
        TokenizerError: the file is broken, or nothing is known of files of this name.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise TokenizerError(
            f"how a text is split for this vocabulary is not known; allowed: vocabularies called {', '.join(KINDS)}"
        )
    ranks = _parse(data)
    tokens = sorted(ranks, key=ranks.__getitem__)
    tokenizer = Tokenizer(models.BPE(vocab=ranks, merges=derive_merges(tokens, ranks.keys()), ignore_merges=True))
    split_as(tokenizer, name)
    if not names:
        tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in kind.special])
    return tokenizer


def split_as(tokenizer: Tokenizer, name: str) -> None:
    """Let a tokenizer of bytes split a text as that of the file called `name`, one of KINDS."""
    kind = KINDS[name]
    if kind.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(kind.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _parse(data: bytes) -> dict[str, int]:
    """The rank of each token, its bytes written as characters."""
    ranks: dict[str, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[as_chars(base64.b64decode(token, validate=True))] = int(rank)
        except ValueError as error:
            raise TokenizerError(f"line {number} is {line[:80]!r}; allowed: base64, a space, a rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"its {len(ranks)} tokens have other ranks; allowed: 0 to {len(ranks) - 1}, each once")
    missing = [byte for byte, char in enumerate(CHAR_OF_BYTE) if char not in ranks]
    if missing:
        raise TokenizerError(f"it has no token for the byte {missing[0]}; allowed: vocabularies with all single bytes")
    return ranks
