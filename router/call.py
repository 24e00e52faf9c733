"""One generation as the front ends ask for it and as its deltas come back: plain values that gRPC and HTTP share."""

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
from weft.v1 import inference_pb2 as pb

from router.errors import RouterError
from router.keys import OneRequest, Tenant
from router.spans import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    name: str = ""
    reasoning_content: str = ""
    """What an assistant thought before it said this."""
    tool_call_id: str = ""
    """The call that a tool's message answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A prompt that the model's chat template writes."""

    messages: tuple[ChatMessage, ...]
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """What the template sees beside its own variables, such as `enable_thinking`; values as JSON has them."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with what opens the assistant's turn."""
    continue_final_message: bool = False
    """Whether it ends within the last message, which the answer then continues; it opens no turn then."""

    @property
    def num_characters(self) -> int:
        """Characters of all that the template may show of the messages."""
        return sum(
            len(each.content) + len(each.reasoning_content) + len(each.name) + len(each.tool_call_id)
            for each in self.messages
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """What a client asks for. Exactly one of `text`, `token_ids` and `chat` is set."""

    model: str = ""
    """Empty: the only model served."""
    text: str | None = None
    token_ids: Sequence[int] | None = None
    """As the client sent them, and no tuple yet: to copy 4 million ids holds up all others for a tenth of a second."""
    chat: Conversation | None = None
    sampling: pb.SamplingParams
    """As the client sent it; the dispatcher fills in the defaults and checks every value."""
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""
    """Empty: the dispatcher makes one."""
    timeout_s: float | None = None
    """Time left to the client's deadline."""
    target_ttft_s: float | None = None
    """Target of the time to the first token. None: the model's, or else the router's."""
    target_tpot_s: float | None = None
    """Target of the mean time of each further token, likewise; within both the request counts as goodput."""
    tenant: Tenant | None = None
    """The holder of the API key that came with the call; None: the router needs none."""
    request: OneRequest = field(default_factory=OneRequest)
    """What counts against the key's rate; the choices of one HTTP request share it."""
    counts_prompt: bool = True
    """False where another choice of the same prompt counts it, for metrics, logs and rates as in the usage."""
    trace_context: TraceContext = ()
    """Trace context of the client's span; empty: it has none."""


class TokenName(NamedTuple):
    """What a token reads as on its own."""

    data: bytes
    """UTF-8; not whole where the token is only a part of a character."""
    is_special: bool = False
    """Whether it is a special token, which has its name here and is left out of texts by `skip_special_tokens`."""
    first_data: bytes | None = None
    """What it reads as where a text begins, if that is something else: there the space before a word may be dropped."""


class TokenReader(Protocol):
    """What a tokenizer makes of the tokens of an answer. Safe to use from any thread."""

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, where generation configs may have further ones; None: none does."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    def token_name(self, token_id: int) -> TokenName:
        """Return what a token reads as on its own; nothing for an id without an entry."""


class GenerateDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step gave one call; the last delta has `finished`."""

    request_id: str
    model: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    tokenizer: TokenReader
    """Of these tokens, whatever the model's replicas run meanwhile."""
    logprobs: tuple[pb.TokenLogprobs, ...] = ()
    finished: pb.Finished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """A model as ListModels tells it."""

    name: str
    max_context: int
    vocab_size: int
    ready_replicas: int


def max_context_of(model: str, cards: Sequence[ModelCard]) -> int:
    """Return a model's context; the empty name is the only model served. 0: the model has gone meanwhile."""
    return next((card.max_context for card in cards if model in ("", card.name)), 0)


class Dispatch(Protocol):
    """What the front ends need; dispatch.py is the real one, tests have a double. Errors: those of errors.py."""

    def generate(self, call: GenerateCall) -> AsyncGenerator[GenerateDelta, None]:
        """Serve one call. Closing the generator, or cancelling the task that reads it, aborts the call everywhere."""

    def refuse(self, error: RouterError, *, request_id: str, tenant: Tenant | None) -> None:
        """Count a call that was refused with this error before it was one."""

    async def tokenize(
        self, model: str, prompt: str | Conversation, *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Return the token ids that `generate` would use for this prompt."""

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""

    async def token_names(self, tokenizer: TokenReader, token_ids: Collection[int]) -> dict[int, TokenName]:
        """Return what each token reads as on its own. For the tokens of an answer, whose deltas have their tokenizer:
        ids are not checked, and no place is needed."""

    async def prompt_text(self, tokenizer: TokenReader, token_ids: Sequence[int]) -> str:
        """Return what the prompt of an answer reads as, special tokens written out; as `token_names` otherwise."""

    def list_models(self) -> list[ModelCard]:
        """Return the models served now."""
