"""Streaming text equals the tokenizer's own decoding, for real tokenizers on real prompts."""

import gzip
import json
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from workers.detokenizer import IncrementalDetokenizer
from workers.errors import EngineConfigError
from workers.tokenizer import TokenTable, load_token_table

TOKENIZERS = ["llama2-32k", "gpt2", "qwen"]


def stream(table: TokenTable, token_ids: list[int], **options: object) -> tuple[list[str], IncrementalDetokenizer]:
    """Push all tokens until a stop; the deltas, the flush last."""
    detokenizer = IncrementalDetokenizer(table, **options)  # type: ignore[arg-type]
    deltas = []
    for token_id in token_ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stop_string is not None:
            break
    return [*deltas, detokenizer.flush()], detokenizer


def byte_table() -> TokenTable:
    """Id n is the byte n."""
    tokenizer = Tokenizer(models.BPE(vocab=_byte_vocab(), merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return TokenTable(tokenizer)


def _byte_vocab() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def prompts(shared: Path, name: str, count: int) -> list[str]:
    with gzip.open(shared / "prompts" / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line)["messages"][0]["content"] for _, line in zip(range(count), lines, strict=False)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_streamed_text_equals_decode_on_real_prompts(name: str, shared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    table = load_token_table(shared / "tokenizers" / name)
    for source in ("alpaca_zh", "alpaca_en", "toolcall_multiturn", "arena_hard_en", "rag_rgb"):
        for prompt in prompts(shared, source, 60):
            token_ids = tokenizer.encode(prompt[:1500] + " 👩‍👩‍👧 ñandú ไทย 🇨🇭").ids
            deltas, _ = stream(table, token_ids)
            assert "".join(deltas) == tokenizer.decode(token_ids)
            assert "�" in prompt or not any("�" in delta for delta in deltas)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_any_split_of_a_text_starts_like_decode(name: str, skip: bool, shared: Path) -> None:
    """A request's text begins in the middle of a prompt: leading spaces and special tokens as `decode` has them."""
    tokenizer = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    table = load_token_table(shared / "tokenizers" / name)
    special = next(iter(tokenizer.get_added_tokens_decoder()))
    token_ids = tokenizer.encode("Once upon a time, there was  a cat.\n\n It sat.").ids
    for start in range(len(token_ids)):
        rest = [special, *token_ids[start:], special]
        deltas, _ = stream(table, rest, skip_special_tokens=skip)
        assert "".join(deltas) == tokenizer.decode(rest, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
def test_text_goes_on_where_the_prompt_ends(name: str, skip: bool, shared: Path) -> None:
    """Word by word, also where nothing but special tokens is before it."""
    tokenizer = Tokenizer.from_file(str(shared / "tokenizers" / name / "tokenizer.json"))
    table = load_token_table(shared / "tokenizers" / name)
    special = next(iter(tokenizer.get_added_tokens_decoder()))
    words = tokenizer.encode("Once upon a time, there was  a cat.\n\n It sat.", add_special_tokens=False).ids
    token_ids = [special, *words, special]
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    for start in range(1, len(token_ids)):
        deltas, _ = stream(table, token_ids[start:], prompt_token_ids=token_ids[:start], skip_special_tokens=skip)
        assert tokenizer.decode(token_ids[:start], skip_special_tokens=skip) + "".join(deltas) == whole


def test_a_character_that_the_prompt_begins_ends_in_the_text() -> None:
    face, sign = "😀".encode(), "€".encode()
    for start in range(1, 4):
        deltas, _ = stream(byte_table(), list(face[start:] + sign), prompt_token_ids=list(b"a" + face[:start]))
        assert "".join(deltas) == "😀€"
        detokenizer = IncrementalDetokenizer(byte_table(), list(b"a" + face[:start]))
        detokenizer.resume(list(face[start:3]))
        assert detokenizer.push(face[3]) == "😀"


def test_a_character_is_never_split() -> None:
    deltas, _ = stream(byte_table(), list("né 你😀".encode()))
    assert deltas == ["n", "", "é", " ", "", "", "你", "", "", "", "😀", ""]


def test_a_character_cut_by_the_end_becomes_a_replacement() -> None:
    deltas, _ = stream(byte_table(), list("a你".encode())[:-1])
    assert deltas == ["a", "", "", "�"]


def test_stop_string_over_several_tokens_is_held_back_and_removed() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"one\n\nUser: two"), stop=["\n\nUser:"])
    assert deltas == ["o", "n", "e", "", "", "", "", "", "", "", ""]
    assert detokenizer.stop_string == "\n\nUser:"


def test_false_start_of_a_stop_string_is_released() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"aab aabc"), stop=["aabc"], include_stop_str=True)
    assert "".join(deltas) == "aab aabc"
    assert deltas[3] == "aab "
    assert detokenizer.stop_string == "aabc"


@pytest.mark.parametrize(("stop", "text"), [("aaab", "aaaab"), ("aabaaac", "aabaaabaaac")])
def test_a_stop_string_that_begins_within_a_false_start_is_found(stop: str, text: str) -> None:
    deltas, detokenizer = stream(byte_table(), list(text.encode()), stop=[stop])
    assert "".join(deltas) == text.removesuffix(stop)
    assert detokenizer.stop_string == stop


def test_held_text_is_flushed_at_the_end() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"so END"), stop=["ENDING"])
    assert deltas == ["s", "o", " ", "", "", "", "END"]
    assert detokenizer.stop_string is None


def test_of_stop_strings_complete_together_the_longest_wins() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"xxab"), stop=["b", "ab"])
    assert "".join(deltas) == "xx"
    assert detokenizer.stop_string == "ab"


def test_stop_string_before_min_tokens_does_not_count() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"a.b.c"), stop=["."], min_tokens=3)
    assert "".join(deltas) == "a.b"
    assert detokenizer.stop_string == "."


def test_cost_per_token_does_not_grow() -> None:
    table = byte_table()
    detokenizer = IncrementalDetokenizer(table, stop=["\xff" * 3])
    first, rest = 2_000, 60_000

    def push(count: int) -> float:
        start = time.thread_time()  # of this thread alone: others may have the cores
        for _ in range(count):
            detokenizer.push(0x80)  # never a character: nothing may pile up
        return (time.thread_time() - start) / count

    push(100)
    early = min(push(first) for _ in range(3))
    push(rest)
    late = min(push(first) for _ in range(3))
    assert late < 5 * early + 5e-6


def test_unknown_decoder_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(EngineConfigError, match="WordPiece; allowed: ByteLevel, Metaspace, Sequence"):
        TokenTable(tokenizer)


def test_metaspace_drops_the_mark_of_the_first_token() -> None:
    vocab = {"▁Hello": 0, "▁world": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    deltas, _ = stream(TokenTable(tokenizer), [0, 1, 7])
    assert "".join(deltas) == tokenizer.decode([0, 1]) == "Hello world"


def test_a_stop_string_that_overlaps_one_before_min_tokens_counts() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"aaab"), stop=["aa"], min_tokens=3)
    assert detokenizer.stop_string == "aa"
    assert "".join(deltas) == "a"


def test_resume_finds_a_stop_string_that_begins_before_min_tokens() -> None:
    detokenizer = IncrementalDetokenizer(byte_table(), stop=["abc"], min_tokens=3)
    detokenizer.resume(list(b"abc"))
    assert detokenizer.stop_string == "abc"


def test_resume_tells_the_longest_of_stop_strings_complete_together() -> None:
    detokenizer = IncrementalDetokenizer(byte_table(), stop=["b", "ab"])
    detokenizer.resume(list(b"xab"))
    assert detokenizer.stop_string == "ab"


def test_resume_goes_on_in_a_stop_string_that_all_of_the_text_begins() -> None:
    detokenizer = IncrementalDetokenizer(byte_table(), stop=["abcde"])
    detokenizer.resume(list(b"abc"))
    assert [detokenizer.push(token_id) for token_id in b"de"] == ["", ""]
    assert detokenizer.stop_string == "abcde"


def test_resume_tells_the_stop_string_that_is_complete_first() -> None:
    detokenizer = IncrementalDetokenizer(byte_table(), stop=["abcd", "b"])
    detokenizer.resume(list(b"xabcd"))
    assert detokenizer.stop_string == "b"


def test_a_stop_string_before_min_tokens_is_no_part_of_a_later_one() -> None:
    deltas, detokenizer = stream(byte_table(), list(b"abbab"), stop=["ab"], min_tokens=3)
    assert "".join(deltas) == "abb"
    assert detokenizer.stop_string == "ab"
