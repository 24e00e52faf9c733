"""host:port, as every part of the program writes and reads it.

An IPv6 address has brackets where a port follows it (RFC 3986, section 3.2.2) and none where it stands alone: in a
setting, and where it is bound.
"""

import ipaddress
import socket


def join_host_port(host: str, port: int | str) -> str:
    """Return host:port, as in "127.0.0.1:50051" and "[::1]:50051"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port. Raises ValueError when it is no host:port."""
    written, _, port = address.rpartition(":")
    host = written.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not (host and is_port and join_host_port(host, port) == address):
        raise ValueError(f"{address!r} is no address; allowed: host:port, or [IPv6 address]:port, up to 65535")
    return host, int(port)


def is_loopback(address: str) -> bool:
    """Whether the host of host:port is this machine, by what is written there: no name but localhost is looked up."""
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of the sockets that bind this host; a name has IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def connectable(host: str) -> str:
    """Return the host at which its own machine reaches what listens on this one: loopback for every address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
