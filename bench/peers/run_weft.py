"""Weft's engine as one of the engines that are compared, in this checkout's own environment."""

import time
from dataclasses import asdict, replace

from bench.peers.worker import Answer, Job, Loaded, Setup, packages, serve_worker
from workers.config import CacheConfig, EngineConfig, SchedulerConfig
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.request import Request, RequestId, RequestOutput, SamplingParams


class WeftEngine:
    """The engine with its defaults; only the sizes are those that every peer gets."""

    def __init__(self, setup: Setup) -> None:
        cache = CacheConfig()
        config = EngineConfig(
            model=setup.model,
            dtype="bfloat16" if setup.dtype == "int8" else setup.dtype,  # type: ignore[arg-type]  # its flags say which
            quantization="int8" if setup.dtype == "int8" else "none",
            device=setup.device,  # type: ignore[arg-type]
            max_context=setup.max_context,
            num_threads=setup.num_threads,
            cache=replace(
                cache,
                num_blocks=_num_blocks(setup, cache.block_size),
                dtype=setup.kv_cache_dtype,  # type: ignore[arg-type]
            ),
            scheduler=SchedulerConfig(max_num_seqs=setup.max_num_seqs),
        )
        self._dtype = "int8 weights and activations, head too" if setup.dtype == "int8" else setup.dtype
        if setup.kv_cache_dtype != "auto":
            self._dtype += f", cache {setup.kv_cache_dtype}"
        self._engine: Engine = build_engine(config)
        self._num_jobs = 0

    def describe(self) -> Loaded:
        """Return torch's version; the commit of this checkout is told with the machine."""
        return Loaded(packages=packages("torch"), dtype=self._dtype)

    def run(self, job: Job) -> Answer:
        """Run all requests at once; each job has a salt, so that none finds blocks of another."""
        self._num_jobs += 1
        collected = _Collected(len(job.prompts))
        sampling = SamplingParams(**asdict(job.sampling), ignore_eos=True)
        for index, (prompt, num_out) in enumerate(zip(job.prompts, job.num_out, strict=True)):
            self._engine.add_request(
                Request(
                    request_id=RequestId(str(index)),
                    prompt_token_ids=tuple(prompt),
                    sampling=replace(
                        sampling, max_tokens=num_out, logprobs=2 if job.with_gaps else None, seed=self._num_jobs + index
                    ),
                    cache_salt=f"job {self._num_jobs}",
                )
            )
        while collected.num_open:
            for output in self._engine.step().outputs:
                collected.take(output)
        return Answer(
            tokens=collected.tokens,
            first_s=collected.first_s,
            gaps=collected.gaps if job.with_gaps else None,
        )


class _Collected:
    def __init__(self, number: int) -> None:
        self.num_open = number
        self.first_s: float | None = None
        self.tokens: list[list[int]] = [[] for _ in range(number)]
        self.gaps: list[list[float]] = [[] for _ in range(number)]

    def take(self, output: RequestOutput) -> None:
        if output.error is not None:
            raise output.error
        index = int(output.request_id)
        if output.token_ids and self.first_s is None:
            self.first_s = time.perf_counter()
        self.tokens[index] += output.token_ids
        self.gaps[index] += [each.top[0][1] - each.top[1][1] for each in output.logprobs]
        self.num_open -= output.finish is not None


def _num_blocks(setup: Setup, block_size: int) -> int:
    """Return blocks enough for all sequences, each of which leaves its last block partly empty."""
    return setup.cache_tokens // block_size + 2 * setup.max_num_seqs


def main() -> None:
    """Answer the parent."""
    serve_worker(WeftEngine)


if __name__ == "__main__":
    main()
