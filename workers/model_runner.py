"""One rank's part of a step: a plan's tensors through this stage's layers, and on the last stage to tokens."""

import time

import numpy as np
import torch

from parallel.decoder import Decoder
from parallel.device.base import Device
from parallel.kernels.base import LayerCache
from parallel.mesh import Mesh
from parallel.pipeline import StageLink
from workers.config import EngineConfig
from workers.inputs import InputBuilder, StepInputs
from workers.kv_cache import allocate_caches, choose_num_blocks
from workers.plan import ModelOutput, NewSequence, SampledToken, ScheduledSequence, StepPlan
from workers.request import SamplingParams
from workers.sampler import Sampler
from workers.stats import RankStats


class ModelRunner:
    """Executes plans in order, every rank the same ones. One thread. `allocate` comes before the first `run`."""

    def __init__(
        self, decoder: Decoder, *, mesh: Mesh, device: Device, config: EngineConfig, stats: RankStats | None = None
    ) -> None:
        self._decoder = decoder
        self._mesh = mesh
        self._device = device
        self._config = config
        self._caches: list[LayerCache] = []
        groups = decoder.layer_groups
        self.windows = groups.windows
        """Of each group of layers that has a block table, its sliding window."""
        self._group_of_layer = [groups.group_of_layer[i] for i in decoder.layer_indices]
        self._link = StageLink(
            mesh, hidden_size=decoder.description.hidden_size, dtype=decoder.dtype, device=decoder.device
        )
        self._inputs, self._sampler = self._new_state()
        self._stats = stats or RankStats()
        axes = {"tensor": mesh.tp, "pipeline": mesh.pp}
        self._stats.axes = {name: axis for name, axis in axes.items() if axis.size > 1}

    def choose_num_blocks(self) -> int:
        """Return how many cache blocks this rank can hold. All ranks call it; on CUDA they run a step together."""
        return choose_num_blocks(self._config.cache, self._decoder, self._device, self._profile)

    def allocate(self, num_blocks: int) -> None:
        """Make the cache; `num_blocks` is the same on all ranks."""
        block_size = self._config.cache.block_size
        self._caches = allocate_caches(self._decoder, num_blocks=num_blocks, block_size=block_size)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> ModelOutput | None:
        """Do this rank's part of the next step.

        Returns:
            The sampled tokens on the first tensor rank of the last stage, None on all others.

        Raises:
            CollectiveError: another rank of the group is gone.
        """
        start_s = time.perf_counter()
        output = self._run(plan)
        self._stats.add_step(time.perf_counter() - start_s)
        return output

    def _run(self, plan: StepPlan) -> ModelOutput | None:
        inputs = self._inputs.build(plan)
        x = inputs.token_ids if self._mesh.is_first_stage else self._link.recv(len(inputs.token_ids))
        metas = [inputs.metas[group] for group in self._group_of_layer]
        hidden = self._decoder(x, inputs.positions, self._caches, metas)
        if not self._mesh.is_last_stage:
            self._link.send(hidden)
            return None
        if self._sampler is not None:
            self._sampler.apply(plan)
        sampled = self._sample(hidden, inputs) if len(inputs.sample_slots) else []
        return None if self._sampler is None else ModelOutput(plan.number, sampled)

    def _sample(self, hidden: torch.Tensor, inputs: StepInputs) -> list[SampledToken]:
        rows = hidden if inputs.sample_rows is None else hidden[inputs.sample_rows]
        logits = self._decoder.logits(rows)
        if logits is None or self._sampler is None:
            return []
        return self._sampler.sample(logits, inputs.sample_slots, inputs.sample_positions)

    def _new_state(self) -> tuple[InputBuilder, Sampler | None]:
        num_slots = self._config.scheduler.max_num_seqs
        inputs = InputBuilder(
            num_slots=num_slots,
            max_context=self._decoder.description.max_context,
            block_size=self._config.cache.block_size,
            device=self._decoder.device,
            num_groups=len(self.windows),
        )
        samples = self._mesh.is_last_stage and self._mesh.tp.rank == 0
        return inputs, Sampler(device=self._decoder.device, num_slots=num_slots) if samples else None

    def _profile(self) -> None:
        """Run the largest step: the whole token budget, as many sampled rows as there can be, all in one block."""
        self.allocate(1)
        self.run(_largest_plan(self._config, self._decoder.description.max_context, num_groups=len(self.windows)))
        if not self._mesh.is_last_stage:
            self._link.flush()
        self._caches = []
        self._inputs, self._sampler = self._new_state()


def _largest_plan(config: EngineConfig, max_context: int, *, num_groups: int) -> StepPlan:
    """Every slot taken, the token budget spent: one token for each sequence, and the rest shared by the last ones."""
    budget, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    lengths = np.ones(num_seqs, np.int64)
    for slot in reversed(range(num_seqs)):
        lengths[slot] += min(budget - int(lengths.sum()), max_context - 1)
    sampling = SamplingParams(top_p=0.9, logprobs=1)
    new, scheduled = [], []
    for slot, length in enumerate(lengths.tolist()):
        num_blocks = -(-length // config.cache.block_size) * num_groups
        new.append(NewSequence(slot, [0] * length, length, sampling, []))
        scheduled.append(ScheduledSequence(slot, 0, length, [], [0] * num_blocks, True))
    return StepPlan(0, [], new, scheduled)
