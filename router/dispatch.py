"""The one path that gRPC and HTTP share: resolve the model, tokenize, check, admit, and stream from the replicas.

Text work runs in the tokenizer pool; replicas are the business of flight.py. Every call ends in exactly one outcome
(call_account.py).
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import TypeVar

from weft.v1.inference_pb2 import SamplingParams

from router.admission import Admission
from router.call import Conversation, GenerateCall, GenerateDelta, ModelCard, TokenName, TokenReader
from router.call_account import CallAccount
from router.config import RouterConfig
from router.convert import (
    check_call,
    check_chat,
    check_length,
    check_num_token_ids,
    check_token_ids,
    complete_sampling,
)
from router.directory import Directory, ModelRoute
from router.errors import DeadlineError, NoReplicaError, RouterError
from router.flight import Flight, PreparedRequest
from router.keys import Tenant, cache_space
from router.metrics import RouterMetrics
from router.spans import NO_TRACER, Span, Tracer
from router.token_names import TokenNames
from router.tokenizer_pool import TokenizerPool

T = TypeVar("T")


class Dispatcher:
    """Serves calls over the models of a directory. Satisfies call.Dispatch; lives on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        directory: Directory,
        admission: Admission,
        pool: TokenizerPool,
        metrics: RouterMetrics,
        rng: random.Random,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._config = config
        self._directory = directory
        self._admission = admission
        self._pool = pool
        self._names = TokenNames(pool)
        self._metrics = metrics
        self._rng = rng
        self._tracer = tracer

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateDelta, None]:
        """Serve one call. Closing the generator, or cancelling the task that reads it, aborts the call everywhere."""
        deadline_s = _deadline(call.timeout_s)
        with CallAccount(call, self._metrics, self._tracer, deadline_s=deadline_s) as account:
            route = self._directory.resolve(call.model)
            account.begin(route)
            with self._admission.enter() as ticket:
                with account.span.child("weft.prepare"):
                    request = await _until(deadline_s, self._prepare(call, route, deadline_s))
                account.accept(request)
                prepare = partial(self._prepare, call, route, deadline_s)
                with closing(self._flight(request, route, account.span, prepare)) as flight:
                    with account.span.child("weft.admission"):
                        await flight.hold(self._most_held)
                        await self._admission.start(ticket, deadline_s)
                    account.start()
                    while not account.has_ended:
                        delta = await flight.next()
                        account.receive(delta)
                        yield delta

    def refuse(self, error: RouterError, *, request_id: str, tenant: Tenant | None) -> None:
        """Count a call that was refused with this error before it was one."""
        call = GenerateCall(sampling=SamplingParams(), request_id=request_id, tenant=tenant)
        with suppress(RouterError), CallAccount(call, self._metrics, self._tracer, deadline_s=None):
            raise error

    async def tokenize(
        self, model: str, prompt: str | Conversation, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids that `generate` would use for this prompt."""
        route = self._directory.resolve(model)
        if not isinstance(prompt, str):
            check_chat(prompt)
        with self._admission.enter():
            tokenizer = await self._pool.get(route.text)
            return await self._pool.encode(tokenizer, prompt, add_special_tokens=add_special_tokens)

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        route = self._directory.resolve(model)
        with self._admission.enter():
            max_context, vocab_size = route.max_context, route.vocab_size  # of this text: another may come meanwhile
            tokenizer = await self._pool.get(route.text)
            check_num_token_ids(len(token_ids), max_context)
            check_token_ids("token_ids", token_ids, vocab_size or tokenizer.vocab_size)
            return await self._pool.run(tokenizer.decode, token_ids, skip_special_tokens)

    async def token_names(self, tokenizer: TokenReader, token_ids: Collection[int]) -> dict[int, TokenName]:
        """Return what each token of an answer reads as on its own. The answer had its place; its names need none."""
        return await self._names.of(tokenizer, token_ids)

    async def prompt_text(self, tokenizer: TokenReader, token_ids: Sequence[int]) -> str:
        """Return what the prompt of an answer reads as, special tokens written out; as `token_names` otherwise."""
        return await self._pool.run(tokenizer.decode, token_ids, skip_special_tokens=False)

    def list_models(self) -> list[ModelCard]:
        """Return the models served now."""
        return [
            ModelCard(
                name=route.name,
                max_context=route.max_context,
                vocab_size=route.vocab_size or 0,
                ready_replicas=route.num_ready,
            )
            for route in self._directory.routes
        ]

    @property
    def _most_held(self) -> int:
        """Requests that may wait for a replica of one model: its share of all places."""
        config = self._admission.places.config
        num_models = max(1, len(self._directory.routes))  # the last may have gone a moment ago
        return max(1, (config.max_in_flight + config.max_queued) // num_models)

    async def _prepare(self, call: GenerateCall, route: ModelRoute, deadline_s: float | None) -> PreparedRequest:
        """Turn a call into tokens and complete parameters. Raises InvalidRequestError."""
        check_call(call)
        prompt = call.chat if call.chat is not None else call.text
        asked: Sequence[int] = call.token_ids or ()
        while True:
            text = route.text
            tokenizer = await self._pool.get(text)
            if prompt is not None:
                asked = await self._pool.encode(tokenizer, prompt)
            max_context = await self._max_context(route)
            if text.is_like(route.text):
                break  # else a rollout came meanwhile, and what the route tells is of another tokenizer
        vocab_size = route.vocab_size or tokenizer.vocab_size
        prompt_field = "prompt" if call.chat is None else "messages"
        check_length(len(asked), call.sampling, max_context, prompt_field=prompt_field)  # before each id is looked at
        token_ids = tuple(asked)
        check_token_ids("prompt", token_ids, vocab_size)
        check_token_ids("stop_token_ids", call.sampling.stop_token_ids, vocab_size)
        sampling = complete_sampling(
            call.sampling,
            tokenizer.generation_defaults.sampling,
            max_tokens=tokenizer.generation_defaults.max_tokens(len(token_ids), max_context - len(token_ids)),
            seed=self._rng.getrandbits(64),
        )
        return PreparedRequest(
            request_id=call.request_id or f"req-{self._rng.getrandbits(64):016x}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            priority=call.priority,
            cache_salt=cache_space(call.tenant, call.cache_salt),
            deadline_s=deadline_s,
            text=text,
            tokenizer=tokenizer,
            counts_prompt=call.counts_prompt,
        )

    async def _max_context(self, route: ModelRoute) -> int:
        """Return the model's context; when only replicas know it, wait for the first."""
        loop = asyncio.get_running_loop()
        limit_s = self._config.failover.new_request_wait_s
        give_up_s = loop.time() + limit_s
        while not route.max_context:
            if loop.time() >= give_up_s:
                raise NoReplicaError(f"no replica of model {route.name!r} was ready for {limit_s:g} s")
            await self._directory.wait_for_change(give_up_s - loop.time())
        return route.max_context

    def _flight(
        self, request: PreparedRequest, route: ModelRoute, span: Span, prepare: Callable[[], Awaitable[PreparedRequest]]
    ) -> Flight:
        return Flight(
            request,
            route,
            prepare=prepare,
            directory=self._directory,
            config=self._config.failover,
            pool=self._pool,
            metrics=self._metrics,
            span=span,
            router_id=self._config.router_id,
            retry_after_s=lambda: self._admission.places.retry_after_s,
        )


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s


async def _until(deadline_s: float | None, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout_at(deadline_s):
            return await work
    except TimeoutError:
        raise DeadlineError("the deadline passed before the request reached a replica") from None
