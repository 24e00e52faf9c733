"""One request in flight: placed on a replica, read from it, and placed again with its tokens when the replica breaks.

A request is its tokens: the next replica gets the prompt and what was generated, and goes on with exactly the tokens
and the text that the first would have given. Tokenizing, checking and admission came before (dispatch.py); where a
request may go, and for how long it looks, is decided in placing.py.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import grpc
from weft.v1 import inference_pb2, replica_pb2

from router.call import GenerateDelta, TokenReader
from router.config import FailoverConfig
from router.directory import Directory, ModelRoute
from router.errors import DeadlineError, InvalidRequestError, OverloadedError, RequestFailedError
from router.inbox import Ending, Inbox, Received, ReplicaLost
from router.metrics import RouterMetrics
from router.model_text import ModelText
from router.placing import Placing
from router.prefix_index import ReplicaId
from router.replica import ReplicaLink
from router.spans import Span, TraceContext
from router.tokenizer_pool import TokenizerPool

logger = logging.getLogger(__name__)

_INLINE_HASH_TOKENS = 8192
"""Prompts up to this length are hashed on the event loop, in less than a millisecond."""

_wire_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A checked request, ready for any replica."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: inference_pb2.SamplingParams
    """With every default filled in."""
    priority: int
    cache_salt: str
    deadline_s: float | None
    """The client's deadline, on the event loop's clock; None: none."""
    text: ModelText
    """What its tokens were made by: it may go only to replicas that run the same."""
    tokenizer: TokenReader
    """That made them."""
    counts_prompt: bool
    """As in GenerateCall."""


@dataclass(slots=True, kw_only=True)
class _Part:
    """The request's stay on one replica."""

    link: ReplicaLink
    wire_id: str
    inbox: Inbox
    span: Span
    submitted_s: float
    first_s: float | None = None
    last_s: float = 0.0
    timer: asyncio.TimerHandle | None = None
    """Ends the wait for outputs at the request's deadline."""


class Flight:
    """Gives the deltas of one request, whatever happens to replicas. One task reads it; `close` it in any case."""

    def __init__(
        self,
        request: PreparedRequest,
        route: ModelRoute,
        *,
        prepare: Callable[[], Awaitable[PreparedRequest]],
        directory: Directory,
        config: FailoverConfig,
        pool: TokenizerPool,
        metrics: RouterMetrics,
        span: Span,
        router_id: str,
        retry_after_s: Callable[[], float],
    ) -> None:
        self._request = request
        self._prepare = prepare
        """Makes the request anew, for when the replicas run another tokenizer."""
        self._route = route
        self._directory = directory
        self._config = config
        self._pool = pool
        self._metrics = metrics
        self._span = span
        self._router_id = router_id
        self._generated: list[int] = []
        self._part: _Part | None = None
        self._served_by: list[ReplicaId] = []
        self._retry_after_s = retry_after_s
        self._placing = Placing(config, route.name, retry_after_s)
        self._is_held = False  # as far as the controller knows
        self._first_prediction: int | None = None
        self._lost_prefill_s = 0.0
        self._lost_decode_s = 0.0
        self._hashes: list[bytes] | None = None
        route.held.add(self)

    async def hold(self, most: int) -> None:
        """Wait while the model has no replica; for longer where one is started because somebody asks.

        Args:
            most: requests of the model that may wait so.

        Raises:
            DeadlineError, NoReplicaError: none came in time.
            OverloadedError: as many wait as may.
        """
        if self._route.num_ready:
            return
        if self._route.num_waiting >= most:
            raise OverloadedError(
                f"{self._route.num_waiting} requests wait for a replica of model {self._route.name!r}; allowed: {most}",
                retry_after_s=self._retry_after_s(),
            )
        with self._route.waiting():
            try:
                async with asyncio.timeout_at(self._request.deadline_s):
                    await self._wait_for_replica()
            except TimeoutError:
                raise DeadlineError(
                    f"the deadline passed before a replica of model {self._route.name!r} was ready"
                ) from None

    async def _wait_for_replica(self) -> None:
        begin_s = time.monotonic()
        while not self._route.num_ready:
            limit_s = self._config.new_request_wait_s
            if self._route.starts_on_demand:
                limit_s = self._config.cold_start_wait_s
                self._is_held = True
                self._directory.report_soon()
            left_s = begin_s + limit_s - time.monotonic()
            if left_s <= 0:
                raise self._placing.no_replica_error(limit_s)
            await self._directory.wait_for_change(left_s)

    async def next(self) -> GenerateDelta:
        """Return the next delta; after one with `finished` there is none.

        Raises:
            DeadlineError, InvalidRequestError, OverloadedError, NoReplicaError, ReplicaFailedError, RequestFailedError:
                the request has failed for good.
        """
        try:
            return await self._next()
        except TimeoutError:
            raise self._deadline_error() from None

    def close(self) -> None:
        """Abort the request wherever it is, unless it has ended. Once."""
        self._route.held.discard(self)
        part = self._leave()
        if part is not None:
            part.link.abort(part.wire_id)
            part.span.fail("aborted")
            part.span.end()

    async def _next(self) -> GenerateDelta:
        while True:
            if self._part is None:
                self._part = await self._enter()
            part = self._part
            received = await part.inbox.take()
            self._note(part, received)
            finished = None
            if received.ending is not None:
                self._leave()
                _end_span(part.span, received.ending)
            match received.ending:
                case None:
                    pass
                case replica_pb2.RequestFinished():
                    finished = self._finish(received.ending)
                case replica_pb2.RequestFailed():
                    self._after_failure(part, received.ending)
                case ReplicaLost(reason=reason, was_leaving=was_leaving):
                    self._after_loss(part, reason, was_leaving=was_leaving)
                case _:
                    assert_never(received.ending)
            if finished is not None or received.token_ids or received.text:
                return self._delta(received, finished)

    # Placing

    async def _enter(self) -> _Part:
        """Place the request; TimeoutError at its deadline. One timer ends its stay: one for each token costs a tenth
        of the router's work."""
        async with asyncio.timeout_at(self._request.deadline_s):
            part = await self._place()
        if self._request.deadline_s is not None:
            part.timer = asyncio.get_running_loop().call_at(self._request.deadline_s, part.inbox.expire)
        return part

    def _leave(self) -> _Part | None:
        part, self._part = self._part, None
        if part is not None:
            part.inbox.close()
            if part.timer is not None:
                part.timer.cancel()
        return part

    async def _place(self) -> _Part:
        self._route.held.add(self)
        self._placing.seek(time.monotonic())
        while True:
            await self._prepare_again()
            await self._hash()
            if self._route.starts_on_demand and not self._placing.has_begun and not self._route.num_ready:
                await self._wait_for_replica()  # its last one has left, however late it said so
                self._placing.seek_anew(time.monotonic())
                continue
            now_s = time.monotonic()
            links = self._placing.find(self._route, now_s, self._request.text)
            if links:
                return self._submit(links)
            await self._directory.wait_for_change(self._placing.wait_s(now_s))

    async def _prepare_again(self) -> None:
        """Make the tokens anew where a rollout has another tokenizer; a request that has begun stays with its own."""
        if self._generated or self._request.text.is_like(self._route.text):
            return
        self._request = replace(await self._prepare(), request_id=self._request.request_id)
        self._hashes = None

    async def _hash(self) -> None:
        """Hash the blocks of prompt and output once for each placing, off the event loop when they are many."""
        if self._hashes is not None:
            return
        token_ids, salt = self._token_ids(), self._request.cache_salt
        if len(token_ids) <= _INLINE_HASH_TOKENS:
            self._hashes = self._route.hash_blocks(token_ids, salt)
        else:
            self._hashes = await self._pool.run(self._route.hash_blocks, token_ids, salt)

    def _token_ids(self) -> tuple[int, ...]:
        return (*self._request.prompt_token_ids, *self._generated)

    def _submit(self, links: Sequence[ReplicaLink]) -> _Part:
        request, hashes = self._request, self._hashes or []
        num_tokens = len(request.prompt_token_ids) + len(self._generated)
        choice = self._route.choose(links, hashes, num_tokens)
        link, predicted = choice.link, choice.num_cached_tokens
        wire_id = f"{self._router_id}/{next(_wire_numbers)}/{request.request_id}"
        span = self._span.child("weft.replica_call", is_call=True)
        span.set(weft__replica=link.replica_id, weft__choice=choice.reason, weft__predicted_cached_tokens=predicted)
        inbox = link.submit(self._submission(wire_id, span.context), num_pending_tokens=num_tokens - predicted)
        self._route.held.discard(self)
        self._metrics.choices.labels(self._route.name, choice.reason).inc()
        if self._first_prediction is None:
            self._first_prediction = min(predicted, len(request.prompt_token_ids))
            if request.counts_prompt:
                self._metrics.prompt_tokens.labels(self._route.name).inc(len(request.prompt_token_ids))
                self._metrics.predicted_tokens.labels(self._route.name).inc(self._first_prediction)
        logger.debug("request %s goes to %s (%s)", wire_id, link.replica_id, choice.reason)
        if self._is_held:
            self._is_held = False
            self._directory.report_soon()  # else it would count here and as the replica's load
        return _Part(link=link, wire_id=wire_id, inbox=inbox, span=span, submitted_s=time.monotonic())

    def _submission(self, wire_id: str, trace_context: TraceContext) -> replica_pb2.Submit:
        request = self._request
        timeout_s = 0.0
        if request.deadline_s is not None:
            timeout_s = max(request.deadline_s - asyncio.get_running_loop().time(), 0.001)
        return replica_pb2.Submit(
            request_id=wire_id,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=self._generated,
            sampling=request.sampling,
            priority=request.priority,
            cache_salt=request.cache_salt,
            timeout_s=timeout_s,
            **dict(trace_context),
        )

    # Reading

    def _note(self, part: _Part, received: Received) -> None:
        if not received.token_ids:
            return
        part.last_s = time.monotonic()
        if part.first_s is None:
            part.first_s = part.last_s
            part.span.event("first token")
            self._served_by.append(part.link.replica_id)
            self._placing.note_tokens()
        self._generated.extend(received.token_ids)

    def _delta(self, received: Received, finished: inference_pb2.Finished | None) -> GenerateDelta:
        return GenerateDelta(
            request_id=self._request.request_id,
            model=self._route.name,
            text=received.text,
            token_ids=received.token_ids,
            prompt_token_ids=self._request.prompt_token_ids,
            tokenizer=self._request.tokenizer,
            logprobs=received.logprobs,
            finished=finished,
        )

    def _finish(self, ending: replica_pb2.RequestFinished) -> inference_pb2.Finished:
        if ending.reason == inference_pb2.FINISH_REASON_ABORT and self._request.deadline_s is not None:
            raise self._deadline_error()  # by the replica's clock, which may be a little ahead
        finished = inference_pb2.Finished(
            reason=ending.reason, usage=self._usage(ending.usage), replica_ids=self._served_by
        )
        match ending.WhichOneof("stopped_by"):
            case "stop_string":
                finished.stop_string = ending.stop_string
            case "stop_token_id":
                finished.stop_token_id = ending.stop_token_id
        if self._request.counts_prompt:
            self._metrics.cached_tokens.labels(self._route.name).inc(finished.usage.cached_tokens)
        return finished

    def _usage(self, last: inference_pb2.Usage) -> inference_pb2.Usage:
        """Return the usage over all parts. A part that broke told none; what the router saw stands in for it."""
        cached_tokens = (self._first_prediction or 0) if len(self._served_by) > 1 else last.cached_tokens
        return inference_pb2.Usage(
            prompt_tokens=len(self._request.prompt_token_ids),
            cached_tokens=cached_tokens,
            completion_tokens=len(self._generated),
            queue_s=last.queue_s,
            prefill_s=last.prefill_s + self._lost_prefill_s,
            decode_s=last.decode_s + self._lost_decode_s,
        )

    # When it goes wrong

    def _after_loss(self, part: _Part, reason: str, *, was_leaving: bool) -> None:
        """Note a part that its replica did not finish; the loop places the request anew, unless too many broke."""
        self._hashes = None
        if part.first_s is not None:
            self._lost_prefill_s += part.first_s - part.submitted_s
            self._lost_decode_s += part.last_s - part.first_s
        replica_id, num_tokens = part.link.replica_id, len(self._generated)
        if was_leaving:
            logger.info("request %s: replica %s left after %d tokens: %s", part.wire_id, replica_id, num_tokens, reason)
        else:
            self._metrics.failovers.labels(self._route.name).inc()
            logger.warning(
                "request %s: replica %s broke after %d tokens: %s", part.wire_id, replica_id, num_tokens, reason
            )
        self._placing.note_loss(replica_id, reason, was_leaving=was_leaving)

    def _after_failure(self, part: _Part, failed: replica_pb2.RequestFailed) -> None:
        """Raise what the failure means to the client, or return when another replica may do better."""
        match _STATUS.get(failed.code):
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._metrics.retries.labels(self._route.name).inc()
                self._placing.note_full(part.link.replica_id)
            case grpc.StatusCode.UNAVAILABLE if part.first_s is None:
                self._metrics.retries.labels(self._route.name).inc()
                self._placing.note_leaving(part.link.replica_id)
            case grpc.StatusCode.UNAVAILABLE:
                self._placing.note_leaving(part.link.replica_id)
                self._after_loss(part, failed.message, was_leaving=part.link.is_leaving)
            case grpc.StatusCode.INVALID_ARGUMENT:
                raise InvalidRequestError(failed.message)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._deadline_error()
            case _:
                raise RequestFailedError(failed.message)

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(f"the deadline passed after {len(self._generated)} tokens")


def _end_span(span: Span, ending: Ending) -> None:
    match ending:
        case replica_pb2.RequestFailed():
            span.fail(ending.message)
        case ReplicaLost():
            span.fail(ending.reason)
    span.end()


_STATUS: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
