"""A Dispatch without replicas: it answers with a text of its own, one byte a token, and records what was asked."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from weft.v1 import inference_pb2 as pb

from router.call import Conversation, GenerateCall, GenerateDelta, ModelCard, TokenName, TokenReader
from router.errors import InvalidRequestError, ModelNotFoundError, RouterError
from router.keys import Tenant

EOS = 256
"""The one token that is no byte."""
VOCAB_SIZE = 257
CACHED_TOKENS = 3
DEADLINE_S = 120.0


class FakeDispatch:
    """Serves one model, "fake/model". Tokens are bytes; a prompt's tokens are those of its text."""

    def __init__(self, reply: str = "Hello world") -> None:
        self.reply = reply
        self.model = ModelCard(name="fake/model", max_context=64, vocab_size=VOCAB_SIZE, ready_replicas=1)
        self.calls: list[GenerateCall] = []
        self.tokenized: list[str | Conversation] = []
        self.refused: list[tuple[RouterError, str]] = []
        self.aborted: list[str] = []
        """Request ids of the calls that were closed before their end."""
        self.error: Exception | None = None
        """Raised by every call, after `error_after` tokens."""
        self.error_after = 0
        self.hold_after: int | None = None
        """Every call stops after this many tokens, until it is aborted."""
        self.eos_token_id = EOS
        """The end-of-sequence token of the tokenizer; every whole answer ends with EOS."""
        self._changed = asyncio.Event()

    async def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateDelta, None]:
        is_over = False
        self.calls.append(call)
        self._changed.set()
        try:
            async for delta in self._deltas(call):
                is_over = delta.finished is not None
                yield delta
        except RouterError:
            is_over = True
            raise
        finally:
            if not is_over:
                self.aborted.append(call.request_id)
                self._changed.set()

    def refuse(self, error: RouterError, *, request_id: str, tenant: Tenant | None) -> None:
        self.refused.append((error, request_id))

    async def tokenize(
        self, model: str, prompt: str | Conversation, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        self._check_model(model)
        self.tokenized.append(prompt)
        text = prompt if isinstance(prompt, str) else "".join(message.content for message in prompt.messages)
        return (*text.encode(), EOS) if add_special_tokens else tuple(text.encode())

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        self._check_model(model)
        return self.decode(token_ids, skip_special_tokens)

    async def token_names(self, tokenizer: TokenReader, token_ids: Collection[int]) -> dict[int, TokenName]:
        return {each: tokenizer.token_name(each) for each in token_ids}

    async def prompt_text(self, tokenizer: TokenReader, token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text = bytes(token_id for token_id in ids if token_id < EOS).decode(errors="replace")
        return text if skip_special_tokens else text + "<eos>" * list(ids).count(EOS)

    def token_name(self, token_id: int) -> TokenName:
        return TokenName(b"<eos>", is_special=True) if token_id == EOS else TokenName(bytes([token_id]))

    def list_models(self) -> list[ModelCard]:
        return [self.model]

    async def wait_for_calls(self, count: int) -> None:
        """Wait until so many calls have begun."""
        await self._wait(lambda: len(self.calls) >= count)

    async def wait_for_aborts(self, count: int) -> None:
        """Wait until so many calls were aborted."""
        await self._wait(lambda: len(self.aborted) >= count)

    async def _deltas(self, call: GenerateCall) -> AsyncGenerator[GenerateDelta, None]:
        self._check(call)
        request_id = call.request_id or "made-by-the-router"
        sampling = call.sampling
        limit = sampling.max_tokens if sampling.HasField("max_tokens") else self.model.max_context
        reply, stop = _cut(self.reply, list(sampling.stop))
        token_ids = [*reply.encode(), *([] if stop else [EOS])][:limit]
        shown = ""
        for count, token_id in enumerate(token_ids):
            await self._trouble(count)
            text = bytes(token_ids[: count + 1]) if token_id != EOS else reply.encode()
            certain = text.decode(errors="ignore")
            yield GenerateDelta(
                request_id=request_id,
                model=self.model.name,
                text=certain[len(shown) :],
                token_ids=(token_id,),
                prompt_token_ids=_prompt_token_ids(call),
                tokenizer=self,
                logprobs=(_logprobs(token_id, sampling.logprobs),) if sampling.HasField("logprobs") else (),
            )
            shown = certain
        await self._trouble(len(token_ids))
        finished = pb.Finished(
            reason=pb.FINISH_REASON_STOP if stop or token_ids[-1:] == [EOS] else pb.FINISH_REASON_LENGTH,
            usage=pb.Usage(
                prompt_tokens=len(_prompt_token_ids(call)),
                cached_tokens=CACHED_TOKENS,
                completion_tokens=len(token_ids),
            ),
            replica_ids=["replica-0"],
        )
        if stop:
            finished.stop_string = stop
        elif token_ids[-1:] == [EOS]:
            finished.stop_token_id = EOS
        yield GenerateDelta(
            request_id=request_id,
            model=self.model.name,
            prompt_token_ids=_prompt_token_ids(call),
            tokenizer=self,
            finished=finished,
        )

    def _check(self, call: GenerateCall) -> None:
        self._check_model(call.model)
        if call.sampling.temperature < 0:
            raise InvalidRequestError(
                f"temperature is {call.sampling.temperature}; allowed: at least 0", field="temperature"
            )
        if call.sampling.HasField("max_tokens") and call.sampling.max_tokens < 1:
            raise InvalidRequestError(
                f"max_tokens is {call.sampling.max_tokens}; allowed: at least 1", field="max_tokens"
            )

    def _check_model(self, model: str) -> None:
        if model not in ("", self.model.name):
            raise ModelNotFoundError(f"model {model!r} is not served; served: {self.model.name!r}")

    async def _trouble(self, count: int) -> None:
        if self.error is not None and count == self.error_after:
            raise self.error
        if self.hold_after == count:
            await asyncio.Event().wait()

    async def _wait(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not is_true():
                self._changed.clear()
                await self._changed.wait()


def _prompt_token_ids(call: GenerateCall) -> tuple[int, ...]:
    if call.token_ids is not None:
        return tuple(call.token_ids)
    messages = call.chat.messages if call.chat else ()
    return tuple((call.text or "".join(message.content for message in messages)).encode())


def _cut(text: str, stops: list[str]) -> tuple[str, str]:
    """Return the text before the first stop string in it, and that string."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    return (text[: min(found)[0]], min(found)[1]) if found else (text, "")


def _logprobs(token_id: int, num_top: int) -> pb.TokenLogprobs:
    """The chosen token is the most probable one; its followers in the vocabulary come next."""
    top = [pb.Logprob(token_id=(token_id + rank) % VOCAB_SIZE, logprob=-0.5 - rank) for rank in range(num_top)]
    return pb.TokenLogprobs(chosen=pb.Logprob(token_id=token_id, logprob=-0.5), top=top)
