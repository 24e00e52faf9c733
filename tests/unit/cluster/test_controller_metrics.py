"""What the controller tells Prometheus: the cluster's state, and where all other processes are."""

import asyncio
import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import cast

import pytest
from helpers.ipv6 import needs_ipv6
from helpers.polling import until
from prometheus_client.parser import text_string_to_metric_families
from weft.addresses import split_host_port
from weft.v1 import control_pb2

from cluster.control_server import ControlState
from cluster.controller_metrics import ControllerListener
from cluster.errors import StartError


class State:
    """A cluster with one group that serves and one that starts."""

    def __init__(self) -> None:
        ranks = [control_pb2.RankStatus(rank=i, node="n1", metrics_address=f"10.0.0.1:{7000 + i}") for i in range(2)]
        self.model = control_pb2.ModelStatus(
            name="m",
            wanted_replicas=3,
            autoscaling=control_pb2.AutoscalingStatus(min_replicas=1, max_replicas=8),
            groups=[
                control_pb2.GroupStatus(
                    group_id="m-0",
                    state=control_pb2.GROUP_STATE_READY,
                    ranks=ranks,
                    restarts=2,
                    seconds_in_state=7.0,
                    progress=1.0,
                ),
                control_pb2.GroupStatus(group_id="m-1", state=control_pb2.GROUP_STATE_STARTING, progress=0.5),
            ],
        )
        self.router = control_pb2.RouterStatus(
            router_id="router-0", alive=True, restarts=1, metrics_address="10.0.0.2:9464"
        )
        self.outside = [
            control_pb2.RouterStatus(router_id="edge-0", alive=True, metrics_address="10.0.0.7:9464"),
            control_pb2.RouterStatus(router_id="edge-1", alive=True),
        ]

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        asyncio.get_running_loop()  # the state belongs to the event loop
        return [self.model]

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        return [self.router]

    def outside_routers(self) -> list[control_pb2.RouterStatus]:
        return self.outside


@pytest.fixture
def state() -> State:
    return State()


def listen(state: State, host: str, port: int = 0) -> ControllerListener:
    return ControllerListener(cast(ControlState, state), state.outside_routers, host=host, port=port)


@pytest.fixture
async def listener(state: State) -> AsyncIterator[ControllerListener]:
    listener = listen(state, "127.0.0.1")
    yield listener
    await listener.close()


async def get(listener: ControllerListener, page: str) -> str:
    url = f"http://{listener.address}{page}"
    return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=5).read().decode())


async def test_state_is_told_in_gauges_and_counters(listener: ControllerListener) -> None:
    families = text_string_to_metric_families(await get(listener, "/metrics"))
    seen = {(s.name, *(s.labels[k] for k in sorted(s.labels))): s.value for family in families for s in family.samples}
    assert seen == {
        ("weft_cluster_replicas_wanted", "m"): 3,
        ("weft_cluster_replicas_ready", "m"): 1,
        ("weft_cluster_replicas_min", "m"): 1,
        ("weft_cluster_replicas_max", "m"): 8,
        ("weft_cluster_groups", "m", "pending"): 0,
        ("weft_cluster_groups", "m", "starting"): 1,
        ("weft_cluster_groups", "m", "ready"): 1,
        ("weft_cluster_groups", "m", "draining"): 0,
        ("weft_cluster_groups", "m", "failed"): 0,
        ("weft_cluster_groups", "m", "stopped"): 0,
        ("weft_cluster_group_restarts_total", "m-0", "m"): 2,
        ("weft_cluster_group_restarts_total", "m-1", "m"): 0,
        ("weft_cluster_group_state_seconds", "m-0", "m", "ready"): 7,
        ("weft_cluster_group_state_seconds", "m-1", "m", "starting"): 0,
        ("weft_cluster_group_loaded_ratio", "m-0", "m"): 1,
        ("weft_cluster_group_loaded_ratio", "m-1", "m"): 0.5,
        ("weft_cluster_router_alive", "router-0"): 1,
        ("weft_cluster_router_restarts_total", "router-0"): 1,
    }


async def test_every_process_is_a_target_once(listener: ControllerListener) -> None:
    assert json.loads(await get(listener, "/targets")) == [
        {"targets": ["10.0.0.2:9464"], "labels": {"job": "weft-router", "router": "router-0"}},
        {
            "targets": ["10.0.0.7:9464"],
            "labels": {"job": "weft-router", "router": "edge-0", "__meta_weft_outside": "true"},
        },
        {"targets": ["10.0.0.1:7000"], "labels": {"job": "weft-rank", "node": "n1"}},
        {"targets": ["10.0.0.1:7001"], "labels": {"job": "weft-rank", "node": "n1"}},
    ]


@pytest.mark.parametrize("address", ["0.0.0.0", "[::]", "[::1]"])
async def test_a_router_on_the_controllers_machine_is_a_target_where_the_controller_was_asked(
    listener: ControllerListener, state: State, address: str
) -> None:
    state.router.metrics_address = state.outside[0].metrics_address = f"{address}:9464"
    router, outside, *_ = json.loads(await get(listener, "/targets"))
    assert router["targets"] == outside["targets"] == ["127.0.0.1:9464"], "whoever scrapes is on another machine"


async def test_other_pages_are_refused(listener: ControllerListener) -> None:
    with pytest.raises(urllib.error.HTTPError, match="allowed: /metrics, /targets"):
        await get(listener, "/")


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_pages_are_served_on_an_ipv6_address(host: str) -> None:
    listener = listen(State(), host)
    try:
        assert listener.address.startswith(f"[{host}]:")
        assert "weft_cluster_groups" in await get(listener, "/metrics")
    finally:
        await listener.close()


@needs_ipv6
@pytest.mark.parametrize(("asked_at", "reached_at"), [("127.0.0.1", "127.0.0.1:9464"), ("[::1]", "[::1]:9464")])
async def test_who_asks_over_ipv4_is_told_ipv4_targets_also_where_both_are_listened_on(
    state: State, asked_at: str, reached_at: str
) -> None:
    state.router.metrics_address = "[::]:9464"
    listener = listen(state, "::")
    listener.address = listener.address.replace("[::]", asked_at)
    try:
        router, *_ = json.loads(await get(listener, "/targets"))
    finally:
        await listener.close()
    assert router["targets"] == [reached_at]


async def test_who_goes_before_the_answer_is_no_error(
    listener: ControllerListener, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(split_host_port(listener.address)) as gone:  # no answer while this loop does not run
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    await get(listener, "/metrics")  # behind it
    await until(lambda: not any("process_request_thread" in thread.name for thread in threading.enumerate()))
    assert capsys.readouterr().err == ""


async def test_who_says_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cluster.controller_metrics.IDLE_TIMEOUT_S", 0.05)
    listener = listen(State(), "127.0.0.1")
    try:
        with socket.create_connection(split_host_port(listener.address), timeout=5) as silent:
            assert await asyncio.to_thread(silent.recv, 1) == b""
    finally:
        await listener.close()
    assert capsys.readouterr().err == ""


async def test_taken_port_is_told(listener: ControllerListener) -> None:
    port = int(listener.address.rpartition(":")[2])
    with pytest.raises(StartError, match=f"metrics cannot listen on 127.0.0.1:{port}"):
        listen(State(), "127.0.0.1", port)
