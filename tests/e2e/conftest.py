"""One real service for all end-to-end tests: two replica groups of two ranks on a local Ray, behind the router."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import trustme
from helpers.certificates import inner_tls
from helpers.live_cluster import Cluster
from helpers.otlp import Collector, running_collector

from cluster.config import build_spec
from cluster.models import PACKAGED
from cluster.service import Service
from router.tls import InnerTls

REPLICAS = 2
START_TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The model that ships with the program."""
    folder = PACKAGED["weft-tiny"]
    if not (folder / "config.json").is_file():
        pytest.skip("needs the default model")
    return folder


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where the service sends its spans: those of requests whose client asks for it."""
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="session")
def inner_files(tmp_path_factory: pytest.TempPathFactory) -> InnerTls:
    """A certificate of the service, and its authority: all connections inside of it are mutual TLS."""
    return inner_tls(trustme.CA(), tmp_path_factory.mktemp("inner"))


@pytest.fixture(scope="session")
def session_cluster(model_folder: Path, collector: Collector, inner_files: InnerTls) -> Iterator[Cluster]:
    spec = build_spec(
        {
            "models": [
                {
                    "name": "tiny",
                    "path": str(model_folder),
                    "tensor_parallel": 2,
                    "replicas": REPLICAS,
                    "device": "cpu",
                    "dtype": "float32",
                    "step_timeout_s": 10.0,
                    "cache": {"num_blocks": 1024},
                }
            ],
            "router": {"port": 0, "http_port": 0, "metrics_port": 0, "policy": "least_loaded"},
            "controller": {"port": 0},
            "tracing": {"endpoint": collector.endpoint, "sample_ratio": 0.0},
            "inner_tls": asdict(inner_files),
        }
    )
    with Service.start(spec) as service:
        service.wait_ready(timeout_s=START_TIMEOUT_S)
        router = service.status().routers[0]
        yield Cluster(
            service=service,
            grpc_address=router.grpc_address,
            http_address=router.http_address,
            num_replicas=REPLICAS,
        )


@pytest.fixture
def cluster(session_cluster: Cluster) -> Cluster:
    """The service, whole again after whatever the test before did to it."""
    session_cluster.wait_whole()
    return session_cluster
