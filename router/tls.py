"""TLS for listeners and connections, from PEM files; mutual where the other side's authority is named."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from router.errors import RouterConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Who this side is, and whom it trusts."""

    cert_file: str
    """Certificate chain."""
    key_file: str
    ca_file: str | None = None
    """Authorities of the other side. A listener that has it takes only clients with a certificate of theirs."""
    server_name: str | None = None
    """Name that the certificates of the other side carry, where it is not the address that is dialled."""

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """Those of a gRPC listener. Raises RouterConfigError when a file cannot be read."""
        ca = None if self.ca_file is None else _read(self.ca_file)
        pair = _read(self.key_file), _read(self.cert_file)
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Those of a gRPC connection. Raises RouterConfigError when a file cannot be read."""
        ca = None if self.ca_file is None else _read(self.ca_file)
        return grpc.ssl_channel_credentials(ca, _read(self.key_file), _read(self.cert_file))


def bind(server: grpc.Server | grpc.aio.Server, address: str, tls: TlsFiles | None) -> int:
    """Listen on host:port, with TLS where it is given; the port. Raises RuntimeError when it is taken."""
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.credentials)


def connect(address: str, tls: TlsFiles | None, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """A connection to another part of the cluster, with TLS where it is given."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, tls.channel_credentials, options=options)


def connect_blocking(address: str, tls: TlsFiles | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """Return the same for callers without an event loop."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    if tls.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.secure_channel(address, tls.channel_credentials, options=options)


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RouterConfigError(f"the TLS file {path} cannot be read: {error.strerror}") from error
