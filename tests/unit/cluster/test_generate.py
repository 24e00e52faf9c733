"""`weft generate`, and what it has in common with `weft chat`: TLS, keys and what goes with a request."""

import asyncio
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trustme
from helpers.certificates import inner_tls
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router
from typer.testing import CliRunner

from cluster.cli import app
from cluster.errors import ClusterConfigError, RequestError
from cluster.generate import generate
from router.config import MetricsConfig
from router.keys import hash_key
from router.tls import ClientTls, TlsFiles


async def test_generate_speaks_tls_and_shows_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority, cert = tmp_path / "ca.pem", tmp_path / "cert.pem"
    ca = trustme.CA()
    ca.cert_pem.write_to_path(str(authority))
    ca.issue_cert("weft.example.org").private_key_and_cert_chain_pem.write_to_path(str(cert))
    keys = tmp_path / "keys.yaml"
    keys.write_text(f"keys: [{{name: alice, sha256: {hash_key('wk-1')}}}]")
    tls = TlsFiles(cert_file=str(cert), key_file=str(cert))
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, tls=tls, api_keys=str(keys))) as router,
    ):
        send = partial(
            generate,
            "hi",
            router=router.addresses.grpc,
            model="",
            is_chat=False,
            system=None,
            stream=False,
            as_json=True,
            timeout_s=20.0,
            options={"max_tokens": 2},
        )
        trusting = ClientTls(ca_file=str(authority), server_name="weft.example.org")
        await asyncio.to_thread(send, tls=trusting, api_key="wk-1")
        assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 2
        with pytest.raises(RequestError, match=r"unavailable: .*; --tls-name says which name is in the router's cert"):
            await asyncio.to_thread(send, tls=replace(trusting, server_name="other.example.org"), api_key="wk-1")
        with pytest.raises(RequestError, match="unauthenticated: the API key is not known"):
            await asyncio.to_thread(send, tls=trusting, api_key="wk-2")
        with pytest.raises(RequestError, match=r"^unavailable: .*; a router with TLS wants --tls-ca, one with "):
            await asyncio.to_thread(send, tls=None, api_key="wk-1")


COMMANDS = pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=["generate", "chat"])


@COMMANDS
async def test_router_that_wants_a_certificate_is_shown_one(command: list[str], tmp_path: Path) -> None:
    ca = trustme.CA()
    files, mine = inner_tls(ca, tmp_path / "router", name="localhost"), inner_tls(ca, tmp_path / "client", name="alice")
    tls = TlsFiles(cert_file=files.cert_file, key_file=files.key_file, ca_file=files.ca_file)
    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls)) as router:
        trusting = [*command, "--router", router.addresses.grpc, "--tls-name", "localhost", "--tls-ca", mine.ca_file]
        shown = ["--tls-cert", mine.cert_file, "--tls-key", mine.key_file]
        answer = await asyncio.to_thread(CliRunner().invoke, app, [*trusting, *shown], input="hi\n")
        assert answer.exit_code == 0
        refused = await asyncio.to_thread(CliRunner().invoke, app, [*trusting, "--timeout", "5"], input="hi\n")
        assert isinstance(refused.exception, RequestError)
        assert "one with a ca_file --tls-cert and --tls-key too" in str(refused.exception)
        assert len(a.submits) == 1


async def test_targets_go_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "router.request_log")
    config_changes = {"metrics": MetricsConfig(log_requests=True)}
    async with FakeReplica("a") as a, running_router(router_config(a.address, **config_changes)) as router:
        flags = ["--target-ttft", "60.5", "--target-tpot", "0.25", "--max-tokens", "2"]
        command = ["generate", "hi", "--router", router.addresses.grpc, *flags]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0
    (line,) = [record.getMessage() for record in caplog.records if record.name == "router.request_log"]
    assert '"target_ttft_s":60.5,"target_tpot_s":0.25' in line


async def test_how_to_sample_and_when_go_with_the_request() -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        flags = ["--min-tokens", "1", "--max-tokens", "2", "--logprobs", "1", "--priority", "-3", "--json"]
        command = ["generate", "hi", "--router", router.addresses.grpc, *flags]
        result = await asyncio.to_thread(CliRunner().invoke, app, command)
        assert result.exit_code == 0
    (submit,) = a.submits
    assert (submit.sampling.min_tokens, submit.sampling.logprobs, submit.priority) == (1, 1, -3)


def test_log_probabilities_that_nothing_would_show_are_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--logprobs", "1", "--router", "127.0.0.1:1"])
    assert "--logprobs: plain output does not show them; allowed: with --json" in str(result.exception)


@COMMANDS
@pytest.mark.parametrize("flag", ["--tls-cert", "--tls-key", "--tls-name"])
def test_what_is_said_of_certificates_is_refused_without_tls(command: list[str], flag: str) -> None:
    result = CliRunner().invoke(app, [*command, "--router", "127.0.0.1:1", flag, "weft"])
    assert isinstance(result.exception, ClusterConfigError)
    assert f"{flag}: without TLS nobody shows a certificate; allowed: with --tls-ca" in str(result.exception)


@COMMANDS
def test_key_that_cannot_be_one_is_told(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--router", "127.0.0.1:1", "--api-key", "wk\n"])
    assert isinstance(result.exception, RequestError)
    assert "unauthenticated: the API key holds a line break" in str(result.exception)


def test_system_message_of_no_chat_is_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--system", "Be kind.", "--router", "127.0.0.1:1"])
    assert "--system: a plain prompt has no system message" in str(result.exception)


@pytest.mark.parametrize("command", [["generate", "hi", "--chat"], ["chat"]], ids=["generate", "chat"])
async def test_variables_for_the_chat_template_go_with_the_request(command: list[str]) -> None:
    async with FakeReplica("a") as a, running_router(router_config(a.address)) as router:
        flags = ["--router", router.addresses.grpc, "--chat-template-kwargs", '{"think": false}', "--max-tokens", "2"]
        result = await asyncio.to_thread(CliRunner().invoke, app, [*command, *flags], input="hi\n")
        assert result.exit_code == 0
    assert [bytes(submit.prompt_token_ids).decode() for submit in a.submits] == ["[think=False]<user>hi"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--chat", "--chat-template-kwargs", "think=no"], "is 'think=no', which is not JSON: Expecting value"),
        (["--chat", "--chat-template-kwargs", "[1]"], "is '[1]'; allowed: a JSON object"),
        (["--chat", "--chat-template-kwargs", '{"a":' + "[" * 200_000], "is an object in too many others"),
        (["--chat-template-kwargs", "{}"], "a plain prompt has no chat template; allowed: with --chat"),
    ],
)
def test_what_is_no_variables_for_a_chat_template_is_refused(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["generate", "hi", *flags, "--router", "127.0.0.1:1"])
    assert isinstance(result.exception, ClusterConfigError)
    assert said in str(result.exception)


def test_what_is_no_text_is_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--router", "127.0.0.1:1"], input=b"caf\xe9")
    assert "the prompt on stdin is no text: 'utf-8' codec can't decode byte 0xe9" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ca.crt", "models: []", "ca.crt: no certificate or crl found; allowed: certificates of authorities, PEM"),
        ("ca.crt", None, "ca.crt cannot be read: No such file"),
        ("tls.key", trustme.CA().issue_cert("weft").private_key_pem.bytes().decode(), "key values mismatch"),
    ],
    ids=["no authorities", "no file", "another key"],
)
def test_files_of_certificates_that_do_not_fit_are_told(
    tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    tls = inner_tls(trustme.CA(), tmp_path)
    file = tmp_path / name
    file.unlink() if content is None else file.write_text(content)
    flags = ["--tls-ca", tls.ca_file, "--tls-cert", tls.cert_file, "--tls-key", tls.key_file]
    result = CliRunner().invoke(app, ["generate", "hi", "--router", "127.0.0.1:1", *flags])
    assert isinstance(result.exception, ClusterConfigError)
    assert message in str(result.exception)


def test_certificate_is_refused_without_its_key(tmp_path: Path) -> None:
    tls = inner_tls(trustme.CA(), tmp_path)
    flags = ["--tls-ca", tls.ca_file, "--tls-cert", tls.cert_file]
    result = CliRunner().invoke(app, ["generate", "hi", "--router", "127.0.0.1:1", *flags])
    assert isinstance(result.exception, ClusterConfigError)
    assert "a client's certificate lacks its key" in str(result.exception)


def test_refused_request_prints_nothing() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--router", "127.0.0.1:1", "--timeout", "1"])
    assert isinstance(result.exception, RequestError)
    assert str(result.exception).endswith("Connection refused; is `weft serve` running?")
    assert result.stdout == ""


def test_timeout_beyond_what_grpc_counts_is_refused() -> None:
    result = CliRunner().invoke(app, ["generate", "hi", "--timeout", "inf"])
    assert result.exit_code == 2
