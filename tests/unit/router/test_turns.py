"""Who passes on what came, and when."""

import asyncio
import random

import pytest
from helpers.virtual_time import VirtualLoop, run_in_virtual_time
from weft.v1 import replica_pb2

from router.inbox import Inbox
from router.turns import Turns
from tests.helpers.polling import until


class Line:
    """Requests that ask for turns."""

    def __init__(self, at_once: int, longest_s: float = 600.0) -> None:
        self.turns = Turns(at_once, longest_s)
        self._turns: dict[str, asyncio.Future[None]] = {}

    def ask(self, *names: str, goes_first: bool = False) -> None:
        for name in names:
            turn = self._turns[name] = asyncio.get_running_loop().create_future()
            self.turns.ask(turn, goes_first=goes_first)

    def end(self, name: str) -> None:
        self.turns.end(self._turns[name])

    def cancel(self, name: str) -> None:
        self._turns[name].cancel()

    @property
    def have_begun(self) -> set[str]:
        return {name for name, turn in self._turns.items() if turn.done() and not turn.cancelled()}


async def test_few_have_a_turn_at_once_and_the_others_follow_in_the_order_in_which_they_asked() -> None:
    line = Line(at_once=2)
    line.ask("a", "b", "c", "d", "e")
    assert line.have_begun == {"a", "b"}
    line.end("b")
    assert line.have_begun == {"a", "b", "c"}
    line.end("a")
    line.end("a")  # ends nobody else's
    assert line.have_begun == {"a", "b", "c", "d"}


async def test_who_goes_first_is_before_all_that_wait() -> None:
    line = Line(at_once=1)
    line.ask("a", "b")
    line.ask("new", "newer", goes_first=True)
    line.end("a")
    assert line.have_begun == {"a", "new"}
    line.end("new")
    assert line.have_begun == {"a", "new", "newer"}
    line.end("newer")
    assert line.have_begun == {"a", "new", "newer", "b"}


async def test_one_that_left_the_line_takes_no_turn() -> None:
    line = Line(at_once=1)
    line.ask("a", "gone", "b")
    line.cancel("gone")
    line.end("gone")
    assert line.have_begun == {"a"}
    line.end("a")
    assert line.have_begun == {"a", "b"}


def test_a_turn_that_lasts_too_long_holds_nobody_up_and_one_that_began_later_goes_on() -> None:
    async def main(_: VirtualLoop) -> None:
        line = Line(at_once=2, longest_s=1.0)
        line.ask("stalled")
        await asyncio.sleep(0.6)
        line.ask("later", "a", "b")
        await asyncio.sleep(0.3)
        assert line.have_begun == {"stalled", "later"}
        await asyncio.sleep(0.2)
        assert line.have_begun == {"stalled", "later", "a"}
        await asyncio.sleep(0.6)
        assert line.have_begun == {"stalled", "later", "a", "b"}

    run_in_virtual_time(main, random.Random(0))


async def test_turns_that_were_let_go_do_not_count_when_they_end_after_all() -> None:
    line = Line(at_once=1, longest_s=0.001)
    line.ask("stalled", "a")
    await until(lambda: "a" in line.have_begun)
    line.end("stalled")
    line.ask("b")
    line.end("a")
    assert "b" in line.have_begun


async def test_what_comes_for_a_request_in_the_line_is_merged() -> None:
    turns = Turns(at_once=1, longest_s=600.0)
    writing, waiting = Inbox(turns), Inbox(turns)
    writing.add(replica_pb2.RequestOutput(token_ids=[1]))
    assert (await writing.take()).token_ids == (1,)  # and is being written
    waiting.add(replica_pb2.RequestOutput(token_ids=[2], text="b"))
    taking = asyncio.create_task(waiting.take())
    for token_id in (3, 4):
        await asyncio.sleep(0)
        waiting.add(replica_pb2.RequestOutput(token_ids=[token_id], text="c"))
    assert not taking.done()
    writing.close()
    received = await taking
    assert (received.token_ids, received.text) == ((2, 3, 4), "bcc")


async def test_the_first_tokens_of_a_request_go_before_the_next_ones_of_others() -> None:
    turns = Turns(at_once=1, longest_s=600.0)
    writing, old, new = Inbox(turns), Inbox(turns), Inbox(turns)
    for inbox in (old, writing):
        inbox.add(replica_pb2.RequestOutput(token_ids=[1]))
        await inbox.take()
        inbox.add(replica_pb2.RequestOutput(token_ids=[2]))
        if inbox is old:
            inbox.close()
    taken = []

    async def take(name: str, inbox: Inbox) -> None:
        await inbox.take()
        taken.append(name)
        inbox.close()

    tasks = [asyncio.create_task(take("old", old)), asyncio.create_task(take("new", new))]
    await asyncio.sleep(0)
    new.add(replica_pb2.RequestOutput(token_ids=[1]))
    assert not taken
    writing.close()
    await asyncio.wait(tasks)
    assert taken == ["new", "old"]


@pytest.mark.parametrize("leaves", ["before it knows of its turn", "while it writes"])
async def test_a_reader_that_leaves_keeps_no_turn(leaves: str) -> None:
    turns = Turns(at_once=1, longest_s=600.0)
    first, second = Inbox(turns), Inbox(turns)
    first.add(replica_pb2.RequestOutput(token_ids=[1]))
    if leaves == "while it writes":
        await first.take()
    else:
        taking = asyncio.create_task(first.take())
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait((taking,))
    first.close()
    second.add(replica_pb2.RequestOutput(token_ids=[2]))
    assert (await asyncio.wait_for(second.take(), 120)).token_ids == (2,)
