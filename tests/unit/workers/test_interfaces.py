"""By which interfaces the ranks of a group reach each other."""

import socket

import psutil
import pytest
from helpers.ipv6 import needs_ipv6

from workers.interfaces import choose_interfaces


def outside_interfaces(family: socket.AddressFamily) -> dict[str, str]:
    """By name, an address of this family of each interface of this machine that others reach."""
    return {
        name: entry.address
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == family and not entry.address.startswith(("127.", "::1", "fe80:"))
    }


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_group_on_loopback_stays_there(host: str) -> None:
    assert choose_interfaces(host, {}) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_group_over_machines_uses_the_interface_of_its_address(family: socket.AddressFamily) -> None:
    outside = outside_interfaces(family)
    if not outside:
        pytest.skip(f"needs an interface besides loopback that has an address of {family.name}")
    name, address = next(iter(outside.items()))
    assert choose_interfaces(address, {}) == {"GLOO_SOCKET_IFNAME": name}


def test_an_interface_that_the_user_chose_is_kept() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "eth7"}
    assert choose_interfaces("127.0.0.1", environment) == {"NCCL_SOCKET_IFNAME": "lo"}
