"""TLS of the listeners and of the cluster's inner connections, plain and mutual, against certificates made here."""

import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router

from router.client import AsyncClient, UnavailableError
from router.config import LinkConfig
from router.errors import RouterConfigError
from router.tls import TlsFiles


@pytest.fixture
def ca() -> trustme.CA:
    return trustme.CA()


def files(ca: trustme.CA, folder: Path, name: str, *, is_mutual: bool) -> TlsFiles:
    cert = ca.issue_cert(name)
    folder.mkdir()
    cert.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in cert.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)
    ca.cert_pem.write_to_path(str(folder / "ca.pem"))
    return TlsFiles(
        cert_file=str(folder / "cert.pem"),
        key_file=str(folder / "key.pem"),
        ca_file=str(folder / "ca.pem") if is_mutual else None,
        server_name=name,
    )


async def test_listeners_speak_tls_and_nothing_else(ca: trustme.CA, tmp_path: Path) -> None:
    tls = files(ca, tmp_path / "router", "localhost", is_mutual=False)
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


async def test_a_listener_with_an_authority_takes_only_its_clients(ca: trustme.CA, tmp_path: Path) -> None:
    tls = files(ca, tmp_path / "router", "localhost", is_mutual=True)
    mine = files(ca, tmp_path / "client", "client", is_mutual=True)
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


async def test_replicas_and_routers_know_each_other_by_certificate(ca: trustme.CA, tmp_path: Path) -> None:
    inner = files(ca, tmp_path / "inner", "weft", is_mutual=True)
    stranger = files(trustme.CA(), tmp_path / "stranger", "weft", is_mutual=True)
    async with FakeReplica("a", tls=inner) as a:
        async with running_router(router_config(a.address, link=LinkConfig(tls=inner))) as router:
            await router.wait_ready(1)
        for link in (LinkConfig(tls=stranger), LinkConfig()):
            async with running_router(router_config(a.address, link=link)) as router:
                with pytest.raises(TimeoutError):
                    await router.wait_ready(1, timeout_s=1.0)


async def test_a_missing_file_is_a_clear_error(tmp_path: Path) -> None:
    tls = TlsFiles(cert_file=str(tmp_path / "none.pem"), key_file=str(tmp_path / "none.pem"))
    with pytest.raises(RouterConfigError, match=r"TLS file .*none\.pem cannot be read: No such file"):
        async with running_router(router_config("127.0.0.1:1", tls=tls)):
            pass
