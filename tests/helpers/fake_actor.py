"""Methods of an actor of Ray, as whoever has its handle calls them."""

from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import ActorUnavailableError


class FakeMethod:
    """A method that answers as a test says."""

    def __init__(self, answer: Callable[..., Awaitable[Any]]) -> None:
        self.remote = answer
        self.num_broken = 0

    def break_once(self) -> None:
        """Let the connection break while the first call is under way."""
        answer = self.remote

        async def ask(*args: object) -> Any:
            if not self.num_broken:
                self.num_broken += 1
                raise ActorUnavailableError("the connection broke", None)
            return await answer(*args)

        self.remote = ask
