"""OpenVINO GenAI as one of the engines that are compared: its continuous batching pipeline, prefixes cached."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from bench.peers.worker import Answer, Job, Loaded, Sampling, Setup, cached, packages, serve_worker

_API: Any = openvino_genai
_PRECISIONS = {
    "bfloat16": ("fp32", "bf16"),
    "float16": ("fp16", "f16"),
    "float32": ("fp32", "f32"),
    "int8": ("int8", "bf16"),
}
"""For each dtype: weights as exported, and what the CPU is asked to compute in (fp32 weights become bf16 when compiled
for it). One without the instructions computes in float32.
"""


class OpenVino:
    """One pipeline; requests are added together and stepped until none is left."""

    def __init__(self, setup: Setup) -> None:
        weights, self._precision = _PRECISIONS[setup.dtype]
        self._weights = weights
        folder = cached(setup.cache, weights, lambda path: _export(setup.model, path, weights))
        scheduler = _API.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = setup.max_num_seqs
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = True
        properties = {"INFERENCE_PRECISION_HINT": self._precision, "INFERENCE_NUM_THREADS": setup.num_threads}
        self._cache = "u8"  # its default whatever it computes in, and faster
        if setup.dtype == "float32":  # in which engines are compared token by token
            self._cache = properties["KV_CACHE_PRECISION"] = "f32"
        self._pipeline = _API.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._num_requests = 0

    def describe(self) -> Loaded:
        """Return versions, and the precision of weights and of computing."""
        return Loaded(
            packages=packages("openvino", "openvino-genai"),
            dtype=f"{self._weights} weights, {self._precision}, keys and values {self._cache}",
        )

    def run(self, job: Job) -> Answer:
        """Run all requests at once; prompts differ between jobs, so the prefix cache finds nothing older."""
        handles = []
        for prompt, num_out in zip(job.prompts, job.num_out, strict=True):
            ids: Any = openvino.Tensor(np.array([prompt], dtype=np.int64))
            self._num_requests += 1
            handles.append(self._pipeline.add_request(self._num_requests, ids, _config(job.sampling, num_out)))
        first_s = None
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            if first_s is None and any(handle.can_read() for handle in handles):
                first_s = time.perf_counter()
        return Answer(tokens=[list(handle.read_all()[0].generated_ids) for handle in handles], first_s=first_s)


def _config(sampling: Sampling, num_out: int) -> Any:
    config = _API.GenerationConfig()
    config.max_new_tokens = num_out
    config.ignore_eos = True
    config.repetition_penalty = sampling.repetition_penalty
    config.do_sample = not sampling.is_greedy
    if config.do_sample:
        config.temperature, config.top_p = sampling.temperature, sampling.top_p
        if sampling.top_k:
            config.top_k = sampling.top_k
    return config


def _export(model: str, path: Path, weights: str) -> None:
    """Convert with optimum, in a process of its own: it needs torch, which the pipeline runs without."""
    command = [
        *(str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", model),
        *("--task", "text-generation-with-past", "--weight-format", weights, str(path)),
    ]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def main() -> None:
    """Answer the parent."""
    serve_worker(OpenVino)


if __name__ == "__main__":
    main()
