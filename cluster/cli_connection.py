"""How commands reach the controller or a router: its address and the TLS options, the same for each of them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer
from weft.addresses import join_host_port

from cluster.cli_flags import check_address
from cluster.defaults import DEFAULT_CONTROL_PORT, DEFAULT_HOST
from cluster.errors import ClusterConfigError
from router.errors import RouterConfigError
from router.tls import INNER_NAME, ClientTls, InnerTls

if TYPE_CHECKING:
    from cluster.control_client import ControlClient

DEFAULT_CONTROL = join_host_port(DEFAULT_HOST, DEFAULT_CONTROL_PORT)
DEFAULT_ROUTER = f"{DEFAULT_HOST}:50051"

_PANEL = "Connection"
_OwnParameters = ParamSpec("_OwnParameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFlags:
    """Which router is asked, and who asks."""

    router: Annotated[str, typer.Option(help="host:port of the router's gRPC service.")] = DEFAULT_ROUTER
    api_key: Annotated[
        str | None, typer.Option(envvar="WEFT_API_KEY", show_envvar=True, help="API key, where the router wants one.")
    ] = None
    tls_ca: Annotated[
        str | None,
        typer.Option(metavar="PEM", help="Speak TLS to a router whose certificate these authorities signed."),
    ] = None
    tls_cert: Annotated[
        str | None,
        typer.Option(metavar="PEM", help="With --tls-ca: a client's certificate chain, where the router wants one."),
    ] = None
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="Key of that certificate.")] = None
    tls_name: Annotated[
        str | None, typer.Option(help="With --tls-ca: name in the router's certificate. Default: that in --router.")
    ] = None

    def check(self) -> ClientTls | None:
        """Return how TLS is spoken, None: not at all. Raises ClusterConfigError for what cannot be used."""
        check_address("--router", self.router)
        for flag, value in (("--tls-cert", self.tls_cert), ("--tls-key", self.tls_key), ("--tls-name", self.tls_name)):
            if value is not None and self.tls_ca is None:
                raise ClusterConfigError(f"{flag}: without TLS nobody shows a certificate; allowed: with --tls-ca")
        try:
            return ClientTls.from_flags(self.tls_cert, self.tls_key, self.tls_ca, self.tls_name)
        except RouterConfigError as error:
            raise ClusterConfigError(str(error)) from error


def connect(
    *,
    control: Annotated[
        str, typer.Option(envvar="WEFT_CONTROL", help="host:port of the controller.", rich_help_panel=_PANEL)
    ] = DEFAULT_CONTROL,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            envvar="WEFT_CONTROL_TLS_CERT",
            metavar="PEM",
            help="Where the cluster has inner_tls: an operator's certificate chain.",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            envvar="WEFT_CONTROL_TLS_KEY", metavar="PEM", help="Key of that certificate.", rich_help_panel=_PANEL
        ),
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            envvar="WEFT_CONTROL_TLS_CA", metavar="PEM", help="The cluster's authorities.", rich_help_panel=_PANEL
        ),
    ] = None,
    tls_name: Annotated[
        str,
        typer.Option(
            envvar="WEFT_CONTROL_TLS_NAME", help="Name in the cluster's certificates.", rich_help_panel=_PANEL
        ),
    ] = INNER_NAME,
) -> "ControlClient":
    """Return a connection to the controller. Raises ClusterConfigError when address or TLS files cannot be used."""
    from cluster.control_client import ControlClient

    check_address("--control", control)
    try:
        tls = InnerTls.from_flags(tls_cert, tls_key, tls_ca, tls_name)
        if tls is not None:
            tls.check(serves=False)
    except RouterConfigError as error:
        raise ClusterConfigError(str(error)) from error
    return ControlClient(control, tls=tls)


def with_control(command: "Callable[Concatenate[ControlClient, _OwnParameters], None]") -> Callable[..., None]:
    """Return a command that has the options of `connect` in place of its first parameter, the connection."""
    shared = inspect.signature(connect).parameters
    own = list(inspect.signature(command).parameters.values())[1:]

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with connect(**{name: options.pop(name) for name in shared}) as client:
            command(client, **options)  # type: ignore[call-arg]

    parameters = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*own, *shared.values())]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def connection_flags(control: str, tls: InnerTls | None) -> list[str]:
    """Return the options by which a command reaches this controller."""
    flags = [] if control == DEFAULT_CONTROL else ["--control", control]
    if tls is not None:
        flags += ["--tls-cert", tls.cert_file, "--tls-key", tls.key_file, "--tls-ca", tls.ca_file]
        flags += [] if tls.server_name == INNER_NAME else ["--tls-name", tls.server_name]
    return flags
