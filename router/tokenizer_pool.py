"""The tokenizers of the served models, loaded once each, and the threads in which text work runs off the event loop.

app.py says which of them are needed, whenever membership changes: they are loaded before a request asks for them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

from router.call import Conversation, TokenReader
from router.errors import OverloadedError
from router.generation_config import GenerationDefaults
from router.model_text import ModelText

logger = logging.getLogger(__name__)

Prompt = str | Conversation

P = ParamSpec("P")
T = TypeVar("T")


_LONG_TEXT = 100_000
"""Characters; more may take seconds to encode."""
_MOST_LONG = 64 << 20
"""Characters of long texts that wait at once, or are encoded: each may take four bytes."""
_LONG_RATE = 1.5e6
"""Characters that are encoded in a second, about."""


class Tokenizer(TokenReader, Protocol):
    """What the dispatcher needs of a model's tokenizer; tokenizer.py has the real one. Safe to use from any thread."""

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's generation_config sets for requests that leave it open."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text."""

    def render_chat(self, chat: Conversation) -> tuple[int, ...]:
        """Return the token ids of a conversation, ready for the assistant's answer."""


@dataclass(slots=True, kw_only=True)
class _Encoding:
    prompt: Prompt
    """Kept, so that no other one gets its id."""
    token_ids: asyncio.Future[tuple[int, ...]]
    num_waiting: int = 0


class TokenizerPool:
    """Loads tokenizers and runs functions in its threads. Admission bounds what waits for a thread."""

    def __init__(
        self,
        load: Callable[[ModelText], Tokenizer],
        *,
        num_threads: int,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Make a pool without tokenizers.

        Args:
            load: reads the tokenizer of a text; it may block, and raise.
            num_threads: for loading, and as many for all texts but the longest.
            on_change: called whenever a tokenizer was loaded, or could not be.
        """
        self._load = load
        self._on_change = on_change
        self._load_threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer-load")
        """A load may wait for its files for a minute, and texts of other models do not wait with it."""
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        """For texts that may take seconds: one after the other, and no other text waits for them."""
        self._tokenizers: dict[str, asyncio.Future[Tokenizer]] = {}
        """Tokenizers by the identity of their ModelText: a folder may have other files later."""
        self._encodings: dict[tuple[int, int, bool], _Encoding] = {}
        self._num_long = 0
        """Characters of long texts that wait or are encoded."""

    async def get(self, text: ModelText) -> Tokenizer:
        """Return a revision's tokenizer, loading it where it is not: once for revisions whose tokens are alike.

        Raises what loading raises.
        """
        return await asyncio.shield(self._loading(text))  # a caller that leaves does not stop it for the others

    def keep(self, texts: Iterable[ModelText]) -> None:
        """Load the tokenizers of these texts that are not there, and let go of all others.

        Whoever has one of the others, or waits for it, goes on with it. What cannot be loaded is tried again by the
        next call, or for the next request.
        """
        self._tokenizers = {text.identity: self._loading(text) for text in texts}

    @property
    def is_ready(self) -> bool:
        """Whether a tokenizer is there, or none is being loaded."""
        loads = self._tokenizers.values()
        return not loads or any(load.done() for load in loads)

    def _loading(self, text: ModelText) -> asyncio.Future[Tokenizer]:
        loading = self._tokenizers.get(text.identity)
        if loading is None:
            loading = asyncio.get_running_loop().run_in_executor(self._load_threads, self._load, text)
            self._tokenizers[text.identity] = loading
            loading.add_done_callback(partial(self._note_loaded, text))
        return loading

    def _note_loaded(self, text: ModelText, loading: asyncio.Future[Tokenizer]) -> None:
        if loading.cancelled():  # the pool was closed
            return
        if (error := loading.exception()) is not None:
            logger.warning("the tokenizer in %s cannot be loaded: %s", text.path, error)
            if self._tokenizers.get(text.identity) is loading:
                del self._tokenizers[text.identity]  # the folder may be there next time
        if self._on_change is not None:
            self._on_change()

    async def encode(self, tokenizer: Tokenizer, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return a prompt's token ids; a conversation frames itself, whatever `add_special_tokens` says.

        Calls that wait at the same time for the same object, as the choices of one request do, have it encoded once.

        Raises:
            OverloadedError: the text is long, and those that wait are too many.
        """
        key = (id(tokenizer), id(prompt), add_special_tokens)
        encoding = self._encodings.get(key)
        if encoding is None:
            token_ids = asyncio.ensure_future(self._encode(tokenizer, prompt, add_special_tokens))
            encoding = self._encodings[key] = _Encoding(prompt=prompt, token_ids=token_ids)
        encoding.num_waiting += 1
        try:
            return await asyncio.shield(encoding.token_ids)
        finally:
            encoding.num_waiting -= 1
            if not encoding.num_waiting:  # nobody is there for it: where no thread has begun it, none will
                del self._encodings[key]
                encoding.token_ids.cancel()

    async def _encode(self, tokenizer: Tokenizer, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        num_characters = len(prompt) if isinstance(prompt, str) else prompt.num_characters

        def encode() -> tuple[int, ...]:
            if isinstance(prompt, str):
                return tokenizer.encode(prompt, add_special_tokens)
            return tokenizer.render_chat(prompt)

        if num_characters <= _LONG_TEXT:
            return await _run_in(self._threads, encode)
        if self._num_long + num_characters > _MOST_LONG:
            raise OverloadedError(
                f"texts of {self._num_long} characters wait to be encoded; allowed: {_MOST_LONG} at once",
                retry_after_s=self._num_long / _LONG_RATE,
            )
        self._num_long += num_characters
        try:
            return await _run_in(self._long_thread, encode)
        finally:
            self._num_long -= num_characters

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads. Once begun it goes on, also when its caller has left."""
        return await _run_in(self._threads, function, *args, **kwargs)

    def close(self) -> None:
        """Let the threads end; work that has not begun is dropped, and so is what a load under way will give."""
        for loading in self._tokenizers.values():
            loading.cancel()
        self._load_threads.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_thread.shutdown(wait=False, cancel_futures=True)


async def _run_in(threads: ThreadPoolExecutor, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    work = [partial(function, *args, **kwargs)]
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, lambda: work.pop()())
    finally:
        work.clear()  # else the queue of the threads keeps the text of a caller that has left until it is its turn
