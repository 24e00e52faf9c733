"""The streamed text as a pure function of the tokens, against a model that looks at the whole text each time."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from workers.detokenizer import IncrementalDetokenizer
from workers.tokenizer import TokenTable


def letter_table() -> TokenTable:
    """Ids 0-2 are a, b, c; ids from 3 on are pairs of them: stop strings meet token borders everywhere."""
    pieces = ["a", "b", "c"] + [x + y for x in "abc" for y in "abc"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable(tokenizer)


TABLE = letter_table()
PIECES = [TABLE.piece(i).decode() for i in range(12)]


def expected(token_ids: list[int], stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first (of those the longest): looks at every prefix."""
    text = "".join(PIECES[i] for i in token_ids)
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 11), max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), max_size=4),
    include=st.booleans(),
)
def test_stop_strings_cut_where_they_are_complete_first(token_ids: list[int], stops: list[str], include: bool) -> None:
    detokenizer = IncrementalDetokenizer(TABLE, stop=stops, include_stop_str=include)
    text = ""
    for token_id in token_ids:
        text += detokenizer.push(token_id)
        if detokenizer.stop_string is not None:
            break
    text += detokenizer.flush()
    assert (text, detokenizer.stop_string) == expected(token_ids, stops, include)


@settings(max_examples=200, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, 11), max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_held_back_text_is_never_longer_than_needed(token_ids: list[int], stops: list[str]) -> None:
    """What is held back may begin a stop string; what was emitted could not."""
    detokenizer = IncrementalDetokenizer(TABLE, stop=stops)
    emitted, text = "", ""
    for token_id in token_ids:
        emitted += detokenizer.push(token_id)
        text += PIECES[token_id]
        if detokenizer.stop_string is not None:
            return
        held = max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        assert emitted == text[: len(text) - held]


@pytest.mark.parametrize("name", ["llama2-32k", "gpt2", "qwen"])
def test_any_tokens_decode_alike_and_resume_anywhere(name: str, shared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    table = TokenTable(tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(token_ids=st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=40), data=st.data())
    def check(token_ids: list[int], data: st.DataObject) -> None:
        detokenizer = IncrementalDetokenizer(table)
        deltas = [detokenizer.push(token_id) for token_id in token_ids]
        split = data.draw(st.integers(0, len(token_ids)))
        resumed = IncrementalDetokenizer(table)
        resumed.resume(token_ids[:split])
        assert [resumed.push(token_id) for token_id in token_ids[split:]] == deltas[split:]
        tail = detokenizer.flush()
        assert resumed.flush() == tail
        text = tokenizer.decode(token_ids)
        if name != "llama2-32k" or "�" not in text:  # byte fallback marks each byte of an invalid run
            assert "".join(deltas) + tail == text

    check()


def byte_fallback_table() -> TokenTable:
    """Ids 0-255 are single bytes, then a special token, one with a leading space, a lone space and words."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<s>", "▁a", "▁", "a", "ab", "é", "ba"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return TokenTable(tokenizer)


RESUMED = byte_fallback_table()
UTF8_IDS = [0x20, 0x61, 0x80, 0xBF, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0xFF, *range(256, 264)]


@settings(max_examples=500, derandomize=True, deadline=None)
@given(
    prompt=st.lists(st.sampled_from(UTF8_IDS), max_size=6),
    before=st.lists(st.sampled_from(UTF8_IDS), max_size=25),
    after=st.lists(st.sampled_from(UTF8_IDS), max_size=8),
    stops=st.lists(st.text("ab é�€", min_size=1, max_size=5), max_size=3),
    include=st.booleans(),
    skips=st.booleans(),
    min_tokens=st.integers(0, 12),
)
def test_resumed_text_goes_on_as_if_every_token_had_been_pushed(
    prompt: list[int],
    before: list[int],
    after: list[int],
    stops: list[str],
    include: bool,
    skips: bool,
    min_tokens: int,
) -> None:
    pushed, resumed = (
        IncrementalDetokenizer(
            RESUMED, prompt, stop=stops, include_stop_str=include, skip_special_tokens=skips, min_tokens=min_tokens
        )
        for _ in range(2)
    )
    for token_id in before:
        if pushed.stop_string is None:
            pushed.push(token_id)
    resumed.resume(before)
    assert resumed.stop_string == pushed.stop_string
    for token_id in after:
        if pushed.stop_string is None:
            assert resumed.push(token_id) == pushed.push(token_id)
            assert resumed.stop_string == pushed.stop_string
    assert resumed.flush() == pushed.flush()
