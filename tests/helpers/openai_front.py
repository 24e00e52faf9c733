"""The OpenAI-compatible front over a fake dispatcher, and requests to it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn

from helpers.fake_dispatch import FakeDispatch
from router.openai import create_app

MODEL = "fake/model"
MAX_BODY_BYTES = 100_000
USER = {"role": "user", "content": "Hi"}


@asynccontextmanager
async def serving(dispatch: FakeDispatch) -> AsyncIterator[str]:
    """Run the front on a free loopback port; yields its address."""
    app = create_app(dispatch, max_body_bytes=MAX_BODY_BYTES, ready=lambda: True)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve())
    async with asyncio.timeout(10):
        while not server.started:  # noqa: ASYNC110 (uvicorn has no event to wait for)
            await asyncio.sleep(0.005)
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        server.should_exit = True
        async with asyncio.timeout(10):
            await running


async def complete(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": MODEL, "prompt": "Hi"} | fields)


async def chat(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json={"model": MODEL, "messages": [USER]} | fields)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream, the last one "[DONE]" where it ended well."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in data]
