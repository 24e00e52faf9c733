"""`weft bench offline`: the engine in this process, all requests at once, no network. One rank."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.errors import BenchConfigError
from bench.load.calls import Call, Chat, Prompt, Session
from bench.load.datasets import DatasetOptions, make_sessions, take_calls
from bench.load.engine_run import run_engine
from bench.load.geometries import find_model
from bench.load.hardware import Ceiling, measure_ceiling
from bench.load.model_cost import ModelCost
from bench.load.statistics import Summary, Targets, summarize
from bench.load.watcher import OfflineWatcher
from bench.machine import Span, Stopwatch
from cluster.config import build_section
from parallel.device.base import Device
from parallel.device.energy import GpuEnergy
from parallel.device.select import select_device
from parallel.errors import DeviceError
from parallel.families.registry import describe_model
from parallel.kernels.select import choose_dtype
from parallel.mesh import Mesh
from parallel.stored_head import untie_stored_head
from router.call import ChatMessage, Conversation
from router.tokenizer import ModelTokenizer
from workers.config import EngineConfig
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.errors import EngineConfigError
from workers.request import SamplingParams
from workers.stats import RankStats


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Which workloads on which model."""

    model: str
    """A geometry of geometries.py, or a model as `weft serve` takes it."""
    settings: Mapping[str, Any]
    """Settings of the model, as in its section of a cluster file."""
    datasets: tuple[DatasetOptions, ...]
    num_requests: int
    """Requests of each dataset that has no end, in each repeat."""
    repeats: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    ignore_eos: bool
    targets: Targets | None
    seed: int
    """Seed of the first repeat; each has the next one, and so other tokens."""

    @property
    def sampling(self) -> SamplingParams:
        """Return how tokens are chosen. Raises InvalidRequestError."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One workload run once. Loading and warm-up are not in it."""

    summary: Summary
    span: Span
    num_steps: int
    mbu: float
    """Bytes that had to be read, over those that memory gives in the same time."""
    flop_utilization: float
    """Operations that had to be done, over those that matrix products do in the same time."""
    peak_memory_bytes: int
    """Resident on a CPU, allocated on a GPU."""
    model_idle_share: float
    """Share of the time with work in which the model did not compute: scheduling, inputs, sampling, outputs."""
    energy_j: float | None
    """Energy that the GPU took; None where nothing tells."""


@dataclass(slots=True, kw_only=True)
class OfflineResult:
    """All workloads on one engine. Filled repeat by repeat, so that who is interrupted keeps what there is."""

    model: Path
    dtype: str
    device: str
    num_parameters: int
    load_s: float
    load_peak_memory_bytes: int
    """The most memory that the process had until the model was loaded and measured."""
    ceiling: Ceiling
    repeats: dict[str, list[Repeat]] = field(default_factory=dict)
    """The repeats of each workload that were run to their end."""
    is_complete: bool = False
    """Whether all were."""

    def median(self, name: str, of: Callable[[Repeat], float | None]) -> float | None:
        """Return the median over a workload's repeats, of those that have the value."""
        values = [value for value in map(of, self.repeats[name]) if value is not None]
        return statistics.median(values) if values else None


def measure_offline(options: OfflineOptions, tell: Callable[[OfflineResult], None], watcher: OfflineWatcher) -> None:
    """Load the model, measure what the machine can, and run each workload: once to warm up, then `repeats` times.

    `tell` is called with the result, also with what there is of it when the rest fails or is interrupted.

    Raises ClusterError, ModelError, EngineError: the model, a setting or a dataset cannot be used; for a dataset that
    cannot be read, or is too long for the model, before anything is loaded.
    """
    watcher.begin("find or make the model", None)
    folder = find_model(options.model)
    config = engine_config(folder, options.settings)
    try:
        device = select_device(config.device)
    except DeviceError as error:
        raise BenchConfigError(str(error)) from error
    dtype = choose_dtype(config.dtype, folder, device, config.kernels)
    encode = _Encoder(folder)
    _check_requests(options, config, encode)
    watcher.begin("load", 1.0)
    started_s = time.perf_counter()
    stats = RankStats()
    engine = build_engine(config, progress=watcher.reach, rank_stats=stats)
    load_s = time.perf_counter() - started_s
    try:
        watcher.begin("measure the machine", None)
        int8_linears, int8_cache = config.quantization == "int8", config.cache.dtype == "int8"
        ceiling = measure_ceiling(device, dtype, int8_linears=int8_linears)
        bench = _Bench(engine, stats, device, ceiling, options, encode)
        result = OfflineResult(
            model=folder,
            dtype=str(dtype).removeprefix("torch.")
            + (", linear layers int8" if int8_linears else "")
            + (", cache int8" if int8_cache else ""),
            device=_device_name(device),
            num_parameters=_num_parameters(folder, dtype),
            load_s=load_s,
            load_peak_memory_bytes=device.peak_memory_bytes(),
            ceiling=ceiling,
        )
        try:
            bench.run_all(options.datasets, watcher, result)
        finally:
            if result.repeats:
                tell(result)
    finally:
        engine.close()


class _Bench:
    def __init__(
        self,
        engine: Engine,
        stats: RankStats,
        device: Device,
        ceiling: Ceiling,
        options: OfflineOptions,
        encode: "_Encoder",
    ) -> None:
        self._engine = engine
        self._stats = stats
        self._device = device
        self._ceiling = ceiling
        self._options = options
        self._encode = encode
        self._energy = GpuEnergy.of(device.torch_device)

    def run_all(self, datasets: Sequence[DatasetOptions], watcher: OfflineWatcher, result: OfflineResult) -> None:
        """Run each in turn, and fill the result."""
        for dataset in datasets:
            for repeat in self._run(dataset, watcher):
                result.repeats.setdefault(str(dataset.kind), []).append(repeat)
        result.is_complete = True

    def _run(self, dataset: DatasetOptions, watcher: OfflineWatcher) -> Iterator[Repeat]:
        """Run one round to warm up, which is not among the results, and the repeats."""
        options = self._options
        watcher.begin(str(dataset.kind), options.repeats + 1)
        for index in range(options.repeats + 1):
            sessions = _make_round(dataset, options, index, vocab_size=self._engine.vocab_size)
            repeat = self._run_once([self._encode(session) for session in sessions], index)
            watcher.reach(index + 1)
            if index:
                yield repeat

    def _run_once(self, sessions: Sequence[Session], index: int) -> Repeat:
        engine, options = self._engine, self._options
        num_steps, stats = engine.stats.num_steps, self._stats
        busy_s, idle_s = stats.model_busy_s, stats.model_idle_s
        read_bytes, flops = stats.model_read_bytes, stats.model_flops
        self._device.reset_peak_memory()
        energy_j = self._energy.read_j()
        watch = Stopwatch()
        records = run_engine(engine, sessions, options.sampling, cache_salt=f"round {index}")
        span = watch.stop()
        used_j = self._energy.read_j()
        busy_s, idle_s = stats.model_busy_s - busy_s, stats.model_idle_s - idle_s
        read_bytes, flops = stats.model_read_bytes - read_bytes, stats.model_flops - flops
        return Repeat(
            summary=summarize(records, options.targets),
            span=span,
            num_steps=engine.stats.num_steps - num_steps,
            mbu=read_bytes / self._ceiling.read_bytes_per_s / span.wall_s,
            flop_utilization=flops / self._ceiling.flops_per_s / span.wall_s,
            peak_memory_bytes=self._device.peak_memory_bytes(),
            model_idle_share=idle_s / (busy_s + idle_s),
            energy_j=None if energy_j is None or used_j is None else used_j - energy_j,
        )


def _make_round(dataset: DatasetOptions, options: OfflineOptions, index: int, *, vocab_size: int) -> Iterator[Session]:
    number = None if dataset.is_workload else options.num_requests
    return take_calls(make_sessions(dataset, vocab_size=vocab_size, seed=options.seed + index), number)


def _check_requests(options: OfflineOptions, config: EngineConfig, encode: "_Encoder") -> None:
    """Refuse what the engine would refuse when it is loaded. Prompts of later rounds mostly have the same lengths.

    Raises InvalidRequestError, and BenchConfigError, also for a file that cannot be read.
    """
    _ = options.sampling  # checked as it is made
    description = describe_model(Path(config.model))
    context = config.max_context or description.max_context
    for dataset in options.datasets:
        sessions = _make_round(dataset, options, 0, vocab_size=description.vocab_size)
        longest = max(len(encode.ids(call.prompt)) for session in sessions for call in session.calls)
        if longest >= context:
            raise BenchConfigError(
                f"{dataset.kind}: a prompt has {longest} tokens; allowed: at most {context - 1}, so that one more fits "
                f"into the model's context of {context}"
            )


class _Encoder:
    """Makes token ids of text and conversations, as a router does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: ModelTokenizer | None = None

    def __call__(self, session: Session) -> Session:
        """Return the session with token ids."""
        return replace(session, calls=tuple(Call(prompt=self.ids(c.prompt), num_out=c.num_out) for c in session.calls))

    def ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt."""
        if isinstance(prompt, tuple):
            return prompt
        if self._tokenizer is None:
            self._tokenizer = ModelTokenizer.from_folder(self._folder)
        if isinstance(prompt, Chat):
            messages = tuple(ChatMessage(**message) for message in prompt.messages)
            return self._tokenizer.render_chat(Conversation(messages=messages))
        return self._tokenizer.encode(prompt)


def engine_config(folder: Path, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the settings of one rank, from those of a model's section. Raises ClusterError, EngineConfigError."""
    section = build_section({**settings, "path": str(folder)})
    config = section.to_spec(hash_key=b"bench").engine
    num_ranks = section.replicas * config.parallel.world_size
    if num_ranks != 1:
        raise EngineConfigError(
            f"{num_ranks} ranks are asked for; allowed offline: 1 (`weft bench serve` measures groups)"
        )
    return config


def _num_parameters(folder: Path, dtype: torch.dtype) -> int:
    """Count the parameters that one rank loads."""
    mesh = Mesh.single()
    return ModelCost.of(
        untie_stored_head(describe_model(folder), folder, mesh=mesh, dtype=dtype), dtype
    ).weights.num_parameters


def _device_name(device: Device) -> str:
    if device.torch_device.type == "cuda":
        return torch.cuda.get_device_name(device.torch_device)
    return str(device.torch_device)
