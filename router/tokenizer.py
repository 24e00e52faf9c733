"""A served model's text side: tokenizer, chat template and generation defaults, read from its folder.

Everything here is synchronous and safe to use from several threads; dispatch.py runs it in a pool, off the event loop.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer

from router.call import ChatMessage
from router.chat_template import ChatTemplate, load_chat_template
from router.errors import InvalidRequestError, ModelFilesError

_DEFAULTED_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ModelTokenizer:
    """Text to token ids and back for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        generation_defaults: Mapping[str, float | int] | None = None,
    ) -> None:
        """Take parts already read; `from_folder` reads them."""
        tokenizer.no_truncation()  # files saved by a training script may carry both
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._generation_defaults = MappingProxyType(dict(generation_defaults or {}))
        self._vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_folder(cls, path: str | Path, *, now: Callable[[], datetime] = datetime.now) -> Self:
        """Read tokenizer.json and, where there are some, the tokenizer's config, chat template and generation config.

        Args:
            path: a folder in Hugging Face layout.
            now: the clock that chat templates may ask for the date.

        Raises:
            ModelFilesError: tokenizer.json is missing, or one of the files is broken.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelFilesError(f"{file} does not exist; the router needs the model's tokenizer in this form")
        tokenizer = _read_tokenizer(file)
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        _declare_tokens(tokenizer, config.get("added_tokens_decoder") or {}, special_tokens.values())
        return cls(
            tokenizer,
            chat_template=load_chat_template(folder, config, special_tokens=special_tokens, now=now),
            generation_defaults=_read_generation_defaults(folder / "generation_config.json"),
        )

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included; the model's own may be padded beyond it."""
        return self._vocab_size

    @property
    def generation_defaults(self) -> Mapping[str, float | int]:
        """What generation_config.json sets of temperature, top_p, top_k, min_p and repetition_penalty.

        Only what is written there, and whatever `do_sample` says: clients of an API choose greedy decoding by
        temperature 0, so a file with `do_sample: false` and no temperature leaves the API's own default in place.
        """
        return self._generation_defaults

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text.

        Args:
            text: any text; special tokens written out in it become their ids.
            add_special_tokens: also add what the tokenizer puts around a prompt, such as a beginning-of-sequence token.
        """
        # The batch call lets other threads run meanwhile, the single call does not: for a text of 1 MB the longest
        # pause of another thread was 0.02 s against 0.87 s.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Ids without an entry, as in a padded vocabulary, have no text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to and with what opens the assistant's turn.

        Raises:
            InvalidRequestError: the model has no chat template, or the conversation does not fit it.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages were given, but this model has no chat template; allowed: a text prompt or token ids",
                field="messages",
            )
        return self.encode(self._chat_template.render(messages), add_special_tokens=False)


def _read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object, empty where there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{file} holds a {type(value).__name__}; allowed: an object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and its like; files write them as text or as an object with `content`."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_tokenizer(file: Path) -> Tokenizer:
    """Read tokenizer.json, special tokens taken literally.

    Files converted from sentencepiece may mark them `normalized`; then the "▁" that the normalizer puts before a text
    also becomes part of the token's name, and decoding no longer knows it as special.
    """
    description = _read_json(file)
    for token in description.get("added_tokens") or []:
        if token.get("special"):
            token["normalized"] = False
    try:
        return Tokenizer.from_str(json.dumps(description, ensure_ascii=False))
    except Exception as error:  # the package raises bare Exception
        raise ModelFilesError(f"{file} is not a tokenizer: {error}") from error


def _declare_tokens(tokenizer: Tokenizer, added: Mapping[str, Mapping[str, Any]], special: Iterable[str]) -> None:
    """Tell the tokenizer which entries are tokens in their own right: older files say it in tokenizer_config.json only.

    Without it, a special token written out in a prompt would fall apart into pieces, and one that the model generates
    would show in the text. No id changes: a token gets the id that the vocabulary or the order of the file gives it.
    """
    for token_id in sorted(added, key=int):
        fields = dict(added[token_id])
        if fields.get("special"):
            fields["normalized"] = False
        token = AddedToken(fields.pop("content"), **fields)
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    tokenizer.add_special_tokens([token for token in special if tokenizer.token_to_id(token) is not None])


def _read_generation_defaults(file: Path) -> dict[str, float | int]:
    config = _read_json(file)
    defaults: dict[str, float | int] = {}
    for name in _DEFAULTED_FIELDS:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelFilesError(f"{name} in {file} is {value!r}; allowed: a number")
        if name == "top_k" and value != int(value):
            raise ModelFilesError(f"{name} in {file} is {value!r}; allowed: a whole number")
        defaults[name] = int(value) if name == "top_k" else value
    return defaults
