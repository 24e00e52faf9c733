"""The one place where a model folder becomes a tokenizer: the router encodes with it, the engine decodes with it.

The vocabulary is the first of these that is there:

    tokenizer.json                   the form of the `tokenizers` package, read as it is
    tokenizer.model, spiece.model    SentencePiece, or a tiktoken vocabulary under the same name (Llama 3)
    *.tiktoken                       tiktoken
    vocab.json and merges.txt        byte-level BPE; split as by GPT-2, or as by Qwen 2 where the config names its class

What the other JSON files say of single tokens is added to it (declared.py). No code of the folder is run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.tokenizer.declared import DeclaredTokens, read_declared_tokens
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.sentencepiece import convert_sentencepiece
from weft.tokenizer.tiktoken import convert_tiktoken, is_tiktoken, split_as

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "*.tiktoken", "vocab.json", "merges.txt")
"""Files that hold a vocabulary, as patterns."""
DECLARING_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that say more of its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A folder's tokenizer, and what the files beside it say that is not the tokenizer's own business."""

    tokenizer: Tokenizer
    config: Mapping[str, Any]
    """tokenizer_config.json; empty where there is none."""
    special_tokens: Mapping[str, str]
    """The text of "bos_token" and its like."""


def load_tokenizer(folder: Path, *, encodes: bool = True) -> LoadedTokenizer:
    """Read the tokenizer of a folder in Hugging Face layout; who only decodes leaves its merges out, most of the time.

    Raises TokenizerError, which names the file.
    """
    declared = read_declared_tokens(folder)
    tokenizer = _read_vocabulary(folder, declared, encodes=encodes)
    tokenizer.no_truncation()  # files saved by a training script may carry both
    tokenizer.no_padding()
    declared.apply(tokenizer)
    declared.frame(tokenizer)
    return LoadedTokenizer(tokenizer=tokenizer, config=declared.config, special_tokens=declared.named)


def _read_vocabulary(folder: Path, declared: DeclaredTokens, *, encodes: bool) -> Tokenizer:
    if (file := folder / "tokenizer.json").is_file():
        return _read_tokenizer_json(file, encodes=encodes)
    for file in (folder / "tokenizer.model", folder / "spiece.model", *sorted(folder.glob("*.tiktoken"))):
        if file.is_file():
            return _convert(file, declared)
    if (vocabulary := folder / "vocab.json").is_file() and (merges := folder / "merges.txt").is_file():
        return _read_byte_level(vocabulary, merges, declared.config)
    raise TokenizerError(
        f"{folder} has no tokenizer; looked for {', '.join(TOKENIZER_FILES[:-2])}, or vocab.json with merges.txt"
    )


def _read_tokenizer_json(file: Path, *, encodes: bool) -> Tokenizer:
    """Read tokenizer.json, special tokens taken literally.

    Files converted from SentencePiece may mark them `normalized`; then the "▁" that the normalizer puts before a text
    also becomes part of the token's name, and decoding no longer knows it as special.

    What is not looked at stays the bytes that it is: 150,000 tokens and their merges would take longer here than there.
    """
    try:
        description = msgspec.json.decode(_read(file), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(description.get("added_tokens", b"null")) or []
        for token in added:
            if token.get("special"):
                token["normalized"] = False
        description["added_tokens"] = _raw(added)
        if not encodes:
            model = msgspec.json.decode(description["model"], type=dict[str, msgspec.Raw])
            if "merges" in model:
                description["model"] = _raw(model | {"merges": _raw([])})
        return Tokenizer.from_buffer(msgspec.json.encode(description))
    except Exception as error:  # the package raises bare Exception
        raise TokenizerError(f"{file} is not a tokenizer: {error}") from error


def _read(file: Path) -> bytes:
    """Return the file's content. Raises TokenizerError for what `git clone` leaves in its place without Git LFS."""
    data = file.read_bytes()
    if data.startswith(b"version https://git-lfs"):
        raise TokenizerError("it is a pointer of Git LFS; allowed: the file itself, as `git lfs pull` brings it")
    return data


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _convert(file: Path, declared: DeclaredTokens) -> Tokenizer:
    try:
        data = _read(file)
        if file.suffix == ".tiktoken" or is_tiktoken(data):
            return convert_tiktoken(data, name=file.name, names=declared.names)
        return convert_sentencepiece(
            data,
            names=declared.names,
            is_prefixed=declared.config.get("add_prefix_space") is not False,
            is_each_part_prefixed=_is_each_part_prefixed(declared.config),
        )
    except Exception as error:  # the package raises bare Exception
        raise TokenizerError(f"{file}: {error}") from error


def _is_each_part_prefixed(config: Mapping[str, Any]) -> bool:
    """As `legacy` says; tokenizers with code of their own encode each part between special tokens by itself."""
    return bool(config.get("legacy", "auto_map" in config))


def _read_byte_level(vocabulary: Path, merges: Path, config: Mapping[str, Any]) -> Tokenizer:
    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    except Exception as error:  # the package raises bare Exception
        raise TokenizerError(f"{vocabulary} and {merges.name} are not a vocabulary and its merges: {error}") from error
    if str(config.get("tokenizer_class")).startswith("Qwen2"):
        split_as(tokenizer, "qwen.tiktoken")
        return tokenizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(config.get("add_prefix_space")))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
