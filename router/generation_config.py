"""What a model's generation_config.json says of sampling, for requests that do not say it themselves.

As `transformers` reads it: only `do_sample: true` samples, without it a model is greedy whatever the temperature, and
`max_new_tokens` counts before `max_length`, which includes the prompt. Other fields that are not written there are left
to the defaults of the protocol, not to those of `transformers` (top_k 50, 20 tokens), and so is a model without the
file: a client of an API expects the former. End-of-sequence ids are the engine's business (workers/engine.py).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.v1 import inference_pb2 as pb

from router.convert import check_sampling
from router.errors import InvalidRequestError, ModelFilesError

logger = logging.getLogger(__name__)

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty")
_COUNTS = ("top_k", "min_new_tokens", "max_new_tokens", "max_length")

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "min_length": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1, 1.0),
    "penalty_alpha": (0, 0.0),
    "watermarking_config": (),
    "stop_strings": ([], ""),
}
"""Further fields that change what `transformers` generates, and the values with which they do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What a model sets for requests that leave it open."""

    sampling: Mapping[str, float | int] = field(default_factory=lambda: MappingProxyType({}))
    """Fields of the protocol's SamplingParams, except for the number of tokens."""
    max_new_tokens: int | None = None
    max_length: int | None = None
    """Prompt and output together; says nothing of longer prompts."""

    def max_tokens(self, num_prompt_tokens: int, room: int) -> int:
        """Return how many tokens to generate at most, where `room` is what is left of the context."""
        if self.max_new_tokens is not None:
            return min(self.max_new_tokens, room)
        if self.max_length is not None and self.max_length > num_prompt_tokens:
            return min(self.max_length - num_prompt_tokens, room)
        return room


def read_generation_defaults(config: Mapping[str, Any], file: Path) -> GenerationDefaults:
    """Return the defaults that a generation_config.json sets; warn of what it asks for in vain.

    Raises:
        ModelFilesError: a field is of the wrong kind; the message names it and `file`.
    """
    sampling: dict[str, float | int] = {
        name: value for name in _NUMBERS if (value := _number(config, name, file)) is not None
    }
    counts = {name: count for name in _COUNTS if (count := _count(config, name, file)) is not None}
    if "top_k" in counts:
        sampling["top_k"] = counts["top_k"]
    if "min_new_tokens" in counts:
        sampling["min_tokens"] = counts["min_new_tokens"]
    do_sample = config.get("do_sample")
    if do_sample not in (None, True, False):
        raise ModelFilesError(f"do_sample in {file} is {do_sample!r}; allowed: true, false")
    if not do_sample:
        sampling["temperature"] = 0.0
    for name, value in list(sampling.items()):
        try:
            asked = pb.SamplingParams()
            setattr(asked, name, value)
            check_sampling(asked)
        except (InvalidRequestError, ValueError) as error:  # else every request that leaves it open would be refused
            logger.warning("%s: %s; ignored", file, error)
            del sampling[name]
    for name, neutral in _NEUTRAL.items():
        if config.get(name) is not None and config[name] not in neutral:
            logger.warning("%s asks for %s %s, which is not served; ignored", file, name, config[name])
    return GenerationDefaults(
        sampling=MappingProxyType(sampling),
        max_new_tokens=counts.get("max_new_tokens"),
        max_length=counts.get("max_length"),
    )


def _number(config: Mapping[str, Any], name: str, file: Path) -> float | int | None:
    value = config.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ModelFilesError(f"{name} in {file} is {value!r}; allowed: a number")
    return value


def _count(config: Mapping[str, Any], name: str, file: Path) -> int | None:
    value = _number(config, name, file)
    if value is None or (name == "top_k" and value == -1):  # off, as others write it
        return None
    if not math.isfinite(value) or value != int(value) or value < 0 or (name.startswith("max") and value == 0):
        raise ModelFilesError(f"{name} in {file} is {value!r}; allowed: a whole number, none below 0, no maximum of 0")
    return int(value)
