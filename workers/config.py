"""The engine's settings, as frozen values; cluster/config.py builds them from flags or YAML."""

from dataclasses import dataclass, field
from enum import StrEnum

from parallel.kernels.cuda_buckets import TOKEN_BUCKETS
from workers.errors import EngineConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache of one replica."""

    block_size: int = 16
    """Tokens in a block."""
    num_blocks: int | None = None
    """Blocks in the pool; None: what fits into `memory_fraction`, measured by a profiling run."""
    memory_fraction: float = 0.9
    """Of the device's memory, in (0, 1], for weights, activations and cache together (CUDA)."""
    cpu_cache_bytes: int = 256 << 20
    """Size of the cache on a CPU, where memory belongs to everybody; per rank."""
    dtype: str = "auto"
    """"auto" (that of the model), or "int8": keys and values in 8 bits, with a scale for each token and head (CPU)."""
    enable_prefix_caching: bool = True
    """Keep the blocks of finished requests and share equal prefixes."""
    host_cache_bytes: int = 0
    """Host memory for blocks that are evicted, from which prefixes come back; per rank, 0: none."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise EngineConfigError(f"block_size is {self.block_size}; allowed: at least 1")
        if self.dtype not in ("auto", "int8"):
            raise EngineConfigError(f"the cache's dtype is {self.dtype!r}; allowed: 'auto', 'int8'")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise EngineConfigError(f"num_blocks is {self.num_blocks}; allowed: at least 2")
        if self.cpu_cache_bytes < 1:
            raise EngineConfigError(f"cpu_cache_bytes is {self.cpu_cache_bytes}; allowed: at least 1")
        if not 0 < self.memory_fraction <= 1:
            raise EngineConfigError(f"memory_fraction is {self.memory_fraction}; allowed: more than 0, at most 1")
        if self.host_cache_bytes < 0:
            raise EngineConfigError(f"host_cache_bytes is {self.host_cache_bytes}; allowed: at least 0")
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

    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_num_seqs: int = 256
    """Sequences running at once."""
    max_waiting: int = 1024
    """Requests waiting at once; one more is refused."""
    prefill_chunk_tokens: int | None = None
    """The most prompt tokens of one sequence in a step; None: only the token budget limits."""
    policy: SchedulingPolicy = SchedulingPolicy.FCFS
    """Which request is served first."""
    async_scheduling: bool | None = None
    """Plan a step while the one before it runs, with the tokens that it samples. None: on a GPU; on a CPU without other
    ranks only while requests wait, since one that comes while none does would wait a step longer. Pipeline stages
    overlap by themselves, and never do it."""
    promote_after_s: float | None = 60.0
    """Under all policies but "fcfs", a request that has waited so long goes before all others; None: never."""

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_waiting"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"{name} is {getattr(self, name)}; allowed: at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; allowed: at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can decode in each step"
            )
        if self.prefill_chunk_tokens is not None and self.prefill_chunk_tokens < 1:
            raise EngineConfigError(f"prefill_chunk_tokens is {self.prefill_chunk_tokens}; allowed: at least 1")
        if self.promote_after_s is not None and not self.promote_after_s >= 0:
            raise EngineConfigError(f"promote_after_s is {self.promote_after_s}; allowed: at least 0")

    @property
    def max_chunk_tokens(self) -> int:
        """The most tokens of one sequence in a step."""
        return self.prefill_chunk_tokens or self.max_num_batched_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How one replica's model is split over ranks; rank = stage * tensor_parallel + tensor rank."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: bool = False
    """Experts are divided over the tensor-parallel ranks, each whole; else every rank has a part of each."""
    one_shot_all_reduce: bool = False
    """Small all-reduces of tensor-parallel ranks go through memory that they share, where GPUs and torch have that."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"{name} is {getattr(self, name)}; allowed: at least 1")

    @property
    def world_size(self) -> int:
        """Ranks in the group."""
        return self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that one replica's engine is told."""

    model: str
    """A folder in Hugging Face layout, already on this machine."""
    dtype: str = "auto"
    """"auto" (that of the checkpoint), "float32", "float16" or "bfloat16"."""
    quantization: str = "none"
    """"none", or "int8": linear layers and the head multiply in 8 bits, whatever the dtype of the rest."""
    device: str = "auto"
    """"auto" (CUDA where there is one), "cpu" or "cuda"."""
    kernels: str = "auto"
    """The model's operations: "auto" (the fastest of the device), "reference", "cpu", "cpu-native" or "cuda"."""
    attention_backend: str = "auto"
    """What attends on CUDA: "auto", "flash-attention", "flashinfer" or "triton"."""
    compile: bool = False
    """Compile the layers by torch.compile's compiler, where the kernels leave torch something to see."""
    max_cudagraph_capture_size: int = TOKEN_BUCKETS[-1]
    """On CUDA, decode steps of up to so many sequences are recorded as graphs ahead of requests; 0: no step is."""
    max_context: int | None = None
    """Longest prompt plus output; None: what the model's config says."""
    step_timeout_s: float = 60.0
    """A step that takes longer means that a rank hangs, and ends the group."""
    num_threads: int | None = None
    """CPU threads of each rank; None: the cores of the machine divided over the ranks on it."""
    hash_key: bytes = b""
    """Key of the block hash; equal on all replicas of a model."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise EngineConfigError(f"dtype is {self.dtype!r}; allowed: 'auto', 'float32', 'float16', 'bfloat16'")
        if self.quantization not in ("none", "int8"):
            raise EngineConfigError(f"quantization is {self.quantization!r}; allowed: 'none', 'int8'")
        if self.device not in ("auto", "cpu", "cuda"):
            raise EngineConfigError(f"device is {self.device!r}; allowed: 'auto', 'cpu', 'cuda'")
        if self.kernels not in ("auto", "reference", "cpu", "cpu-native", "cuda"):
            raise EngineConfigError(
                f"kernels are {self.kernels!r}; allowed: 'auto', 'reference', 'cpu', 'cpu-native', 'cuda'"
            )
        if not 0 <= self.max_cudagraph_capture_size <= TOKEN_BUCKETS[-1]:
            raise EngineConfigError(
                f"max_cudagraph_capture_size is {self.max_cudagraph_capture_size}; allowed: 0 to {TOKEN_BUCKETS[-1]}"
            )
        if self.attention_backend not in ("auto", "flash-attention", "flashinfer", "triton"):
            raise EngineConfigError(
                f"attention_backend is {self.attention_backend!r}; "
                "allowed: 'auto', 'flash-attention', 'flashinfer', 'triton'"
            )
