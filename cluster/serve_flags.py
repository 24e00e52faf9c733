"""The flags of `weft serve`, by what they are about, each with the setting of a cluster file that it changes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from cluster.errors import ClusterConfigError
from cluster.models import DEFAULT_MODEL

_of_model = partial(typer.Option, rich_help_panel="Model")
_of_cache = partial(typer.Option, rich_help_panel="Cache and batches")
_of_network = partial(typer.Option, rich_help_panel="Network")


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting that a flag changes."""

    path: str
    unit: int | None = None
    """How many units of the setting are one of the flag: 2**30 for bytes in GiB; None: they are the same."""

    def value(self, flag: Any) -> Any:
        """Return the setting's value for the flag's. Raises ClusterConfigError where that is no number."""
        if isinstance(flag, Path):
            return str(flag)
        if self.unit is None:
            return flag
        if not math.isfinite(flag):
            raise ClusterConfigError(f"{self.path}: {flag}; allowed: a finite number")
        return int(flag * self.unit)


def settings_of(*groups: Any) -> Mapping[str, Any]:
    """Return the settings of all flags that are given, by dotted path. Raises ClusterConfigError."""
    return {
        setting.path: setting.value(flag)
        for group in groups
        for name, setting in _settings(type(group))
        if (flag := getattr(group, name)) is not None
    }


def flag_of(path: str) -> str:
    """Return the flag that changes a setting."""
    groups = (ModelFlags, CacheFlags, NetworkFlags)
    names = {setting.path: name for group in groups for name, setting in _settings(group)}
    return "--" + names[path].replace("_", "-")


def _settings(group: type) -> Iterator[tuple[str, Setting]]:
    """Yield each field of a group that changes a setting, and which."""
    for name, hint in get_type_hints(group, include_extras=True).items():
        yield from ((name, each) for each in hint.__metadata__ if isinstance(each, Setting))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Which model, how it is divided and how it computes."""

    model: Annotated[
        str | None,
        _of_model(help=f"Folder in Hugging Face layout, hub id, or a packaged name. Default: {DEFAULT_MODEL}."),
        Setting("models[0].path"),
    ] = None
    name: Annotated[str | None, _of_model(help="What clients call the model."), Setting("models[0].name")] = None
    tensor_parallel: Annotated[
        int | None,
        _of_model("--tensor-parallel", "--tp", help="Ranks that share each layer."),
        Setting("models[0].tensor_parallel"),
    ] = None
    pipeline_parallel: Annotated[
        int | None,
        _of_model("--pipeline-parallel", "--pp", help="Stages that share the layers."),
        Setting("models[0].pipeline_parallel"),
    ] = None
    expert_parallel: Annotated[
        bool | None,
        _of_model(
            "--expert-parallel/--no-expert-parallel",
            "--ep/--no-ep",
            help="Divide experts over the tensor-parallel ranks, each whole.",
        ),
        Setting("models[0].expert_parallel"),
    ] = None
    replicas: Annotated[int | None, _of_model(help="Number of replica groups."), Setting("models[0].replicas")] = None
    dtype: Annotated[str | None, _of_model(help="auto, float32, float16 or bfloat16."), Setting("models[0].dtype")] = (
        None
    )
    quantization: Annotated[
        str | None, _of_model(help="none, or int8: linear layers in 8 bits."), Setting("models[0].quantization")
    ] = None
    device: Annotated[str | None, _of_model(help="auto, cpu or cuda."), Setting("models[0].device")] = None
    kernels: Annotated[
        str | None, _of_model(help="auto, reference, cpu, cpu-native or cuda."), Setting("models[0].kernels")
    ] = None
    attention_backend: Annotated[
        str | None,
        _of_model(help="On CUDA: auto, flash-attention, flashinfer or triton."),
        Setting("models[0].attention_backend"),
    ] = None
    compile: Annotated[
        bool | None,
        _of_model("--compile/--no-compile", help="Compile the layers by torch's compiler."),
        Setting("models[0].compile"),
    ] = None
    max_cudagraph_capture_size: Annotated[
        int | None,
        _of_model(help="On CUDA: sequences of the largest decode step recorded as a graph; 0: no step is."),
        Setting("models[0].max_cudagraph_capture_size"),
    ] = None
    max_context: Annotated[
        int | None,
        _of_model(help="Longest prompt plus output; less where the KV cache does not hold it."),
        Setting("models[0].max_context"),
    ] = None
    num_threads: Annotated[
        int | None,
        _of_model(help="CPU threads of each rank; default: its share of the cores."),
        Setting("models[0].num_threads"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFlags:
    """What is computed together, and what is kept."""

    max_num_seqs: Annotated[
        int | None, _of_cache(help="Sequences running at once."), Setting("models[0].scheduler.max_num_seqs")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, _of_cache(help="Token budget of a step."), Setting("models[0].scheduler.max_num_batched_tokens")
    ] = None
    prefill_chunk_tokens: Annotated[
        int | None,
        _of_cache(help="Most prompt tokens of one sequence in a step."),
        Setting("models[0].scheduler.prefill_chunk_tokens"),
    ] = None
    async_scheduling: Annotated[
        bool | None,
        _of_cache(
            "--async-scheduling/--no-async-scheduling",
            help="Plan a step while the one before runs; default: on a GPU; on a CPU of one rank while requests wait.",
        ),
        Setting("models[0].scheduler.async_scheduling"),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        _of_cache(help="Who is served first: fcfs, priority, deadline, shortest_remaining or mlfq."),
        Setting("models[0].scheduler.policy"),
    ] = None
    stream_interval: Annotated[
        float | None,
        _of_cache(
            metavar="SECONDS",
            help="Tokens closer together than this share a message; 0: none do. Default: 0.02 on a CPU, else 0.",
        ),
        Setting("models[0].stream_interval_s"),
    ] = None
    block_size: Annotated[
        int | None, _of_cache(help="Tokens in a KV block."), Setting("models[0].cache.block_size")
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        _of_cache(help="auto, or int8: keys and values in 8 bits, on a CPU."),
        Setting("models[0].cache.dtype"),
    ] = None
    num_blocks: Annotated[
        int | None, _of_cache(help="KV blocks; default: what fits."), Setting("models[0].cache.num_blocks")
    ] = None
    memory_fraction: Annotated[
        float | None,
        _of_cache(help="Share of a GPU's memory, for everything."),
        Setting("models[0].cache.memory_fraction"),
    ] = None
    cpu_cache_gb: Annotated[
        float | None,
        _of_cache(min=0, help="KV cache of each rank on a CPU, in GiB."),
        Setting("models[0].cache.cpu_cache_bytes", unit=2**30),
    ] = None
    prefix_caching: Annotated[
        bool | None,
        _of_cache("--prefix-caching/--no-prefix-caching", help="Share equal prefixes."),
        Setting("models[0].cache.enable_prefix_caching"),
    ] = None
    host_cache_gb: Annotated[
        float | None,
        _of_cache(min=0, help="Host memory of each rank for evicted KV blocks, in GiB."),
        Setting("models[0].cache.host_cache_bytes", unit=2**30),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFlags:
    """Where the service listens, how the router chooses, which Ray cluster it is on, and what is recorded."""

    policy: Annotated[
        str | None,
        _of_network(help="How a replica is chosen: round_robin, least_loaded, power_of_two or prefix_affinity."),
        Setting("router.policy"),
    ] = None
    host: Annotated[str | None, _of_network(help="Address to listen on; default: loopback."), Setting("host")] = None
    routers: Annotated[
        int | None,
        _of_network(help="Router processes, on the same gRPC and HTTP ports."),
        Setting("router.num_routers"),
    ] = None
    port: Annotated[int | None, _of_network(help="Port of gRPC; 0: any."), Setting("router.port")] = None
    http_port: Annotated[int | None, _of_network(help="Port of OpenAI HTTP; 0: any."), Setting("router.http_port")] = (
        None
    )
    metrics_port: Annotated[
        int | None, _of_network(help="Port of the router's metrics; 0: any."), Setting("router.metrics_port")
    ] = None
    control_port: Annotated[
        int | None, _of_network(help="Port of the controller; 0: any."), Setting("controller.port")
    ] = None
    ray_address: Annotated[
        str | None,
        _of_network(help='Ray cluster to join ("auto": the one of this machine); default: a local one.'),
        Setting("ray.address"),
    ] = None
    record_decisions: Annotated[
        Path | None,
        _of_network(
            metavar="FOLDER", resolve_path=True, help="Where each process writes what it decides, for `weft replay`."
        ),
        Setting("recording.folder"),
    ] = None
    take_over: Annotated[
        bool, _of_network("--take-over", help="Go on with the service that the Ray cluster has already.")
    ] = False
