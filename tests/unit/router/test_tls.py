"""TLS of the listeners and of the cluster's inner connections, plain and mutual, against certificates made here."""

import asyncio
import socket
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest
import trustme
from cryptography.x509 import ExtendedKeyUsage
from cryptography.x509.oid import ExtendedKeyUsageOID
from helpers.certificates import inner_tls
from helpers.fake_replica import FakeReplica
from helpers.polling import poll
from helpers.router_harness import RunningRouter, router_config, running_router
from weft.v1 import replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaStub

from router.client import AsyncClient, Client, ModelInfo, UnavailableError
from router.config import LinkConfig
from router.errors import RouterConfigError
from router.flags import parse_flags, to_config
from router.tls import InnerTls, TlsFiles, connect


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


def listener_files(ca: trustme.CA, folder: Path, *, is_mutual: bool) -> TlsFiles:
    files = inner_tls(ca, folder, name="localhost")
    return TlsFiles(cert_file=files.cert_file, key_file=files.key_file, ca_file=files.ca_file if is_mutual else None)


async def test_listeners_speak_tls_and_nothing_else(ca: trustme.CA, tmp_path: Path) -> None:
    tls = listener_files(ca, tmp_path / "router", is_mutual=False)
    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls, http_port=0)) as router:
        target, root = f"localhost:{router.addresses.grpc.rpartition(':')[2]}", ca.cert_pem.bytes()
        async with AsyncClient(target, credentials=grpc.ssl_channel_credentials(root), timeout_s=10) as client:
            await client.wait_ready(10)
            assert (await client.complete("hi", max_tokens=2)).usage.completion_tokens == 2
        async with AsyncClient(target, timeout_s=5) as client:
            with pytest.raises(UnavailableError):
                await client.models()
        url = f"https://localhost:{router.addresses.http.rpartition(':')[2]}/v1/models"
        trusting = ssl.create_default_context(cadata=root.decode())
        async with httpx.AsyncClient(verify=trusting) as http:
            assert (await http.get(url)).json()["data"][0]["id"] == "tiny"


async def test_client_may_look_for_another_name_than_it_dials(ca: trustme.CA, tmp_path: Path) -> None:
    tls = listener_files(ca, tmp_path / "router", is_mutual=False)
    credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())

    def list_models(target: str) -> list[ModelInfo]:
        with Client(target, credentials=credentials, tls_name="localhost", timeout_s=10) as client:
            return client.models()

    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls)) as router:
        target = router.addresses.grpc
        assert target.startswith("127.0.0.1:")
        async with AsyncClient(target, credentials=credentials, timeout_s=10) as client:
            with pytest.raises(UnavailableError):
                await client.models()
        async with AsyncClient(target, credentials=credentials, tls_name="localhost", timeout_s=10) as client:
            await client.wait_ready(30)  # what is told of a model changes when its replica is there
            assert await client.models() == await asyncio.to_thread(list_models, target) != []


async def test_a_listener_with_an_authority_takes_only_its_clients(ca: trustme.CA, tmp_path: Path) -> None:
    tls = listener_files(ca, tmp_path / "router", is_mutual=True)
    mine = inner_tls(ca, tmp_path / "client", name="client")
    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls, http_port=0)) as router:
        target, root = f"localhost:{router.addresses.grpc.rpartition(':')[2]}", ca.cert_pem.bytes()
        async with AsyncClient(target, credentials=mine.channel_credentials, timeout_s=10) as client:
            await client.wait_ready(10)
        async with AsyncClient(target, credentials=grpc.ssl_channel_credentials(root), timeout_s=5) as client:
            with pytest.raises(UnavailableError):
                await client.models()
        url = f"https://localhost:{router.addresses.http.rpartition(':')[2]}/v1/models"
        context = ssl.create_default_context(cadata=root.decode())
        async with httpx.AsyncClient(verify=context) as http:
            with pytest.raises(httpx.TransportError):
                await http.get(url)
        context.load_cert_chain(mine.cert_file, mine.key_file)
        async with httpx.AsyncClient(verify=context) as http:
            assert (await http.get(url)).status_code == 200


async def asked(router: RunningRouter, trusted: trustme.CA, client: InnerTls | None = None) -> list[bool]:
    """Whether the listeners for gRPC and HTTP answer a new connection, which trusts an authority."""
    root, answers = trusted.cert_pem.bytes(), []
    credentials = grpc.ssl_channel_credentials(root) if client is None else client.channel_credentials
    target = f"localhost:{router.addresses.grpc.rpartition(':')[2]}"
    async with AsyncClient(target, credentials=credentials, timeout_s=5) as grpc_client:
        try:
            answers.append(bool(await grpc_client.models()))
        except UnavailableError:
            answers.append(False)
    context = ssl.create_default_context(cadata=root.decode())
    if client is not None:
        context.load_cert_chain(client.cert_file, client.key_file)
    async with httpx.AsyncClient(verify=context) as http:
        try:
            url = f"https://localhost:{router.addresses.http.rpartition(':')[2]}/v1/models"
            answers.append((await http.get(url)).status_code == 200)
        except httpx.TransportError:
            answers.append(False)
    return answers


async def test_a_listeners_renewed_certificate_holds_for_new_connections_without_a_restart(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, after = tmp_path / "router", trustme.CA()
    tls = listener_files(ca, folder, is_mutual=False)
    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls, http_port=0)) as router:
        assert await asked(router, ca) == [True, True]
        (folder / "tls.crt").write_bytes(b"-")
        assert await asked(router, ca) == await asked(router, ca) == [True, True]
        assert caplog.text.count("goes on with the certificate that it has") == 2, "once for each listener"
        listener_files(after, folder, is_mutual=False)
        assert await asked(router, after) == [True, True]
        assert await asked(router, ca) == [False, False]


@pytest.mark.parametrize(
    ("from_days", "to_days", "message"),
    [(-9, -2, "which has expired on {end}"), (2, 9, "which holds only from {begin}"), (-9, 9, "")],
)
async def test_a_certificate_that_does_not_hold_today_is_told_at_the_start_and_shown(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture, from_days: int, to_days: int, message: str
) -> None:
    today = datetime.now(UTC)
    begin, end = today + timedelta(days=from_days), today + timedelta(days=to_days)
    files = inner_tls(ca, tmp_path, name="localhost", not_before=begin, not_after=end)
    tls = TlsFiles(cert_file=files.cert_file, key_file=files.key_file, ca_file=files.ca_file)
    async with running_router(router_config("127.0.0.1:1", tls=tls, http_port=0)):
        told = [each.message for each in caplog.records if each.name == "router.tls"]
    dates = {name: date.strftime(f"%b {date.day:2} %H:%M:%S %Y GMT") for name, date in (("begin", begin), ("end", end))}
    wanted = f"{{}} shows the certificate {tls.cert_file}, {message.format(**dates)}: clients refuse it"
    assert told == ([wanted.format("HTTP"), wanted.format("gRPC")] if message else [])


async def test_a_certificate_that_runs_out_while_it_is_shown_is_told_once(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    files = inner_tls(ca, tmp_path / "router", name="localhost", not_after=tomorrow)
    tls = TlsFiles(cert_file=files.cert_file, key_file=files.key_file)
    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls, http_port=0)) as router:
        assert await asked(router, ca) == [True, True]
        assert "expired" not in caplog.text
        monkeypatch.setattr("router.tls.time", SimpleNamespace(time=lambda: tomorrow.timestamp() + 1))
        assert await asked(router, ca) == await asked(router, ca) == [True, True]
    assert caplog.text.count("which has expired on") == 2, "once for each listener"


def test_a_certificate_for_no_server_is_told(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("trustme.x509.ExtendedKeyUsage", lambda _: ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]))
        tls = listener_files(ca, tmp_path, is_mutual=False)
    tls.check()
    assert f"the certificate {tls.cert_file} is refused by clients: " in caplog.text


async def test_a_listeners_new_authority_of_clients_takes_the_place_of_the_one_before(
    ca: trustme.CA, tmp_path: Path
) -> None:
    folder, other = tmp_path / "router", trustme.CA()
    mine, theirs = inner_tls(ca, tmp_path / "mine"), inner_tls(other, tmp_path / "theirs", trusts=ca)
    tls = listener_files(ca, folder, is_mutual=True)
    async with FakeReplica("a") as a, running_router(router_config(a.address, tls=tls, http_port=0)) as router:
        assert (await asked(router, ca, mine), await asked(router, ca, theirs)) == ([True, True], [False, False])
        (folder / "ca.crt").write_bytes(other.cert_pem.bytes())
        assert (await asked(router, ca, mine), await asked(router, ca, theirs)) == ([False, False], [True, True])


def shake_hands(
    router: RunningRouter, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """Ask the listener for HTTP once; return the session that it leaves. Raises OSError where it does not answer."""
    port = int(router.addresses.http.rpartition(":")[2])
    with (
        socket.create_connection(("localhost", port), 10) as raw,
        context.wrap_socket(raw, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        if not connection.recv(1):
            raise ConnectionError
        return connection.session


async def test_a_session_does_not_outlive_the_authority_of_its_client(ca: trustme.CA, tmp_path: Path) -> None:
    mine = inner_tls(ca, tmp_path / "mine")
    tls = listener_files(ca, tmp_path / "router", is_mutual=True)
    context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    context.load_cert_chain(mine.cert_file, mine.key_file)
    async with running_router(router_config("127.0.0.1:1", tls=tls, http_port=0)) as router:
        session = await asyncio.to_thread(shake_hands, router, context)
        session = await asyncio.to_thread(shake_hands, router, context, session)
        (tmp_path / "router" / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
        with pytest.raises(OSError):  # asyncio closes, sometimes before the alert that says why
            await asyncio.to_thread(shake_hands, router, context, session)


async def test_clients_with_certificates_speak_tls_1_3(ca: trustme.CA, tmp_path: Path) -> None:
    context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    mine = inner_tls(ca, tmp_path / "mine")
    context.load_cert_chain(mine.cert_file, mine.key_file)
    for is_mutual in (False, True):
        tls = listener_files(ca, tmp_path / "router", is_mutual=is_mutual)
        async with running_router(router_config("127.0.0.1:1", tls=tls, http_port=0)) as router:
            if is_mutual:
                with pytest.raises(ssl.SSLError):
                    await asyncio.to_thread(shake_hands, router, context)
            else:
                await asyncio.to_thread(shake_hands, router, context)


def connect_to_http(router: RunningRouter) -> socket.socket:
    return socket.create_connection(("localhost", int(router.addresses.http.rpartition(":")[2])), timeout=10)


def ask_http(router: RunningRouter, context: ssl.SSLContext, max_tokens: int) -> ssl.SSLSocket:
    client = context.wrap_socket(connect_to_http(router), server_hostname="localhost")
    body = b'{"prompt": "hello", "stream": true, "max_tokens": %d}' % max_tokens
    head = b"POST /v1/completions HTTP/1.1\r\nHost: r\r\nContent-Length: %d\r\n\r\n" % len(body)
    client.sendall(head + body)
    return client


def read_answer(client: ssl.SSLSocket) -> bytes:
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        answer += client.recv(65536) or pytest.fail("it was cut off")
    return answer


async def test_stop_does_not_wait_for_clients_that_keep_a_connection_and_read_no_more(
    ca: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.http_protocol._FAREWELL_S", 0.05)
    context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    tls = listener_files(ca, tmp_path / "router", is_mutual=False)
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, tls=tls, http_port=0, grace_s=3600.0)) as router,
    ):
        idle = await asyncio.to_thread(ask_http, router, context, 1)
        await a.wait_until(lambda: a.num_requests == 1)
        await a.step()
        await asyncio.to_thread(read_answer, idle)
        busy = await asyncio.to_thread(ask_http, router, context, 3)
        await a.wait_until(lambda: a.num_requests == 1)
        router.stop.set()
        await a.step(2)
        assert not router.task.done()
        a.resume()
        assert b"[DONE]" in await asyncio.to_thread(read_answer, busy)
        await asyncio.wait_for(router.task, 20)  # asyncio itself waits for 30 s
        idle.close()
        busy.close()


async def test_stop_does_not_wait_for_a_client_whose_tls_begins_later(ca: trustme.CA, tmp_path: Path) -> None:
    context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    tls = listener_files(ca, tmp_path / "router", is_mutual=False)
    async with (
        FakeReplica("a", paused=True) as a,
        running_router(router_config(a.address, tls=tls, http_port=0, grace_s=3600.0)) as router,
    ):

        async def refuses() -> bool:
            try:
                (await asyncio.to_thread(connect_to_http, router)).close()
            except ConnectionRefusedError:
                return True
            return False

        late = await asyncio.to_thread(connect_to_http, router)
        busy = await asyncio.to_thread(ask_http, router, context, 1)
        await a.wait_until(lambda: a.num_requests == 1)
        router.stop.set()
        await poll(refuses, True)
        late = await asyncio.to_thread(context.wrap_socket, late, server_hostname="localhost")
        a.resume()
        await asyncio.to_thread(read_answer, busy)
        await asyncio.wait_for(router.task, 10)
        assert late.recv(1) == b""
        late.close()
        busy.close()


async def greets(replica: FakeReplica, tls: InnerTls | None) -> bool:
    """Whether the replica answers a hello over a connection of its own."""
    async with connect(replica.address, tls, ()) as channel:
        call = ReplicaStub(channel).Connect(timeout=10)
        try:
            await call.write(replica_pb2.ConnectRequest(hello=replica_pb2.Hello(router_id="r", protocol_version=1)))
            return isinstance(await call.read(), replica_pb2.ConnectResponse)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False


async def test_replicas_and_routers_know_each_other_by_certificate(ca: trustme.CA, tmp_path: Path) -> None:
    inner = inner_tls(ca, tmp_path / "inner")
    async with FakeReplica("a", tls=inner) as a:
        async with running_router(router_config(a.address, link=LinkConfig(tls=inner))) as router:
            await router.wait_ready(1)
        assert not await greets(a, None)
        assert not await greets(a, inner_tls(trustme.CA(), tmp_path / "stranger", trusts=ca))


async def test_a_router_takes_no_replica_of_another_name_or_authority(ca: trustme.CA, tmp_path: Path) -> None:
    mine = inner_tls(ca, tmp_path / "mine")
    other_name = replace(inner_tls(ca, tmp_path / "name", name="other"), server_name="other")
    async with FakeReplica("a", tls=other_name) as a:
        assert await greets(a, replace(mine, server_name="other"))
        assert not await greets(a, mine)
    stranger = trustme.CA()
    async with FakeReplica("a", tls=inner_tls(stranger, tmp_path / "stranger")) as a:
        assert not await greets(a, inner_tls(stranger, tmp_path / "alice", trusts=ca))


async def test_a_renewed_certificate_holds_for_new_connections_without_a_restart(
    ca: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = inner_tls(ca, tmp_path / "served")
    before, after = inner_tls(ca, tmp_path / "before"), trustme.CA()
    async with FakeReplica("a", tls=served) as a:
        assert await greets(a, before)
        inner_tls(ca, tmp_path / "served", name="mistaken")
        assert await greets(a, before)
        assert "goes on with the certificate that it has" in caplog.text
        inner_tls(after, tmp_path / "served")
        assert await greets(a, inner_tls(after, tmp_path / "after"))
        assert not await greets(a, before)


async def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    none = str(tmp_path / "none.pem")
    for settings in (
        {"tls": TlsFiles(cert_file=none, key_file=none)},
        {"link": LinkConfig(tls=InnerTls(cert_file=none, key_file=none, ca_file=none))},
    ):
        with pytest.raises(RouterConfigError, match=r"TLS file .*none\.pem cannot be read: No such file"):
            async with running_router(router_config("127.0.0.1:1", **settings)):
                pass


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tls.key", trustme.CA().issue_cert("weft").private_key_pem.bytes(), "key values mismatch; allowed: a cert"),
        ("tls.key", b"-", r"tls\.crt and .*tls\.key: .*; allowed: a certificate chain and its key, plain PEM"),
        ("tls.crt", b"-", r"tls\.crt and .*tls\.key: .*; allowed: a certificate chain and its key, plain PEM"),
        ("ca.crt", b"-", r"ca\.crt: .*; allowed: certificates of authorities, PEM"),
        (
            "ca.crt",
            trustme.CA().cert_pem.bytes(),
            r"tls\.crt would be refused: .*issuer certificate; allowed: .*'weft'",
        ),
    ],
    ids=["another key", "no key", "no certificate", "no authorities", "other authorities"],
)
def test_files_that_do_not_fit_are_a_clear_error(
    ca: trustme.CA, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    tls = inner_tls(ca, tmp_path)
    tls.check(serves=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(RouterConfigError, match=message):
        tls.check(serves=True)


def test_only_those_who_serve_need_the_clusters_name(ca: trustme.CA, tmp_path: Path) -> None:
    tls = inner_tls(ca, tmp_path, name="alice")
    tls.check(serves=False)
    with pytest.raises(RouterConfigError, match=r"Hostname mismatch.*with the name 'weft'"):
        tls.check(serves=True)


def test_flags_name_all_files_or_none() -> None:
    def tls(*flags: str) -> InnerTls | None:
        return to_config(parse_flags(["--control=c:1", *flags])).link.tls

    flags = ("--inner-tls-cert=c", "--inner-tls-key=k", "--inner-tls-ca=a")
    assert tls() is None
    assert tls(*flags) == InnerTls(cert_file="c", key_file="k", ca_file="a", server_name="weft")
    assert tls(*flags, "--inner-tls-name=n").server_name == "n"
    with pytest.raises(RouterConfigError, match="allowed: all three"):
        tls(*flags[:2])
