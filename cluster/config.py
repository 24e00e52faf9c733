"""What a user may set, as YAML or as flags, and the frozen values that it becomes.

Both ways go through `ClusterFile`: unknown keys are refused and every message begins with the dotted path. The sections
that belong to the engine and the router are those packages' own dataclasses, so there is one list of settings.
"""

import dataclasses
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from weft.addresses import join_host_port
from weft.recording import RecordingConfig
from weft.yaml_text import read_yaml

from cluster.autoscaler import AutoscalerConfig
from cluster.defaults import DEFAULT_CONTROL_METRICS_PORT, DEFAULT_CONTROL_PORT, DEFAULT_HOST
from cluster.errors import ClusterConfigError
from cluster.models import DEFAULT_MODEL
from cluster.settings_json import settings_json
from parallel.kernels.cuda_buckets import TOKEN_BUCKETS
from router.config import PolicyName, Port, RouterConfig, TracingConfig
from router.config_faults import NO_BLANKS, check_sizes, describe_faults
from router.settings import RouterSettings, Section
from router.tls import InnerTls, TlsFiles
from workers.config import (
    AttentionBackendName,
    CacheConfig,
    DeviceName,
    DtypeName,
    EngineConfig,
    GraphSize,
    KernelsName,
    MaxContext,
    NumThreads,
    ParallelConfig,
    QuantizationName,
    SchedulerConfig,
    StepTimeout,
)
from workers.errors import EngineConfigError

_MAX_NAME = 128  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model that the cluster serves and how many replicas of it."""

    name: str
    """What clients call it."""
    source: str
    """A folder, a packaged name or a hub id."""
    replicas: int
    cpus_per_rank: float
    """Ray CPUs that each rank reserves."""
    accelerator: str | None
    """Type of the GPUs, as Ray names it; None: any."""
    start_timeout_s: float
    drain_timeout_s: float
    """Seconds until requests on a group that leaves move to another replica."""
    section: "ModelSection"
    """The settings that this was made from."""
    engine: EngineConfig
    """Settings of the engine, whose `model` is `source` until a rank resolves it on its own node."""
    stream_interval_s: float | None = None
    """Seconds between frames of steps; None: what suits the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The wanted state of a whole cluster."""

    models: tuple[ModelSpec, ...]
    host: str
    control_port: int
    control_metrics_port: int
    inner_tls: InnerTls | None
    """TLS of every gRPC connection inside the cluster, the router's included; None: plain text."""
    router: RouterConfig
    """Settings that all routers have, but for ports and ids."""
    num_routers: int
    ray_address: str | None
    """Address of the Ray cluster; None: a local Ray is started for this service alone."""
    file: "ClusterFile"
    """The settings that this was made from."""
    spare_s: float = 0.0
    """How long processes that are started ahead wait for work; 0: there are none."""


_SectionT = TypeVar("_SectionT", bound=Section)

MAX_REPLICAS = 4096
"""Limit of a model's replicas: a mistyped number is refused, before the controller has made a group of each."""


class ModelSection(Section):
    """One entry of `models`."""

    path: str = DEFAULT_MODEL
    """A folder in Hugging Face layout, a packaged name or a hub id."""
    name: Annotated[str, Field(max_length=_MAX_NAME, pattern=NO_BLANKS)] | None = None
    """What clients call it, no blanks in it; None: the last part of `path`."""
    replicas: Annotated[int, Field(ge=0, le=MAX_REPLICAS)] = 1
    """Number of replica groups."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    layer_partition: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Layers of each pipeline stage, where they are not to be equally many: the last one also has the head."""
    expert_parallel: bool = False
    """Divide experts over the tensor-parallel ranks, each whole; else every rank has a part of each."""
    one_shot_all_reduce: bool = False
    """On CUDA, small all-reduces go through memory that the ranks share, where that works, not through NCCL."""
    dtype: DtypeName = "auto"
    quantization: QuantizationName = "none"
    """"none", or "int8": linear layers and the head in 8 bits."""
    device: DeviceName = "auto"
    kernels: KernelsName = "auto"
    """"auto": the fastest kernels of the device."""
    attention_backend: AttentionBackendName = "auto"
    """Which attention CUDA devices use."""
    compile: bool = False
    """Compile the layers by torch's compiler: on CUDA, or with kernels "reference" or "cpu"."""
    max_cudagraph_capture_size: GraphSize = TOKEN_BUCKETS[-1]
    """On CUDA, the largest decode step that is recorded as a graph, in sequences; 0: no step is recorded."""
    max_context: MaxContext | None = None
    num_threads: NumThreads | None = None
    """CPU threads of each rank; None: a node's cores, hyperthreads not counted, divided over the ranks on it."""
    step_timeout_s: StepTimeout = 60.0
    start_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A formation that is not READY after so long is torn down."""
    cpus_per_rank: Annotated[float, Field(ge=0.001)] = 0.01
    """Ray CPUs that each rank reserves, a fraction or a whole number; raise it to spread CPU replicas over nodes."""
    min_replicas: Annotated[int, Field(ge=0)] = 0
    """Bounds of `replicas`, for whoever changes it while the service runs."""
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = None
    autoscaling: AutoscalerConfig | None = None
    """Rules by which the number follows the load, from `replicas` on and within the bounds; null: it stays as it is."""
    accelerator: str | None = None
    """Place ranks only on GPUs of this type, as Ray names it: "A100", "H100", "L4" and so on; None: on any."""
    drain_timeout_s: Annotated[float, Field(ge=0)] = 30.0
    """Requests on a group that leaves may take so long; then they move to another replica with the tokens they have."""
    stream_interval_s: Annotated[float, Field(ge=0, le=10)] | None = None
    """Tokens that follow each other more closely come in one message, but for a request's first and last; 0: each has
    one; None: 0.02 on a CPU, where messages take time from the model, 0 on a GPU."""
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        name = Path(self.path).name
        return self.name or (name if name not in ("", "..") else os.path.basename(os.path.abspath(self.path)))

    @model_validator(mode="after")
    def _check_bounds(self) -> "ModelSection":
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; allowed: at least min_replicas, {self.min_replicas}"
            )
        if self.autoscaling is not None and self.max_replicas is None:
            raise ValueError("max_replicas is null; allowed: a number, where there is `autoscaling`")
        check_replicas(self, self.replicas)
        return self

    @model_validator(mode="after")
    def _check_served_name(self) -> "ModelSection":
        name = self.served_name
        if len(name) > _MAX_NAME or re.search(NO_BLANKS, name) is None:
            raise ValueError(
                f"path ends in {name!r}; allowed: with a `name`, which has at most {_MAX_NAME} characters, and no "
                "blanks or control characters in it"
            )
        return self

    @field_validator("cpus_per_rank")
    @classmethod
    def _check_cpus(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError(f"{value} is not whole; allowed: a fraction up to 1, or a whole number")
        return value

    def to_spec(self, hash_key: bytes) -> ModelSpec:
        """Return the frozen values. Raises EngineConfigError when they contradict each other."""
        engine = EngineConfig(
            model=self.path,
            dtype=self.dtype,
            quantization=self.quantization,
            device=self.device,
            kernels=self.kernels,
            attention_backend=self.attention_backend,
            compile=self.compile,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
            max_context=self.max_context,
            step_timeout_s=self.step_timeout_s,
            num_threads=self.num_threads,
            hash_key=hash_key,
            cache=self.cache,
            scheduler=self.scheduler,
            parallel=ParallelConfig(
                tensor_parallel=self.tensor_parallel,
                pipeline_parallel=self.pipeline_parallel,
                layer_partition=self.layer_partition,
                expert_parallel=self.expert_parallel,
                one_shot_all_reduce=self.one_shot_all_reduce,
            ),
        )
        return ModelSpec(
            name=self.served_name,
            source=self.path,
            replicas=self.replicas,
            cpus_per_rank=self.cpus_per_rank,
            accelerator=self.accelerator,
            start_timeout_s=self.start_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
            stream_interval_s=self.stream_interval_s,
            section=self,
            engine=engine,
        )


def check_replicas(section: ModelSection, replicas: int) -> None:
    """Raise ValueError when a model may not have so many replicas."""
    least, most = section.min_replicas, section.max_replicas or MAX_REPLICAS
    if not least <= replicas <= most:
        raise ValueError(f"replicas is {replicas}; allowed: {least} to {most}")


class RouterSection(RouterSettings):
    """The front door of the service."""

    port: Port = 50051
    """Port of gRPC; 0: any free port, for this and the other ports."""
    http_port: Port | None = 8000
    """Port of the OpenAI-compatible HTTP front; null: off."""
    metrics_port: Port | None = 9464
    """Port of Prometheus's page; null: off."""
    tls: TlsFiles | None = None
    """TLS of the gRPC and HTTP listeners; null: plain text."""
    api_keys: str | None = None
    """File of the API keys (docs/security.md); null: everybody may ask."""
    num_routers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that share `port` and `http_port`; each has a metrics port of its own, the first one `metrics_port`."""
    policy: PolicyName = PolicyName.PREFIX_AFFINITY
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    unready_s: Annotated[float, Field(ge=0)] = 0.0

    def to_config(
        self,
        *,
        host: str,
        control: str,
        tracing: TracingConfig,
        recording: RecordingConfig,
        inner_tls: InnerTls | None,
    ) -> RouterConfig:
        """Return the router's own values."""
        own = ("num_routers", "port")
        fields = {name: getattr(self, name) for name in RouterSection.model_fields if name not in own}
        fields["link"] = dataclasses.replace(self.link, tls=inner_tls)
        return RouterConfig(
            control=control,
            host=host,
            grpc_port=self.port,
            shares_ports=self.num_routers > 1,
            tracing=tracing,
            recording=recording,
            **fields,
        )


class ControllerSection(Section):
    """The controller's gRPC service, for `weft status`, `weft stop` and routers, and its metrics."""

    port: Port = DEFAULT_CONTROL_PORT
    metrics_port: Port | None = None
    """Port of Prometheus's page; null: 9465 beside the default `port`, else any free one, so that two services fit."""

    @property
    def actual_metrics_port(self) -> int:
        """The port that null stands for, where it is null."""
        if self.metrics_port is not None:
            return self.metrics_port
        return DEFAULT_CONTROL_METRICS_PORT if self.port == DEFAULT_CONTROL_PORT else 0


class RaySection(Section):
    """Which Ray cluster the service runs on."""

    address: str | None = None
    """As in ray.init ("auto" finds the one of this machine); null: start a local one and end it with the service."""
    spare_s: Annotated[float, Field(ge=0)] = 3600.0
    """Seconds that processes which are started ahead on a cluster that was joined wait for work; 0: there are none."""


class ClusterFile(Section):
    """The whole YAML file."""

    models: Annotated[tuple[ModelSection, ...], Field(min_length=1)] = (ModelSection(),)
    host: str = DEFAULT_HOST
    """Address that the router and the controller bind; loopback unless told otherwise."""
    router: RouterSection = RouterSection()
    controller: ControllerSection = ControllerSection()
    tracing: TracingConfig = TracingConfig()
    """Spans of routers and replicas."""
    recording: RecordingConfig = RecordingConfig()
    """What replicas, routers and the autoscaler decide, for `weft replay`."""
    inner_tls: InnerTls | None = None
    """Mutual TLS between routers, replicas, the controller and the `weft` command; null: plain text."""
    ray: RaySection = RaySection()

    @property
    def ports(self) -> dict[str, int | None]:
        """What is listened on, by setting; 0: any free port, None: nothing."""
        return {
            "router.port": self.router.port,
            "router.http_port": self.router.http_port,
            "router.metrics_port": self.router.metrics_port,
            "controller.port": self.controller.port,
            "controller.metrics_port": self.controller.actual_metrics_port,
        }


def load_cluster_file(path: Path) -> dict[str, Any]:
    """Return the YAML file's mapping, not yet checked. Raises ClusterConfigError when there is none."""
    try:
        data = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterConfigError(f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ClusterConfigError(f"{path}: not YAML: {said}") from error
    if not isinstance(data, dict):
        seen = "an empty file" if data is None else f"a {type(data).__name__}"
        keys = ", ".join(ClusterFile.model_fields)
        raise ClusterConfigError(f"{path}: {seen}; allowed: a mapping with the keys {keys}")
    return data


def build_section(data: Mapping[str, Any]) -> ModelSection:
    """Check one model's settings. Raises ClusterConfigError naming every fault by its dotted path."""
    return _validate(ModelSection, data)


def check_section(section: ModelSection) -> None:
    """Raise ClusterConfigError when a section that was made from another one is wrong."""
    build_section(section.model_dump(mode="json"))


def build_spec(data: Mapping[str, Any]) -> ClusterSpec:
    """Check settings and freeze them. Raises ClusterConfigError naming every fault by its dotted path."""
    file = _validate(ClusterFile, data)
    models = []
    for index, section in enumerate(file.models):
        try:
            models.append(section.to_spec(secrets.token_bytes(32)))
        except EngineConfigError as error:
            raise ClusterConfigError(f"models[{index}]: {error}") from error
    _check_unique(models)
    _check_ports(file)
    _check_inner_tls(file)
    return ClusterSpec(
        models=tuple(models),
        host=file.host,
        control_port=file.controller.port,
        control_metrics_port=file.controller.actual_metrics_port,
        inner_tls=file.inner_tls,
        router=file.router.to_config(
            host=file.host,
            control=join_host_port(file.host, file.controller.port),
            tracing=file.tracing,
            recording=file.recording,
            inner_tls=file.inner_tls,
        ),
        num_routers=file.router.num_routers,
        ray_address=file.ray.address,
        file=file,
        spare_s=0.0 if file.ray.address is None else file.ray.spare_s,
    )


def _validate(kind: type[_SectionT], data: Mapping[str, Any]) -> _SectionT:
    # Through JSON: strict mode there takes mappings for dataclasses and names for enums, and coerces nothing else.
    text = settings_json(data)
    check_sizes(data, ClusterConfigError)
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ClusterConfigError(describe_faults(kind, error)) from error


def _check_unique(models: list[ModelSpec]) -> None:
    seen: dict[str, int] = {}
    for index, model in enumerate(models):
        if model.name in seen:
            other = f"models[{seen[model.name]}]"
            raise ClusterConfigError(
                f"models[{index}].name: {model.name!r} is the name of {other}; allowed: one of its own"
            )
        seen[model.name] = index


def _check_ports(file: ClusterFile) -> None:
    owner: dict[int, str] = {}
    for name, port in file.ports.items():
        if port and port in owner:
            raise ClusterConfigError(f"{name}: {port} is {owner[port]} already; allowed: a port of its own, or 0")
        if port:
            owner[port] = name


def _check_inner_tls(file: ClusterFile) -> None:
    if file.router.link.tls is not None:
        raise ClusterConfigError(
            "router.link.tls: given; allowed: the section inner_tls, which holds for the whole cluster"
        )
    if file.inner_tls is None:
        return
    for name in ("cert_file", "key_file", "ca_file"):
        path = getattr(file.inner_tls, name)
        if not Path(path).is_absolute():
            raise ClusterConfigError(f"inner_tls.{name}: {path!r}; allowed: an absolute path, the same on every node")
