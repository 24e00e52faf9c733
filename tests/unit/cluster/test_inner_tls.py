"""Mutual TLS inside the cluster: replica, router, controller and the `weft` command with one authority between them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme
from helpers.certificates import inner_tls
from helpers.fake_model import run_alone
from helpers.fixed_control import fixed_control
from helpers.router_harness import router_config, running_router
from helpers.traces import gated_replica
from typer.testing import CliRunner, Result
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from cluster.cli import app
from cluster.cli_connection import connection_flags
from cluster.config import build_spec
from cluster.control_client import ControlClient
from cluster.control_server import bind_control_port
from cluster.errors import ClusterConfigError, ControllerError, StartError
from cluster.preflight import check_spec
from router.client import AsyncClient
from router.config import LinkConfig
from router.spans import NO_TRACER
from router.tls import InnerTls
from workers.request import Request, RequestId, SamplingParams

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(ca: trustme.CA, tmp_path: Path) -> InnerTls:
    return inner_tls(ca, tmp_path / "inner")


def weft(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


async def test_cluster_serves_and_is_operated_over_tls(ca: trustme.CA, tls: InnerTls, tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=6)
    wanted = run_alone(Request(request_id=RequestId("x"), prompt_token_ids=PROMPT, sampling=sampling))
    async with (
        gated_replica("a", NO_TRACER, tls=tls) as a,
        fixed_control({"a": a.address}, tls) as control,
        running_router(router_config(control=control, link=LinkConfig(tls=tls, backoff_s=0.01))) as router,
        AsyncClient(router.addresses.grpc) as client,
    ):
        a.step()
        await router.wait_ready(1)
        completion = await client.complete(PROMPT, max_tokens=6, temperature=0.0)
        assert completion.token_ids == tuple(wanted)
        alice = inner_tls(ca, tmp_path / "alice", name="alice")
        shown = await asyncio.to_thread(weft, "status", "--json", *connection_flags(control, alice))
        assert json.loads(shown.stdout)["models"][0]["name"] == "tiny"


async def test_controller_takes_nobody_without_a_certificate_of_its_authority(
    ca: trustme.CA, tls: InnerTls, tmp_path: Path
) -> None:
    stranger = inner_tls(trustme.CA(), tmp_path / "stranger", trusts=ca)

    def ask(address: str, tls: InnerTls | None) -> None:
        with ControlClient(address, tls=tls) as client:
            client.status()

    async with fixed_control({}, tls) as control:
        await asyncio.to_thread(ask, control, tls)
        with pytest.raises(
            ControllerError, match="With inner_tls it wants WEFT_CONTROL_TLS_CERT, _KEY and _CA, or the options"
        ):
            await asyncio.to_thread(ask, control, None)
        with pytest.raises(ControllerError, match="with inner_tls and certificates of these authorities"):
            await asyncio.to_thread(ask, control, stranger)
        trusting = grpc.ssl_channel_credentials(ca.cert_pem.bytes())  # it knows the controller, and shows nothing
        async with grpc.aio.secure_channel(control, trusting, options=tls.channel_options) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await ControlStub(channel).GetStatus(control_pb2.GetStatusRequest(), timeout=10)


def test_inner_tls_reaches_the_cluster_and_the_links_of_routers(tls: InnerTls) -> None:
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    spec = build_spec({"inner_tls": files, "router": {"link": {"backoff_s": 0.5}}})
    assert spec.inner_tls == spec.router.link.tls == tls
    assert spec.router.link.backoff_s == 0.5
    assert build_spec({"inner_tls": {**files, "server_name": "n"}}).router.link.tls.server_name == "n"
    assert (build_spec({}).inner_tls, build_spec({}).router.link.tls) == (None, None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"cert_file": "/c", "key_file": "/k"}, "inner_tls.ca_file: missing"),
        ({"cert_file": "/c", "key_file": "k", "ca_file": "/a"}, "inner_tls.key_file: 'k'; allowed: an absolute path"),
        (
            {"cert_file": "/c", "key_file": "/k", "ca_file": "/a", "name": "n"},
            "inner_tls.name: unknown key; allowed: cert_file, key_file, ca_file, server_name",
        ),
    ],
)
def test_section_with_a_fault_is_refused(section: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        build_spec({"inner_tls": section})


def test_one_half_of_the_connections_cannot_have_tls_alone(tls: InnerTls) -> None:
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    with pytest.raises(ClusterConfigError, match=r"router\.link\.tls: given; allowed: the section inner_tls"):
        build_spec({"router": {"link": {"tls": files}}})


def test_files_that_do_not_fit_stop_a_start(tls: InnerTls) -> None:
    Path(tls.key_file).write_bytes(trustme.CA().issue_cert("weft").private_key_pem.bytes())
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    with pytest.raises(StartError, match="key values mismatch"):
        check_spec(build_spec({"inner_tls": files, "controller": {"port": 0}}))


async def test_controller_on_a_node_without_the_files_says_so(tls: InnerTls) -> None:
    tls = replace(tls, ca_file=tls.ca_file + ".none")
    with pytest.raises(StartError, match=r"cannot speak TLS: the TLS file .*none cannot be read"):
        bind_control_port("127.0.0.1", 0, tls)


def test_command_with_half_of_the_files_is_refused(tls: InnerTls) -> None:
    refused = weft("status", "--tls-cert", tls.cert_file)
    assert isinstance(refused.exception, ClusterConfigError)
    assert "allowed: all three" in str(refused.exception)


def test_command_with_files_that_do_not_fit_is_refused(tls: InnerTls) -> None:
    Path(tls.key_file).write_bytes(trustme.CA().issue_cert("weft").private_key_pem.bytes())
    refused = weft("status", *connection_flags("127.0.0.1:1", tls))
    assert isinstance(refused.exception, ClusterConfigError)
    assert "key values mismatch" in str(refused.exception)


@pytest.mark.parametrize("command", ["status", "stop", "apply", "scale", "rollout", "drain", "top", "logs"])
def test_every_command_to_the_controller_has_the_options(command: str) -> None:
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, "--help"]).stdout
    assert all(option in shown for option in ("--control", "--tls-cert", "--tls-key", "--tls-ca", "--tls-name"))


def test_flags_are_those_that_are_needed(tls: InnerTls) -> None:
    assert connection_flags("127.0.0.1:50050", None) == []
    assert connection_flags("a:1", None) == ["--control", "a:1"]
    flags = ["--tls-cert", tls.cert_file, "--tls-key", tls.key_file, "--tls-ca", tls.ca_file]
    assert connection_flags("127.0.0.1:50050", tls) == flags
    assert connection_flags("127.0.0.1:50050", replace(tls, server_name="n")) == [*flags, "--tls-name", "n"]
