"""One rank's part of a step: a plan's tensors through this stage's layers, and on the last stage to tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from parallel.collectives import broadcast
from parallel.decoder import Decoder
from parallel.device.base import Device
from parallel.device.energy import GpuEnergy
from parallel.host_memory import populate_when_idle
from parallel.kernels.base import AttentionMeta, LayerCache
from parallel.kernels.linears import Search, Sift
from parallel.kernels.sampling import Edits
from parallel.kernels.select import select_sampling, select_taking
from parallel.mesh import Mesh
from parallel.pipeline import StageLink
from workers.config import EngineConfig
from workers.host_cache import HostCache, make_host_cache
from workers.inputs import InputBuilder
from workers.kv_cache import allocate_planes, block_rows, choose_num_blocks, lay_out_caches, num_host_blocks
from workers.model_clock import ModelClock, StepCost
from workers.model_flops import ModelFlops
from workers.model_reads import ModelReads
from workers.overlap import Lookahead, StepExecution, choose_execution, choose_lookahead
from workers.plan import ModelOutput, StepPlan
from workers.rehearsal import Rehearsal
from workers.sampler import Sampled, Sampler, nothing_sampled
from workers.slot_draws import SlotDraws
from workers.stats import RankStats
from workers.step_inputs import StepInputs
from workers.step_times import StepTimes


class _Asked(NamedTuple):
    """What a step asks of the head."""

    search: Search | Sift | None
    """What to find: tokens (`Search`), the logits that matter (`Sift`), or all logits (None)."""
    edits: Edits | None
    """What is done to the logits before tokens are chosen from them."""


_FinishLayers = Callable[[], tuple[torch.Tensor, torch.Tensor | None]]
"""Finishes the layers: returns hidden states, on the last stage those of sampled tokens, and the tokens that the head
found for them if it was searched too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """A plan, and its tensors."""

    plan: StepPlan
    inputs: StepInputs


class ModelRunner:
    """Executes plans in order, every rank the same ones. `allocate` comes before the first.

    A step has two halves, each of which belongs to one thread: `prepare`, which looks at the plan alone, and `start`.
    Of a QUEUED step `start` only queues the work, and what it returns waits for it. Of a JOINED one other threads begin
    it, if they can, and what `start` returns joins them and does the rest.
    """

    def __init__(
        self, decoder: Decoder, *, mesh: Mesh, device: Device, config: EngineConfig, stats: RankStats | None = None
    ) -> None:
        self._decoder = decoder
        self._mesh = mesh
        self._device = device
        self._config = config
        self._caches: list[LayerCache] = []
        self._rows_RBX = torch.empty(0)
        """The memory of the caches, by blocks. The thread that populates it ends when this is gone."""
        groups = decoder.layer_groups
        self.windows = groups.windows
        """Sliding window of each group of layers that has a block table."""
        self.num_host_blocks = num_host_blocks(config.cache, decoder)
        """Slots of the host tier."""
        self._host: HostCache | None = None
        self._group_of_layer = [groups.group_of_layer[i] for i in decoder.layer_indices]
        self._link = StageLink(
            mesh, hidden_size=decoder.description.hidden_size, dtype=decoder.dtype, device=decoder.device
        )
        self.execution = choose_execution(works_by_itself=device.works_by_itself, world_size=mesh.world_size)
        self._is_joined = self.execution is StepExecution.JOINED
        self.lookahead = self._choose_lookahead()
        """Whether steps are planned ahead; it may change in `allocate`."""
        self._last_sampled = torch.zeros(config.scheduler.max_num_seqs, dtype=torch.int64, device=decoder.device)
        self._latest: tuple[Sampled | None, torch.Tensor] = None, torch.empty(0, dtype=torch.int64)
        self._kernels = "cpu" if decoder.kernels.slowness else config.kernels
        """Name of those that go with the decoder's: what could not be compiled is not tried again, which takes long."""
        self._choice = select_sampling(device.torch_device, self._kernels, decoder.dtype)
        self._inputs, self._draws, self._sampler = self._new_state()
        self._reads, self._flops = ModelReads(decoder), ModelFlops(decoder)
        self._served_stats = stats or RankStats()
        _introduce(self._served_stats, decoder, mesh=mesh, device=device, config=config)
        self._stats = RankStats()
        """What steps are noted in: something that nobody reads, until the rehearsals are over."""
        self._clock = ModelClock(device, self._stats)
        self._times = StepTimes()

    def choose_num_blocks(self) -> int:
        """Return how many cache blocks this rank can hold. All ranks call it; on CUDA they run steps together."""
        rehearsal = self._rehearsal()
        return choose_num_blocks(
            self._config.cache, self._decoder, self._device, rehearsal.profile, rehearsal.measure_graph_bytes
        )

    def allocate(self, num_blocks: int) -> None:
        """Make the cache, and its host tier if there is one. All ranks call it, with the same `num_blocks`.

        Then they run small steps together, as rehearsal.py says.
        """
        planes = self._allocate(num_blocks)
        self._rows_RBX = block_rows(self._decoder, planes, num_blocks=num_blocks)
        self._rehearsal().run_ahead()
        self._stats = self._served_stats
        self._clock = ModelClock(self._device, self._stats)
        self.lookahead = self._choose_lookahead()  # steps were run, which may have shown that others can begin them
        if self.num_host_blocks:
            self._host = make_host_cache(self._rows_RBX, num_slots=self.num_host_blocks)
        take = select_taking(self._device.torch_device, self._kernels, self._decoder.dtype)
        if take is not None:
            populate_when_idle(self._rows_RBX, self._times.is_resting, take)

    def _choose_lookahead(self) -> Lookahead:
        return choose_lookahead(
            self.execution,
            async_scheduling=self._config.scheduler.async_scheduling,
            num_stages=self._mesh.pp.size,
            starts_steps=self._decoder.starts_steps,
        )

    def _allocate(self, num_blocks: int) -> torch.Tensor:
        block_size = self._config.cache.block_size
        planes = allocate_planes(self._decoder, num_blocks=num_blocks, block_size=block_size)
        self._caches = lay_out_caches(self._decoder, planes, block_size=block_size)
        return planes

    @contextmanager
    def _small_cache(self) -> Iterator[None]:
        """Have a cache of one block, before there is the real one."""
        self._allocate(1)
        yield
        self._caches = []

    def _rehearsal(self) -> Rehearsal:
        return Rehearsal(
            self._decoder,
            device=self._device,
            config=self._config,
            stats=self._served_stats,
            small_cache=self._small_cache,
            run=self._rehearse,
        )

    def _rehearse(self, plan: StepPlan) -> None:
        """Run a plan, and forget its sequences."""
        self.run(plan)
        self._link.flush()
        self._inputs, self._draws, self._sampler = self._new_state()

    def run(self, plan: StepPlan) -> ModelOutput | None:
        """Do this rank's part of the next step.

        Returns:
            The sampled tokens on the first tensor rank of the last stage, None on all others.

        Raises:
            CollectiveError: another rank of the group is gone.
        """
        return self.start(self.prepare(plan))()

    def prepare(self, plan: StepPlan) -> StepWork:
        """Build the tensors of the next step."""
        return StepWork(plan=plan, inputs=self._inputs.build(plan))

    def start(self, work: StepWork) -> Callable[[], ModelOutput | None]:
        """Start the next step of those prepared; the result waits for its end, and is `run`'s. CollectiveError."""
        begin_s = self._times.begin()
        self._draws.apply(work.plan)
        if self._is_joined and work.inputs.fed_rows.shape[0]:  # only now, for few steps ask
            self._keep_latest()
        asked = self._ask(work.inputs)
        layers = self._start_layers(work, asked)
        cost = None
        if self._is_joined:
            try:  # while the others compute
                cost = self._cost(work, asked)
                self._inputs.look_ahead()
            except BaseException:
                layers()  # what has begun ends before anything else happens
                raise
        queued = None if self._is_joined else self._finish_model(work, asked, layers, None)

        def finish() -> ModelOutput | None:
            sampled = self._finish_model(work, asked, layers, cost) if self._is_joined else queued
            output = None if sampled is None else sampled.result(work.plan.number)
            self._stats.add_step(self._times.end(begin_s))
            return output

        return finish

    def drop_recordings(self) -> None:
        """Let go of recorded steps."""
        self._decoder.drop_recordings()

    def _ask(self, inputs: StepInputs) -> _Asked:
        """Return what to ask of the head, the same on every rank of the last stage."""
        rows, edits = self._draws.rows(inputs.sample_slots), self._edits(inputs)
        search = rows.search(inputs.sample_positions, edits)
        if search is not None:
            is_known = self._decoder.finds_largest if search.noise is None else self._decoder.draws
            return _Asked(search if is_known else None, edits)
        sift = rows.sift(inputs.sample_positions, edits)
        return _Asked(sift if sift is not None and self._decoder.sifts(sift) else None, edits)

    def _edits(self, inputs: StepInputs) -> Edits | None:
        """Return what the sequences do to their logits. The last token of some may be known on the device alone."""
        slots, positions = inputs.sample_slots, inputs.sample_positions
        if not self._draws.has_edits or not inputs.fed_rows.shape[0]:
            return self._draws.edits(slots, positions)
        last_S = self._last_sampled[inputs.sample_slots_device]
        if self.execution is not StepExecution.QUEUED:  # it is known by now
            self._draws.add_early(slots, positions, last_S.tolist())
        return self._draws.edits(slots, positions, last_S)

    def _start_layers(self, work: StepWork, asked: _Asked) -> _FinishLayers:
        """Let other threads begin, where they can; what is returned does the rest of the layers' work."""
        metas = [work.inputs.metas[group] for group in self._group_of_layer]
        if not self._is_joined or not self._decoder.can_start(metas):
            return partial(self._run_layers, work, metas)
        inputs = work.inputs
        x, rows = self._layers_input(work), inputs.sample_rows
        self._clock.begin()
        return self._decoder.start(x, inputs.positions, self._caches, metas, rows_S=rows, search=asked.search)

    @torch.inference_mode()
    def _run_layers(self, work: StepWork, metas: list[AttentionMeta]) -> tuple[torch.Tensor, None]:
        x = self._layers_input(work)
        self._clock.begin()
        rows = work.inputs.sample_rows if self._mesh.is_last_stage else None
        return self._decoder(x, work.inputs.positions, self._caches, metas, rows), None

    def _cost(self, work: StepWork, asked: _Asked) -> StepCost:
        meta, num_sampled = work.inputs.metas[0], len(work.inputs.sample_slots)
        num_searched = 0 if asked.search is None else num_sampled
        return StepCost(
            read_bytes=self._reads.step_bytes(meta, num_searched=num_searched),
            flops=self._flops.step_flops(meta, num_sampled=num_sampled),
        )

    def _layers_input(self, work: StepWork) -> torch.Tensor:
        if self._host is not None:
            self._host.copy(work.plan.saves, work.plan.loads)
        inputs = work.inputs
        return self._token_ids(inputs) if self._mesh.is_first_stage else self._link.recv(len(inputs.token_ids))

    def _finish_model(
        self, work: StepWork, asked: _Asked, layers: _FinishLayers, cost: StepCost | None
    ) -> Sampled | None:
        """Finish the layers, ask the head and sample; on other stages, send on."""
        plan, inputs = work.plan, work.inputs
        hidden, given = layers()
        is_chosen = given is not None or isinstance(asked.search, Search)
        samples = self._mesh.is_last_stage and len(inputs.sample_slots) > 0
        if samples and given is None:
            given = self._ask_head(hidden, asked)
        self._clock.end(follows=plan.follows, cost=cost or self._cost(work, asked))
        if not self._mesh.is_last_stage:
            self._link.send(hidden)
        sampled = self._sample(given, inputs, asked, is_chosen=is_chosen) if samples else None
        if self._sampler is None:
            return None
        return sampled or nothing_sampled()

    def _token_ids(self, inputs: StepInputs) -> torch.Tensor:
        if inputs.fed_rows.shape[0]:
            inputs.token_ids[inputs.fed_rows] = self._last_sampled[inputs.fed_slots]
        return inputs.token_ids

    @torch.inference_mode()
    def _ask_head(self, hidden: torch.Tensor, asked: _Asked) -> torch.Tensor | None:
        """Return logits, or the tokens themselves; None on ranks that do not sample."""
        if isinstance(asked.search, Search):
            return self._decoder.find(hidden, asked.search, self._choice)
        return self._decoder.logits(hidden, asked.search)

    def _sample(
        self, given: torch.Tensor | None, inputs: StepInputs, asked: _Asked, *, is_chosen: bool
    ) -> Sampled | None:
        sampled = None
        if given is not None and self._sampler is not None:
            rows = inputs.sample_slots, inputs.sample_positions
            if is_chosen:
                sampled = self._sampler.take(given, inputs.sample_slots)
            else:
                edits = asked.edits if asked.search is None else None  # else they are made
                with torch.inference_mode():
                    sampled = self._sampler.sample(given, *rows, edits)
        if self.lookahead is not Lookahead.NEVER:
            self._latest = sampled, inputs.sample_slots_device
            if not self._is_joined:
                self._keep_latest()
        return sampled

    @torch.inference_mode()
    def _keep_latest(self) -> None:
        """Note what was sampled last, for a step that was planned before that was known."""
        sampled, slots = self._latest
        token_ids = torch.zeros_like(slots) if sampled is None else sampled.token_ids.clamp(min=0)
        self._last_sampled[slots] = broadcast(token_ids, self._mesh.tp)

    def _new_state(self) -> tuple[InputBuilder, SlotDraws, Sampler | None]:
        num_slots = self._config.scheduler.max_num_seqs
        inputs = InputBuilder(
            num_slots=num_slots,
            max_context=self._decoder.description.max_context,
            block_size=self._config.cache.block_size,
            device=self._decoder.device,
            num_groups=len(self.windows),
        )
        draws = SlotDraws(num_slots)
        if not self._mesh.is_last_stage or self._mesh.tp.rank > 0:
            return inputs, draws, None
        return inputs, draws, Sampler(device=self._device, draws=draws, choice=self._choice)


def _introduce(stats: RankStats, decoder: Decoder, *, mesh: Mesh, device: Device, config: EngineConfig) -> None:
    """Note what the rank computes with."""
    axes = {"tensor": mesh.tp, "pipeline": mesh.pp}
    stats.axes = {name: axis for name, axis in axes.items() if axis.size > 1}
    stats.info = {
        "kernels": decoder.kernels.name,
        "attention_backend": decoder.kernels.attention_backend,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "quantization": config.quantization,
        "device": device.torch_device.type,
    }
    stats.slowness = decoder.kernels.slowness
    stats.peak_memory_bytes = device.peak_memory_bytes
    stats.energy_j = GpuEnergy.of(device.torch_device).read_j
