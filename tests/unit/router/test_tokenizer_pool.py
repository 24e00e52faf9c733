"""Tokenizers are loaded once, off the event loop, and again after a failure."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
from helpers.polling import until
from helpers.router_harness import BOS, ByteTokenizer

from router import tokenizer_pool
from router.call import ChatMessage, Conversation
from router.errors import ModelFilesError, OverloadedError
from router.model_text import ModelText
from router.tokenizer_pool import TokenizerPool

TINY = ModelText(path="/tiny", digest="1-a")


async def test_callers_share_one_load_even_when_the_first_leaves() -> None:
    loads: list[str] = []
    may_load = threading.Event()

    def load(text: ModelText) -> ByteTokenizer:
        loads.append(text.path)
        assert may_load.wait(10)
        return ByteTokenizer()

    pool = TokenizerPool(load, num_threads=1)
    first, second = (asyncio.create_task(pool.get(TINY)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    may_load.set()
    assert (await second).encode("a", False) == (97,)
    assert await pool.get(TINY) is await second
    assert loads == ["/tiny"]
    pool.close()


async def test_folder_is_read_again_where_its_files_are_others_and_only_there() -> None:
    loads: list[ModelText] = []

    def load(text: ModelText) -> ByteTokenizer:
        loads.append(text)
        return ByteTokenizer()

    pool = TokenizerPool(load, num_threads=1)
    first, moved, overwritten = [
        await pool.get(ModelText(path=path, digest=digest, revision=revision))
        for revision, (path, digest) in enumerate([("/tiny", "1-a"), ("/tiny-2", "1-a"), ("/tiny", "1-b")])
    ]
    assert moved is first
    assert overwritten is not first
    assert [(text.path, text.digest) for text in loads] == [("/tiny", "1-a"), ("/tiny", "1-b")]
    pool.close()


def fails_once(message: str) -> Callable[[ModelText], ByteTokenizer]:
    """Return what loads a tokenizer at the second attempt."""
    attempts = itertools.count()

    def load(text: ModelText) -> ByteTokenizer:
        if next(attempts) == 0:
            raise ModelFilesError(message)
        return ByteTokenizer()

    return load


async def test_failed_load_is_tried_again() -> None:
    pool = TokenizerPool(fails_once("no tokenizer.json"), num_threads=1)
    with pytest.raises(ModelFilesError):
        await pool.get(TINY)
    await asyncio.sleep(0)  # since Python 3.14 a load may be done before anything waits for it
    assert isinstance(await pool.get(TINY), ByteTokenizer)
    pool.close()


async def test_what_nobody_needs_is_dropped_but_by_those_who_have_it_or_wait_for_it() -> None:
    may_load = threading.Event()

    def load(text: ModelText) -> ByteTokenizer:
        assert text == TINY or may_load.wait(10)
        return ByteTokenizer()

    other = ModelText(path="/other", digest="1-b")
    pool = TokenizerPool(load, num_threads=1)
    had = await pool.get(TINY)
    waiting = asyncio.create_task(pool.get(other))
    await asyncio.sleep(0)
    pool.keep([TINY])
    assert await pool.get(TINY) is had
    pool.keep([other])
    may_load.set()
    assert (await waiting).encode("a", False) == (97,)
    assert await pool.get(TINY) is not had, "it is read again for whoever needs it after all"
    pool.close()


async def test_what_is_needed_is_loaded_before_somebody_asks() -> None:
    loads: list[str] = []
    may_load = {TINY.path: threading.Event(), "/other": threading.Event()}
    changed = asyncio.Event()

    def load(text: ModelText) -> ByteTokenizer:
        assert may_load[text.path].wait(10)
        loads.append(text.path)
        return ByteTokenizer()

    other = ModelText(path="/other", digest="1-b")
    pool = TokenizerPool(load, num_threads=2, on_change=changed.set)
    assert pool.is_ready, "nothing is needed"
    for _ in range(2):
        pool.keep([TINY, ModelText(path="/tiny-2", digest=TINY.digest), other])
    assert not pool.is_ready
    may_load[TINY.path].set()
    await changed.wait()
    assert loads == [TINY.path]
    assert pool.is_ready, "for one of two models"
    may_load["/other"].set()
    await asyncio.gather(pool.get(TINY), pool.get(other))
    assert loads == [TINY.path, "/other"]
    pool.close()


async def test_what_cannot_be_loaded_ahead_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    changed = asyncio.Event()
    pool = TokenizerPool(fails_once("no head"), num_threads=1, on_change=changed.set)
    for expected in (["the tokenizer in /tiny cannot be loaded: no head"], []):
        caplog.clear()
        changed.clear()
        pool.keep([TINY])
        await changed.wait()
        assert pool.is_ready, "a request is told what is wrong"
        assert [record.getMessage() for record in caplog.records] == expected
    pool.close()


async def test_text_waits_for_no_load_of_another_model() -> None:
    may_load = threading.Event()

    def load(text: ModelText) -> ByteTokenizer:
        assert text == TINY or may_load.wait(10)
        return ByteTokenizer()

    other = ModelText(path="/other", digest="1-b")
    pool = TokenizerPool(load, num_threads=1)
    tokenizer = await pool.get(TINY)
    pool.keep([TINY, other])
    async with asyncio.timeout(5):
        assert await pool.encode(tokenizer, "a", add_special_tokens=False) == (97,)
        assert await pool.run(tokenizer.decode, (97,)) == "a"
    may_load.set()
    pool.close()


async def test_work_runs_in_another_thread() -> None:
    pool = TokenizerPool(lambda _: ByteTokenizer(), num_threads=1)
    assert await pool.run(threading.get_ident) != threading.get_ident()
    pool.close()


class SlowTokenizer(ByteTokenizer):
    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.encoded: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.encoded.append(text[:5])
        self.has_begun.set()
        assert self.may_end.wait(10)
        return super().encode(text, add_special_tokens)


async def test_long_texts_leave_the_threads_to_the_rest_also_when_a_caller_has_gone() -> None:
    tokenizer = SlowTokenizer()
    pool = TokenizerPool(lambda _: tokenizer, num_threads=1)
    long = [asyncio.create_task(pool.encode(tokenizer, letter * 200_000)) for letter in "abc"]
    assert await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    long[0].cancel()
    assert await asyncio.wait_for(pool.run(len, "abc"), 10) == 3
    tokenizer.may_end.set()
    assert [len(ids) for ids in await asyncio.gather(*long[1:])] == [200_001, 200_001], "and one that begins each"
    pool.close()


async def test_long_texts_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "_MOST_LONG", 500_000)
    tokenizer = SlowTokenizer()
    pool = TokenizerPool(lambda _: tokenizer, num_threads=1)
    waiting = [asyncio.create_task(pool.encode(tokenizer, letter * 200_000)) for letter in "ab"]
    assert await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    with pytest.raises(OverloadedError, match="texts of 400000 characters wait to be encoded; allowed: 500000 at once"):
        await pool.encode(tokenizer, "c" * 200_000)
    tokenizer.may_end.set()
    await asyncio.gather(*waiting)
    assert len(await pool.encode(tokenizer, "c" * 200_000)) == 200_001
    pool.close()


@pytest.mark.parametrize("field", ["reasoning_content", "name", "tool_call_id"])
async def test_whatever_a_template_may_show_makes_a_conversation_long(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "_LONG_TEXT", 10)
    monkeypatch.setattr(tokenizer_pool, "_MOST_LONG", 20)
    tokenizer = ByteTokenizer()
    pool = TokenizerPool(lambda _: tokenizer, num_threads=1)
    message = replace(ChatMessage(role="assistant", content="four"), **{field: "h" * 17})
    with pytest.raises(OverloadedError, match="allowed: 20 at once"):
        await pool.encode(tokenizer, Conversation(messages=(message,)))
    pool.close()


async def test_choices_of_a_request_have_its_prompt_encoded_once_while_one_of_them_is_there() -> None:
    tokenizer = SlowTokenizer()
    pool = TokenizerPool(lambda _: tokenizer, num_threads=1)
    prompt = "".join(["hel", "lo"])
    same, other = prompt, "".join(["hel", "lo"])
    choices = [asyncio.create_task(pool.encode(tokenizer, text)) for text in (prompt, same, same, other)]
    assert await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    choices[0].cancel()
    await asyncio.sleep(0)
    tokenizer.may_end.set()
    assert await asyncio.gather(*choices[1:]) == [(BOS, *b"hello")] * 3
    assert tokenizer.encoded == ["hello", "hello"], "another request is one of its own"
    assert await pool.encode(tokenizer, prompt, add_special_tokens=False) == tuple(b"hello")
    pool.close()


class Text(str):
    """A text of which a test can see whether it is still there."""


async def test_prompt_that_nobody_waits_for_any_more_is_not_begun() -> None:
    tokenizer = SlowTokenizer()
    pool = TokenizerPool(lambda _: tokenizer, num_threads=1)
    first = asyncio.create_task(pool.encode(tokenizer, "first"))
    assert await asyncio.to_thread(tokenizer.has_begun.wait, 10)
    text = Text("later")
    kept = weakref.ref(text)
    later = [asyncio.create_task(pool.encode(tokenizer, text)) for _ in range(2)]
    await asyncio.sleep(0)
    for task in later:
        task.cancel()
    await asyncio.gather(*later, return_exceptions=True)
    del text, task, later
    await until(lambda: kept() is None)  # else a thread that is busy for long keeps texts of all who come and go
    tokenizer.may_end.set()
    assert await first == (BOS, *b"first")
    assert await pool.run(len, "abc") == 3, "all that waited for the thread has had it"
    assert tokenizer.encoded == ["first"]
    pool.close()
