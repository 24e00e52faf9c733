"""Every metric that Weft's processes expose, with its labels, from their real collectors."""

from collections import defaultdict

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from weft.v1 import control_pb2

from cluster.controller_metrics import ClusterState, ControllerCollector
from cluster.metrics import EngineCollector
from cluster.rank_metrics import RankCollector
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router, text_request
from parallel.mesh import Axis
from workers.engine import EngineLoad
from workers.stats import EngineStats, RankStats

Labels = dict[str, set[str]]
"""Sample name -> the labels that all its series have."""


async def metrics_pages() -> list[str]:
    """Return the pages of a router, of an engine with its rank, and of a controller, once a request was served."""
    return [await _router_page(), _page(_engine(), _rank()), _page(_controller())]


def labels_of(page: str) -> Labels:
    """Return the labels of each sample of a metrics page."""
    found: dict[str, list[set[str]]] = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name].append(set(sample.labels))
    return {name: set.intersection(*sets) for name, sets in found.items()}


async def _router_page() -> str:
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        await router.generate(text_request("hello", max_tokens=3))
        await router.outcomes(1)
        return await router.scrape()


def _page(*collectors: Collector) -> str:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry).decode()


def _engine() -> EngineCollector:
    load = EngineLoad(num_running=0, num_waiting=0, num_free_blocks=1, num_blocks=1, num_pending_tokens=0)
    labels = {"model": "m", "replica": "m-0.1"}
    return EngineCollector(EngineStats(), load=lambda: load, num_cached_blocks=lambda: 0, block_size=16, labels=labels)


def _rank() -> RankCollector:
    stats, axis = RankStats(), Axis(size=2)
    axis.counts["all_reduce"] = 1
    stats.axes = {"tensor": axis}
    stats.info = {
        "kernels": "cpu",
        "attention_backend": "torch",
        "dtype": "float32",
        "quantization": "none",
        "device": "cpu",
    }
    stats.peak_memory_bytes = lambda: 1
    return RankCollector(stats, loaded_ratio=lambda: 1.0, labels={"model": "m", "replica": "m-0.1", "rank": "0"})


def _controller() -> ControllerCollector:
    group = control_pb2.GroupStatus(group_id="m-0", state=control_pb2.GROUP_STATE_READY)
    autoscaling = control_pb2.AutoscalingStatus(max_replicas=1)
    model = control_pb2.ModelStatus(name="m", wanted_replicas=1, groups=[group], autoscaling=autoscaling)
    router = control_pb2.RouterStatus(router_id="router-0", alive=True)
    return ControllerCollector(lambda: ClusterState([model], [router]))
