"""What the controller tells Prometheus: the state of the cluster, and where everything else is to be scraped.

    GET /metrics    groups by state, replicas wanted and ready, restarts, routers
    GET /targets    every router and rank, for `http_sd_configs`: their ports are chosen when they start

Both are read from the controller's state when somebody asks, on the controller's event loop.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from weft.addresses import family_of, join_host_port, split_host_port
from weft.v1 import control_pb2

from cluster.control_server import ControlState
from cluster.errors import StartError
from cluster.status_view import state_name
from router.metrics_listener import IDLE_TIMEOUT_S

_STATES = ("pending", "starting", "ready", "draining", "failed", "stopped")
_THIS_MACHINE = ("0.0.0.0", "::", "127.0.0.1", "::1")
"""Addresses at which a router may listen, or connect from, and which other machines cannot connect to."""
_READ_TIMEOUT_S = 5.0
"""Limit of a scrape: it fails where the event loop is busy for longer, which is the truth."""
_STOP_POLL_S = 0.2
"""How often the listener looks whether it was closed; the controller's end waits for that."""


class ClusterState(NamedTuple):
    """The state of a cluster at one moment."""

    models: Sequence[control_pb2.ModelStatus]
    routers: Sequence[control_pb2.RouterStatus]
    outside_routers: Sequence[control_pb2.RouterStatus] = ()
    """Routers that report and that others started."""


class ControllerCollector(Collector):
    """Turns the cluster's state into metric families."""

    def __init__(self, read: Callable[[], ClusterState]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return every metric as it is now."""
        state = self._read()
        return (*_models(state.models), *_groups(state.models), *_routers(state.routers))


def targets(state: ClusterState, host: str) -> list[dict[str, object]]:
    """Return what `/targets` answers: an entry for each process, with its job and its place as labels.

    Args:
        host: where the caller reaches this machine; routers are on it, and may listen on all of its addresses. Those
            that others started may be elsewhere; `__meta_weft_outside` tells them apart, for relabelling.
    """
    entries = [_router_target(each, host) for each in state.routers if each.metrics_address]
    entries += [
        _router_target(each, host, __meta_weft_outside="true") for each in state.outside_routers if each.metrics_address
    ]
    for model in state.models:
        for group in model.groups:
            for rank in group.ranks:
                if rank.metrics_address:
                    labels = {"job": "weft-rank", "node": rank.node}
                    entries.append({"targets": [rank.metrics_address], "labels": labels})
    return entries


def _router_target(router: control_pb2.RouterStatus, host: str, **labels: str) -> dict[str, object]:
    listens_on, port = split_host_port(router.metrics_address)
    address = join_host_port(host if listens_on in _THIS_MACHINE else listens_on, port)
    return {"targets": [address], "labels": {"job": "weft-router", "router": router.router_id, **labels}}


class ControllerListener:
    """Serves both pages over HTTP, from threads of its own. Made and closed on the controller's event loop."""

    def __init__(
        self,
        state: ControlState,
        outside_routers: Callable[[], Sequence[control_pb2.RouterStatus]],
        *,
        host: str,
        port: int,
    ) -> None:
        """Bind and start. Raises StartError when the port is taken."""
        self._state = state
        self._outside_routers = outside_routers
        self._loop = asyncio.get_running_loop()
        registry = CollectorRegistry()
        registry.register(ControllerCollector(self._read))
        pages = {
            "/metrics": lambda _: (CONTENT_TYPE_LATEST, generate_latest(registry)),
            "/targets": lambda host: ("application/json", msgspec.json.encode(targets(self._read(), host))),
        }
        try:
            self._server = _PageServer(host, port, pages)
        except OSError as error:
            address = join_host_port(host, port)
            raise StartError(f"the controller's metrics cannot listen on {address}: {error.strerror}") from error
        self.address = join_host_port(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_STOP_POLL_S,), daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Stop serving."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()

    def _read(self) -> ClusterState:
        return asyncio.run_coroutine_threadsafe(self._read_here(), self._loop).result(_READ_TIMEOUT_S)

    async def _read_here(self) -> ClusterState:
        return ClusterState(self._state.model_statuses(), self._state.router_statuses(), self._outside_routers())


_Pages = Mapping[str, Callable[[str], tuple[str, bytes]]]


class _PageServer(ThreadingHTTPServer):
    def __init__(self, host: str, port: int, pages: _Pages) -> None:
        self.address_family = family_of(host)
        super().__init__((host, port), _handler(pages))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a caller that has gone, as at the timeout of its scrape."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _handler(pages: _Pages) -> type[BaseHTTPRequestHandler]:
    """Return a handler of these pages; each is told at which of this machine's addresses it was asked for."""

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_TIMEOUT_S

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            if page is None:
                self.send_error(404, f"allowed: {', '.join(pages)}")
                return
            try:
                asked_at = self.connection.getsockname()[0]
                content_type, body = page(asked_at.removeprefix("::ffff:"))  # an IPv4 address, where :: is listened on
            except TimeoutError:
                self.send_error(503, "the controller is busy")
                return
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def _models(models: Sequence[control_pb2.ModelStatus]) -> Iterable[Metric]:
    wanted = GaugeMetricFamily("weft_cluster_replicas_wanted", "Replicas that a model should have.", labels=["model"])
    ready = GaugeMetricFamily("weft_cluster_replicas_ready", "Replicas that take requests.", labels=["model"])
    least = GaugeMetricFamily("weft_cluster_replicas_min", "Fewest that the autoscaler may want.", labels=["model"])
    most = GaugeMetricFamily("weft_cluster_replicas_max", "Most that the autoscaler may want.", labels=["model"])
    groups = GaugeMetricFamily("weft_cluster_groups", "Replica groups by state.", labels=["model", "state"])
    for model in models:
        states = [state_name(group) for group in model.groups]
        wanted.add_metric([model.name], model.wanted_replicas)
        ready.add_metric([model.name], states.count("ready"))
        if model.HasField("autoscaling"):
            least.add_metric([model.name], model.autoscaling.min_replicas)
            most.add_metric([model.name], model.autoscaling.max_replicas)
        for state in _STATES:
            groups.add_metric([model.name, state], states.count(state))
    return (wanted, ready, least, most, groups)


def _groups(models: Sequence[control_pb2.ModelStatus]) -> Iterable[Metric]:
    labels = ["model", "group"]
    restarts = CounterMetricFamily("weft_cluster_group_restarts", "Formations after the first.", labels=labels)
    since = GaugeMetricFamily(
        "weft_cluster_group_state_seconds", "Time that a group has been in its state.", labels=[*labels, "state"]
    )
    loaded = GaugeMetricFamily("weft_cluster_group_loaded_ratio", "Part of its weights that is loaded.", labels=labels)
    for model in models:
        for group in model.groups:
            place = [model.name, group.group_id]
            restarts.add_metric(place, group.restarts)
            since.add_metric([*place, state_name(group)], group.seconds_in_state)
            loaded.add_metric(place, group.progress)
    return (restarts, since, loaded)


def _routers(routers: Sequence[control_pb2.RouterStatus]) -> Iterable[Metric]:
    alive = GaugeMetricFamily(
        "weft_cluster_router_alive", "1 while a router serves, or finishes its requests.", labels=["router"]
    )
    restarts = CounterMetricFamily("weft_cluster_router_restarts", "Starts after the first.", labels=["router"])
    for router in routers:
        alive.add_metric([router.router_id], float(router.alive))
        restarts.add_metric([router.router_id], router.restarts)
    return (alive, restarts)
