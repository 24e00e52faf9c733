"""A served model's text side: tokenizer, chat template and generation defaults, read from its folder.

What is read has a digest: folders of equal digests make equal tokens of a text.

Everything here is synchronous and safe to use from several threads; dispatch.py runs it in a pool, off the event loop.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer
from weft.tokenizer.byte_level import BYTE_OF_CHAR
from weft.tokenizer.declared import read_json_object
from weft.tokenizer.errors import TokenizerError
from weft.tokenizer.load import DECLARING_FILES, TOKENIZER_FILES, load_tokenizer

from router.call import Conversation, TokenName
from router.chat_template import TEMPLATE_FILES, ChatTemplate, load_chat_template
from router.errors import InvalidRequestError, ModelFilesError
from router.generation_config import GenerationDefaults, read_generation_defaults

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")

_DIGEST_VERSION = "1"
"""Changes with the way in which the digest is made: routers of other versions then do not compare it."""


class ModelTokenizer:
    """Text to token ids and back for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        generation_defaults: GenerationDefaults | None = None,
        eos_token: str | None = None,
        digest: str = "",
    ) -> None:
        """Take parts already read; `from_folder` reads them."""
        self.digest = digest
        """Digest of the files that it was read from; empty: not known."""
        self.eos_token_id: int | None = None if eos_token is None else tokenizer.token_to_id(eos_token)
        """Id of the token that ends a text, where the vocabulary has it."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        """Entries of the vocabulary, added tokens included; the model's own may be padded beyond it."""
        self.generation_defaults = generation_defaults or GenerationDefaults()
        """What generation_config.json sets for requests that leave it open."""
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @classmethod
    def from_folder(cls, path: str | Path, *, now: Callable[[], datetime] = datetime.now) -> Self:
        """Read the tokenizer (weft/tokenizer/load.py says from which files), its chat template and generation config.

        Args:
            path: a folder in Hugging Face layout.
            now: the clock that chat templates may ask for the date.

        Raises:
            ModelFilesError: there is no tokenizer, or one of the files is broken or cannot be read.
        """
        folder = Path(path)
        file = folder / "generation_config.json"
        try:
            loaded = load_tokenizer(folder)
            defaults = read_generation_defaults(read_json_object(file), file) if file.exists() else GenerationDefaults()
            return cls(
                loaded.tokenizer,
                chat_template=load_chat_template(folder, loaded.config, special_tokens=loaded.special_tokens, now=now),
                generation_defaults=defaults,
                eos_token=loaded.special_tokens.get("eos_token"),
                digest=_digest(folder, defaults),
            )
        except TokenizerError as error:
            raise ModelFilesError(str(error)) from error
        except OSError as error:  # which knows no name where it comes of reading
            raise ModelFilesError(f"{error.filename or folder} cannot be read: {error.strerror}") from error

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
        # As in `encode`: the single call held up all other threads for 4 s with a million ids.
        (text,) = self._tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_name(self, token_id: int) -> TokenName:
        """Return what a token reads as on its own; nothing for an id without an entry."""
        # A decoder may drop the space before the first word of a text, so the name is what the token adds to itself.
        once = self.decode((token_id,), skip_special_tokens=False)
        name = self.decode((token_id, token_id), skip_special_tokens=False)[len(once) :]
        written = self._tokenizer.id_to_token(token_id) or ""
        data = _written_bytes(written) if "\ufffd" in name else name.encode()
        first_data = None if "\ufffd" in once or once == name else once.encode()
        return TokenName(data, is_special=token_id in self._special_ids, first_data=first_data)

    def render_chat(self, chat: Conversation) -> tuple[int, ...]:
        """Return the token ids of a conversation, up to and with what opens the assistant's turn.

        Raises:
            InvalidRequestError: the model has no chat template, or the conversation does not fit it.
        """
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages were given, but this model has no chat template; allowed: a text prompt or token ids",
                field="messages",
            )
        return self.encode(self._chat_template.render(chat), add_special_tokens=False)


def is_alike(digest: str, other: str) -> bool:
    """Whether two digests show no difference; what versions of Weft have made in different ways is not compared."""
    return digest == other or digest.partition("-")[0] != other.partition("-")[0]


def _written_bytes(token: str) -> bytes:
    """Return the bytes of a token with a part of a character, from how the vocabulary writes it: one byte as <0xE2>, or
    each byte as a character."""
    if _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(token[3:5])
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:  # it is whole, and holds U+FFFD itself
        return token.encode()


def _digest(folder: Path, defaults: GenerationDefaults) -> str:
    """Hash the files as they are, but of the generation config only what it sets: its other fields are often new."""
    patterns = (*TOKENIZER_FILES, *DECLARING_FILES, *TEMPLATE_FILES)
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    read = (contents, sorted(defaults.sampling.items()), defaults.max_new_tokens, defaults.max_length)
    return f"{_DIGEST_VERSION}-{hashlib.sha256(repr(read).encode()).hexdigest()[:32]}"
