"""Steps that a rank runs before there are requests: to measure what they take, and for what happens only once.

Plans are run by model_runner.py; graphs are recorded by the layers themselves, when they see a size of step.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import numpy as np

from parallel.decoder import Decoder
from parallel.device.base import Device
from parallel.kernels.cuda_buckets import (
    TOKEN_BUCKETS,
    StepBucket,
    fullest_context,
    largest_mixed,
    largest_pieces,
    largest_steps,
)
from workers.config import EngineConfig
from workers.plan import NewSequence, ScheduledSequence, ScheduledSequences, StepPlan
from workers.request import SamplingParams
from workers.stats import RankStats

logger = logging.getLogger(__name__)

_MOST_SAMPLING = SamplingParams(top_p=0.9, logprobs=1, repetition_penalty=1.1)
"""What takes most memory and work of the sampler."""
_WAYS_TO_SAMPLE = (
    _MOST_SAMPLING,
    *(SamplingParams(temperature=t, repetition_penalty=penalty) for t in (1.0, 0.0) for penalty in (1.1, 1.0)),
)
"""What brings up all kernels of the sampler. Logits are float32 where a row wants more than the largest of them; and
tensor-parallel ranks look through their own parts of logits, edited or not, unless a row wants more than that."""


class Rehearsal:
    """Runs steps that nobody has asked for. All ranks of a group run the same ones together: layers may communicate."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        device: Device,
        config: EngineConfig,
        stats: RankStats,
        small_cache: Callable[[], AbstractContextManager[None]],
        run: Callable[[StepPlan], None],
    ) -> None:
        """`run` carries out a plan and forgets its sequences, in the cache that there is or, inside of `small_cache`,
        in one of a single block; `stats`: where to note what was recorded.
        """
        self._decoder = decoder
        self._device = device
        self._config = config
        self._stats = stats
        self._small_cache = small_cache
        self._run = run

    def profile(self) -> None:
        """Run the largest step: the whole token budget, as many sampled rows as there can be; its last sequence has
        the longest context, and then that with which attention keeps the most partitions of the others.
        """
        max_context = self._decoder.description.max_context
        lengths = _largest_lengths(self._config, max_context)
        with self._small_cache():
            for context in sorted({fullest_context(len(lengths), max_context), max_context}):
                start = max(0, context - lengths[-1])
                self._run_step([*((0, length) for length in lengths[:-1]), (start, lengths[-1])])

    def measure_graph_bytes(self) -> int:
        """Return the bytes that graphs will take, estimated from the three largest of each kind.

        These bring the memory of intermediate results, which all graphs share: the first most of it, the next ones
        some, for fewer tokens may have more partitions. Each of the rest is taken to need the lesser of what the second
        and the third need. The graphs are of the small cache, and dropped when the real one is seen.
        """
        graph_bytes = 0
        with self._small_cache():
            for steps in self._steps_to_record():
                free_bytes = [self._device.free_memory_bytes()]
                for step in filter(self._is_recorded, steps[:3]):
                    self._run_size(step)
                    free_bytes.append(self._device.free_memory_bytes())
                taken = [max(0, before - after) for before, after in pairwise(free_bytes)]
                graph_bytes += sum(taken) + min(taken[1:], default=0) * max(0, len(steps) - 3)
        return graph_bytes

    def run_ahead(self) -> None:
        """Run small steps, for what happens once should not be part of a request.

        On a CPU it is one; on CUDA one of each size of which the layers record a graph, or would, for kernels are
        compiled by these sizes; and one for each way to sample.
        """
        if not self._device.works_by_itself:
            self._run_step([(0, 1)])
            return
        if self._config.max_cudagraph_capture_size:
            self._record_steps()
        else:
            self._run_without_recording()
        for sampling in _WAYS_TO_SAMPLE:
            self._run_step([(0, min(2, self._decoder.description.max_context))], sampling)

    def _steps_to_record(self) -> list[list[StepBucket]]:
        """The sizes of steps that may be recorded: with chunks, whole or in pieces, and of decodes."""
        max_size = self._config.max_cudagraph_capture_size
        return self._steps(max_size) if max_size else []

    def _steps(self, max_size: int) -> list[list[StepBucket]]:
        """The same where the largest step of decodes has so many sequences."""
        scheduler, max_context = self._config.scheduler, self._decoder.description.max_context
        max_num_seqs = min(max_size, scheduler.max_num_seqs)
        max_num_tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_context)
        return [
            largest_mixed(max_num_tokens=max_num_tokens, max_context=max_context),
            largest_pieces(max_num_tokens),
            largest_steps(max_num_seqs=max_num_seqs, max_context=max_context),
        ]

    def _record_steps(self) -> None:
        """Let the layers record each size of step, the largest first, whose memory the others then share."""
        start_s = time.perf_counter()
        for steps in self._steps_to_record():
            for step in filter(self._is_recorded, steps):
                self._run_size(step)
            took_s = time.perf_counter() - start_s
            logger.info("%d sizes of steps are recorded after %.1f s", self._decoder.num_recorded, took_s)
        if num_recorded := self._decoder.num_recorded:
            self._stats.num_recorded_steps = num_recorded
            self._stats.recording_s = time.perf_counter() - start_s

    def _run_without_recording(self) -> None:
        mixed, _, decodes = self._steps(TOKEN_BUCKETS[-1])
        for step in (*mixed, *decodes):
            self._run_size(step)

    def _is_recorded(self, step: StepBucket) -> bool:
        """Whether the layers record steps of this kind, as far as is known: the first that cannot be recorded whole
        shows that none can, and is recorded in pieces.
        """
        if step.is_in_pieces:
            return not self._decoder.records_chunks
        return self._decoder.records_chunks if step.num_chunks else self._decoder.records_whole_steps

    def _run_size(self, step: StepBucket) -> None:
        """Run a step of this size in which one sequence has the longest context: that decides on the bucket."""
        context = step.max_context_len or self._decoder.description.max_context
        if not (step.num_chunks or step.is_in_pieces):
            self._run_step([(context - 1, 1), *[(0, 1)] * (step.num_tokens - 1)])
            return
        num_whole, rest = divmod(step.num_tokens, context)  # of as few sequences as there can be
        start = 0 if num_whole else context - rest
        self._run_step([*[(start, rest)] * (rest > 0), *[(0, context)] * num_whole])

    def _run_step(self, shares: Sequence[tuple[int, int]], sampling: SamplingParams = _MOST_SAMPLING) -> None:
        """Run a step of new sequences that nobody has asked for, (start, tokens) of each, all in the first block."""
        new = [NewSequence(slot, [0] * num, num, sampling, []) for slot, (_, num) in enumerate(shares)]
        scheduled = (ScheduledSequence(slot, start, num, [], [], True) for slot, (start, num) in enumerate(shares))
        self._run(StepPlan(0, [], new, ScheduledSequences.of(scheduled)))


def _largest_lengths(config: EngineConfig, max_context: int) -> list[int]:
    """Return tokens of each slot, the budget spent: one for each, and the rest shared by the last ones."""
    budget, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    lengths = np.ones(num_seqs, np.int64)
    for slot in reversed(range(num_seqs)):
        lengths[slot] += min(budget - int(lengths.sum()), max_context - 1)
    return [int(length) for length in lengths]
