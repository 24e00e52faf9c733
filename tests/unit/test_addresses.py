"""host:port, with brackets around an IPv6 address."""

import socket

import pytest
from weft.addresses import connectable, family_of, is_loopback, join_host_port, split_host_port


@pytest.mark.parametrize(
    ("host", "address", "family"),
    [
        ("127.0.0.1", "127.0.0.1:80", socket.AF_INET),
        ("weft-control.default.svc", "weft-control.default.svc:80", socket.AF_INET),
        ("::1", "[::1]:80", socket.AF_INET6),
        ("::", "[::]:80", socket.AF_INET6),
        ("fd00::2", "[fd00::2]:80", socket.AF_INET6),
    ],
)
def test_host_and_port_become_one_text_and_two_values_again(host: str, address: str, family: int) -> None:
    assert join_host_port(host, 80) == address
    assert split_host_port(address) == (host, 80)
    assert family_of(host) == family


@pytest.mark.parametrize(
    "address", ["::1", "::1:80", "h", "h:", ":80", "[]:80", "[::1]", "[::1]:", "h:x", "h:65536", "[h:80", ""]
)
def test_what_is_no_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: host:port, or \[IPv6 address\]:port"):
        split_host_port(address)


def test_what_is_written_tells_whether_it_is_this_machine() -> None:
    assert all(map(is_loopback, ["127.0.0.1:1", "127.0.0.2:1", "[::1]:1", "localhost:1"]))
    assert not any(map(is_loopback, ["10.0.0.1:1", "[fd00::2]:1", "weft.example.org:1", "dns:///localhost:1", ""]))


def test_what_listens_everywhere_is_reached_on_loopback() -> None:
    assert [connectable(host) for host in ("0.0.0.0", "::")] == ["127.0.0.1", "::1"]
    assert all(connectable(host) == host for host in ("127.0.0.1", "::1", "fd00::2", "weft.example.org"))
