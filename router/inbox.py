"""What a replica sent for one request: replica.py fills it with frames, flight.py empties it at its client's pace."""

import asyncio
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import msgspec
from weft.v1 import inference_pb2, replica_pb2

from router.turns import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLost:
    """The end of a request's part on a replica whose stream broke."""

    reason: str
    was_leaving: bool = False
    """The replica or the controller had said before that it leaves."""


_MOST_TOKENS, _MOST_WITH_LOGPROBS = 4096, 256
"""Tokens that are taken at once, and of those with log-probabilities, which take long to render. gRPC's clients take
messages of 4 MiB unless told otherwise."""

Ending = replica_pb2.RequestFinished | replica_pb2.RequestFailed | ReplicaLost


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What came for one request since it looked last."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[inference_pb2.TokenLogprobs, ...]
    ending: Ending | None


class Inbox:
    """What was sent and not yet taken, merged; bounded by the request's max_tokens. `close` it in any case."""

    __slots__ = (
        "_counts",
        "_ending",
        "_is_expired",
        "_is_new",
        "_logprobs",
        "_texts",
        "_token_ids",
        "_turn",
        "_turns",
        "_waits",
    )

    def __init__(self, turns: Turns) -> None:
        """`turns` are those of all requests: one lasts from a `take` to the next."""
        self._turns = turns
        self._token_ids: list[int] = []
        self._counts: list[int] = []  # tokens of each output, whose text is beside it
        self._texts: list[str] = []
        self._logprobs: list[inference_pb2.TokenLogprobs] = []
        self._ending: Ending | None = None
        self._is_expired = False
        self._is_new = True  # nothing was taken
        self._turn: asyncio.Future[None] | None = None  # of the `take` under way, or of the last one
        self._waits = False  # that `take`, for something to come

    def add(self, output: replica_pb2.RequestOutput) -> bool:
        """Append one output; True when it is the last of its request."""
        self._token_ids.extend(output.token_ids)
        self._counts.append(len(output.token_ids))
        self._texts.append(output.text)
        for each in output.logprobs:
            own = inference_pb2.TokenLogprobs()
            own.CopyFrom(each)  # the frame's own would keep all of it in memory, which is of all requests
            self._logprobs.append(own)
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
        """Wait until something is there and it is the reader's turn, and take it, or the first of very much.

        One reader at a time, which has passed on what it took before. Raises TimeoutError when the inbox has expired.
        """
        self.close()
        self._turn = asyncio.get_running_loop().create_future()
        self._waits = True
        if not self._is_empty or self._is_expired:
            self._wake()
        await self._turn
        self._is_new = False
        if self._is_empty:
            raise TimeoutError
        num_tokens, num_outputs = len(self._token_ids), len(self._counts)
        most = _MOST_WITH_LOGPROBS if self._logprobs else _MOST_TOKENS
        if num_tokens > most:
            sums = list(accumulate(self._counts[:most]))
            num_outputs = max(1, bisect_right(sums, most))
            num_tokens = sums[num_outputs - 1]
        is_all = num_outputs == len(self._counts)
        received = Received(
            token_ids=tuple(self._token_ids[:num_tokens]),
            text="".join(self._texts[:num_outputs]),
            logprobs=tuple(self._logprobs[:num_tokens]),  # one for each token, or none
            ending=self._ending if is_all else None,
        )
        del self._token_ids[:num_tokens], self._logprobs[:num_tokens]
        del self._texts[:num_outputs], self._counts[:num_outputs]
        return received

    def close(self) -> None:
        """What was taken has been passed on, or nobody takes any more."""
        if self._turn is not None:
            self._turns.end(self._turn)
            self._turn = None

    @property
    def _is_empty(self) -> bool:
        return not self._counts and self._ending is None

    def _wake(self) -> None:
        if self._waits and self._turn is not None:
            self._waits = False
            self._turns.ask(self._turn, goes_first=self._is_new)
