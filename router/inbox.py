"""What a replica sent for one request: replica.py fills it with frames, flight.py empties it at its client's pace."""

import asyncio
from dataclasses import dataclass

import msgspec
from weft.v1 import inference_pb2, replica_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLost:
    """The end of a request's part on a replica whose stream broke."""

    reason: str
    was_leaving: bool = False
    """The replica or the controller had said before that it leaves."""


Ending = replica_pb2.RequestFinished | replica_pb2.RequestFailed | ReplicaLost


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What came for one request since it looked last."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[inference_pb2.TokenLogprobs, ...]
    ending: Ending | None


class Inbox:
    """What was sent and not yet taken, merged; bounded by the request's max_tokens."""

    __slots__ = ("_ending", "_is_expired", "_logprobs", "_texts", "_token_ids", "_waiter")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[inference_pb2.TokenLogprobs] = []
        self._ending: Ending | None = None
        self._is_expired = False
        self._waiter: asyncio.Future[None] | None = None

    def add(self, output: replica_pb2.RequestOutput) -> bool:
        """Append one output; True when it is the last of its request."""
        self._token_ids.extend(output.token_ids)
        if output.text:
            self._texts.append(output.text)
        if output.logprobs:
            self._logprobs.extend(output.logprobs)
        if output.HasField("finished"):
            self._ending = output.finished
        elif output.HasField("failed"):
            self._ending = output.failed
        self._wake()
        return self._ending is not None

    def lose(self, reason: str, *, was_leaving: bool = False) -> None:
        """Note that the stream broke."""
        self._ending = ReplicaLost(reason=reason, was_leaving=was_leaving)
        self._wake()

    def expire(self) -> None:
        """Note that the request's deadline has passed."""
        self._is_expired = True
        self._wake()

    async def take(self) -> Received:
        """Wait until something is there, and take all of it. One reader at a time. TimeoutError: it has expired."""
        if self._is_empty and not self._is_expired:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._is_empty:
            raise TimeoutError
        received = Received(
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            logprobs=tuple(self._logprobs),
            ending=self._ending,
        )
        self._token_ids.clear()
        self._texts.clear()
        self._logprobs.clear()
        return received

    @property
    def _is_empty(self) -> bool:
        return not self._token_ids and not self._texts and self._ending is None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
