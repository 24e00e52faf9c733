"""What the JSON files beside a vocabulary say of single tokens: which are special, and where they are.

tokenizer_config.json      bos_token ..., added_tokens_decoder {id: token}, additional_special_tokens, add_bos_token
special_tokens_map.json    bos_token ..., additional_special_tokens; the config comes before it
added_tokens.json          {text: id}, where the config has no added_tokens_decoder
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from weft.tokenizer.errors import TokenizerError

_LISTS = ("additional_special_tokens", "extra_special_tokens")
_MAX_ID = (1 << 19) - 1
"""Largest id that a file may give a token, twice as far as vocabularies go: all ids before it are filled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTokens:
    """What a folder says of its tokens, whatever the form of its vocabulary."""

    config: Mapping[str, Any]
    """tokenizer_config.json."""
    named: Mapping[str, str]
    """The text of "bos_token" and its like."""
    special: frozenset[str]
    """Texts of special tokens: the named ones and further ones."""
    by_id: Mapping[int, AddedToken]
    """Tokens whose place is given, in the order of their ids."""

    @property
    def names(self) -> dict[int, str]:
        """The text of each token whose place is given."""
        return {token_id: token.content for token_id, token in self.by_id.items()}

    def apply(self, tokenizer: Tokenizer) -> None:
        """Make the tokens known to a tokenizer, so that they are found in a text, and left out where special.

        A token gets the id that the vocabulary gives it, else the one declared; ids in between are filled. Special
        tokens without an id and not in the vocabulary are left out: the model has no embedding for them.
        """
        for token_id, token in self.by_id.items():
            if tokenizer.token_to_id(token.content) is None:
                free = range(tokenizer.get_vocab_size(with_added_tokens=True), token_id)
                tokenizer.add_special_tokens([f"<|reserved_token_{id}|>" for id in free])
            tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
        placed = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
        known = [text for text in sorted(self.special) if tokenizer.token_to_id(text) is not None]
        tokenizer.add_special_tokens([_as_special(placed.get(text) or AddedToken(text)) for text in known])

    def frame(self, tokenizer: Tokenizer) -> None:
        """Put the tokens around a prompt that `add_bos_token` and `add_eos_token` ask for.

        Where one of them is not given, its side stays as it is.
        """
        has_bos, has_eos = (self.config.get(f"add_{name}_token") is not None for name in ("bos", "eos"))
        if not (has_bos or has_eos):
            return
        before, after = _read_frame(tokenizer)
        bos = self._frame_token(tokenizer, "bos") if has_bos else before
        eos = self._frame_token(tokenizer, "eos") if has_eos else after
        ids = {token: tokenizer.token_to_id(token) for token in (*bos, *eos)}
        tokenizer.post_processor = TemplateProcessing(  # it reads "$" and ":" in a text, so tokens get other names here
            single=[*(str(ids[token]) for token in bos), "$A", *(str(ids[token]) for token in eos)],
            special_tokens=[{"id": str(each), "ids": [each], "tokens": [token]} for token, each in ids.items()],
        )

    def _frame_token(self, tokenizer: Tokenizer, name: str) -> list[str]:
        token = self.named.get(f"{name}_token")
        if not self.config.get(f"add_{name}_token") or token is None or tokenizer.token_to_id(token) is None:
            return []
        return [token]


def _as_special(token: AddedToken) -> AddedToken:
    """Return the same, taken literally and left out of texts; the white space that it takes in stays its own."""
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(token.content, **flags, special=True, normalized=False)


def _read_frame(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Return the tokens that a tokenizer puts before and behind a prompt."""
    framed = tokenizer.encode("a")
    added = framed.special_tokens_mask
    num_before = next((i for i, is_added in enumerate(added) if not is_added), len(added))
    num_after = next((i for i, is_added in enumerate(reversed(added)) if not is_added), 0)
    return framed.tokens[:num_before], framed.tokens[len(added) - num_after :]


def read_declared_tokens(folder: Path) -> DeclaredTokens:
    """Read the files of a folder that are there. Raises TokenizerError when one is broken."""
    config = read_json_object(folder / "tokenizer_config.json")
    values = read_json_object(folder / "special_tokens_map.json") | config
    named = {name: text for name in values if name.endswith("_token") and (text := _text(values[name])) is not None}
    listed = [text for name in _LISTS for value in _members(values.get(name)) if (text := _text(value)) is not None]
    special = frozenset([*named.values(), *listed])
    return DeclaredTokens(config=config, named=named, special=special, by_id=_read_places(folder, config, special))


def read_json_object(file: Path) -> dict[str, Any]:
    """Return a JSON object, empty where there is no file. Raises TokenizerError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        json.dumps(value, ensure_ascii=False).encode()  # JSON can escape what is in no text: half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds a {type(value).__name__}; allowed: an object")
    return value


def _read_places(folder: Path, config: Mapping[str, Any], special: frozenset[str]) -> dict[int, AddedToken]:
    decoder = config.get("added_tokens_decoder")
    file = folder / ("tokenizer_config.json" if decoder else "added_tokens.json")
    try:
        if decoder:
            places = {int(token_id): _added_token(fields, special) for token_id, fields in decoder.items()}
        else:
            texts = read_json_object(file)
            places = {int(texts[text]): AddedToken(text, special=text in special) for text in texts}
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise TokenizerError(f"{file}: the added tokens are not written as text and id: {error!r}") from error
    for token_id, token in places.items():
        if not 0 <= token_id <= _MAX_ID:
            raise TokenizerError(f"{file}: the id of {token.content!r} is {token_id}; allowed: 0 to {_MAX_ID}")
    return dict(sorted(places.items()))


def _added_token(value: Any, special: frozenset[str]) -> AddedToken:
    fields = {"content": value} if isinstance(value, str) else {key: value[key] for key in value if key in _FIELDS}
    is_special = bool(fields.pop("special", False)) or fields["content"] in special
    if is_special:
        fields["normalized"] = False  # taken literally: see read_tokenizer_json
    return AddedToken(**fields, special=is_special)


_FIELDS = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")


def _text(value: Any) -> str | None:
    """Files write a token as text, or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):  # by a name that only code asks for
        return list(value.values())
    return value if isinstance(value, list) else []
