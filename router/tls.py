"""TLS from PEM files: of the listeners for clients, and between routers, replicas, the controller and operators.

Files are tried before they are used, and what is wrong with them is told. They are read again by every new connection,
so that certificates can be renewed under a running cluster; one that runs out meanwhile is told too.
"""

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc

from router.errors import RouterConfigError

logger = logging.getLogger(__name__)

INNER_NAME = "weft"

_NO_CHECK_TIME = ssl.VerifyFlags(0x200000)  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name

_LoadedT = TypeVar("_LoadedT")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Who a listener for clients is, and whom it takes."""

    cert_file: str
    """Certificate chain."""
    key_file: str
    ca_file: str | None = None
    """Authorities of clients: only those with a certificate of theirs are taken, over HTTP those that speak TLS 1.3.
    None: everybody."""

    def check(self) -> None:
        """Try the files as a listener does, which warns of a certificate that has expired or does not hold yet.

        Raises:
            RouterConfigError: the files cannot be read or do not fit.
        """
        _Renewal(self, self._load, "the router")

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC listener, which follow the files. Raises RouterConfigError as `context`."""
        return _Renewal(self, self._load, "gRPC").credentials

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context of an HTTP listener, which follows the files.

        Raises:
            RouterConfigError: the files cannot be read or do not fit.
        """
        renewal, first = _Renewal(self, self._load, "HTTP"), self._load()

        def show(connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            """Show the files as they are now, at each handshake, whether the client names a server or not."""
            renewal()
            connection.context = renewal.loaded

        first.sni_callback = show
        return first

    def _load(self) -> ssl.SSLContext:
        context = _load(ssl.PROTOCOL_TLS_SERVER, self.cert_file, self.key_file, self.ca_file)
        if self.ca_file is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            # Who resumes a session is not asked for a certificate, though its authority be gone from the file. Python
            # can forbid that in TLS 1.3 only.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """Whom a client takes for its router, and who it is itself."""

    ca_file: str | None
    """Authorities of the router's certificate; None: those of this machine."""
    cert_file: str | None = None
    """Certificate chain, for a router that takes only clients of its authorities; None: there is none, and no key."""
    key_file: str | None = None
    server_name: str | None = None
    """Name in the router's certificate; None: that which is dialled."""

    @classmethod
    def from_flags(cls, cert: str | None, key: str | None, ca: str | None, name: str | None) -> "ClientTls | None":
        """Return what a command line says; None where it says nothing. Raises RouterConfigError as `check`."""
        if cert is None and key is None and ca is None and name is None:
            return None
        if (cert is None) != (key is None):
            raise RouterConfigError("a client's certificate lacks its key, or a key its certificate; allowed: both")
        tls = cls(ca_file=ca, cert_file=cert, key_file=key, server_name=name)
        tls.check()
        return tls

    def check(self) -> None:
        """Try the files. Raises RouterConfigError when one cannot be read, or they do not fit."""
        _load(ssl.PROTOCOL_TLS_CLIENT, self.cert_file, self.key_file, self.ca_file)

    @property
    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC connection. Raises RouterConfigError when a file cannot be read."""
        ca, key, cert = (
            None if path is None else _read(path) for path in (self.ca_file, self.key_file, self.cert_file)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context of an HTTP connection. Raises RouterConfigError as `check`."""
        context = _load(ssl.PROTOCOL_TLS_CLIENT, self.cert_file, self.key_file, self.ca_file)
        if self.ca_file is None:
            context.load_default_certs()
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerTls:
    """Mutual TLS inside the cluster: who this side is, and whom it trusts."""

    cert_file: str
    """Certificate chain."""
    key_file: str
    ca_file: str
    """Authorities of the other sides: whoever has a certificate of theirs may ask replicas and command the cluster."""
    server_name: str = INNER_NAME
    """Name in the certificates of replicas and controller. It is looked for in place of the address that is dialled,
    for a replica may come up on any node."""

    @classmethod
    def from_flags(cls, cert: str | None, key: str | None, ca: str | None, name: str) -> "InnerTls | None":
        """Return what a command line says; None where it names no file. Raises RouterConfigError when it names some."""
        if cert is None and key is None and ca is None:
            return None
        if cert is None or key is None or ca is None:
            raise RouterConfigError("inner TLS lacks a certificate, its key or the authorities; allowed: all three")
        return cls(cert_file=cert, key_file=key, ca_file=ca, server_name=name)

    def check(self, *, serves: bool) -> None:
        """Try the files; with `serves` also whether a peer that has the same ones would take them.

        Raises:
            RouterConfigError: one cannot be read, they do not belong together, or a peer would refuse them.
        """
        client = _load(ssl.PROTOCOL_TLS_CLIENT, self.cert_file, self.key_file, self.ca_file)
        if not serves:
            return
        server = _load(ssl.PROTOCOL_TLS_SERVER, self.cert_file, self.key_file, self.ca_file)
        server.verify_mode = ssl.CERT_REQUIRED
        try:
            _shake_hands(client, server, self.server_name)
        except ssl.SSLError as error:
            raise RouterConfigError(
                f"{self.cert_file} would be refused: {_reason(error)}; allowed: a certificate for servers and clients "
                f"with the name {self.server_name!r}, from the authorities in {self.ca_file}"
            ) from error

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC listener, which follow the files. Raises RouterConfigError as `check`."""
        return _Renewal(self, partial(self.check, serves=True), "inner TLS").credentials

    @property
    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC connection. Raises RouterConfigError when a file cannot be read."""
        return grpc.ssl_channel_credentials(_read(self.ca_file), _read(self.key_file), _read(self.cert_file))

    @property
    def channel_options(self) -> tuple[tuple[str, Any], ...]:
        """gRPC options that go with `channel_credentials`."""
        return (("grpc.ssl_target_name_override", self.server_name),)


def bind(server: grpc.Server | grpc.aio.Server, address: str, tls: TlsFiles | InnerTls | None) -> int:
    """Listen on host:port, with TLS where it is given; return the port.

    Raises:
        RuntimeError: the port is taken.
        RouterConfigError: a TLS file cannot be read, or they do not fit.
    """
    if tls is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, tls.credentials)


NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Channel option: dial the address itself, whatever `https_proxy` says in the environment."""


def connect(address: str, tls: InnerTls | None, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
    """Return a connection to another part of the cluster, with TLS where it is given and by no proxy."""
    options = (*options, NO_PROXY)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials, options=(*options, *tls.channel_options))


def connect_blocking(address: str, tls: InnerTls | None, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
    """Return a connection as `connect` does, for callers without an event loop."""
    options = (*options, NO_PROXY)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.channel_credentials, options=(*options, *tls.channel_options))


class _Renewal(Generic[_LoadedT]):
    """What a listener shows: called before each handshake, by gRPC in a thread of its own."""

    def __init__(self, files: TlsFiles | InnerTls, load: Callable[[], _LoadedT], whose: str) -> None:
        """Read the files; warn of dates. Raises RouterConfigError as `load`, which tries them."""
        self._files = files
        self._load = load
        self.loaded = load()
        self._whose = whose
        self._pem = self._read()
        self._fault = self._told_date = ""
        self._dates = _read_dates(files.cert_file, files.key_file)
        self._warn_of_date()

    @property
    def credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC listener."""
        # The stub forgets that the fetcher may return None.
        return grpc.dynamic_ssl_server_credentials(
            self.certificates,
            self,  # type: ignore[arg-type]
            require_client_authentication=self._files.ca_file is not None,
        )

    @property
    def certificates(self) -> grpc.ServerCertificateConfiguration:
        """Certificates as the files had them when they were read last."""
        chain, key, authorities = self._pem
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what the files say now; None where that is nothing new, or cannot be used."""
        try:
            pem = self._read()
            if pem == self._pem:
                self._warn_of_date()
                return None
            self.loaded = self._load()
            self._dates = _read_dates(self._files.cert_file, self._files.key_file)
        except RouterConfigError as error:
            if str(error) != self._fault:  # once, not for each client
                logger.warning("%s goes on with the certificate that it has: %s", self._whose, error)
            self._fault = str(error)
            return None
        self._pem, self._fault = pem, ""
        self._warn_of_date()
        return self.certificates

    def _warn_of_date(self) -> None:
        """Say once that the certificate does not hold today; it is shown all the same, to clients that do not look."""
        wrong = "" if self._dates is None else _wrong_date(*self._dates)
        if wrong and wrong != self._told_date:
            logger.warning(
                "%s shows the certificate %s, which %s: clients refuse it", self._whose, self._files.cert_file, wrong
            )
        self._told_date = wrong

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        ca = self._files.ca_file
        return _read(self._files.cert_file), _read(self._files.key_file), None if ca is None else _read(ca)


def _load(protocol: int, cert_file: str | None, key_file: str | None, ca_file: str | None) -> ssl.SSLContext:
    """Return the files as Python's TLS reads them, which tells faults that gRPC would only meet at a handshake."""
    for path in (cert_file, key_file, ca_file):
        if path is not None:
            _read(path)
    context = ssl.SSLContext(protocol)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as gRPC: an authority need not be a root
    try:
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file, password="")
    except ssl.SSLError as error:
        raise RouterConfigError(
            f"{cert_file} and {key_file}: {_reason(error)}; allowed: a certificate chain and its key, plain PEM"
        ) from error
    if ca_file is None:
        return context
    try:
        context.load_verify_locations(ca_file)
    except ssl.SSLError as error:
        raise RouterConfigError(f"{ca_file}: {_reason(error)}; allowed: certificates of authorities, PEM") from error
    return context


def _read_dates(cert_file: str, key_file: str) -> tuple[str, str] | None:
    """Return when a certificate begins and ends to hold, such as "Jan  5 09:34:43 2027 GMT"; None: it is for no server.

    Python tells it only of one that was shown over TLS: here to a client that trusts this very certificate.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME
    try:
        client.load_verify_locations(cert_file)
        end = _shake_hands(client, _load(ssl.PROTOCOL_TLS_SERVER, cert_file, key_file, None), None)
    except ssl.SSLError as error:
        logger.warning("the certificate %s is refused by clients: %s", cert_file, _reason(error))
        return None
    shown: dict[str, Any] = end.getpeercert() or {}
    return shown["notBefore"], shown["notAfter"]


def _wrong_date(begin: str, end: str) -> str:
    """Say what is wrong with a certificate that holds from one date to another; empty where it holds today."""
    now_s = time.time()
    if now_s > ssl.cert_time_to_seconds(end):
        return f"has expired on {end}"
    return f"holds only from {begin}" if now_s < ssl.cert_time_to_seconds(begin) else ""


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """Connect the two in memory; return the client's end. Raises ssl.SSLError as either would on a network."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(down, up, server_hostname=name), server.wrap_bio(up, down, server_side=True)
    is_done = False
    while not is_done:
        is_done = True
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                is_done = False
    return ends[0]


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message.rstrip(".")
    return error.reason.replace("_", " ").lower() if error.reason else "it cannot be read as that"


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RouterConfigError(f"the TLS file {path} cannot be read: {error.strerror}") from error
