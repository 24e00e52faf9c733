"""Waits for what other tasks and processes do."""

import asyncio
from collections.abc import Awaitable, Callable

GUARD_S = 120.0
"""What should happen at once has failed when it has not by then: a busy machine takes its time."""


async def poll(read: Callable[[], Awaitable[object]], wanted: object, timeout_s: float = GUARD_S) -> None:
    """Wait until an async function returns what is wanted."""
    async with asyncio.timeout(timeout_s):
        while await read() != wanted:  # noqa: ASYNC110 - what it reads is in another task or process
            await asyncio.sleep(0.005)


async def until(condition: Callable[[], bool], timeout_s: float = GUARD_S) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
