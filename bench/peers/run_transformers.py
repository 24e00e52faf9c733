"""transformers as one of the engines that are compared: `generate` on one left-padded batch."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import transformers

from bench.peers.worker import Answer, Job, Loaded, Sampling, Setup, packages, serve_worker


class Generate:
    """One batch that runs until its longest request is done; tokens beyond those asked for do not count."""

    def __init__(self, setup: Setup) -> None:
        self._model = load_model(setup)

    def describe(self) -> Loaded:
        """Return the versions of transformers and torch."""
        return Loaded(packages=packages("transformers", "torch"), dtype=str(self._model.dtype), note="left padding")

    def run(self, job: Job) -> Answer:
        """Pad to the longest prompt, generate as much as the longest output."""
        longest = max(map(len, job.prompts))
        padding = [longest - len(prompt) for prompt in job.prompts]
        rows = [[0] * pad + prompt for pad, prompt in zip(padding, job.prompts, strict=True)]
        input_ids = torch.tensor(rows, device=self._model.device)
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=self._model.device)
        first = _FirstToken()
        with torch.inference_mode():
            ids = self._model.generate(
                input_ids,
                attention_mask=mask,
                generation_config=make_config(job.sampling, max(job.num_out)),
                stopping_criteria=[first],
            )
        generated = ids[:, longest:].tolist()
        tokens = [row[:num_out] for row, num_out in zip(generated, job.num_out, strict=True)]
        return Answer(tokens=tokens, first_s=first.at_s)


def load_model(setup: Setup) -> Any:
    """Return the model in the dtype asked for. Raises ValueError for one that is 8 bits."""
    if setup.dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype is {setup.dtype!r}; allowed: 'bfloat16', 'float16', 'float32'")
    torch.set_num_threads(setup.num_threads)
    dtype = getattr(torch, setup.dtype)
    auto: Any = transformers.AutoModelForCausalLM
    options = {"dtype": dtype, "attn_implementation": "sdpa", "device_map": setup.device}
    model = auto.from_pretrained(setup.model, **options).eval()
    model.generation_config.eos_token_id = None  # `generate` takes from it what its caller leaves open
    return model


def make_config(sampling: Sampling, num_out: int) -> Any:
    """Have exactly so many tokens generated: there is no end of text."""
    make: Callable[..., Any] = transformers.GenerationConfig
    how: dict[str, Any] = {"do_sample": False}
    if not sampling.is_greedy:  # without top_k there would be one of 50
        how = {"do_sample": True, **asdict(sampling)}
    elif sampling.repetition_penalty != 1:
        how["repetition_penalty"] = sampling.repetition_penalty
    return make(max_new_tokens=num_out, eos_token_id=None, pad_token_id=0, use_cache=True, **how)


class _FirstToken:
    """A stopping criterion that never stops and notes when the first token was there."""

    def __init__(self) -> None:
        self.at_s: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.at_s is None:
            input_ids[0, -1].item()  # a GPU has only been given the work so far
            self.at_s = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    """Answer the parent."""
    serve_worker(Generate)


if __name__ == "__main__":
    main()
