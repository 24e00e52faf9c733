"""Tokenizers are loaded once, off the event loop, and again after a failure."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from helpers.router_harness import ByteTokenizer

from router.errors import ModelFilesError
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


async def test_failed_load_is_tried_again() -> None:
    results: Iterator[ModelFilesError | ByteTokenizer] = iter([ModelFilesError("no tokenizer.json"), ByteTokenizer()])

    def load(text: ModelText) -> ByteTokenizer:
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    pool = TokenizerPool(load, num_threads=1)
    with pytest.raises(ModelFilesError):
        await pool.get(TINY)
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
    pool.keep({TINY.identity})
    assert await pool.get(TINY) is had
    pool.keep({other.identity})
    may_load.set()
    assert (await waiting).encode("a", False) == (97,)
    assert await pool.get(TINY) is not had, "it is read again for whoever needs it after all"
    pool.close()


async def test_work_runs_in_another_thread() -> None:
    pool = TokenizerPool(lambda _: ByteTokenizer(), num_threads=1)
    assert await pool.run(threading.get_ident) != threading.get_ident()
    pool.close()


async def test_long_work_leaves_the_threads_to_the_rest_also_when_its_caller_has_gone() -> None:
    may_end = threading.Event()
    pool = TokenizerPool(lambda _: ByteTokenizer(), num_threads=1)
    long = [asyncio.create_task(pool.run_long(may_end.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    long[0].cancel()
    assert await asyncio.wait_for(pool.run(len, "abc"), 10) == 3
    may_end.set()
    assert await asyncio.gather(*long[1:]) == [True, True]
    pool.close()
