"""Prompts of every dataset: lengths, what they share, and the same ones again for the same seed."""

import gzip
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BenchConfigError
from bench.load.calls import Chat, Lengths, Session, begin_otherwise
from bench.load.dataset_files import TraceLimits, read_trace
from bench.load.datasets import DatasetKind, DatasetOptions, make_sessions, take_calls
from bench.load.workloads import make_workload

VOCAB_SIZE = 1000


def sessions(number: int, seed: int = 0, **options: Any) -> list[Session]:
    return list(islice(make_sessions(DatasetOptions(**options), vocab_size=VOCAB_SIZE, seed=seed), number))


def ids(session: Session, call: int = 0) -> tuple[int, ...]:
    prompt = session.calls[call].prompt
    assert isinstance(prompt, tuple)
    return prompt


def write_lines(file: Path, *records: Any) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


def test_w1_is_one_request() -> None:
    (call,) = make_workload("W1", vocab_size=VOCAB_SIZE, seed=0)
    assert (len(call.prompt), call.num_out) == (128, 64)


def test_w4_is_of_long_prompts_that_share_nothing() -> None:
    calls = make_workload("W4", vocab_size=VOCAB_SIZE, seed=0)
    assert [(len(call.prompt), call.num_out) for call in calls] == [(1920, 64)] * 4
    assert len({call.prompt[:16] for call in calls}) == 4


def test_w2_spreads_lengths_evenly_and_keeps_them_in_every_round() -> None:
    calls, others = (make_workload("W2", vocab_size=VOCAB_SIZE, seed=seed) for seed in (0, 1))
    lengths = [(len(call.prompt), call.num_out) for call in calls]
    assert lengths == [(len(call.prompt), call.num_out) for call in others]
    ins, outs = zip(*lengths, strict=True)
    assert (len(ins), min(ins), max(ins), min(outs), max(outs)) == (32, 32, 256, 16, 128)
    assert (sum(ins), sum(outs)) == (4608, 2304)
    assert lengths[:3] == [(220, 110), (155, 45), (111, 99)], "those of earlier measurements"
    assert all(call.prompt != other.prompt for call, other in zip(calls, others, strict=True))


def test_w3_shares_512_tokens() -> None:
    calls = make_workload("W3", vocab_size=VOCAB_SIZE, seed=0)
    assert [(len(call.prompt), call.num_out) for call in calls] == [(544, 32)] * 32
    assert len({call.prompt[:512] for call in calls}) == 1
    assert len({call.prompt[512:] for call in calls}) == 32


@pytest.mark.parametrize("kind", [DatasetKind.RANDOM, DatasetKind.SHARED_PREFIX, DatasetKind.SESSIONS, DatasetKind.W2])
def test_the_seed_alone_says_which_prompts(kind: DatasetKind) -> None:
    assert sessions(5, kind=kind) == sessions(5, kind=kind)
    assert sessions(5, kind=kind) != sessions(5, seed=1, kind=kind)


def test_random_lengths_stay_in_their_range() -> None:
    found = sessions(200, inputs=Lengths(low=3, high=6), outputs=Lengths(low=1, high=2))
    assert {len(ids(session)) for session in found} == {3, 4, 5, 6}
    assert {session.calls[0].num_out for session in found} == {1, 2}
    assert all(0 <= token < VOCAB_SIZE for session in found for token in ids(session))


def test_shared_prefixes_are_few() -> None:
    found = sessions(50, kind=DatasetKind.SHARED_PREFIX, prefix_tokens=20, num_prefixes=3)
    assert len({ids(session)[:20] for session in found}) == 3
    assert len({ids(session)[20:] for session in found}) == 50


def test_each_turn_of_a_session_goes_on_from_the_one_before() -> None:
    (session,) = sessions(
        1,
        kind=DatasetKind.SESSIONS,
        prefix_tokens=8,
        turns=Lengths(low=3, high=3),
        inputs=Lengths(low=5, high=5),
        outputs=Lengths(low=4, high=4),
        think_s=0.5,
    )
    first, second, third = (ids(session, call) for call in range(3))
    assert [len(prompt) for prompt in (first, second, third)] == [13, 22, 31]
    assert second[:13] == first
    assert third[:22] == second
    assert session.think_s == 0.5


def test_number_of_calls_is_exact_whatever_the_sessions() -> None:
    options = DatasetOptions(kind=DatasetKind.SESSIONS, turns=Lengths(low=3, high=3), prefix_tokens=4)
    taken = list(take_calls(make_sessions(options, vocab_size=VOCAB_SIZE, seed=0), 7))
    assert [len(session.calls) for session in taken] == [3, 3, 1]
    for number in (100, None):
        all_of_w2 = make_sessions(DatasetOptions(kind=DatasetKind.W2), vocab_size=VOCAB_SIZE, seed=0)
        assert len(list(take_calls(all_of_w2, number))) == 32


def test_prompt_files_hold_texts_ids_and_conversations(tmp_path: Path) -> None:
    said = [{"role": role, "content": f"{i}"} for i, role in enumerate(["user", "assistant", "user", "assistant"])]
    file = write_lines(
        tmp_path / "prompts.jsonl.gz",
        {"prompt": "Hello", "output_length": 3},
        {"token_ids": [1, 2, 3]},
        {"messages": said},
        {"messages": said[:1], "reference": "ignored"},
        {"messages": said[1:2]},
    )
    found = sessions(9, kind=DatasetKind.PROMPTS, file=file, has_end=True, outputs=Lengths(low=9, high=9))
    assert len(found) == 4, "nothing asks for the last one's reply"
    prompts = {
        session.calls[-1].prompt if isinstance(session.calls[-1].prompt, str | tuple) else None for session in found
    }
    assert prompts == {"Hello", (1, 2, 3), None}
    assert {session.calls[0].num_out for session in found} == {3, 9}
    turns = max((session.calls for session in found), key=len)
    assert [call.prompt for call in turns] == [Chat(messages=tuple(said[:1])), Chat(messages=tuple(said[:3]))]


def test_prompt_files_are_gone_through_again(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "prompts.jsonl", *({"prompt": str(i)} for i in range(10)))
    found = [session.calls[0].prompt for session in sessions(20, kind=DatasetKind.PROMPTS, file=file)]
    assert sorted(found[:10]) == sorted(found[10:]) == sorted(map(str, range(10)))
    assert found[:10] != found[10:]
    once = [session.calls[0].prompt for session in sessions(20, kind=DatasetKind.PROMPTS, file=file, has_end=True)]
    assert once == found[:10]


def test_equal_hash_ids_become_equal_tokens(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 250, "input_length": 600, "output_length": 6, "hash_ids": [7, 4]},
        {"timestamp": 250, "input_length": 10, "output_length": 7},
    )
    first, second, third = sessions(4, kind=DatasetKind.TRACE, file=file)
    assert [len(ids(session)) for session in (first, second, third)] == [1030, 600, 10]
    assert [session.calls[0].num_out for session in (first, second, third)] == [5, 6, 7]
    assert [session.at_s for session in (first, second, third)] == [0.0, 0.25, 0.25]
    assert ids(first)[:512] == ids(second)[:512]
    assert ids(first)[512:600] != ids(second)[512:600]


def test_traces_are_scaled_and_cut_and_still_share(tmp_path: Path) -> None:
    line = {"input_length": 1024, "output_length": 100, "hash_ids": [1, 2]}
    file = write_lines(
        tmp_path / "trace.jsonl", line, {**line, "hash_ids": [1, 3]}, {"input_length": 0, "output_length": 1}
    )
    limits = TraceLimits(scale=0.25, max_input_tokens=200, max_output_tokens=10)
    first, second, smallest = read_trace(file, limits=limits, vocab_size=VOCAB_SIZE, seed=0)
    assert (len(ids(first)), first.calls[0].num_out, first.at_s) == (200, 10, None)
    assert ids(first)[:128] == ids(second)[:128]
    assert ids(first)[128:] != ids(second)[128:]
    assert (len(ids(smallest)), smallest.calls[0].num_out) == (1, 1)


def test_mooncake_trace_shares_as_much_as_its_hash_ids(shared: Path) -> None:
    """A prefix cache of blocks as long as the scaled hash blocks finds exactly what the ids say."""
    file = shared / "traces" / "mooncake_conversation.jsonl.gz"
    with gzip.open(file, "rt") as lines:
        records = [json.loads(line) for line in islice(lines, 300)]
    block = 16
    found = islice(read_trace(file, limits=TraceLimits(scale=block / 512), vocab_size=VOCAB_SIZE, seed=0), 300)
    seen_ids: set[int] = set()
    seen_blocks: set[tuple[int, ...]] = set()
    for record, session in zip(records, found, strict=True):
        prompt = ids(session)
        blocks = [prompt[: end * block] for end in range(1, len(prompt) // block + 1)]
        whole = record["hash_ids"][: len(blocks)]
        assert [each in seen_blocks for each in blocks] == [each in seen_ids for each in whole]
        seen_ids.update(whole)
        seen_blocks.update(blocks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no prompts"),
        ("{", r":1: not JSON"),
        ("[1]", r":1: is a list; allowed: a JSON object"),
        ('{"prompt": "a"}\n{"text": "b"}', r":2: has \['text'\]; allowed: \"prompt\" with a text"),
        ('{"prompt": "a", "output_length": -1}', r":1: output_length is -1; allowed: a whole number, at least 1"),
        ('{"prompt": "a", "output_length": 0}', r":1: output_length is 0"),
        ('{"prompt": "a", "output_length": true}', r":1: output_length is True"),
        (f'{{"prompt": "a", "output_length": {2**31}}}', r":1: output_length is 2147483648; .* below 2\*\*31"),
        ('{"prompt": ""}', r":1: has \['prompt'\]"),
        ('{"token_ids": [1, "two"]}', r":1: has \['token_ids'\]; allowed: .* from 0 on"),
        ('{"token_ids": [1, -2]}', r":1: has \['token_ids'\]"),
        ('{"token_ids": []}', r":1: has \['token_ids'\]"),
        (f'{{"token_ids": [0, {2**31 - 1}]}}\n{{"token_ids": [{2**31}]}}', r":2: has \['token_ids'\]"),
        ('{"messages": []}', r":1: has \['messages'\]"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}', r":1: has \['messages'\]"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', r"role and content, both texts"),
        ('{"prompt": "a"}\n{"prompt": "bad \\ud83d half"}', r":2: a text has '\\ud83d', half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\ude00"}]}', r":1: a text has '\\ude00', half of"),
        ('{"messages": [{"role": "\\ud83d", "content": "a"}]}', r":1: a text has '\\ud83d', half of"),
        ('{"prompt": "a"}\n' + "[" * 100_000, r":2: is nested too deeply"),
    ],
)
def test_wrong_lines_of_prompts_are_told(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(BenchConfigError, match=message):
        sessions(1, kind=DatasetKind.PROMPTS, file=file)


def test_a_byte_that_is_no_utf8_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl.gz"
    file.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 9_999 + b'{"prompt": "caf\xe9"}\n'))
    with pytest.raises(BenchConfigError, match=r"gz:10000: not JSON: 'utf-8' codec .* byte 0xe9 in position 15"):
        sessions(1, kind=DatasetKind.PROMPTS, file=file)


def test_lines_are_read_as_windows_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    found = sessions(2, kind=DatasetKind.PROMPTS, file=file)
    assert {call.prompt for session in found for call in session.calls} == {"a", "b"}


def test_wrong_traces_are_refused_with_their_line(tmp_path: Path) -> None:
    limits = TraceLimits()
    line = {"input_length": 1, "output_length": 1}
    for name, records, message in (
        ("empty", [], "has no requests"),
        ("half timed", [line, {**line, "timestamp": 3}], "times for some only"),
        ("no length", [{"input_length": 1}], r":1: output_length is None"),
        ("one id", [{**line, "hash_ids": 5}], r":1: hash_ids is 5; allowed: a list"),
        ("nested ids", [{**line, "hash_ids": [[5]]}], r":1: hash_ids is \[\[5\]\]"),
        ("time as text", [{**line, "timestamp": "3"}], r":1: timestamp is '3'; allowed: milliseconds"),
        ("never", [{**line, "timestamp": float("inf")}], r":1: timestamp is inf"),
        ("too late", [line | {"timestamp": 0}, {**line, "timestamp": 10**400}], r":2: timestamp is 10+; allowed"),
        ("too long", [{**line, "input_length": 10**400}], r":1: input_length is 10+; allowed"),
        ("half a character", [{**line, "hash_ids": ["\ud83d"]}], r":1: a text has '\\ud83d', half of"),
    ):
        file = write_lines(tmp_path / name, *records)
        with pytest.raises(BenchConfigError, match=message):
            read_trace(file, limits=limits, vocab_size=VOCAB_SIZE, seed=0)
    with pytest.raises(BenchConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing", limits=limits, vocab_size=VOCAB_SIZE, seed=0)


def test_requests_of_a_trace_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    records = [{"timestamp": at, "input_length": int(at), "output_length": 1} for at in (7, 2.5, 4)]
    found = sessions(9, kind=DatasetKind.TRACE, file=write_lines(tmp_path / "trace", *records))
    assert [(session.at_s, len(ids(session))) for session in found] == [(0.0025, 2), (0.004, 4), (0.007, 7)]


def test_whole_characters_may_be_escaped(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "prompts.jsonl", {"prompt": "\N{GRINNING FACE}", "note": "\ud83d"})
    assert "\\ud83d\\ude00" in file.read_text()
    (session,) = sessions(1, kind=DatasetKind.PROMPTS, file=file)
    assert session.calls[0].prompt == "\N{GRINNING FACE}"


def test_empty_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n\n  \n')
    assert [session.calls[0].prompt for session in sessions(2, kind=DatasetKind.PROMPTS, file=file)] == ["a", "a"]


def test_files_belong_to_the_kinds_that_read_them(tmp_path: Path) -> None:
    with pytest.raises(BenchConfigError, match="--file is missing; allowed: one with --dataset prompts or trace"):
        DatasetOptions(kind=DatasetKind.TRACE)
    with pytest.raises(BenchConfigError, match=r"--file is .*; allowed: one with --dataset prompts"):
        DatasetOptions(kind=DatasetKind.RANDOM, file=tmp_path)


def test_lengths_are_drawn_from_both_ends() -> None:
    rng = random.Random(0)
    assert {Lengths(low=2, high=4).draw(rng) for _ in range(100)} == {2, 3, 4}
    assert (str(Lengths(low=2, high=4)), str(Lengths(low=4, high=4))) == ("2-4", "4")


def test_prompts_that_begin_otherwise_share_nothing() -> None:
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    assert begin_otherwise("a", "(x)") == "(x) a"
    assert begin_otherwise(Chat(messages=said), "(x)") == Chat(messages=({"role": "user", "content": "(x) a"}, said[1]))
    assert begin_otherwise((1, 2, 3), "(x)") == (3, 2, 1)
