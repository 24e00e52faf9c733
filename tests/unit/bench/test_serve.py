"""`weft bench serve` on a real router over fake replicas: both fronts see the same, and errors are told apart."""

import asyncio
import errno
import itertools
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import pytest_asyncio
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers.certificates import inner_tls
from helpers.fake_replica import VOCAB_SIZE, FakeReplica
from helpers.router_harness import RunningRouter, router_config, running_router
from rich.console import Console
from typer.testing import CliRunner

from bench.errors import BenchConfigError, BenchError
from bench.load import serve
from bench.load.arrivals import ClosedLoop, Load, OpenLoop, Replay
from bench.load.calls import Call, Lengths
from bench.load.datasets import DatasetKind, DatasetOptions, make_sessions
from bench.load.flag_groups import GoalFlags, LoadFlags, PromptFlags, ServiceFlags, SessionFlags
from bench.load.flags import find_idle, parse_dataset, parse_lengths, parse_target, parse_targets
from bench.load.grpc_sender import GrpcSender
from bench.load.http_sender import connect_http
from bench.load.plots import plot_sweep
from bench.load.records import CallError, Usage
from bench.load.report import print_sweep, serve_line, warnings
from bench.load.sender import Protocol, ServedModel, Target
from bench.load.serve import measure
from bench.load.serve_values import Outcome, Point, ServeOptions
from bench.load.statistics import Targets
from bench.load.watcher import ServeWatcher
from cluster.cli import app
from router import client_values
from router.client import AsyncClient
from router.config import MetricsConfig
from router.keys import hash_key
from router.tls import ClientTls, TlsFiles

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "proto")])}
PROTOCOLS = pytest.mark.parametrize("protocol", list(Protocol))
DATASET = DatasetOptions(
    kind=DatasetKind.SHARED_PREFIX,
    prefix_tokens=16,
    inputs=Lengths(low=4, high=12),
    outputs=Lengths(low=2, high=9),
)


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with FakeReplica("a") as replica:
        yield replica


@pytest_asyncio.fixture
async def router(replica: FakeReplica) -> AsyncIterator[RunningRouter]:
    async with running_router(router_config(replica.address, http_port=0)) as router:
        await router.wait_ready(1)
        yield router


def target(router: RunningRouter, protocol: Protocol, **changes: Any) -> Target:
    address = router.addresses.grpc if protocol is Protocol.GRPC else f"http://{router.addresses.http}"
    return Target(**{"protocol": protocol, "address": address, "timeout_s": 20.0, **changes})


def options(where: Target, **changes: Any) -> ServeOptions:
    return ServeOptions(
        **{
            "target": where,
            "loads": (ClosedLoop(concurrency=4),),
            "dataset": DATASET,
            "num_requests": 12,
            "duration_s": None,
            "num_warmup": 0,
            "vocab_size": 200,
            "targets": None,
            "seed": 0,
            **changes,
        }
    )


@PROTOCOLS
async def test_both_fronts_count_the_same(router: RunningRouter, replica: FakeReplica, protocol: Protocol) -> None:
    outcome = await measure(options(target(router, protocol), targets=Targets(ttft_s=60.0, tpot_s=60.0)))
    (point,) = outcome.points
    summary = point.summary
    assert outcome.model == ServedModel(name="tiny", vocab_size=VOCAB_SIZE if protocol is Protocol.GRPC else None)
    assert (summary.num_requests, summary.num_answered, summary.num_short, summary.errors) == (12, 12, 0, {})
    assert summary.input_tokens == sum(len(submit.prompt_token_ids) for submit in replica.submits)
    assert summary.output_tokens == sum(submit.sampling.max_tokens for submit in replica.submits)
    assert all(submit.sampling.ignore_eos and submit.sampling.temperature == 0 for submit in replica.submits)
    assert {(submit.sampling.top_k, submit.sampling.top_p) for submit in replica.submits} == {(40, 1)}, "the model's"
    assert summary.cached_tokens >= 8 * 16, "all but the first four know the prefix"
    assert summary.ttft_s is not None
    assert summary.e2e_s is not None
    assert summary.ttft_s.mean <= summary.e2e_s.mean <= summary.duration_s
    assert summary.goodput is not None
    assert summary.goodput.output_rate == summary.output_rate
    assert summary.itl_s is not None


@PROTOCOLS
async def test_how_tokens_are_chosen_is_sent(router: RunningRouter, replica: FakeReplica, protocol: Protocol) -> None:
    asked = parse_target(ServiceFlags(), PromptFlags(temperature=0.5, top_k=7, top_p=0.25, repetition_penalty=1.5))
    assert target(router, protocol).sampling == {"temperature": 0.0}, "of the rest nothing is sent"
    where = target(router, protocol, **asked.sampling)
    await measure(options(where, num_requests=1))
    (submit,) = replica.submits
    assert (submit.sampling.temperature, submit.sampling.top_k, submit.sampling.top_p) == (0.5, 7, 0.25)
    assert submit.sampling.repetition_penalty == 1.5


@PROTOCOLS
async def test_targets_are_sent_where_wanted(
    replica: FakeReplica, protocol: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router.request_log")
    sent = GoalFlags(ttft_target=60_000.5, tpot_target=500.0)
    config = router_config(replica.address, http_port=0, metrics=MetricsConfig(log_requests=True))
    async with running_router(config) as router:
        await router.wait_ready(1)
        for goals in (sent, None):
            asked = parse_target(ServiceFlags(), PromptFlags(), goals)
            where = target(router, protocol, target_ttft_s=asked.target_ttft_s, target_tpot_s=asked.target_tpot_s)
            await measure(options(where, num_requests=1))
    messages = [record.getMessage() for record in caplog.records if record.name == "router.request_log"]
    lines = [json.loads(message.removeprefix("request ended: ")) for message in messages]
    assert [(line["target_ttft_s"], line["target_tpot_s"]) for line in lines] == [(60.0005, 0.5), (1.0, 0.1)]


@PROTOCOLS
async def test_loads_send_the_same_prompts_and_share_no_cache(
    router: RunningRouter, replica: FakeReplica, protocol: Protocol
) -> None:
    loads = (OpenLoop(rate=1000.0), OpenLoop(rate=float("inf")))
    points = (await measure(options(target(router, protocol), loads=loads, num_warmup=5))).points
    assert [point.summary.num_answered for point in points] == [12, 12]
    assert all(point.summary.lag_s is not None for point in points)
    rounds = [replica.submits[:5], replica.submits[5:17], replica.submits[17:]]
    prompts = [sorted(tuple(submit.prompt_token_ids) for submit in each) for each in rounds]
    assert prompts[1] == prompts[2]
    assert len({submit.cache_salt for submit in replica.submits}) == 3
    first, second = (point.summary.cached_tokens for point in points)
    assert first < 12 * 16
    assert second < 12 * 16


@PROTOCOLS
async def test_texts_and_conversations_are_sent_turn_by_turn(
    router: RunningRouter, replica: FakeReplica, protocol: Protocol, tmp_path: Path
) -> None:
    file = tmp_path / "prompts.jsonl"
    said = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    file.write_text(json.dumps({"messages": said}) + "\n" + json.dumps({"prompt": "héllo"}) + "\n")
    dataset = DatasetOptions(kind=DatasetKind.PROMPTS, file=file, outputs=Lengths(low=4, high=4))
    asked = options(target(router, protocol), dataset=dataset, num_requests=3, num_warmup=3)
    (point,) = (await measure(asked)).points
    assert (point.summary.num_answered, point.summary.output_tokens) == (3, 12)
    texts = [bytes(i for i in submit.prompt_token_ids if i < 256).decode() for submit in replica.submits]
    assert sorted(texts[3:]) == ["<user>user", "<user>user<assistant>assistant<user>user", "héllo"]
    assert {text.removeprefix("<user>")[0] for text in texts[:3]} == {"("}, "prompts of the warm-up begin otherwise"


@PROTOCOLS
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "bad request"),
        (grpc.StatusCode.INTERNAL, "server error"),
    ],
)
async def test_errors_are_counted_by_kind(
    router: RunningRouter, replica: FakeReplica, protocol: Protocol, refusal: grpc.StatusCode, kind: str
) -> None:
    replica.refusal = refusal
    (point,) = (await measure(options(target(router, protocol), num_requests=3))).points
    assert point.summary.errors == {kind: 3}
    assert point.summary.num_answered == 0
    assert warnings(point) == [f"3 of 3 requests failed: 3 {kind} (scripted refusal)"]


@PROTOCOLS
async def test_warm_up_without_an_answer_ends_it(
    router: RunningRouter, replica: FakeReplica, protocol: Protocol
) -> None:
    replica.refusal = grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(BenchError, match=r"no request of the warm-up was answered: 3 bad request \(scripted refusal\)"):
        await measure(options(target(router, protocol), num_warmup=3))


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        (Replay(), '{"input_length": 4, "output_length": 2}', "the sessions have no times"),
        (ClosedLoop(concurrency=1), '{"input_length": 4}', "output_length is None"),
    ],
)
async def test_a_trace_that_cannot_be_sent_is_told_before_anything_is(
    router: RunningRouter, replica: FakeReplica, tmp_path: Path, load: Load, text: str, message: str
) -> None:
    file, watcher = tmp_path / "trace.jsonl", _Prepared()
    file.write_text(text)
    dataset = DatasetOptions(kind=DatasetKind.TRACE, file=file)
    asked = options(target(router, Protocol.GRPC), loads=(load,), dataset=dataset, num_warmup=1)
    with pytest.raises(BenchConfigError, match=message):
        await measure(asked, watcher)
    assert not watcher.has_begun
    assert not replica.submits


class _Prepared(ServeWatcher):
    has_begun = False

    def prepare(self, what: str) -> None:
        self.has_begun = True


async def test_interrupted_sweep_keeps_what_was_measured(router: RunningRouter, replica: FakeReplica) -> None:
    """The first load whole, of the second what there is."""
    outcome, second_begun = Outcome(), asyncio.Event()

    class Watcher(ServeWatcher):
        def end(self, point: Point) -> None:
            replica._steps_allowed = 0
            second_begun.set()

    loads = (ClosedLoop(concurrency=2), ClosedLoop(concurrency=3))
    running = asyncio.create_task(measure(options(target(router, Protocol.GRPC), loads=loads), Watcher(), outcome))
    await second_begun.wait()
    await replica.wait_until(lambda: len(replica.submits) == 12 + 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    first, second = (point.summary for point in outcome.points)
    assert (first.num_answered, second.num_answered, second.errors) == (12, 0, {"cancelled": 3})
    assert not outcome.is_complete


async def test_a_terminated_command_tells_what_it_measured(
    router: RunningRouter, replica: FakeReplica, tmp_path: Path
) -> None:
    lines = tmp_path / "lines"
    command = [sys.executable, "-m", "cluster.cli", "bench", "serve", "--router", router.addresses.grpc]
    command += ["--concurrency", "3,4", "-n", "6", "--warmup", "0", "--vocab-size", "200", "--json", str(lines)]
    replica.pause()
    process = await asyncio.create_subprocess_exec(
        *command, cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    await replica.wait_until(lambda: len(replica.submits) == 3)
    process.terminate()
    out, err = await process.communicate()
    assert (process.returncode, err) == (143, b"")
    line = json.loads(lines.read_text())
    assert [point["summary"]["errors"] for point in line["points"]] == [{"cancelled": 3}]
    assert not line["complete"]
    assert b"3 of 3 requests failed: 3 cancelled" in out


@PROTOCOLS
async def test_request_without_an_answer_times_out(
    router: RunningRouter, replica: FakeReplica, protocol: Protocol
) -> None:
    replica._steps_allowed = 0
    (point,) = (await measure(options(target(router, protocol, timeout_s=0.3), num_requests=1))).points
    assert point.summary.errors == {"timeout": 1}


@PROTOCOLS
async def test_service_that_is_not_there_or_serves_something_else(router: RunningRouter, protocol: Protocol) -> None:
    with pytest.raises(BenchError, match="serves no model 'other': tiny"):
        await measure(options(target(router, protocol, model="other")))
    with pytest.raises(BenchError, match=r"127\.0\.0\.1:1"):
        await measure(options(target(router, protocol, address="http://127.0.0.1:1"[7 * (protocol == "grpc") :])))


@PROTOCOLS
async def test_service_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, protocol: Protocol) -> None:
    monkeypatch.setattr("bench.load.serve.FIND_TIMEOUT_S", 0.1)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()  # from Python 3.12 on a server waits for its connections

    mute = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    address = f"127.0.0.1:{mute.sockets[0].getsockname()[1]}"
    where = Target(protocol=protocol, address=address if protocol is Protocol.GRPC else f"http://{address}")
    async with mute:
        with pytest.raises(BenchError, match=r"does not say within 0\.1 s which models it serves"):
            await measure(options(where))


@PROTOCOLS
async def test_services_with_tls_and_keys_are_measured_too(protocol: Protocol, tmp_path: Path) -> None:
    authority, cert, keys = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "keys.yaml"
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(authority))
    ca.issue_cert("weft.example.org").private_key_and_cert_chain_pem.write_to_path(str(cert))
    keys.write_text(f"keys: [{{name: alice, sha256: {hash_key('wk-1')}}}]")
    tls = TlsFiles(cert_file=str(cert), key_file=str(cert), ca_file=str(authority))
    async with (
        FakeReplica("a") as replica,
        running_router(router_config(replica.address, http_port=0, tls=tls, api_keys=str(keys))) as router,
    ):
        grpc_address, url = router.addresses.grpc, f"https://{router.addresses.http}/v1"
        where = Target(
            protocol=protocol,
            address=grpc_address if protocol is Protocol.GRPC else url,
            tls=ClientTls(
                ca_file=str(authority), cert_file=str(cert), key_file=str(cert), server_name="weft.example.org"
            ),
            timeout_s=20.0,
        )
        (point,) = (await measure(options(replace(where, api_key="wk-1"), num_requests=2))).points
        assert point.summary.num_answered == 2
        with pytest.raises(BenchError, match=r"unauthenticated|401"):
            await measure(options(replace(where, api_key="wk-2")))
        nobody = ClientTls(ca_file=str(authority), server_name="weft.example.org")
        with pytest.raises(BenchError, match=r"unavailable|gives no list of models"):
            await measure(options(replace(where, api_key="wk-1", tls=nobody)))


async def test_port_of_grpc_in_place_of_http_is_told(router: RunningRouter) -> None:
    where = Target(protocol=Protocol.HTTP, address=f"http://{router.addresses.grpc}", timeout_s=20.0)
    async with connect_http(where) as sender:
        with pytest.raises(BenchError, match=r"of models: what answers speaks no HTTP/1\.1; is it the port of gRPC\?$"):
            await sender.find_model()


async def test_certificate_of_an_authority_that_nobody_knows_is_refused() -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    server = TestServer(web.Application(), scheme="https")
    await server.start_server(ssl=context)
    async with server, connect_http(Target(protocol=Protocol.HTTP, address=str(server.make_url("/")))) as sender:
        with pytest.raises(BenchError, match=r"gives no list of models: .*certificate verify failed"):
            await sender.find_model()


async def test_line_of_json_has_everything_but_the_key(router: RunningRouter, tmp_path: Path) -> None:
    wanted = options(target(router, Protocol.GRPC, api_key="secret"), loads=(OpenLoop(rate=float("inf")),))
    outcome = await measure(wanted)
    line = json.loads(serve_line(wanted, outcome))
    assert line["complete"]
    assert (line["benchmark"], line["model"], line["points"][0]["summary"]["num_answered"]) == ("serve", "tiny", 12)
    assert line["arguments"]["loads"] == [{"rate": "inf", "burstiness": 1.0}]
    assert {"cpu", "cores", "python", "weft", "commit"} <= line.keys()
    assert "secret" not in json.dumps(line)
    assert plot_sweep(outcome.points, tmp_path, title="t").read_bytes().startswith(b"\x89PNG")


async def test_late_and_busy_generators_are_told(router: RunningRouter) -> None:
    (point,) = (await measure(options(target(router, Protocol.GRPC), loads=(OpenLoop(rate=float("inf")),)))).points
    lag = point.summary.lag_s
    assert lag is not None
    late = replace(lag, max=0.5, p99=0.5)
    summary = replace(point.summary, duration_s=2.0, lag_s=late, num_short=2, num_seen=3)
    found = warnings(Point(load=OpenLoop(rate=1.0), summary=summary, cpu_share=0.97))
    assert "fell behind: requests were sent up to 500.0 ms late" in found[0]
    assert "took 97% of a core" in found[1]
    num_answered, num_tokens = summary.num_answered, summary.output_tokens
    assert f"2 of {num_answered} answers ended with fewer tokens than asked for: {num_tokens} of" in found[2]
    assert f"{num_tokens} tokens came as 3 pieces of text" in found[3]
    unsent = Point(load=OpenLoop(rate=1.0), summary=point.summary, cpu_share=0.1, num_unsent=4)
    assert "4 later turns of failed sessions were not sent" in warnings(unsent)[-1]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_requests": 2}, True),
        ({"num_requests": None, "duration_s": 60.0}, True),
        ({"num_requests": 1}, False),
        ({"dataset": DatasetOptions(kind=DatasetKind.W1, has_end=True), "num_requests": None}, False),
    ],
)
async def test_a_dataset_with_fewer_requests_than_asked_for_is_told(
    router: RunningRouter, asked: dict[str, Any], told: bool
) -> None:
    dataset = DatasetOptions(kind=DatasetKind.W1)
    (point,) = (await measure(options(target(router, Protocol.GRPC), **{"dataset": dataset, **asked}))).points
    assert ("the dataset has only 1 request: less was sent than is asked for" in warnings(point)) == told
    assert ("the dataset has only 5 requests" in warnings(replace(point, num_unsent=4))[-1]) == told


async def test_a_dataset_is_not_short_of_what_the_duration_left(router: RunningRouter) -> None:
    load = OpenLoop(rate=1.0, burstiness=float("inf"))  # the second is due after a second
    dataset = DatasetOptions(kind=DatasetKind.W1)
    sessions = [*itertools.islice(make_sessions(dataset, vocab_size=200, seed=0), 1)] * 2
    asked = options(target(router, Protocol.GRPC), loads=(load,), num_requests=None, duration_s=0.5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serve, "make_sessions", lambda *_, **__: iter(sessions))
        (point,) = (await measure(asked)).points
    assert point.summary.num_requests == 1
    assert not any("the dataset has only" in warning for warning in warnings(point))


@pytest.mark.parametrize("has_end", [True, False])
async def test_message_without_tokens_is_no_token_and_one_without_an_end_no_answer(has_end: bool) -> None:
    usage = client_values.Usage(
        prompt_tokens=4, cached_tokens=1, completion_tokens=2, queue_s=0.0, prefill_s=0.0, decode_s=0.0
    )
    finish = client_values.Finish(reason="length", stopped_by=None, usage=usage, replica_ids=("a",))

    class Client:
        async def generate(self, prompt: object, **asked: object) -> AsyncIterator[client_values.Delta]:
            for token_ids, end in (((5, 6), None), ((), finish if has_end else None)):
                yield client_values.Delta(
                    request_id="x", model="tiny", text="", token_ids=token_ids, logprobs=(), finish=end
                )

    received: list[int] = []
    sender = GrpcSender(cast(AsyncClient, Client()), Target(protocol=Protocol.GRPC, address="a:1"))
    with nullcontext() if has_end else pytest.raises(CallError, match="the answer has no end"):
        told = await sender.send(Call(prompt=(1,), num_out=2), "", received.append)
        assert told == Usage(prompt_tokens=4, cached_tokens=1, completion_tokens=2)
    assert received == [2]


async def test_loads_without_a_number_are_apart_from_the_line(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    (point,) = (await measure(options(target(router, Protocol.GRPC), num_requests=2))).points
    points = [replace(point, load=OpenLoop(rate=rate)) for rate in (4.0, float("inf"), 1.0)]
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: drawn.append(figure))
    plot_sweep(points, tmp_path, title="t")
    for axes in drawn[0].axes:
        line, _, crosses = axes.lines[:3]
        assert list(line.get_xdata()) == [1.0, 4.0]
        assert (list(crosses.get_xdata()), crosses.get_linestyle()) == ([point.summary.request_rate], "None")


async def test_the_line_goes_through_the_mean_of_a_load_that_is_repeated(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    (point,) = (await measure(options(target(router, Protocol.GRPC), num_requests=2))).points
    points = [
        replace(point, load=ClosedLoop(concurrency=number), summary=replace(point.summary, output_rate=rate))
        for number, rate in ((4, 100.0), (1, 30.0), (4, 120.0))
    ]
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: drawn.append(figure))
    plot_sweep(points, tmp_path, title="t")
    line, circles = drawn[0].axes[2].lines
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([1, 4], [30.0, 110.0])
    assert (list(circles.get_xdata()), list(circles.get_ydata())) == ([1, 4, 4], [30.0, 100.0, 120.0])
    assert not circles.get_clip_on()


async def test_plot_that_cannot_be_written_is_told(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    points = (await measure(options(target(router, Protocol.GRPC), num_requests=2))).points
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fill_the_disk)
    with pytest.raises(BenchError, match=r"concurrency_sweep\.png cannot be written: No space left on device"):
        plot_sweep(points, tmp_path, title="t")


async def test_requests_at_a_time_are_whole(
    router: RunningRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    (point,) = (await measure(options(target(router, Protocol.GRPC), num_requests=2))).points
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **options: drawn.append(figure))
    plot_sweep([replace(point, load=ClosedLoop(concurrency=number)) for number in (1, 4)], tmp_path, title="t")
    assert all(tick == round(tick) for axes in drawn[0].axes for tick in axes.get_xticks())


@pytest.mark.parametrize("targets", [None, Targets(ttft_s=9.0)])
async def test_sweep_has_a_column_of_goodput_where_there_are_targets(
    router: RunningRouter, targets: Targets | None
) -> None:
    (point,) = (await measure(options(target(router, Protocol.GRPC), num_requests=2, targets=targets))).points
    out = StringIO()
    print_sweep(Console(file=out, width=80), [point, point])
    assert ("good" in out.getvalue()) == (targets is not None)


async def test_command_prints_tables_and_writes_json_and_plot(router: RunningRouter, tmp_path: Path) -> None:
    arguments = [
        *("bench", "serve", "--router", router.addresses.grpc, "--rate", "200,400", "-n", "4", "--warmup", "1"),
        *("--input-tokens", "4-8", "--output-tokens", "3", "--ttft-target", "5000"),
        *("--json", str(tmp_path / "lines"), "--plot", str(tmp_path / "plots")),
    ]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert "200 arrivals/s, Poisson" in result.output
    assert "4 of 4 requests in" in result.output
    assert "all loads" in result.output
    (line,) = (tmp_path / "lines").read_text().splitlines()
    assert [point["name"] for point in json.loads(line)["points"]] == [
        "200 arrivals/s, Poisson",
        "400 arrivals/s, Poisson",
    ]
    assert (tmp_path / "plots" / "rate_sweep.png").stat().st_size > 10_000


async def test_command_runs_where_replicas_do_not(router: RunningRouter, tmp_path: Path) -> None:
    """As in the router's image: no torch, no ray, no numpy."""
    lines = tmp_path / "lines"
    arguments = [
        *("weft", "bench", "serve", "--protocol", "http", "--url", f"http://{router.addresses.http}"),
        *("-n", "3", "--warmup", "0", "--vocab-size", "200", "--json", str(lines)),
    ]
    block = "import runpy, sys; sys.modules.update(dict.fromkeys(('torch', 'ray', 'numpy', 'safetensors', 'zmq')));"
    run = f"{block} sys.argv = {arguments!r}; runpy.run_module('cluster.cli', run_name='__main__')"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", run], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "3 of 3 requests in" in done.stdout
    assert json.loads(lines.read_text())["points"][0]["summary"]["num_answered"] == 3


ODD_ANSWERS = {
    "no events": b"<html>",
    "no JSON": b"data: {\n\n",
    "other JSON": b'data: {"choices": 5}\n\n',
    "line without end": b"data: " + b"x" * 1_000_000,
    "no usage": b"data: [DONE]\n\n",
    "no UTF-8": b'data: {"choices": [{"text": "\xff"}]}\n\n',
    "no end": b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n',
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS.keys())
async def test_answers_that_nobody_understands_are_failed_requests(answer: bytes) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "odd"}]})

    async def complete(request: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="text/event-stream")

    service = web.Application()
    service.add_routes([web.get("/v1/models", models), web.post("/v1/completions", complete)])
    async with TestServer(service) as server:
        where = Target(protocol=Protocol.HTTP, address=f"http://{server.host}:{server.port}", timeout_s=20.0)
        (point,) = (await measure(options(where, num_requests=2))).points
    assert sum(point.summary.errors.values()) == 2


@pytest.mark.parametrize("address", [{"url": "https://127.0.0.1:1"}, {"router": "127.0.0.1:1"}], ids=["http", "grpc"])
def test_flags_say_who_is_trusted_and_who_asks(address: dict[str, str], tmp_path: Path) -> None:
    files = inner_tls(trustme.CA(), tmp_path)
    flags = {"tls_ca": files.ca_file, "tls_cert": files.cert_file, "tls_key": files.key_file, "tls_name": "n"}
    tls = parse_target(ServiceFlags(**address, **flags), PromptFlags()).tls
    assert tls == ClientTls(ca_file=files.ca_file, cert_file=files.cert_file, key_file=files.key_file, server_name="n")
    assert parse_target(ServiceFlags(**address), PromptFlags()).tls is None
    Path(files.ca_file).write_bytes(b"\xff\xfe no certificate")
    with pytest.raises(BenchConfigError, match=r"ca\.crt: .*; allowed: certificates of authorities, PEM"):
        parse_target(ServiceFlags(**address, **flags), PromptFlags())


async def test_command_ends_with_an_error_when_nothing_was_answered(
    router: RunningRouter, replica: FakeReplica
) -> None:
    replica.refusal = grpc.StatusCode.INTERNAL
    arguments = ["bench", "serve", "--router", router.addresses.grpc, "-n", "2", "--warmup", "0"]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert str(result.exception) == "no request was answered"
    assert "2 of 2 requests failed: 2 server error (scripted refusal)" in " ".join(result.output.split())


def test_files_that_cannot_be_written_are_told_before_anything_is_sent(tmp_path: Path) -> None:
    lines = tmp_path / "none" / "lines"
    result = CliRunner().invoke(app, ["bench", "serve", "--router", "127.0.0.1:1", "--json", str(lines)])
    assert "cannot be written: No such file" in str(result.exception)


@pytest.mark.parametrize(
    ("flag", "number"),
    [("--top-p", "0"), ("--temperature", "1e37"), ("--repetition-penalty", "inf"), ("--think-time", "inf")],
)
def test_a_number_that_no_service_takes_is_refused_at_its_flag(flag: str, number: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", flag, number])
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}'" in result.output


def test_address_says_the_protocol() -> None:
    prompts = PromptFlags()
    assert parse_target(ServiceFlags(), prompts).address == "127.0.0.1:50051"
    over_http = parse_target(ServiceFlags(url="http://a"), prompts)
    assert (over_http.protocol, over_http.address) == (Protocol.HTTP, "http://a")
    assert parse_target(ServiceFlags(protocol="http"), prompts).address == "http://127.0.0.1:8000"


def test_one_target_is_enough_to_be_sent_and_is_given_in_milliseconds() -> None:
    for goals, sent in (
        (GoalFlags(tpot_target=50.0), {"target_tpot_s": 0.05}),
        (GoalFlags(ttft_target=500.0), {"target_ttft_s": 0.5}),
    ):
        assert parse_target(ServiceFlags(api_key="wk-1"), PromptFlags(), goals).targets_s == sent
    assert parse_targets(GoalFlags(e2e_target=9.0, ttft_target=3.0)) == Targets(e2e_s=0.009, ttft_s=0.003)
    assert parse_targets(GoalFlags()) is None


def test_lengths_are_from_one_token_on() -> None:
    assert parse_lengths("--output-tokens", "1") == Lengths(low=1, high=1)
    assert parse_lengths("--output-tokens", "1-3") == Lengths(low=1, high=3)
    with pytest.raises(BenchConfigError, match=r"--output-tokens is '0'; allowed: a number, or a range"):
        parse_lengths("--output-tokens", "0")


@pytest.mark.parametrize("is_bounded", [True, False])
def test_a_file_of_prompts_is_sent_again_only_where_a_flag_says_how_much(is_bounded: bool, tmp_path: Path) -> None:
    dataset = parse_dataset("prompts", PromptFlags(file=tmp_path / "prompts.jsonl"), is_bounded=is_bounded)
    assert dataset.has_end is not is_bounded


def test_flags_that_nothing_looks_at_are_found() -> None:
    prompts = PromptFlags(turns="3", input_tokens="64", length_scale=0.5)
    assert find_idle([DatasetKind.SESSIONS], prompts) == ["--length-scale"]
    assert find_idle([DatasetKind.W1, DatasetKind.W2], prompts) == ["--input-tokens", "--turns", "--length-scale"]
    assert find_idle([DatasetKind.PROMPTS], SessionFlags(vocab_size=9)) == ["--vocab-size"]
    assert find_idle([DatasetKind.RANDOM], LoadFlags(burstiness=2.0, speed=2.0)) == ["--burstiness", "--speed"]
    assert find_idle([DatasetKind.RANDOM], LoadFlags(rate="1", burstiness=2.0)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--concurrency", "2"], "--rate and --concurrency are given; allowed: one of them"),
        (["--replay"], "--replay is given, and --dataset random has no times; allowed: with --dataset trace"),
        (["--url", "http://a", "--tls-ca", "f"], "--tls-ca is 'f', and the connection is plain; allowed: with an http"),
        (["--tls-name", "n"], "--tls-name is 'n', and the connection is plain; allowed: with --tls-ca"),
        (["--tls-cert", "f"], "--tls-cert is 'f', and the connection is plain; allowed: with --tls-ca"),
        (["--url", "https://a", "--tls-key", "f"], "a client's certificate lacks its key, or a key its certificate"),
        (["--rate", "fast"], "--rate is 'fast'; allowed: a number, or several as in 1,4,16"),
        (["--concurrency", "1.5"], "--concurrency is '1.5'"),
        (["--send-targets", "--e2e-target", "9"], "--send-targets: there is none; allowed: with --ttft-target"),
        (["--protocol", "smtp"], "--protocol is 'smtp'; allowed: grpc, http"),
        (["--concurrency", ""], "--concurrency is ''"),
        (["--rate", "nan"], "--rate is nan; allowed: more than 0"),
        (["--rate", "4", "--burstiness", "0"], "--burstiness is 0; allowed: at least 0.001 (1: Poisson"),
        (["--e2e-target", "-1"], "--e2e-target is -1 ms"),
        (["--tpot-target", "inf"], "--tpot-target is inf ms; allowed: a number"),
        (["--protocol", "grpc", "--url", "http://a"], "'http://a', and --protocol grpc; allowed with it: --router"),
        (["--router", "http://a:1"], "--router is 'http://a:1'; allowed: host:port"),
        (["--router", "a:65536"], "--router: 'a:65536' is no address; allowed: host:port"),
        (["--router", "[::1"], "--router: '[::1' is no address"),
        (["--url", "a:1"], "--url is 'a:1'; allowed: http://"),
        (["--url", "http://"], "--url is 'http://'; allowed: http://HOST"),
        (["--url", "http://a:65536"], "--url is 'http://a:65536'; allowed: http://HOST[:PORT]"),
        (["--url", "http://[::1"], "--url is 'http://[::1'"),
        (["--control", "a"], "--control: 'a' is no address"),
        (["--router", "a:1", "--url", "http://a"], "--router is 'a:1', and --protocol http; allowed with it: --url"),
        (["--api-key", "wk-1\n"], "--api-key has a line break"),
        (["--api-key", "wk-é"], "--api-key has a line break, or another character"),
        (["--dataset", "all"], "--dataset is 'all'; allowed: random, shared-prefix"),
        (["--input-tokens", "9-3"], "--input-tokens is '9-3'; allowed: a number, or a range"),
        (["--dataset", "trace"], "--file is missing"),
        (["--dataset", "trace", "--file", "x", "--length-scale", "2"], "--length-scale is 2"),
    ],
)
def test_wrong_flags_of_serve_are_refused_by_name(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert message in str(result.exception)
