"""How commands reach the controller: `--control` and the TLS options, the same for each of them."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec

import typer
from weft.addresses import join_host_port

from cluster.cli_flags import check_address
from cluster.defaults import DEFAULT_CONTROL_PORT, DEFAULT_HOST
from cluster.errors import ClusterConfigError
from router.errors import RouterConfigError
from router.tls import INNER_NAME, InnerTls

if TYPE_CHECKING:
    from cluster.control_client import ControlClient

DEFAULT_CONTROL = join_host_port(DEFAULT_HOST, DEFAULT_CONTROL_PORT)

_PANEL = "Connection"
_OwnParameters = ParamSpec("_OwnParameters")


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
