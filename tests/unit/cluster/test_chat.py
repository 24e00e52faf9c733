"""`weft chat` against a real router over a fake replica."""

import asyncio
import io
import json
from functools import partial
from typing import Any

import pytest
from helpers.fake_replica import FakeReplica, certain_text, expected_tokens
from helpers.router_harness import router_config, running_router

from cluster.chat import chat
from cluster.errors import ClusterConfigError, RequestError


def typed(*lines: str) -> Any:
    """As `input`, which ends like it."""
    left = iter(lines)

    def read_line(prompt: str) -> str:
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    return read_line


async def test_each_turn_is_sent_with_all_that_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        talk = partial(
            chat, model="", timeout_s=20.0, router=router.addresses.grpc, options={"max_tokens": 6, "seed": 3}
        )
        await asyncio.to_thread(talk, system="Be brief.", as_json=False, read_line=typed("hi", "  ", "more"))
    first, second = (tuple(submit.prompt_token_ids) for submit in a.submits)
    answer = certain_text(expected_tokens(first, 3, 6), is_over=True)
    assert bytes(first).decode() == "<system>Be brief.<user>hi"
    assert bytes(second).decode() == f"<system>Be brief.<user>hi<assistant>{answer}<user>more"
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == answer
    assert captured.err.count("served by") == 2


async def test_answers_are_json_for_programs_and_a_refusal_ends_the_conversation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        talk = partial(
            chat,
            model="",
            timeout_s=20.0,
            router=router.addresses.grpc,
            system=None,
            as_json=True,
            options={"max_tokens": 2},
        )
        with pytest.raises(RequestError, match="invalid argument: the prompt has"):
            await asyncio.to_thread(talk, read_line=typed("hi", "x" * 600, "more"))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["usage"]["completion_tokens"] == 2


async def test_who_types_may_go_on_after_a_refusal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        talk = partial(
            chat,
            model="",
            timeout_s=20.0,
            router=router.addresses.grpc,
            system=None,
            as_json=False,
            options={"max_tokens": 2},
        )
        await asyncio.to_thread(talk, read_line=typed("x" * 600, "hi"))
    assert [bytes(submit.prompt_token_ids).decode() for submit in a.submits] == ["<user>hi"]
    assert "Error: invalid argument: the prompt has" in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_utf_8_is_told_as_that(errors: str) -> None:
    lines = io.TextIOWrapper(io.BytesIO("café\n".encode("latin-1")), encoding="utf-8", errors=errors)
    talk = partial(chat, model="", timeout_s=20.0, router="127.0.0.1:1", system=None, as_json=False, options={})
    with pytest.raises(ClusterConfigError, match=r"a line of the input is no text: .*; allowed: UTF-8"):
        talk(read_line=lambda prompt: lines.readline())
