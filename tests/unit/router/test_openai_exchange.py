"""How one answer is sent while the router serves others."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from helpers.fake_dispatch import FakeDispatch
from weft.v1 import inference_pb2

from router.call import GenerateDelta
from router.openai_exchange import Exchange


class Pieces:
    """Renders a piece for each delta."""

    async def chunks(self, index: int, delta: GenerateDelta) -> list[dict[str, int]]:
        return [{"index": index}]

    def usage_chunk(self) -> None:
        return None


async def test_others_are_served_between_pieces_that_take_long() -> None:
    """Who reads late has all of them there at once."""
    num_turns, num_at_piece = 0, list[int]()

    async def all_at_once() -> AsyncGenerator[GenerateDelta, None]:
        for _ in range(20):
            yield GenerateDelta(
                request_id="a",
                model="m",
                text="a",
                token_ids=(1,),
                tokenizer=FakeDispatch(),
                logprobs=(inference_pb2.TokenLogprobs(),),
            )

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        if message.get("body", b"").startswith(b'data: {"index"'):
            num_at_piece.append(num_turns)

    others = asyncio.create_task(take_turns())
    pieces: Any = Pieces()
    exchange = Exchange([all_at_once()], pieces, is_stream=True, max_tokens_name="max_tokens", headers={})
    await exchange({"type": "http"}, asyncio.Event().wait, send)  # type: ignore[arg-type] # a client that stays
    others.cancel()
    assert len(num_at_piece) == len(set(num_at_piece)) == 20
