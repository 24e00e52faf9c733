"""Which network interfaces the ranks of a group use, as environment variables of gloo and NCCL tell it to them."""

import fcntl
import socket
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path


def choose_interfaces(host: str, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return what to add to the environment so that gloo uses the interface by which this machine reaches the leader.

    Left to itself it takes the address of the machine's name, often an alias of loopback, which no other machine
    reaches. NCCL finds its interfaces, of which there may be several; it is only told to stay on loopback where all do.
    What the environment says already is kept.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing, and tells the address that it would be sent from
        own = ip_address(probe.getsockname()[0])
    chosen: dict[str, str] = {}
    if own.is_loopback:
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        chosen = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    elif name := _interface_of(own):
        chosen = {"GLOO_SOCKET_IFNAME": name}
    return {variable: name for variable, name in chosen.items() if variable not in environment}


def _interface_of(address: IPv4Address | IPv6Address) -> str | None:
    """The interface that has an address; None when Linux does not tell."""
    if isinstance(address, IPv6Address):
        return _interface_of_ipv6(address)
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(query, get_address, name.encode().ljust(40, b"\0"))
            except OSError:
                continue  # it has no such address, or this is no Linux
            if answer[20:24] == address.packed:
                return name
    return None


def _interface_of_ipv6(address: IPv6Address) -> str | None:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()  # address, index, prefix, scope, flags, name
    except OSError:
        return None
    return next((name for has, *_, name in map(str.split, lines) if bytes.fromhex(has) == address.packed), None)
