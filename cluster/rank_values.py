"""What a rank of a replica group is told, and what it tells the controller. Imports no Ray.

A router tells by an Outcome too why it has ended.
"""

from dataclasses import dataclass, field, fields

from weft.recording import RecordingConfig

from cluster.revision_files import RevisionText
from router.config import TracingConfig
from router.tls import InnerTls
from workers.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """What a rank has of its node's cores, where its settings do not say how many threads it has."""

    num_ranks: int
    """Ranks that share them."""
    num_cpus: float
    """CPUs that Ray has there, hyperthreads counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Which rank of which replica, and what it runs."""

    replica_id: str
    model: str
    """What clients call it."""
    rank: int
    engine: EngineConfig
    node_share: NodeShare
    text: RevisionText | None = None
    """What the model's folder must hold on every node; None: not known."""
    drain_timeout_s: float = 30.0
    """Time after SIGTERM until requests in flight move elsewhere."""
    stream_interval_s: float = 0.0
    """Seconds between the leader's frames of steps (replica_connection.py)."""
    log_level: str = "warning"
    tracing: TracingConfig = field(default_factory=TracingConfig)
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    inner_tls: InnerTls | None = None
    """TLS of the leader's gRPC service, with files of the node that it runs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank runs."""

    node: str
    """Address of the node."""
    pid: int
    node_id: str = ""
    """Ray id of the node."""
    log_file: str = ""
    """Path on that node; empty: the rank logs to no file."""
    metrics_address: str = ""
    """Where Prometheus reads what the rank counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddresses:
    """Where a READY replica listens."""

    address: str
    metrics_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Why a process, or a whole formation, ended by itself."""

    message: str
    is_refusal: bool = False
    """The model or the settings cannot work; another attempt would end the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """How busy a replica is."""

    num_running: int
    num_waiting: int
    kv_usage: float
    """Share of its KV blocks that requests use, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """How a rank is: what a controller must know to take over one that it did not start, and when it is ready."""

    place: RankPlace
    has_begun: bool
    addresses: ReplicaAddresses | None
    """Where the replica listens; None: the rank leads none, or does not serve yet."""
    slowness: str = ""
    """Why it computes in plain torch where compiled kernels were wanted; empty: it does not, or has no weights yet."""

    def __setstate__(self, state: list[object]) -> None:
        """Be what a rank has told; fields that one of earlier code lacks, which come last, have their defaults."""
        defaults = [each.default for each in fields(self)[len(state) :]]
        for each, value in zip(fields(self), [*state, *defaults], strict=False):
            object.__setattr__(self, each.name, value)
