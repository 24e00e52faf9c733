"""The flags of `python -m router`, and the settings that they mean."""

import argparse
import dataclasses
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from weft.addresses import split_host_port
from weft.recording import RecordingConfig

from router.config import PolicyName, RouterConfig, StaticModel, TraceProtocol, TracingConfig
from router.errors import RouterConfigError
from router.settings import RouterSettings, parse_settings
from router.tls import INNER_NAME, InnerTls, TlsFiles


def parse_flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags; None: those of this process. Ends it where there is no such flag."""
    return _parser().parse_args(arguments)


def to_config(options: argparse.Namespace) -> RouterConfig:
    """Return what the flags say. Raises RouterConfigError where they say what cannot be."""
    settings = _settings(options.settings)
    inner_tls = InnerTls.from_flags(
        options.inner_tls_cert, options.inner_tls_key, options.inner_tls_ca, options.inner_tls_name
    )
    fields = {name: getattr(settings, name) for name in RouterSettings.model_fields}
    fields["link"] = dataclasses.replace(settings.link, tls=inner_tls)
    if options.log_requests:
        fields["metrics"] = dataclasses.replace(settings.metrics, log_requests=True)
    return RouterConfig(
        router_id=options.router_id,
        control=None if options.control is None else _address(options.control),
        models=tuple(_static_model(text) for text in options.model),
        host=options.host,
        grpc_port=options.port,
        http_port=None if options.http_port == -1 else options.http_port,
        metrics_port=None if options.metrics_port == -1 else options.metrics_port,
        api_keys=options.api_keys,
        tls=_tls(options),
        policy=PolicyName(options.policy),
        tracing=_tracing(options),
        recording=_recording(options.record_decisions),
        grace_s=options.grace,
        unready_s=options.unready,
        **fields,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router", description="Weft's router: the front door of a cluster.")
    replicas = parser.add_argument_group("replicas (give one of the two)")
    where = replicas.add_mutually_exclusive_group(required=True)
    where.add_argument("--control", metavar="HOST:PORT", help="controller whose membership to follow")
    where.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=FOLDER,HOST:PORT[,HOST:PORT...]",
        help="a model and its replicas, without a controller; may be repeated",
    )
    parser.add_argument(
        "--router-id", default=f"router-{socket.gethostname()}-{os.getpid()}",
        help="name in logs and `weft status`, where the cluster's own are router-0, router-1 ... (default: by host and "
        "process id)",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=int, default=50051, help="gRPC; 0: any (default: %(default)s)")
    parser.add_argument(
        "--http-port", type=int, default=8000, help="OpenAI HTTP; 0: any; -1: off (default: %(default)s)"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=9464, help="Prometheus; 0: any; -1: off (default: %(default)s)"
    )
    parser.add_argument(
        "--policy", choices=[name.value for name in PolicyName], default=PolicyName.PREFIX_AFFINITY, metavar="POLICY",
        help=f"one of {', '.join(PolicyName)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--settings", metavar="JSON", default="{}",
        help=f"""further ones, such as '{{"admission": {{"max_queued": 64}}}}', as in the section router of a cluster
        file (docs/settings.md): {", ".join(RouterSettings.model_fields)}""",
    )  # fmt: skip
    parser.add_argument("--api-keys", metavar="FILE", help="API keys (see docs/security.md); default: none are needed")
    for prefix, what, authorities in (
        ("tls", "the gRPC and HTTP listeners", "serve only clients with a certificate of these authorities"),
        ("inner-tls", "connections to controller and replicas", "authorities that theirs must come from"),
    ):
        parser.add_argument(f"--{prefix}-cert", metavar="PEM", help=f"certificate chain of {what}")
        parser.add_argument(f"--{prefix}-key", metavar="PEM", help="its key")
        parser.add_argument(f"--{prefix}-ca", metavar="PEM", help=authorities)
    parser.add_argument(
        "--inner-tls-name", default=INNER_NAME, metavar="NAME",
        help="name in the certificates of controller and replicas (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--trace-endpoint", metavar="URL", help="OTLP collector for spans; default: no tracing")
    parser.add_argument(
        "--trace-protocol", choices=[name.value for name in TraceProtocol], default=TraceProtocol.GRPC,
        metavar="PROTOCOL", help=f"one of {', '.join(TraceProtocol)} (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--trace-ratio", type=float, default=1.0, metavar="R",
        help="part of requests to trace, 0 to 1 (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--record-decisions", metavar="FOLDER", help="where to write what is decided, for weft replay")
    parser.add_argument(
        "--grace", type=float, default=30.0, metavar="S",
        help="seconds for requests in flight at the end (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--unready", type=float, default=0.0, metavar="S",
        help="seconds before that: not ready, but still serving (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--log-requests", action="store_true", help="a line of JSON for each request that ended")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    return parser


def _settings(text: str) -> RouterSettings:
    try:
        return parse_settings(text)
    except RouterConfigError as error:
        raise RouterConfigError(f"--settings: {error}") from error


def _tracing(options: argparse.Namespace) -> TracingConfig:
    try:
        return TracingConfig(
            endpoint=options.trace_endpoint,
            protocol=TraceProtocol(options.trace_protocol),
            sample_ratio=options.trace_ratio,
        )
    except RouterConfigError as error:
        raise RouterConfigError(f"tracing: {error}") from error


def _recording(folder: str | None) -> RecordingConfig:
    return RecordingConfig(folder=None if folder is None else str(Path(folder).absolute()))


def _tls(options: argparse.Namespace) -> TlsFiles | None:
    cert, key, ca = options.tls_cert, options.tls_key, options.tls_ca
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None:
        raise RouterConfigError("TLS has a certificate or a key only; allowed: both")
    return TlsFiles(cert_file=cert, key_file=key, ca_file=ca)


def _static_model(text: str) -> StaticModel:
    name, _, rest = text.partition("=")
    path, *addresses = rest.split(",")
    if not (name and path and addresses and all(addresses)):
        raise RouterConfigError(f"--model is {text!r}; allowed: NAME=FOLDER,HOST:PORT[,HOST:PORT...]")
    if not os.path.isdir(path):
        raise RouterConfigError(f"--model {name}: {path} is no folder; allowed: that of its tokenizer")
    return StaticModel(name=name, path=path, addresses=tuple(map(_address, addresses)))


def _address(text: str) -> str:
    try:
        split_host_port(text)
    except ValueError as error:
        raise RouterConfigError(str(error)) from error
    return text
