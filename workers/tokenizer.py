"""What each token id is in bytes, read from a tokenizer's own decoder; detokenizer.py makes a stream of text of it.

Three decoders cover the families that Weft serves: byte-level BPE, the SentencePiece kind with byte fallback, and
Metaspace. Joined bytes of the pieces, decoded as UTF-8, are exactly what `Tokenizer.decode` returns for valid text.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from weft.tokenizer.byte_level import BYTE_OF_CHAR
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import load_tokenizer

from workers.errors import EngineConfigError

_Convert = Callable[[str], bytes]


class TokenTable:
    """The bytes of each token id, converted once and then remembered. One per engine; used by its thread only."""

    def __init__(self, tokenizer: Tokenizer, *, eos_token: str | None = None) -> None:
        """Raise EngineConfigError when the tokenizer's decoder is of a kind not known here."""
        self.eos_token_id: int | None = None if eos_token is None else tokenizer.token_to_id(eos_token)
        """Id of the token that ends a text, where the vocabulary has it."""
        self._tokenizer = tokenizer
        self._special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
        self._convert, self._convert_first = _converters(_decoder_state(tokenizer))
        self._pieces: dict[int, bytes] = {}
        self._specials: dict[int, bool] = {}
        self._texts = _Texts(self.piece), _Texts(self.shown_piece)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text; nothing for an id that the tokenizer does not know."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = self._tokenizer.id_to_token(token_id)
            piece = self._pieces[token_id] = b"" if token is None else self._convert(token)
        return piece

    def first_piece(self, token_id: int) -> bytes:
        """Return the same for the first token of a text, without the space that marks a beginning of a word."""
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._convert_first(token)

    def is_special(self, token_id: int) -> bool:
        """Return whether `skip_special_tokens` leaves the token out."""
        special = self._specials.get(token_id)
        if special is None:
            special = self._specials[token_id] = self._tokenizer.id_to_token(token_id) in self._special
        return special

    def shown_piece(self, token_id: int) -> bytes:
        """Return the same as `piece` where special tokens are left out."""
        return b"" if self.is_special(token_id) else self.piece(token_id)

    def texts(self, *, skips_special: bool) -> Mapping[int, str | None]:
        """Return what each token adds where a character has ended; None for one that is no whole characters itself."""
        return self._texts[skips_special]


class _Texts(dict[int, str | None]):
    """The text of each piece that was asked for, made once: a look-up then costs no call of Python."""

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self._piece(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def load_token_table(folder: Path) -> TokenTable:
    """Read the tokenizer of a model folder; EngineConfigError when it is missing, broken or of unknown kind."""
    try:
        loaded = load_tokenizer(folder, encodes=False)
        return TokenTable(loaded.tokenizer, eos_token=loaded.special_tokens.get("eos_token"))
    except TokenizerError as error:
        raise EngineConfigError(str(error)) from error


def _decoder_state(tokenizer: Tokenizer) -> dict[str, Any]:
    if tokenizer.decoder is None:
        raise EngineConfigError("the tokenizer has no decoder; allowed: ByteLevel, Metaspace or a Sequence with Fuse")
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return state


def _converters(decoder: dict[str, Any]) -> tuple[_Convert, _Convert]:
    match decoder["type"]:
        case "ByteLevel":
            return _byte_level, _byte_level
        case "Metaspace":
            return _metaspace(decoder)
        case "Sequence":
            return _sequence(decoder["decoders"])
        case kind:
            raise EngineConfigError(f"the tokenizer's decoder is {kind}; allowed: ByteLevel, Metaspace, Sequence")


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _metaspace(decoder: dict[str, Any]) -> tuple[_Convert, _Convert]:
    mark = decoder["replacement"]
    keeps_first = decoder.get("prepend_scheme", "always") == "never"

    def convert(token: str) -> bytes:
        return token.replace(mark, " ").encode()

    def convert_first(token: str) -> bytes:
        return convert(token) if keeps_first else token.replace(mark, "").encode()

    return convert, convert_first


def _sequence(steps: list[dict[str, Any]]) -> tuple[_Convert, _Convert]:
    """Replace ..., ByteFallback, Fuse, Strip: as SentencePiece models are written; or one ByteLevel or Metaspace."""
    if len(steps) == 1:
        return _converters(steps[0])
    replaced: list[tuple[str, str]] = []
    has_byte_tokens = False
    stripped = ""
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not stripped:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": str(char), "start": 1, "stop": 0} if not stripped:
                stripped = char
            case _:
                raise EngineConfigError(
                    f"the tokenizer's decoder has the step {step}; allowed: Replace of a string, ByteFallback, Fuse, "
                    "and a last Strip of one character at the start"
                )

    def convert(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        if has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode()

    def convert_first(token: str) -> bytes:
        return convert(token).removeprefix(stripped.encode())

    return convert, convert_first


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")
