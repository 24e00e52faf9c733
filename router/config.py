"""The router's settings, as frozen values; flags.py builds them from flags, the cluster from its own YAML."""

import random
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, TypeAlias

from annotated_types import Ge, Le
from weft.bounds import check_fields
from weft.recording import RecordingConfig

from router.errors import RouterConfigError
from router.tls import InnerTls, TlsFiles

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\sA-Z]+")

Port: TypeAlias = Annotated[int, Ge(0), Le(65535)]
MessageBytes: TypeAlias = Annotated[int, Ge(1024), Le(2**31 - 1)]
NumThreads: TypeAlias = Annotated[int, Ge(1), Le(1024)]
_Time: TypeAlias = Annotated[float, Ge(0.001)]
_StopTime: TypeAlias = Annotated[float, Ge(0), Le(10**15)]  # as of any setting: infinity is no time

_MAX_DOUBLINGS = 16  # 0.05 s become an hour; after 1,023 the number would be too large for a float


class PolicyName(StrEnum):
    """How a replica is chosen for a request; policy.py and prefix_policy.py say what each does."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    POWER_OF_TWO = "power_of_two"
    PREFIX_AFFINITY = "prefix_affinity"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """The bounded queue in front of the replicas."""

    max_in_flight: Annotated[int, Ge(1)] = 1024
    """Requests that replicas work on at once, over all models."""
    max_queued: Annotated[int, Ge(0)] = 1024
    """Requests that wait for a place; one more is refused."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How long a client may take: one that takes longer is cut off, for it holds what others wait for. And whose pages
    may be clients."""

    head_timeout_s: _Time = 30.0
    """HTTP: from the connection, or from a request's first byte, to the end of its headers."""
    body_timeout_s: _Time = 120.0
    """HTTP: from the end of a request's headers to the end of its body; for 4 MiB a client needs 280 kbit/s."""
    write_timeout_s: _Time = 60.0
    """How long a client may take nothing of its answer."""
    keep_alive_s: _Time = 75.0
    """HTTP: how long a connection stays open after an answer. Longer than clients and load balancers keep one that
    nobody uses (often 5 to 60 s): who sends on one in the moment in which it is closed gets no answer."""
    allowed_origins: tuple[str, ...] = ()
    """HTTP: browsers let pages of these origins read answers (CORS); "*": of every one. Who asks without a browser is
    not held back by it: that is what API keys are for."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise RouterConfigError(
                    f"allowed_origins has {origin!r}; allowed: '*', or an origin as browsers tell it, such as "
                    "'https://app.example' or 'http://localhost:3000'"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPolicyConfig:
    """What the prefix-affinity policy weighs; everything is counted in tokens still to be computed."""

    request_cost_tokens: Annotated[int, Ge(0)] = 128
    """Work that each request on a replica stands for, besides its tokens still to be computed."""
    cold_credit_tokens: Annotated[int, Ge(0)] = 512
    """How much more work the home of a prefix that nobody holds may have and still get it."""
    home_blocks: Annotated[int, Ge(1)] = 4
    """Leading blocks that decide the home of a cold prefix."""
    load_factor: Annotated[float, Ge(1)] = 1.5
    """A replica with more requests than this times the mean, plus `load_slack`, is no candidate."""
    load_slack: Annotated[int, Ge(0)] = 8

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """When a replica that fails is left alone."""

    max_failures: Annotated[int, Ge(1)] = 3
    """Failures in a row that open the breaker."""
    open_s: Annotated[float, Ge(0)] = 1.0
    """How long an open breaker lets nothing through; doubles each time the probe fails."""
    max_open_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)
        _at_least("max_open_s", self.max_open_s, self.open_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """The stream to a replica, and the one to the controller."""

    connect_timeout_s: _Time = 10.0
    """From dialling to the first message."""
    stall_timeout_s: _Time = 120.0
    """A replica that works on our requests and sends nothing for so long is taken for dead."""
    backoff_s: Annotated[float, Ge(0)] = 0.05
    """Wait before the second dial; doubles with each failure, and half of it is random."""
    max_backoff_s: float = 2.0
    tls: InnerTls | None = None
    """TLS of the connections to controller and replicas; None: they are not encrypted."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)
        _at_least("max_backoff_s", self.max_backoff_s, self.backoff_s)

    def next_wait_s(self, num_failures: int, rng: random.Random) -> float:
        """Return how long to wait before the next dial, after so many that failed in a row."""
        num_doublings = min(num_failures, _MAX_DOUBLINGS)
        return min(self.backoff_s * 2.0**num_doublings, self.max_backoff_s) * rng.uniform(0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverConfig:
    """How long a request looks for a replica; 0: it takes one that is there, or none."""

    max_attempts: Annotated[int, Ge(1)] = 4
    """A request fails when so many replicas broke under it; those that leave as planned do not count."""
    new_request_wait_s: Annotated[float, Ge(0)] = 10.0
    """How long a request that has not begun waits for a ready replica."""
    cold_start_wait_s: Annotated[float, Ge(0)] = 900.0
    """How long a request waits for the first replica of a model that is started when somebody asks."""
    failover_wait_s: Annotated[float, Ge(0)] = 120.0
    """How long a request that has begun waits for another replica; a group needs time to form again."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)


class TraceProtocol(StrEnum):
    """How spans are sent to a collector: OTLP over gRPC or over HTTP."""

    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Spans of requests, by OpenTelemetry."""

    endpoint: str | None = None
    """URL of an OTLP collector, such as http://127.0.0.1:4317; with HTTP .../v1/traces. None: off."""
    protocol: TraceProtocol = TraceProtocol.GRPC
    sample_ratio: Annotated[float, Ge(0), Le(1)] = 1.0
    """Which part of the requests is traced where the caller has not decided, 0 to 1."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise RouterConfigError(f"endpoint is {self.endpoint!r}; allowed: a URL, http:// or https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """What counts as good, and how much is counted apart."""

    slo_ttft_s: Annotated[float, Ge(0)] = 1.0
    """Target of the time to the first token, where neither request nor model has its own; within both it is goodput."""
    slo_tpot_s: Annotated[float, Ge(0)] = 0.1
    """Target of the mean time of each further token, where neither request nor model has its own."""
    log_requests: bool = False
    """A line of JSON in the log for each request that ended (request_log.py)."""
    max_tenants: Annotated[int, Ge(0)] = 64
    """Cache salts that have series of their own, where no API key tells who asks; all others share one."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticModel:
    """A model that is served without a controller."""

    name: str
    path: str
    """Folder with the tokenizer and the configs."""
    addresses: tuple[str, ...]
    """host:port of each replica's weft.v1.Replica service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything one router is told. Either `control` or `models` says where the replicas are."""

    router_id: str = "router-0"
    control: str | None = None
    """host:port of the controller, whose membership the router follows."""
    models: tuple[StaticModel, ...] = ()
    host: str = "127.0.0.1"
    """Address that all listeners bind."""
    grpc_port: Port = 50051
    """gRPC; 0 is any free port, for all listeners."""
    http_port: Port | None = 8000
    """OpenAI-compatible HTTP; None: off."""
    metrics_port: Port | None = 9464
    """Prometheus; None: off."""
    shares_ports: bool = False
    """Other routers of the same service listen on the gRPC and the HTTP port too (SO_REUSEPORT); False: a port that is
    taken is an error. Whoever sets it has seen to it that the ports are nobody else's (cluster/shared_ports.py)."""
    tls: TlsFiles | None = None
    """TLS of the gRPC and HTTP listeners; None: plain text."""
    api_keys: str | None = None
    """File of the API keys (keys.py); None: everybody may ask."""
    policy: PolicyName = PolicyName.PREFIX_AFFINITY
    max_message_bytes: MessageBytes = 4 << 20
    """A larger message from a client is refused."""
    tokenizer_threads: NumThreads = 2
    grace_s: _StopTime = 30.0
    """How long requests in flight may go on after the router was told to stop."""
    unready_s: _StopTime = 0.0
    """How long a router that is told to stop says that it is not ready and still takes requests, so that load balancers
    notice; only then `grace_s` begins."""
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    clients: ClientConfig = field(default_factory=ClientConfig)
    prefix: PrefixPolicyConfig = field(default_factory=PrefixPolicyConfig)
    breaker: BreakerConfig = field(default_factory=BreakerConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    """Whether the router's decisions are recorded, for `weft replay`."""

    def __post_init__(self) -> None:
        check_fields(self, RouterConfigError)
        if (self.control is None) == (not self.models):
            raise RouterConfigError(
                f"control is {self.control!r} and models has {len(self.models)} entries; allowed: one of the two"
            )


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise RouterConfigError(f"{name} is {value}; allowed: at least {least}")
