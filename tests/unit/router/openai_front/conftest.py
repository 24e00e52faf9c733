"""The front in process for httpx, and on a socket for the `openai` package."""

from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio
from helpers.fake_dispatch import FakeDispatch
from helpers.openai_front import MAX_BODY_BYTES, serving

from router.openai import create_app


@pytest.fixture
def dispatch() -> FakeDispatch:
    return FakeDispatch()


@pytest_asyncio.fixture
async def http(dispatch: FakeDispatch) -> AsyncIterator[httpx.AsyncClient]:
    """The front without a socket."""
    app = create_app(dispatch, max_body_bytes=MAX_BODY_BYTES, ready=lambda: True)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as client:
        yield client


@pytest_asyncio.fixture
async def url(dispatch: FakeDispatch) -> AsyncIterator[str]:
    async with serving(dispatch) as address:
        yield address


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """The `openai` package, talking to the front over a socket."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client
