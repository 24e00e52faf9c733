"""Work that goes on to its end: also when whoever waits for it is cancelled, or when Ray does not answer at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError

logger = logging.getLogger(__name__)

T = TypeVar("T")
A = TypeVar("A")

_RETRY_S = 0.5  # Ray fails so under load, which is not to be made worse


async def see_through(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that must not be left half done; when cancelled, be cancelled only after its end."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def ask_until_told(ask: Callable[[A], T], what: A) -> T:
    """Return what Ray answers, asked off the event loop; where it raises RayError, as under load, ask again.

    Whoever took that for an answer would leave processes that nobody ends. When Ray's head is gone for good, Ray ends
    this process.
    """
    while True:
        try:
            return await asyncio.to_thread(ask, what)
        except RayError as error:
            logger.warning("Ray did not answer for %s, and is asked again: %s", what, error)
            await asyncio.sleep(_RETRY_S)


async def ask_actor(ask: Callable[[], Awaitable[T]]) -> T:
    """Return what an actor answers to a question that may be put twice: again where the connection to it broke.

    Raises RayError: the actor has died, or its answer is an error.
    """
    while True:
        try:
            return await ask()
        except ActorUnavailableError as error:
            logger.info("an actor did not answer, and is asked again: %s", error)
            await asyncio.sleep(_RETRY_S)


def end_actor(actor: Any) -> None:
    """End the process of an actor, for good. Blocks until Ray's head has heard it."""
    ray.kill(actor, no_restart=True)
