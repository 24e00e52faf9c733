"""A whole router: ports, overload, metrics, the HTTP face beside gRPC, and an orderly end."""

import asyncio
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from helpers.fake_control import FakeControl
from helpers.fake_replica import FakeReplica
from helpers.ipv6 import needs_ipv6
from helpers.polling import poll
from helpers.router_harness import ByteTokenizer, RunningRouter, router_config, running_router, text_request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from weft.recording import RecordingConfig
from weft.v1 import inference_pb2 as pb
from weft.v1.inference_pb2_grpc import InferenceStub

from router.app import BoundAddresses, run_router
from router.config import AdmissionConfig, ClientConfig, FailoverConfig, LinkConfig, PolicyName, RouterConfig
from router.errors import ModelFilesError, RouterConfigError
from router.flags import parse_flags, to_config
from router.model_text import ModelText
from router.server import READINESS_SERVICE

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("field", ["grpc_port", "http_port", "metrics_port"])
async def test_taken_port_is_a_clear_error(field: str) -> None:
    async with FakeReplica("a") as a:
        everything = router_config(a.address, http_port=0, metrics_port=0)
        async with running_router(everything) as router:
            taken = getattr(router.addresses, field.removesuffix("_port"))
            ports: dict[str, Any] = {"metrics_port": 0, field: int(taken.rpartition(":")[2])}
            config = router_config(a.address, **ports)
            with pytest.raises(RouterConfigError, match=f"cannot listen on {taken}"):
                async with running_router(config):
                    pass


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
@pytest.mark.parametrize("shares_ports", [False, True])
async def test_every_listener_takes_an_ipv6_address(host: str, shares_ports: bool) -> None:
    async with FakeReplica("a") as a:
        ports = {"http_port": 0, "metrics_port": 0, "shares_ports": shares_ports}
        async with running_router(router_config(a.address, host=host, **ports)) as router:
            told = router.addresses
            assert all(address and address.startswith(f"[{host}]:") for address in (told.grpc, told.http, told.metrics))
            await router.wait_ready(1)
            await ask_grpc(told)
            await ask_http(told)
            assert await router.outcomes(2) == {"length": 2}


@needs_ipv6
@pytest.mark.parametrize("field", ["grpc_port", "http_port", "metrics_port"])
async def test_address_that_no_interface_has_is_a_clear_error(field: str) -> None:
    config = router_config("127.0.0.1:1", host="2001:db8::1", **{"grpc_port": 0, "metrics_port": None, field: 0})
    with pytest.raises(RouterConfigError, match=r"cannot listen on \[2001:db8::1\]:0"):
        async with running_router(config):
            pass


def port_of(address: str | None) -> int:
    assert address is not None
    return int(address.rpartition(":")[2])


@asynccontextmanager
async def routers_on_shared_ports(replica: str, num: int) -> AsyncIterator[list[RunningRouter]]:
    """Run routers of one service on the same ports."""
    async with AsyncExitStack() as stack:
        ports: dict[str, int] = {"grpc_port": 0, "http_port": 0}
        routers: list[RunningRouter] = []
        for _ in range(num):
            config = router_config(replica, **ports, metrics_port=0, shares_ports=True)
            routers.append(await stack.enter_async_context(running_router(config)))
            addresses = routers[0].addresses
            ports = {"grpc_port": port_of(addresses.grpc), "http_port": port_of(addresses.http)}
        yield routers


async def ask_grpc(addresses: BoundAddresses) -> None:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with grpc.aio.insecure_channel(addresses.grpc, options=options) as channel:
        answers = [each async for each in InferenceStub(channel).Generate(text_request("hello"), timeout=20)]
    assert answers[-1].HasField("finished")


async def ask_http(addresses: BoundAddresses) -> None:
    async with httpx.AsyncClient(base_url=f"http://{addresses.http}", verify=False, timeout=20) as http:
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("ask", [ask_grpc, ask_http])
async def test_routers_divide_the_connections_to_a_port_that_they_share(
    ask: Callable[[BoundAddresses], Awaitable[None]],
) -> None:
    async with FakeReplica("a") as a, routers_on_shared_ports(a.address, 2) as (first, second):
        assert first.addresses.metrics != second.addresses.metrics

        async def served() -> list[float]:
            pages = [await router.series("weft_router_requests_total") for router in (first, second)]
            return [sum(value for _, value in page) for page in pages]

        async with asyncio.timeout(30):
            while not all(await served()):  # each connection goes to either, by its port
                await ask(first.addresses)
        first.stop.set()
        await first.task
        for _ in range(4):
            await ask(first.addresses)


async def test_port_is_shared_only_by_those_who_say_so() -> None:
    async with FakeReplica("a") as a, routers_on_shared_ports(a.address, 2) as (router, _):
        for field, address in (("grpc_port", router.addresses.grpc), ("http_port", router.addresses.http)):
            ports: dict[str, Any] = {field: port_of(address)}
            with pytest.raises(RouterConfigError, match=f"cannot listen on {address}"):
                async with running_router(router_config(a.address, **ports)):
                    pass
    async with FakeReplica("a") as a, running_router(router_config(a.address, http_port=0)) as router:
        for field, address in (("grpc_port", router.addresses.grpc), ("http_port", router.addresses.http)):
            ports = {field: port_of(address)}
            with pytest.raises(RouterConfigError, match=f"cannot listen on {address}"):
                async with running_router(router_config(a.address, **ports, shares_ports=True)):
                    pass


async def test_router_takes_its_part_of_a_shared_port_when_it_can_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = FailoverConfig(new_request_wait_s=60.0)
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, shares_ports=True, failover=patient)) as router,
    ):
        (model,) = (await router.stub.ListModels(pb.ListModelsRequest())).models
        assert model.ready_replicas == 1
        await poll(router.is_ready, True)
    hasty = FailoverConfig(new_request_wait_s=0.01)
    async with running_router(router_config("127.0.0.1:1", shares_ports=True, failover=hasty)) as router:
        (model,) = (await router.stub.ListModels(pb.ListModelsRequest())).models
        assert model.ready_replicas == 0, "it waits only for so long"
    monkeypatch.setattr("router.app._MOST_WAIT_S", 0.01)
    config = router_config("127.0.0.1:1", shares_ports=True, failover=patient)
    async with asyncio.timeout(20), running_router(config) as router:
        assert (await router.stub.ListModels(pb.ListModelsRequest())).models, "a request may wait longer"


async def test_shared_port_gives_no_connection_to_a_router_that_does_not_serve_yet() -> None:
    may_load = threading.Event()

    def load(text: ModelText) -> ByteTokenizer:
        assert may_load.wait(60)
        return ByteTokenizer()

    async with FakeReplica("a") as a, routers_on_shared_ports(a.address, 1) as (first,):
        await first.wait_ready(1)
        ports = {"grpc_port": port_of(first.addresses.grpc), "http_port": port_of(first.addresses.http)}
        patient = FailoverConfig(new_request_wait_s=60.0)
        config, stop = router_config(a.address, **ports, shares_ports=True, failover=patient), asyncio.Event()
        second = asyncio.create_task(run_router(config, stop=stop, on_ready=lambda _: stop.set(), load_tokenizer=load))
        await a.wait_until(lambda: a.num_connections == 2)
        for _ in range(10):
            await ask_grpc(first.addresses)
            await ask_http(first.addresses)
        may_load.set()
        await second


async def test_stop_ends_the_wait_for_a_first_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app._MOST_WAIT_S", 3600.0)
    stop = asyncio.Event()
    async with FakeReplica("a") as a, asyncio.timeout(10):
        a.drain()
        config = router_config(a.address, shares_ports=True, failover=FailoverConfig(new_request_wait_s=3600.0))
        running = asyncio.create_task(run_router(config, stop=stop, on_ready=lambda _: None))
        await a.wait_until(lambda: a.num_connections == 1)
        stop.set()
        await running


async def test_router_is_ready_when_it_has_a_tokenizer_or_cannot_have_one() -> None:
    may_load = threading.Event()

    def load(text: ModelText) -> ByteTokenizer:
        assert may_load.wait(10)
        raise ModelFilesError(f"{text.path} has no tokenizer")

    async with FakeReplica("a") as a, running_router(router_config(a.address), load_tokenizer=load) as router:
        await router.wait_ready(1)
        assert not await router.is_ready()
        may_load.set()
        await poll(router.is_ready, True)
        with pytest.raises(grpc.aio.AioRpcError, match="/tiny has no tokenizer"):
            await router.generate(text_request("hello"))


async def test_the_last_model_may_go_while_a_request_is_made_ready() -> None:
    begins, may_end = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
            begins.set()
            assert may_end.wait(10)
            return super().encode(text, add_special_tokens)

    async with FakeControl() as control:
        config = router_config(control=control.address, failover=FailoverConfig(new_request_wait_s=0.01))
        async with running_router(config, load_tokenizer=lambda _: Slow()) as router:
            control.set_replicas({})
            await router.wait_ready(0)
            asked = asyncio.create_task(router.generate(text_request("hello")))
            assert await asyncio.to_thread(begins.wait, 10)
            control.set_replicas({}, models=())
            await router.wait_ready(-1)
            may_end.set()
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asked
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE, error.value.details()


async def test_overload_is_refused_early_with_a_hint_and_counted() -> None:
    admission = AdmissionConfig(max_in_flight=2, max_queued=1)
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, admission=admission, metrics_port=0)) as router,
    ):
        await router.wait_ready(1)
        accepted = [asyncio.create_task(router.generate(text_request(f"{i}"))) for i in range(3)]
        await a.wait_until(lambda: a.num_requests == 2)
        await poll(lambda: router.metric("weft_router_requests_queued"), 1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.generate(text_request("too many"))
        a.resume()
        answers = await asyncio.gather(*accepted)
        outcomes = await router.outcomes(4)
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert int(dict(error.value.trailing_metadata() or ())["retry-after-ms"]) >= 100
    assert all(answer.num_finished == 1 for answer in answers)
    assert outcomes == {"length": 3, "resource_exhausted": 1}


async def test_counters_equal_the_usage_that_clients_saw() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address, metrics_port=0)) as router:
        await router.wait_ready(1)
        asked = [text_request("x" * n, max_tokens=n) for n in (3, 5, 9)]
        usages = [(await router.generate(request)).finished.usage for request in asked]  # type: ignore[union-attr]
        await router.outcomes(3)
        for name in ("prompt", "generation", "cached"):
            field = "completion_tokens" if name == "generation" else f"{name}_tokens"
            counted = await router.metric(f"weft_router_{name}_tokens_total", model="tiny")
            assert counted == sum(getattr(usage, field) for usage in usages), name
        for name, count in (("ttft", 3), ("tpot", 3), ("e2e", 3), ("itl", 3 + 5 + 9 - 3)):
            assert await router.metric(f"weft_router_{name}_seconds_count", model="tiny") == count, name
        assert await router.metric("weft_router_replica_ready", model="tiny", replica=a.address) == 1
        assert await router.metric("weft_router_requests_in_flight") == 0


async def test_pages_of_an_allowed_origin_may_ask() -> None:
    clients = ClientConfig(allowed_origins=("https://app.example",))
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0, clients=clients)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", timeout=20, verify=False) as http,
    ):
        answer = await http.options("/v1/completions", headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")


@asynccontextmanager
async def accepted_socket(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> AsyncIterator[socket.socket]:
    """The router's end of a connection of HTTP."""
    accepted: list[socket.socket] = []
    accept = HttpToolsProtocol.connection_made

    def note(self: HttpToolsProtocol, transport: asyncio.Transport) -> None:
        accepted.append(transport.get_extra_info("socket"))
        accept(self, transport)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", note)
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0, **changes)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", verify=False) as http,
    ):
        await http.get("/health")
        yield accepted[0]


async def test_http_sends_without_waiting_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    async with accepted_socket(monkeypatch) as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system has no such time")
@pytest.mark.parametrize(("write_timeout_s", "lasts_s"), [(0.2, 10), (60.0, 60)])
async def test_http_client_that_acknowledges_nothing_is_kept_as_long_as_it_may_take_nothing(
    write_timeout_s: float, lasts_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an answer that comes slowly all that the client does not take has room in the system's buffer."""
    async with accepted_socket(monkeypatch, clients=ClientConfig(write_timeout_s=write_timeout_s)) as accepted:
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == lasts_s * 1000
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL) == 10, "at each the system looks how long"


async def test_http_answers_are_dated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.app._DATE_S", 0.02)
    async with FakeReplica("a") as a, running_router(router_config(a.address, http_port=0)) as router:
        url = f"http://{router.addresses.http}/v1/models"

        async def date() -> str:
            return await asyncio.to_thread(lambda: urlopen(url, timeout=10).headers["date"])

        first = await date()
        async with asyncio.timeout(10):
            while await date() == first:  # the clock of the header has seconds
                pass


async def wait_refusing(router: RunningRouter) -> None:
    """Wait until it takes no more connections."""
    async with asyncio.timeout(10):
        while True:
            try:
                async with grpc.aio.insecure_channel(router.addresses.grpc) as channel:
                    await asyncio.wait_for(channel.channel_ready(), 0.05)
            except TimeoutError:
                return


async def test_stop_lets_requests_in_flight_finish_and_takes_no_new_ones() -> None:
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, http_port=0)) as router,
    ):
        await router.wait_ready(1)
        answering = asyncio.create_task(router.generate(text_request("hello")))
        await a.wait_until(lambda: a.num_requests == 1)
        router.stop.set()
        await wait_refusing(router)
        a.resume()
        assert (await answering).num_finished == 1
        await router.task


async def test_stop_waits_for_a_request_whose_message_is_under_way() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        await router.wait_ready(1)
        may_send = asyncio.Event()

        async def messages() -> AsyncIterator[pb.TokenizeRequest]:
            await may_send.wait()
            yield pb.TokenizeRequest(model="tiny", text="hello")

        tokenize = router.channel.stream_unary(
            f"/{READINESS_SERVICE}/Tokenize",
            request_serializer=pb.TokenizeRequest.SerializeToString,
            response_deserializer=pb.TokenizeResponse.FromString,
        )
        answering = tokenize(messages())
        await router.stub.ListModels(pb.ListModelsRequest())  # behind the other's head
        router.stop.set()
        await wait_refusing(router)
        may_send.set()
        assert len((await answering).token_ids) == 6
        await router.task


async def test_stop_does_not_wait_for_who_watches_health_or_asks_what_there_is() -> None:
    async with running_router(router_config("127.0.0.1:1", grace_s=3600.0)) as router:
        watching = health_pb2_grpc.HealthStub(router.channel).Watch(  # type: ignore[no-untyped-call]
            health_pb2.HealthCheckRequest(service="")
        )
        await watching.read()
        asking = reflection_pb2_grpc.ServerReflectionStub(router.channel).ServerReflectionInfo()  # type: ignore[no-untyped-call]
        await asking.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await asking.read()
        router.stop.set()
        await asyncio.wait_for(router.task, 10)
        assert await watching.code() == await asking.code() == grpc.StatusCode.UNAVAILABLE


async def test_stop_waits_but_a_moment_for_a_connection_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.server._HANDSHAKE_S", 0.1)
    async with running_router(router_config("127.0.0.1:1", grace_s=3600.0)) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(router.addresses.grpc))
        await reader.read(1)  # the router speaks first
        router.stop.set()
        await asyncio.wait_for(router.task, 10)
        writer.close()


async def test_stop_says_not_ready_first_and_still_serves_until_load_balancers_know() -> None:
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, http_port=0, unready_s=3600.0)) as router,
    ):
        await router.wait_ready(1)
        await poll(router.is_ready, True)
        router.stop.set()
        await poll(router.is_ready, False)
        with pytest.raises(HTTPError, match="503"):
            await asyncio.to_thread(urlopen, f"http://{router.addresses.http}/ready", timeout=5)
        assert (await router.generate(text_request("hello"))).num_finished == 1
        router.task.cancel()


async def test_stop_cuts_off_what_outlives_the_grace() -> None:
    async with FakeReplica("a", paused=True) as a:
        async with running_router(router_config(a.address, grace_s=0.1)) as router:
            await router.wait_ready(1)
            answering = asyncio.create_task(router.generate(text_request("hello")))
            await a.wait_until(lambda: a.num_requests == 1)
            router.stop.set()
            await router.task
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await answering
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await a.wait_until(lambda: a.num_requests == 0)


async def test_stop_refuses_over_http_what_outlives_the_grace_unanswered(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeReplica("a", paused=True) as a:
        async with running_router(router_config(a.address, grace_s=0.0, http_port=0)) as router:
            await router.wait_ready(1)
            url, body = f"http://{router.addresses.http}/v1/completions", {"prompt": "hello"}
            async with httpx.AsyncClient(timeout=20) as http:
                asking = [asyncio.create_task(http.post(url, json=body | {"stream": s})) for s in (False, True)]
                await a.wait_until(lambda: a.num_requests == 2)
                await a.step(3)
                router.stop.set()
                assert (await asking[0]).status_code == 503
                with pytest.raises(httpx.RemoteProtocolError):  # it has begun
                    await asking[1]
        await a.wait_until(lambda: a.num_requests == 0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_whoever_stops_a_router_may_give_it_longer_than_its_settings_do() -> None:
    is_stopping = asyncio.Event()

    def grace_s() -> float:
        is_stopping.set()
        return 60.0

    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, grace_s=0.0, http_port=0), grace_s=grace_s) as router,
    ):
        await router.wait_ready(1)
        url, body = f"http://{router.addresses.http}/v1/completions", {"model": "tiny", "prompt": "hello"}
        async with httpx.AsyncClient(timeout=20) as client:
            over_http = asyncio.create_task(client.post(url, json=body))
            over_grpc = asyncio.create_task(router.generate(text_request("hello")))
            await a.wait_until(lambda: a.num_requests == 2)
            assert not is_stopping.is_set()
            router.stop.set()
            await asyncio.wait_for(is_stopping.wait(), 10)
            a.resume()
            assert (await over_grpc).num_finished == 1
            assert (await over_http).status_code == 200
        await router.task


async def test_router_takes_as_many_connections_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # as shells and containers begin
    try:
        async with running_router(router_config("127.0.0.1:1")):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_command_line_starts_a_router_that_stops_at_a_signal() -> None:
    ports = ("--port", "0", "--http-port", "-1", "--metrics-port", "-1")
    command = [sys.executable, "-m", "router", "--control", "127.0.0.1:1", "--log-level", "error", *ports]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=REPOSITORY)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        assert line.startswith("gRPC 127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"control": "x:1", "addresses": ("y:1",)}, "allowed: one of the two"),
        ({}, "control is None and models has 0 entries"),
        ({"addresses": ("y:1",), "grpc_port": 65536}, "grpc_port is 65536; allowed: 0 to 65535"),
        ({"addresses": ("y:1",), "max_message_bytes": 1}, "max_message_bytes is 1; allowed: 1024 to 2147483647"),
        ({"addresses": ("y:1",), "tokenizer_threads": 1025}, "tokenizer_threads is 1025; allowed: 1 to 1024"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    addresses = changes.pop("addresses", ())
    with pytest.raises(RouterConfigError, match=message):
        router_config(*addresses, **changes)


@pytest.mark.parametrize("name", ["connect_timeout_s", "stall_timeout_s"])
def test_time_limit_of_a_link_is_not_0(name: str) -> None:
    with pytest.raises(RouterConfigError, match=f"{name} is 0; allowed: at least 0.001"):
        LinkConfig(**{name: 0})


def test_wait_before_a_dial_doubles_up_to_its_maximum_and_half_of_it_is_random() -> None:
    link, rng = LinkConfig(backoff_s=0.1, max_backoff_s=1.0), random.Random(0)
    for num_failures, longest_s in ((0, 0.1), (1, 0.2), (3, 0.8), (4, 1.0), (5000, 1.0)):
        waits_s = [link.next_wait_s(num_failures, rng) for _ in range(200)]
        assert min(waits_s) == pytest.approx(longest_s / 2, rel=0.05)
        assert max(waits_s) == pytest.approx(longest_s, rel=0.05)


def test_prefix_affinity_is_the_default() -> None:
    assert RouterConfig(control="x:1").policy is PolicyName.PREFIX_AFFINITY


async def test_folder_where_nothing_can_be_recorded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = router_config("x:1", recording=RecordingConfig(folder=str(tmp_path / "file")))
    with pytest.raises(RouterConfigError, match="recording: "):
        async with running_router(config):
            pass


def test_router_in_a_container_has_the_name_of_none_of_the_clusters_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 1)
    name = to_config(parse_flags(["--control", "127.0.0.1:1"])).router_id
    assert name == f"router-{socket.gethostname()}-1"


def test_what_is_no_address_or_no_folder_is_refused(tmp_path: Path) -> None:
    for flags, message in (
        (["--control", "foo"], "'foo' is no address; allowed: host:port"),
        (["--model", f"m={tmp_path},127.0.0.1"], "'127.0.0.1' is no address; allowed: host:port"),
        (["--model", f"m={tmp_path}/m,x:1"], r"--model m: .*/m is no folder; allowed: that of its tokenizer"),
        (["--model", f"m=/{300 * 'm'},x:1"], r"--model m: /m* is no folder"),  # what cannot be looked at is none
    ):
        with pytest.raises(RouterConfigError, match=message):
            to_config(parse_flags(flags))


@pytest.mark.parametrize("flags", [[], ["--control", "x:1", "--model", "m=f,y:1"]])
def test_replicas_come_from_a_controller_or_from_flags(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(flags)
    told = capsys.readouterr().err.splitlines()[-1]
    assert "--control" in told
    assert "--model" in told


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        ("--policy", "round_robin, least_loaded, power_of_two, prefix_affinity"),
        ("--trace-protocol", "grpc, http"),
    ],
)
def test_a_name_that_is_none_is_refused_with_those_there_are(
    flag: str, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--control", "x:1", flag, "foo"])
    told = capsys.readouterr().err.replace("'", "")  # newer versions of Python show the names without
    assert f"invalid choice: foo (choose from {names})" in told


def test_flag_of_a_router_by_itself_names_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_flags(["--control", "x:1", "--record-decisions", "decisions"])
    assert to_config(options).recording == RecordingConfig(folder=str(tmp_path / "decisions"))
    assert to_config(parse_flags(["--control", "x:1"])).recording.folder is None
