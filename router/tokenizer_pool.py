"""The tokenizers of the served models, loaded once each, and the threads in which text work runs off the event loop.

app.py says which of them are still needed, whenever membership changes.
"""

import asyncio
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from router.call import ChatMessage
from router.generation_config import GenerationDefaults
from router.model_text import ModelText

P = ParamSpec("P")
T = TypeVar("T")


class Tokenizer(Protocol):
    """What the dispatcher needs of a model's tokenizer; tokenizer.py has the real one. Safe to use from any thread."""

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary."""

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """What the model's generation_config sets for requests that leave it open."""

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Return the token ids of a conversation, ready for the assistant's answer."""


class TokenizerPool:
    """Loads tokenizers and runs functions in its threads. Admission bounds what waits for a thread."""

    def __init__(self, load: Callable[[ModelText], Tokenizer], *, num_threads: int) -> None:
        self._load = load
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self._tokenizers: dict[str, asyncio.Future[Tokenizer]] = {}
        """By the identity of their texts: a folder may have other files later."""

    async def get(self, text: ModelText) -> Tokenizer:
        """Return a revision's tokenizer, loading it the first time: once for revisions whose tokens are alike.

        Raises what loading raises.
        """
        loading = self._tokenizers.get(text.identity)
        if loading is None:
            loading = asyncio.get_running_loop().run_in_executor(self._threads, self._load, text)
            self._tokenizers[text.identity] = loading
        try:
            return await asyncio.shield(loading)  # a caller that leaves does not stop the load for the others
        except Exception:
            if self._tokenizers.get(text.identity) is loading:
                del self._tokenizers[text.identity]  # the folder may be there next time
            raise

    def keep(self, identities: Container[str]) -> None:
        """Let go of the tokenizers of all other texts. Whoever has one, or waits for it, goes on with it."""
        self._tokenizers = {each: loading for each, loading in self._tokenizers.items() if each in identities}

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def run_long(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run what may take seconds in a thread that is there for this alone, one after the other.

        Once begun it goes on, also when its caller has left.
        """
        return await asyncio.get_running_loop().run_in_executor(self._long_thread, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Let the threads end; work that has not begun is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_thread.shutdown(wait=False, cancel_futures=True)
