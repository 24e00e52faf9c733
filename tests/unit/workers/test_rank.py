"""Where ranks meet, and what a group needs to form."""

import os
import socket

import psutil
import pytest

from workers.config import EngineConfig, ParallelConfig
from workers.errors import EngineConfigError
from workers.rank import Rendezvous, _choose_interface, lead_group


def test_rendezvous_listens_on_its_address_only() -> None:
    rendezvous = Rendezvous.open()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(os.getpid()).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    }
    assert listening == {"127.0.0.1"}
    assert rendezvous.host == "127.0.0.1"


def test_a_group_of_several_ranks_needs_a_rendezvous() -> None:
    config = EngineConfig(model="anything", parallel=ParallelConfig(tensor_parallel=2))
    with pytest.raises(EngineConfigError, match="a group of 2 ranks needs a rendezvous"):
        lead_group(config)


def interfaces() -> dict[str, str]:
    """The IPv4 address of each interface of this machine."""
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # put back at the end
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("environment")
def test_a_group_on_loopback_stays_there() -> None:
    _choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.usefixtures("environment")
def test_a_group_over_machines_uses_the_interface_of_its_address() -> None:
    outside = {name: address for name, address in interfaces().items() if not address.startswith("127.")}
    if not outside:
        pytest.skip("needs an interface besides loopback")
    name, address = next(iter(outside.items()))
    _choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == name
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.usefixtures("environment")
def test_an_interface_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    _choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
