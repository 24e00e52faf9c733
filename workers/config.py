"""The engine's settings, as frozen values; cluster/config.py builds them from flags or YAML."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Gt, Le
from weft.bounds import check_fields

from parallel.kernels.cuda_buckets import TOKEN_BUCKETS
from workers.errors import EngineConfigError

DtypeName: TypeAlias = Literal["auto", "float32", "float16", "bfloat16"]
QuantizationName: TypeAlias = Literal["none", "int8"]
DeviceName: TypeAlias = Literal["auto", "cpu", "cuda"]
KernelsName: TypeAlias = Literal["auto", "reference", "cpu", "cpu-native", "cuda"]
AttentionBackendName: TypeAlias = Literal["auto", "flash-attention", "flashinfer", "triton"]
GraphSize: TypeAlias = Annotated[int, Ge(0), Le(TOKEN_BUCKETS[-1])]
MaxContext: TypeAlias = Annotated[int, Ge(2)]
NumThreads: TypeAlias = Annotated[int, Ge(1), Le(1024)]
StepTimeout: TypeAlias = Annotated[float, Gt(0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of one replica."""

    block_size: Annotated[int, Ge(1)] = 16
    """Tokens in a block."""
    num_blocks: Annotated[int, Ge(2)] | None = None
    """Blocks in the pool; None: what fits into `memory_fraction`, measured by a profiling run."""
    memory_fraction: Annotated[float, Gt(0), Le(1)] = 0.9
    """Share of the device's memory, in (0, 1], for weights, activations and cache together (CUDA)."""
    cpu_cache_bytes: Annotated[int, Ge(1)] = 256 << 20
    """Size of the cache on a CPU, where memory belongs to everybody; per rank."""
    dtype: Literal["auto", "int8"] = "auto"
    """"auto" (that of the model), or "int8": keys and values in 8 bits, with a scale for each token and head (CPU)."""
    enable_prefix_caching: bool = True
    """Keep the blocks of finished requests and share equal prefixes."""
    host_cache_bytes: Annotated[int, Ge(0)] = 0
    """Host memory for blocks that are evicted, from which prefixes come back; per rank, 0: none."""

    def __post_init__(self) -> None:
        check_fields(self, EngineConfigError)
        if self.host_cache_bytes and not self.enable_prefix_caching:
            raise EngineConfigError("host_cache_bytes is for prefixes; allowed: with enable_prefix_caching")


class SchedulingPolicy(StrEnum):
    """Which request is served first; queueing.py says what each does."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    DEADLINE = "deadline"
    SHORTEST_REMAINING = "shortest_remaining"
    MLFQ = "mlfq"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How one replica forms its batches."""

    max_num_batched_tokens: Annotated[int, Ge(1)] = 2048
    """Token budget of a step."""
    max_num_seqs: Annotated[int, Ge(1), Le(1 << 16)] = 256
    """Sequences running at once."""
    max_waiting: Annotated[int, Ge(1)] = 1024
    """Requests waiting at once; one more is refused."""
    prefill_chunk_tokens: Annotated[int, Ge(1)] | None = None
    """The most prompt tokens of one sequence in a step; None: only the token budget limits."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    """Which request is served first."""
    async_scheduling: bool | None = None
    """Plan a step while the one before it runs, with the tokens that it samples. None: on a GPU; on a CPU without other
    ranks only while requests wait, since one that comes while none does would wait a step longer. Pipeline stages
    overlap by themselves, and never do it."""
    promote_after_s: Annotated[float, Ge(0)] | None = 60.0
    """Under all policies but "fcfs", a request that has waited so long goes before all others; None: never."""

    def __post_init__(self) -> None:
        check_fields(self, EngineConfigError)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can decode in each step"
            )

    @property
    def max_chunk_tokens(self) -> int:
        """The most tokens of one sequence in a step."""
        return self.prefill_chunk_tokens or self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How one replica's model is split over ranks; rank = stage * tensor_parallel + tensor rank."""

    tensor_parallel: Annotated[int, Ge(1)] = 1
    pipeline_parallel: Annotated[int, Ge(1)] = 1
    layer_partition: tuple[int, ...] = ()
    """Layers of each pipeline stage; empty: equally many."""
    expert_parallel: bool = False
    """Experts are divided over the tensor-parallel ranks, each whole; else every rank has a part of each."""
    one_shot_all_reduce: bool = False
    """Small all-reduces of tensor-parallel ranks go through memory that they share, where GPUs and torch have that."""

    def __post_init__(self) -> None:
        check_fields(self, EngineConfigError)

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that one replica's engine is told."""

    model: str
    """A folder in Hugging Face layout, already on this machine."""
    dtype: DtypeName = "auto"
    """"auto": that of the checkpoint."""
    quantization: QuantizationName = "none"
    """"none", or "int8": linear layers and the head multiply in 8 bits, whatever the dtype of the rest."""
    device: DeviceName = "auto"
    """"auto": CUDA where there is one."""
    kernels: KernelsName = "auto"
    """The model's operations; "auto": the fastest of the device."""
    attention_backend: AttentionBackendName = "auto"
    """Implementation of attention on CUDA; "auto": the fastest that is installed."""
    compile: bool = False
    """Compile the layers by torch.compile's compiler, where the kernels leave torch something to see."""
    max_cudagraph_capture_size: GraphSize = TOKEN_BUCKETS[-1]
    """On CUDA, decode steps of up to so many sequences are recorded as graphs ahead of requests; 0: no step is."""
    max_context: MaxContext | None = None
    """Longest prompt plus output; None: what the model's config says. Less where the KV cache does not hold it."""
    step_timeout_s: StepTimeout = 60.0
    """A step that takes longer means that a rank hangs, and ends the group."""
    num_threads: NumThreads | None = None
    """CPU threads of each rank; None: the cores that it may use divided over the ranks on the machine."""
    hash_key: bytes = b""
    """Key of the block hash; equal on all replicas of a model."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_fields(self, EngineConfigError)
