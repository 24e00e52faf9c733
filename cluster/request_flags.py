"""The flags of `weft generate` that say how a text is made, by the names that the client has for them."""

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    """What may be said of one request besides its prompt."""

    max_tokens: Annotated[int | None, typer.Option(help="At most this many tokens.")] = None
    min_tokens: Annotated[int | None, typer.Option(help="At least this many tokens.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None
    top_p: Annotated[float | None, typer.Option()] = None
    top_k: Annotated[int | None, typer.Option()] = None
    min_p: Annotated[float | None, typer.Option()] = None
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None
    repetition_penalty: Annotated[float | None, typer.Option()] = None
    presence_penalty: Annotated[float | None, typer.Option()] = None
    frequency_penalty: Annotated[float | None, typer.Option()] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end its text.")] = False
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of each token and of so many likeliest ones.")
    ] = None
    priority: Annotated[int | None, typer.Option(help="Lower is served first, under the policy `priority`.")] = None
    target_ttft_s: Annotated[
        float | None, typer.Option("--target-ttft", help="Seconds to the first token; slower is no goodput.")
    ] = None
    target_tpot_s: Annotated[
        float | None, typer.Option("--target-tpot", help="Seconds for each further token; slower is no goodput.")
    ] = None
