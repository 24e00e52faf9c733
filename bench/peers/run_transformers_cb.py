"""transformers' continuous batching as one of the engines that are compared."""

from typing import Any

import transformers

from bench.peers.run_transformers import load_model, make_config
from bench.peers.worker import Answer, Job, Loaded, Sampling, Setup, packages, serve_worker

_TIMEOUT_S = 1.0
_GPU_MEMORY_SHARE = 0.3
"""Of the memory that is free once the model is loaded."""


class ContinuousBatching:
    """A manager of continuous batching with a thread of its own, kept between jobs."""

    def __init__(self, setup: Setup) -> None:
        self._model = load_model(setup)
        config = _config(setup)
        self._manager = self._model.init_continuous_batching(
            generation_config=make_config(Sampling(), setup.max_context), continuous_batching_config=config
        )
        self._manager.start()

    def describe(self) -> Loaded:
        """Return the versions of transformers and torch."""
        return Loaded(packages=packages("transformers", "torch"), dtype=str(self._model.dtype), note="sdpa")

    def run(self, job: Job) -> Answer:
        """Run all requests at once. When the first token was there is not told: results come whole.

        Raises ValueError for tokens that are drawn: what the manager has been made with holds for all requests.
        """
        if job.sampling != Sampling():
            raise ValueError(f"sampling is {job.sampling}; allowed: {Sampling()}")
        ids = [
            self._manager.add_request(prompt, max_new_tokens=num_out, eos_token_id=-1)
            for prompt, num_out in zip(job.prompts, job.num_out, strict=True)
        ]
        found: dict[str, list[int]] = {}
        while len(found) < len(ids):
            result = self._manager.get_result(timeout=_TIMEOUT_S)
            if result is not None and result.is_finished():
                found[result.request_id] = list(result.generated_tokens)
            elif result is None and not self._manager.is_running():
                raise RuntimeError("transformers' batching thread ended; the log says why")
        return Answer(tokens=[found[each] for each in ids])


def _config(setup: Setup) -> Any:
    """Return sizes that fit the workloads: without a GPU the manager would take a share of all memory. On one it
    finds them itself, in a share that leaves room for the other engines.
    """
    make: Any = transformers.ContinuousBatchingConfig
    if setup.device == "cuda":
        return make(max_requests_per_batch=setup.max_num_seqs, max_memory_percent=_GPU_MEMORY_SHARE)
    page_size = 64
    return make(
        page_size=page_size,
        num_blocks=setup.cache_tokens // page_size + 2 * setup.max_num_seqs,
        max_batch_tokens=2048,
        max_requests_per_batch=setup.max_num_seqs,
    )


def main() -> None:
    """Answer the parent."""
    serve_worker(ContinuousBatching)


if __name__ == "__main__":
    main()
