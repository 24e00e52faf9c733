"""llama.cpp as one of the engines that are compared: its batched API, through llama-cpp-python.

gguf_file.py writes the checkpoint. Q8_0 is made by llama.cpp's own quantizer.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from bench.peers.gguf_file import write_gguf
from bench.peers.worker import Answer, Job, Loaded, Sampling, Setup, cached, packages, serve_worker

_API: Any = llama_cpp
_BATCH_TOKENS = 2048


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """One request in a slot of the context."""

    slot: int
    prompt: Sequence[int]
    num_out: int
    num_done: int = 0
    """Prompt tokens that are in the cache."""
    tokens: list[int] = field(default_factory=list)
    sampler: Any = None
    """Sampler of llama.cpp; None: the most probable token is taken."""

    @property
    def is_finished(self) -> bool:
        return len(self.tokens) == self.num_out


class LlamaCpp:
    """Two contexts of one model: requests that share a prefix need one cache for all, others are faster apart."""

    def __init__(self, setup: Setup) -> None:
        path = _checkpoint(setup)
        _API.llama_backend_init()
        params = _API.llama_model_default_params()
        params.use_extra_bufts = setup.dtype != "int8"  # Q8_0 in its AMX buffers ended the process (0.3.36)
        self._model = _API.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}; its log says why")
        self._dtype = setup.dtype
        self._vocab_size = _API.llama_vocab_n_tokens(_API.llama_model_get_vocab(self._model))
        self._apart = self._make_context(setup, unified=False)
        self._together = self._make_context(setup, unified=True)
        self._batch = _API.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def describe(self) -> Loaded:
        """Return the version of the bindings, which name the library's commit."""
        dtype = "q8_0" if self._dtype == "int8" else self._dtype
        return Loaded(
            packages=packages("llama_cpp_python"),
            dtype=dtype,
            note="cache and attention as by default; exact in float32",
        )

    def run(self, job: Job) -> Answer:
        """Run prompts in batches as full as they go, decoding sequences first; a shared prefix is computed once."""
        prefix = _shared_prefix(job.prompts)
        context = self._together if prefix else self._apart
        _API.llama_memory_clear(_API.llama_get_memory(context), False)
        sequences = [
            _Sequence(slot=slot, prompt=prompt, num_out=num_out)
            for slot, (prompt, num_out) in enumerate(zip(job.prompts, job.num_out, strict=True))
        ]
        if job.sampling != Sampling():
            for each in sequences:
                each.sampler = self._make_sampler(job.sampling, each)
        if prefix:
            self._fill_prefix(context, sequences, prefix)
        first_s = None
        while any(not each.is_finished for each in sequences):
            self._step(context, sequences)
            if first_s is None and any(each.tokens for each in sequences):
                first_s = time.perf_counter()
        for each in sequences:
            if each.sampler is not None:
                _API.llama_sampler_free(each.sampler)
        return Answer(tokens=[each.tokens for each in sequences], first_s=first_s)

    def _make_context(self, setup: Setup, *, unified: bool) -> Any:
        params = _API.llama_context_default_params()
        slot_tokens = -(-setup.max_context // 256) * 256
        params.n_ctx = -(-setup.cache_tokens // 256) * 256 if unified else slot_tokens * setup.max_num_seqs
        params.n_batch = _BATCH_TOKENS
        params.n_seq_max = setup.max_num_seqs
        params.n_threads = params.n_threads_batch = setup.num_threads
        params.kv_unified = unified
        if setup.dtype == "float32":
            params.type_k = params.type_v = _API.GGML_TYPE_F32
            params.flash_attn_type = _API.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it computes in half precision
        params.no_perf = True
        context = _API.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"llama.cpp makes no context of {params.n_ctx} tokens; its log says why")
        return context

    def _make_sampler(self, sampling: Sampling, sequence: _Sequence) -> Any:
        """Chain samplers: penalties over all tokens; then top-k, cheapest here, which temperature leaves as it is."""
        chain = _API.llama_sampler_chain_init(_API.llama_sampler_chain_default_params())
        stages = []
        if sampling.repetition_penalty != 1:
            length = len(sequence.prompt) + sequence.num_out
            stages.append(
                _API.llama_sampler_init_penalties(self._vocab_size, length, sampling.repetition_penalty, 0.0, 0.0)
            )
        if sampling.is_greedy:
            stages.append(_API.llama_sampler_init_greedy())
        else:
            stages += [
                _API.llama_sampler_init_top_k(sampling.top_k),
                _API.llama_sampler_init_temp(sampling.temperature),
                _API.llama_sampler_init_top_p(sampling.top_p, 1),
                _API.llama_sampler_init_dist(sequence.slot),
            ]
        for stage in stages:
            _API.llama_sampler_chain_add(chain, stage)
        for token in sequence.prompt:
            _API.llama_sampler_accept(chain, token)
        return chain

    def _fill_prefix(self, context: Any, sequences: Sequence[_Sequence], prefix: int) -> None:
        """Compute the prefix for the first sequence and let the others refer to it."""
        memory = _API.llama_get_memory(context)
        for start in range(0, prefix, _BATCH_TOKENS):
            self._batch.n_tokens = 0
            for position in range(start, min(start + _BATCH_TOKENS, prefix)):
                self._put(sequences[0].prompt[position], position, 0, wanted=False)
            self._decode(context)
        for sequence in sequences:
            if sequence.slot:
                _API.llama_memory_seq_cp(memory, 0, sequence.slot, 0, prefix)
            sequence.num_done = prefix

    def _step(self, context: Any, sequences: Sequence[_Sequence]) -> None:
        self._batch.n_tokens = 0
        sampled: list[_Sequence] = []
        places: list[int] = []
        for each in sequences:
            if each.tokens and not each.is_finished:
                self._put(each.tokens[-1], len(each.prompt) + len(each.tokens) - 1, each.slot, wanted=True)
                sampled.append(each)
                places.append(self._batch.n_tokens - 1)
        for each in sequences:
            while each.num_done < len(each.prompt) and self._batch.n_tokens < _BATCH_TOKENS:
                is_last = each.num_done == len(each.prompt) - 1
                self._put(each.prompt[each.num_done], each.num_done, each.slot, wanted=is_last)
                each.num_done += 1
                if is_last:
                    sampled.append(each)
                    places.append(self._batch.n_tokens - 1)
        self._decode(context)
        if any(each.sampler is not None for each in sampled):
            tokens = [
                _API.llama_sampler_sample(each.sampler, context, place)
                for each, place in zip(sampled, places, strict=True)
            ]
        else:
            tokens = self._best_tokens(context, len(sampled))
        for each, token in zip(sampled, tokens, strict=True):
            each.tokens.append(token)
            if each.is_finished:
                _API.llama_memory_seq_rm(_API.llama_get_memory(context), each.slot, -1, -1)

    def _put(self, token: int, position: int, slot: int, *, wanted: bool) -> None:
        batch, index = self._batch, self._batch.n_tokens
        batch.token[index] = token
        batch.pos[index] = position
        batch.n_seq_id[index] = 1
        batch.seq_id[index][0] = slot
        batch.logits[index] = wanted
        batch.n_tokens = index + 1

    def _decode(self, context: Any) -> None:
        status = _API.llama_decode(context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode gave {status}; allowed: 0")

    def _best_tokens(self, context: Any, number: int) -> list[int]:
        if not number:
            return []
        logits: NDArray[np.float32] = np.ctypeslib.as_array(
            _API.llama_get_logits(context), shape=(number, self._vocab_size)
        )
        best: list[int] = logits.argmax(axis=1).tolist()
        return best


def _shared_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many tokens all prompts begin with, leaving each one token of its own; 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    return next((index for index, column in enumerate(columns) if len(set(column)) > 1), 0)


def _checkpoint(setup: Setup) -> Path:
    whole = "bfloat16" if setup.dtype == "int8" else setup.dtype
    plain = cached(setup.cache, f"{whole}.gguf", lambda path: write_gguf(Path(setup.model), path, dtype=whole))
    if setup.dtype != "int8":
        return plain
    return cached(setup.cache, "q8_0.gguf", lambda path: _quantize(plain, path))


def _quantize(plain: Path, path: Path) -> None:
    params = _API.llama_model_quantize_default_params()
    params.ftype = _API.LLAMA_FTYPE_MOSTLY_Q8_0
    status = _API.llama_model_quantize(str(plain).encode(), str(path).encode(), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama_model_quantize gave {status}; allowed: 0")


def main() -> None:
    """Answer the parent."""
    serve_worker(LlamaCpp)


if __name__ == "__main__":
    main()
