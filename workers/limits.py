"""How long a request may become here, which token is its last, and the refusal of one that cannot be served at all."""

from dataclasses import dataclass

from workers.errors import InvalidRequestError
from workers.request import FinishReason, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthLimits:
    """What the model and the whole block pool can hold of one sequence."""

    max_context: int
    """Tokens of prompt and output together."""
    cache_tokens: int
    """Tokens of one sequence that the whole pool can hold."""

    def max_num_tokens(self, request: Request) -> int:
        """Return the tokens of prompt and output at which the request ends at the latest."""
        return min(len(request.prompt_token_ids) + request.sampling.max_tokens, self.max_context)

    def check(self, request: Request) -> None:
        """Raise InvalidRequestError for a request with nothing to start from, nothing to generate or no room for it."""
        num_prompt, num_generated = len(request.prompt_token_ids), len(request.generated_token_ids)
        max_tokens = request.sampling.max_tokens
        if not num_prompt:
            raise InvalidRequestError("the prompt has 0 tokens; allowed: at least 1")
        if num_prompt + num_generated >= self.max_context:
            what = "prompt and output have" if num_generated else "the prompt has"
            raise InvalidRequestError(
                f"{what} {num_prompt + num_generated} tokens; allowed: at most "
                f"{self.max_context - 1}, so that one more fits into the context of {self.max_context}"
            )
        if num_generated >= max_tokens:
            raise InvalidRequestError(
                f"{num_generated} tokens are generated already; allowed: fewer than max_tokens ({max_tokens})"
            )
        num_computed = self.max_num_tokens(request) - 1  # the last token is never computed
        if num_computed > self.cache_tokens:
            raise InvalidRequestError(
                f"a prompt of {num_prompt} tokens with max_tokens {max_tokens} puts {num_computed} tokens into the "
                f"KV cache; allowed: {self.cache_tokens}, all of it"
            )


def stop_ids(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Return the ids of tokens that end a request: its own, and the model's unless it ignores them."""
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)


def find_end(
    request: Request, num_generated: int, last_token_id: int, *, stop_token_ids: frozenset[int], max_num_tokens: int
) -> FinishReason | None:
    """Return why a request ends with the last of its generated tokens; None: it goes on.

    `stop_token_ids` as of `stop_ids`, and `max_num_tokens` as of LengthLimits. Stop strings are the detokenizer's.
    """
    if last_token_id in stop_token_ids and num_generated > request.sampling.min_tokens:
        return FinishReason.STOP
    if len(request.prompt_token_ids) + num_generated >= max_num_tokens:
        return FinishReason.LENGTH
    return None
