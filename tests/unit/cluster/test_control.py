"""The controller's gRPC service, as operators, routers and their commands call it."""

import asyncio
import io
import json
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import grpc
import pytest
from helpers.cluster import FakeClock
from helpers.ipv6 import needs_ipv6
from helpers.polling import poll, until
from helpers.router_harness import router_config, running_router
from rich.console import Console
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from cluster.config import ModelSpec, build_spec
from cluster.control_client import ControlClient
from cluster.control_server import ControlServer, bind_control_port
from cluster.demand import Demand, DemandLedger
from cluster.errors import (
    ClusterConfigError,
    ControllerError,
    NotServedError,
    ServiceStoppedError,
    StartError,
    StoppingError,
)
from cluster.log_reader import LogReader, LogSource
from cluster.metrics_pages import fetch_page
from cluster.show_logs import show_logs
from cluster.top import _repeat, run_top
from cluster.wanted import Change, ChangeKind
from router.errors import ModelFilesError
from router.model_files import fetch_model_files
from workers.errors import EngineConfigError

READY = control_pb2.GROUP_STATE_READY


class FakeState:
    def __init__(self) -> None:
        self.path = "/m"
        self.endpoints: list[control_pb2.ReplicaEndpoint] = []
        self.grace_s: float | None = None
        self.calls: list[tuple[Any, ...]] = []
        self.metrics: dict[str, str] = {}
        self.is_stopping = False

    def models(self) -> list[control_pb2.ServedModel]:
        return [control_pb2.ServedModel(name="m", path=self.path, max_context=64)]

    def replicas(self) -> list[control_pb2.ReplicaEndpoint]:
        return list(self.endpoints)

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        ranks = [control_pb2.RankStatus(metrics_address=self.metrics.get("rank", ""))]
        metrics = self.metrics.get("group", "")
        group = control_pb2.GroupStatus(group_id="m-0", state=READY, metrics_address=metrics, ranks=ranks)
        return [control_pb2.ModelStatus(name="m", groups=[group])]

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        metrics = self.metrics.get("router", "")
        return [control_pb2.RouterStatus(router_id="router-0", alive=True, metrics_address=metrics)]

    async def node_statuses(self) -> list[control_pb2.NodeStatus]:
        return [control_pb2.NodeStatus(node_id="n1", address="10.0.0.1", cpus=8)]

    async def apply(self, specs: Sequence[ModelSpec], *, dry_run: bool = False) -> list[Change]:
        self.calls.append(("apply", [spec.name for spec in specs], dry_run))
        return [Change(kind=ChangeKind.ADD, name="b", details=("2 x",))]

    def scale(self, name: str, replicas: int) -> int:
        if replicas == 99:
            raise StoppingError("the service is stopping")
        if name != "m":
            raise NotServedError(f"model is {name!r}; served: 'm'")
        self.calls.append(("scale", name, replicas))
        return 1

    async def roll(self, name: str, settings: Mapping[str, Any]) -> tuple[Change, int]:
        if "step" in settings:
            raise ClusterConfigError("step: unknown key")
        if settings.get("max_context") == 0:
            raise EngineConfigError("max_context is 0")
        self.calls.append(("roll", name, dict(settings)))
        return Change(kind=ChangeKind.ROLLOUT, name=name, details=("a: 1 -> 2",)), 2

    async def undo(self, name: str) -> tuple[Change, int]:
        self.calls.append(("undo", name))
        return Change(kind=ChangeKind.ROLLOUT, name=name), 1

    async def drain(self, target: str, grace_s: float | None) -> tuple[list[str], str]:
        self.calls.append(("drain", target, grace_s))
        return ["m-0.1"], "n1"

    async def undrain(self, target: str) -> str:
        self.calls.append(("undrain", target))
        return "n1"

    async def shut_down(self, grace_s: float) -> None:
        self.grace_s = grace_s


class Running(NamedTuple):
    state: FakeState
    server: ControlServer
    address: str


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    state = FakeState()
    logs = LogReader("here")
    (tmp_path / "err").write_text("first\nsecond\n")
    source = LogSource(name="m-0.1/0", belongs_to=frozenset({"m", "m-0.1"}), node_id="here", path=str(tmp_path / "err"))
    logs.note([source])
    started = build_spec({"controller": {"port": 2}}).file
    server = ControlServer(state, logs, DemandLedger(), started=started, num_restarts=2)
    listener, address = bind_control_port("127.0.0.1", 0)
    await server.start(listener)
    yield Running(state, server, address)
    await server.stop()


async def _next(watch: Any) -> control_pb2.WatchReplicasResponse:
    membership = await asyncio.wait_for(watch.read(), 120)
    assert isinstance(membership, control_pb2.WatchReplicasResponse)
    return membership


async def test_watcher_sees_membership_now_and_at_every_change(running: Running) -> None:
    state, server, address = running
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = ControlStub(channel)
        watch = stub.WatchReplicas(control_pb2.WatchReplicasRequest(router_id="r"))
        await stub.GetStatus(control_pb2.GetStatusRequest())  # the watch came before it, when nothing was known
        await server.publish()
        first = await _next(watch)
        assert [model.name for model in first.models] == ["m"]
        assert not first.replicas
        await server.publish()  # nothing changed: nothing is sent
        state.endpoints = [control_pb2.ReplicaEndpoint(replica_id="m-0.1", model="m", address="a:1")]
        await server.publish()
        second = await _next(watch)
        assert [replica.replica_id for replica in second.replicas] == ["m-0.1"]
        assert second.version == first.version + 1


async def test_no_call_is_made_where_a_signal_interrupts(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyboardInterrupt amid gRPC's own code leaves its locks taken."""
    callers = set()

    def note(*args: object, **options: object) -> control_pb2.GetStatusResponse:
        callers.add(threading.current_thread())
        return control_pb2.GetStatusResponse()

    with ControlClient(running[2]) as client:
        monkeypatch.setattr(client._stub, "GetStatus", note)
        client.status()
        client.close()
        client.close()
    assert threading.main_thread() not in callers
    assert len(callers) == 1


async def test_operator_sees_status_and_shuts_down(running: Running) -> None:
    state, _, address = running
    with ControlClient(address) as client:
        status = await asyncio.to_thread(client.status)
        assert status.models[0].groups[0].group_id == "m-0"
        assert (status.version != "", status.controller.stopping) == (True, False)
        assert 0 <= status.uptime_s < 60
        await asyncio.to_thread(client.shut_down, 3.0)
        state.is_stopping = True
        assert (await asyncio.to_thread(client.status)).controller.stopping
    assert state.grace_s == 3.0


async def test_grace_that_is_longer_than_any_time_of_grpc_is_given(running: Running) -> None:
    state, _, address = running
    with ControlClient(address) as client:
        await asyncio.to_thread(client.shut_down, 1e15)  # the longest `router.grace_s`
    assert state.grace_s == 1e15


async def test_operator_changes_what_is_wanted(running: Running) -> None:
    state, _, address = running

    def operate() -> None:
        with ControlClient(address) as client:
            settings = {
                "models": [{"name": "b"}],
                "host": "127.0.0.1",
                "router": {"port": 1},
                "controller": {"port": 2},
            }
            changes = client.apply(settings, dry_run=True)
            assert [(change.kind, change.name, list(change.details)) for change in changes] == [
                (control_pb2.CHANGE_KIND_ADD, "b", ["2 x"]),
                (control_pb2.CHANGE_KIND_IGNORED, "router", ["router.port: 50051 -> 1"]),
            ]
            assert client.scale("m", 3) == 1
            rolled = client.rollout("m", {"cache": {"num_blocks": 8}})
            assert (rolled.revision, list(rolled.change.details)) == (2, ["a: 1 -> 2"])
            assert client.rollout("m", {}, undo=True).revision == 1
            assert list(client.drain("m-0", grace_s=0.0).replica_ids) == ["m-0.1"]
            assert client.drain("m-0").node_id == "n1"
            assert client.drain("n1", undo=True).node_id == "n1"

    await asyncio.to_thread(operate)
    assert state.calls == [
        ("apply", ["b"], True),
        ("scale", "m", 3),
        ("roll", "m", {"cache": {"num_blocks": 8}}),
        ("undo", "m"),
        ("drain", "m-0", 0.0),
        ("drain", "m-0", None),
        ("undrain", "n1"),
    ]


async def test_what_cannot_be_is_refused_with_its_reason(running: Running) -> None:
    state, _, address = running

    def operate() -> None:
        with ControlClient(address) as client:
            with pytest.raises(ControllerError, match="model is 'x'; served: 'm'"):
                client.scale("x", 3)
            with pytest.raises(ControllerError, match="the service is stopping"):
                client.scale("m", 99)
            with pytest.raises(ClusterConfigError, match="step: unknown key"):
                client.rollout("m", {"step": 1})
            with pytest.raises(ControllerError, match="max_context is 0"):
                client.rollout("m", {"max_context": 0})
            with pytest.raises(ClusterConfigError, match="undo without settings"):
                client.rollout("m", {"max_context": 64}, undo=True)
            with pytest.raises(ClusterConfigError, match=r"models\[0\].modle: unknown key"):
                client.apply({"models": [{"modle": "b"}]}, dry_run=False)
            with pytest.raises(ControllerError, match=r"no log is 'm-9'; there are: m, m-0\.1, m-0\.1/0"):
                client.read_logs("m-9", {}, tail_bytes=1)

    await asyncio.to_thread(operate)
    assert state.calls == []


@pytest.mark.parametrize("grace_s", [math.inf, math.nan, -1.0])
async def test_grace_that_never_ends_or_has_ended_is_refused(running: Running, grace_s: float) -> None:
    state, _, address = running
    message = f"grace_s is {grace_s}; allowed: a finite number, at least 0"
    async with grpc.aio.insecure_channel(address) as channel:
        control = ControlStub(channel)
        for call in (
            control.Drain(control_pb2.DrainRequest(target="m-0", grace_s=grace_s)),
            control.Shutdown(control_pb2.ShutdownRequest(grace_s=grace_s)),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=message) as refused:
                await asyncio.wait_for(call, 120)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (state.calls, state.grace_s) == ([], None)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000], ids=["broken", "list", "deep"])
async def test_settings_that_are_no_mapping_are_refused(running: Running, text: str) -> None:
    _, _, address = running
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="the settings are") as refused:
            await ControlStub(channel).Apply(control_pb2.ApplyRequest(settings_json=text), timeout=120)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_logs_are_read_on_where_they_were_left(running: Running, tmp_path: Path) -> None:
    def read(offsets: dict[str, int], tail_bytes: int) -> control_pb2.LogChunk:
        with ControlClient(running.address) as client:
            answer = client.read_logs("m", offsets, tail_bytes=tail_bytes)
            assert answer.stopping == running.state.is_stopping
            (chunk,) = answer.chunks
            return chunk

    chunk = await asyncio.to_thread(read, {}, 7)
    assert (chunk.name, chunk.data, chunk.has_more) == ("m-0.1/0", b"second\n", False)
    running.state.is_stopping = True
    with (tmp_path / "err").open("a") as file:
        file.write("third\n")
    chunk = await asyncio.to_thread(read, {"m-0.1/0": chunk.next_offset}, 7)
    assert chunk.data == b"third\n"


async def test_who_follows_logs_hears_that_the_service_stops_however_soon_it_has(running: Running) -> None:
    told: list[str] = []

    def follow() -> None:
        with ControlClient(running.address) as client:
            show_logs(client, "m", follows=True, tail_bytes=100, tell=told.append)

    following = asyncio.create_task(asyncio.to_thread(follow))
    await until(lambda: bool(told))
    running.state.is_stopping = True
    await running.server.stop()
    with pytest.raises(ServiceStoppedError, match="the service has stopped"):
        await asyncio.wait_for(following, 20)  # less than it would wait for a next controller


async def test_a_stop_is_answered_when_the_service_ends_also_beside_who_follows_logs(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.control_server._FOLLOW_S", 2.0)
    with ControlClient(running.address) as client:
        await asyncio.to_thread(show_logs, client, "m", follows=False, tail_bytes=100, tell=lambda line: None)
        stopping = asyncio.to_thread(client.shut_down, 0.0)
        ending = asyncio.create_task(running.server.stop())  # as when all has stopped
        await stopping
        await asyncio.wait_for(ending, 1.5)  # else another service finds the port taken


async def test_logs_whose_node_does_not_answer_are_named_beside_those_that_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task: Any = SimpleNamespace(remote=lambda *args: asyncio.Event().wait())
    monkeypatch.setattr("cluster.log_reader._READ_PIECE", SimpleNamespace(options=lambda **options: task))
    monkeypatch.setattr("cluster.log_reader._REMOTE_TIMEOUT_S", 0.01)
    logs = LogReader("here")
    (tmp_path / "err").write_text("a line\n")
    logs.note(
        LogSource(name=f"m-0.1/{node}", belongs_to=frozenset({"m"}), node_id=node, path=str(tmp_path / "err"))
        for node in ("here", "0" * 56)
    )
    lines = await shown(logs, "m")
    assert lines == ["m-0.1/here | a line"]
    assert capsys.readouterr().err.startswith(f"not read: m-0.1/{'0' * 56}; their nodes have gone or do not answer")


async def test_logs_of_many_processes_are_read_in_answers_that_grpc_takes(tmp_path: Path) -> None:
    logs = LogReader("here")
    names = [f"m-0.1/{rank}" for rank in range(80)]
    (tmp_path / "err").write_text("a line\n" * 9500)
    path = str(tmp_path / "err")
    logs.note(LogSource(name=name, belongs_to=frozenset(), node_id="here", path=path) for name in names)
    lines = await shown(logs, "")
    assert Counter(lines) == {f"{name} | a line": (64 << 10) // 7 for name in names}


async def shown(logs: LogReader, target: str) -> list[str]:
    """What `weft logs TARGET` prints of the last 64 KiB of each log."""
    server = ControlServer(FakeState(), logs, DemandLedger())
    listener, address = bind_control_port("127.0.0.1", 0)
    await server.start(listener)
    lines: list[str] = []

    def read() -> None:
        with ControlClient(address) as client:
            show_logs(client, target, follows=False, tail_bytes=64 << 10, tell=lines.append)

    await asyncio.to_thread(read)
    await server.stop()
    return lines


async def fetch(path: str, folder: Path, control: str) -> None:
    with grpc.insecure_channel(control) as channel:
        await asyncio.to_thread(fetch_model_files, path, folder, channel, control=control)


async def test_router_without_the_models_folder_gets_what_it_reads(running: Running, tmp_path: Path) -> None:
    state, _, address = running
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    state.path = str(there)
    read = {"tokenizer.json": b"{}" * 1_500_000, "tokenizer_config.json": b"", "chat_template.jinja": b"{{ messages }}"}
    unread = ("model.safetensors", "model.safetensors.index.json", "README.md", "secret.key")
    for name, content in (read | dict.fromkeys(unread, b"x")).items():
        (there / name).write_bytes(content)
    await fetch(str(there), here, address)
    assert {file.name: file.read_bytes() for file in here.iterdir()} == read


async def test_files_of_a_folder_that_is_not_served_are_not_given(running: Running, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelFilesError, match=f"NOT_FOUND: no model is served from '{tmp_path}'"):
        await fetch(str(tmp_path), tmp_path, running.address)


async def test_files_on_a_file_system_that_hangs_keep_nobody_else_waiting(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hang(folder: Path) -> tuple[()]:
        goes_on.wait()
        return ()

    monkeypatch.setattr("cluster.control_server.read_text_files", hang)
    request = control_pb2.GetModelFilesRequest(path="/m")
    answers = [aiter(running.server.GetModelFiles(request, SimpleNamespace())) for _ in range(40)]
    reads = [asyncio.ensure_future(anext(answer, None)) for answer in answers]
    await asyncio.sleep(0)
    try:
        async with asyncio.timeout(30):
            await asyncio.to_thread(int)  # as what places groups
    finally:
        goes_on.set()
    assert set(await asyncio.gather(*reads)) == {None}


async def test_files_of_the_folder_that_a_replica_still_runs_are_given(running: Running, tmp_path: Path) -> None:
    state, _, address = running
    old, here = tmp_path / "old", tmp_path / "here"
    old.mkdir()
    here.mkdir()
    (old / "tokenizer.json").write_text("{}")
    state.endpoints = [
        control_pb2.ReplicaEndpoint(replica_id="m-0.1", text=control_pb2.ModelText(path=str(old))),
        control_pb2.ReplicaEndpoint(replica_id="m-1.1"),
    ]
    await fetch(str(old), here, address)
    assert [file.name for file in here.iterdir()] == ["tokenizer.json"]
    with pytest.raises(ModelFilesError, match="NOT_FOUND: no model is served from ''"):
        await fetch("", here, address)


PAGE = b"# HELP weft_requests_running A long word: " + b"r" * (3 << 20) + b"\nweft_requests_running 3.0\n"
"""Two of them are more than one message takes."""


class PageProcess(BaseHTTPRequestHandler):
    """A process with a metrics page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def pages() -> Iterator[list[str]]:
    """Addresses of three pages."""
    with ExitStack() as stack:
        servers = [stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), PageProcess)) for _ in range(3)]
        for server in servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            stack.callback(server.shutdown)
        yield [f"127.0.0.1:{server.server_port}" for server in servers]


async def test_metrics_of_processes_are_read_through_the_controller_and_of_nobody_else(
    running: Running, pages: list[str]
) -> None:
    state, _, address = running
    router, rank, stranger = pages
    state.metrics = {"router": router, "group": "127.0.0.1:1", "rank": rank}

    def read() -> Mapping[str, bytes]:
        with ControlClient(address) as client:
            return client.read_metrics([router, "127.0.0.1:1", rank, stranger, ""])

    read_pages = await asyncio.to_thread(read)
    assert read_pages == {router: PAGE, rank: PAGE}


async def test_no_proxy_is_asked_for_metrics(pages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert await fetch_page(pages[0]) == PAGE


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"HTTP/1.0 302 Found\r\nLocation: http://%b/\r\nContent-Length: 1\r\n\r\n1", b""),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 16777217\r\n\r\n", b""),
        (b"HTTP/1.0 200 OK\r\n", b"X: 1\r\n"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"1"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n1", b""),
        (b"a" * 70_000, b""),
    ],
    ids=["elsewhere", "large", "head without end", "slow", "torn", "no HTTP"],
)
async def test_page_that_is_elsewhere_too_large_or_slow_is_not_taken(
    pages: list[str], monkeypatch: pytest.MonkeyPatch, start: bytes, more: bytes
) -> None:
    monkeypatch.setattr("cluster.metrics_pages._TIMEOUT_S", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(start.replace(b"%b", pages[0].encode()))
        with suppress(ConnectionError):
            while more:
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0.001)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, asyncio.timeout(10):
        assert await fetch_page(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") is None


async def test_top_needs_nothing_but_the_controller(
    running: Running, pages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    state, _, address = running
    state.metrics = {"router": "127.0.0.1:1", "group": pages[0]}

    def watch() -> None:
        with ControlClient(address) as client:
            run_top(client, Console(), interval_s=0.0, as_json=True, count=1)

    await asyncio.to_thread(watch)
    seen = json.loads(capsys.readouterr().out)
    assert seen["groups"][0]["running"] == 3
    assert seen["models"][0]["output_tokens_per_s"] is None


@pytest.mark.parametrize("is_terminal", [True, False])
async def test_top_goes_on_when_the_controller_is_back(
    running: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    monkeypatch.setattr("cluster.patience._RETRY_S", 0.0)
    asked = 0

    def status() -> control_pb2.GetStatusResponse:
        nonlocal asked
        asked += 1
        if asked in (3, 4):
            raise ControllerError("no controller answers")
        return control_pb2.GetStatusResponse(models=running.state.model_statuses())

    out = io.StringIO()
    with ControlClient(running.address) as client:
        monkeypatch.setattr(client, "status", status)
        console = Console(file=out, width=200, force_terminal=is_terminal)
        await asyncio.to_thread(run_top, client, console, interval_s=0.0, as_json=False, count=2)
    assert asked == 1 + 2 + 2
    told = out.getvalue() if is_terminal else capsys.readouterr().err
    assert told.count("no controller answers (asked again for 30 s)") == 1


async def test_top_ends_with_the_service(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [control_pb2.GetStatusResponse(controller=control_pb2.ControllerStatus(stopping=True))]

    def status() -> control_pb2.GetStatusResponse:
        if not answers:
            raise ControllerError("no controller answers")
        return answers.pop()

    with ControlClient(running.address) as client:
        monkeypatch.setattr(client, "status", status)
        with pytest.raises(ServiceStoppedError, match="the service has stopped"):
            await asyncio.to_thread(run_top, client, Console(), interval_s=0.0, as_json=True)


def test_looks_of_top_that_came_late_are_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(0.0)
    monkeypatch.setattr("cluster.top.time", SimpleNamespace(monotonic=clock, sleep=clock.advance))
    looked_s: list[float] = []

    def take_look() -> None:
        looked_s.append(clock())
        if len(looked_s) == 2:
            clock.advance(9.0)  # the controller was away

    _repeat(take_look, 2.0, 4)
    assert looked_s == [2.0, 4.0, 13.0, 15.0]


async def test_a_router_that_somebody_else_started_is_in_status_and_top_while_it_reports(
    running: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    _, server, address = running
    await server.publish()
    # The second one is that of the state, and is there once.
    mine, kept = (router_config(control=address, metrics_port=0, router_id=name) for name in ("router-a", "router-0"))
    with ControlClient(address) as client:

        async def routers() -> dict[str, str]:
            status = await asyncio.to_thread(client.status)
            return {router.router_id: router.metrics_address for router in status.routers if router.alive}

        async with running_router(kept), running_router(mine) as router:
            await poll(routers, {"router-0": "", "router-a": router.addresses.metrics})
            assert [each.router_id for each in server.outside_routers()] == ["router-a"]
            told = (await asyncio.to_thread(client.status)).routers[1]
            assert (told.grpc_address, told.http_address) == (router.addresses.grpc, "")
            await asyncio.to_thread(run_top, client, Console(), interval_s=0.0, as_json=True, count=1)
            assert json.loads(capsys.readouterr().out)["models"][0]["output_tokens_per_s"] == 0.0
        await poll(routers, {"router-0": ""})


async def test_what_a_router_reports_is_demand_until_its_stream_ends(running: Running) -> None:
    async def demand() -> Mapping[str, Demand]:
        return running.server._demand.take()

    async with grpc.aio.insecure_channel(running.address) as channel:
        report: Any = ControlStub(channel).ReportDemand()
        models = [control_pb2.ModelDemand(model="m", num_held=2)]
        await report.write(control_pb2.ReportDemandRequest(router_id="r", models=models))
        await poll(demand, {"m": Demand(num_held=2)})
        report.cancel()
        await poll(demand, {})


async def test_second_controller_on_a_port_is_refused(running: Running) -> None:
    port = int(running.address.rpartition(":")[2])
    with pytest.raises(StartError, match=f"cannot listen on 127.0.0.1:{port}"):
        bind_control_port("127.0.0.1", port)


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
async def test_controller_is_reached_at_an_ipv6_address(host: str) -> None:
    listener, address = bind_control_port(host, 0)
    assert address.startswith(f"[{host}]:")
    server = ControlServer(FakeState(), LogReader("here"), DemandLedger())
    await server.start(listener)
    try:
        with ControlClient(address) as client:
            assert (await asyncio.to_thread(client.status)).models
    finally:
        await server.stop()


@needs_ipv6
async def test_controller_on_an_address_that_no_interface_has_is_refused() -> None:
    with pytest.raises(StartError, match=r"cannot listen on \[2001:db8::1\]:0"):
        bind_control_port("2001:db8::1", 0)


async def test_a_server_that_is_no_controller_is_told() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told = f":{port} does not know this command: it is no controller, or an older one"
    with ControlClient(f"127.0.0.1:{port}") as client, pytest.raises(ControllerError, match=told):
        await asyncio.to_thread(client.status)
    await server.stop(None)


def test_nobody_there_is_told_in_one_line() -> None:
    with ControlClient("127.0.0.1:1") as client, pytest.raises(ControllerError, match="no controller answers at"):
        client.status()
