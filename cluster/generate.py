"""`weft generate`: one prompt to a running service, its text as it comes."""

import dataclasses
import json
import sys
from typing import Any

import grpc

from cluster.errors import RequestError
from router.client import Client, ClientError
from router.client_values import Collector, Completion, Options
from router.tls import ClientTls


def generate(
    prompt: str,
    *,
    router: str,
    api_key: str | None = None,
    tls: ClientTls | None = None,
    model: str,
    is_chat: bool,
    system: str | None,
    stream: bool,
    as_json: bool,
    timeout_s: float,
    options: dict[str, Any],
) -> None:
    """Print what the service makes of the prompt: text as it comes, all at the end, or one JSON object.

    Raises:
        RequestError: the router cannot be reached or refused the request.
    """
    asked: Options = {"model": model, "timeout_s": timeout_s, **options}  # type: ignore[typeddict-item]
    messages = _conversation(prompt, system) if is_chat else None
    collector, has_shown = Collector(), False
    try:
        with connect(router, api_key=api_key, tls=tls) as client:
            for delta in client.generate(None if is_chat else prompt, messages=messages, **asked):
                collector.add(delta)
                if stream:
                    print(delta.text, end="", flush=True)
                    has_shown = has_shown or bool(delta.text)
    except ClientError as error:
        if has_shown:
            print()
        raise to_request_error(error) from error
    completion = collector.completion()
    if as_json:
        print(json.dumps(dataclasses.asdict(completion)))
        return
    print("" if stream else completion.text)
    print(summary(completion), file=sys.stderr)


def to_request_error(error: ClientError) -> RequestError:
    """Return the router's error, or its silence, in words."""
    advice, told = "", str(error)
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        advice = "; who answers is no router of Weft"
    elif error.code is grpc.StatusCode.UNAVAILABLE and "Connection refused" in told:
        advice = "; is `weft serve` running?"
    elif "failed to connect" in told and ("Socket closed" in told or "Connection reset" in told):
        advice = "; a router with TLS wants --tls-ca, one with a ca_file --tls-cert and --tls-key too"
    elif "Hostname Verification Check failed" in told:
        advice = "; --tls-name says which name is in the router's certificate"
    return RequestError(f"{error.code.name.lower().replace('_', ' ')}: {told}{advice}")


def connect(router: str, *, api_key: str | None, tls: ClientTls | None) -> Client:
    """Return a connection, with TLS where it is given.

    Raises:
        RequestError: the key cannot be one.
        RouterConfigError: a TLS file cannot be read.
    """
    credentials = None if tls is None else tls.credentials
    try:
        return Client(
            router, api_key=api_key, credentials=credentials, tls_name=None if tls is None else tls.server_name
        )
    except ClientError as error:
        raise to_request_error(error) from error


def summary(completion: Completion) -> str:
    """Say in one line who served a request and how fast."""
    usage = completion.usage
    parts = [
        f"{usage.prompt_tokens} + {usage.completion_tokens} tokens ({usage.cached_tokens} cached)",
        f"TTFT {milliseconds(completion.ttft_s)}",
        f"TPOT {milliseconds(completion.tpot_s)}",
        f"ended by {completion.finish_reason}",
        f"served by {', '.join(completion.replica_ids)}",
    ]
    return "; ".join(parts)


def _conversation(prompt: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": prompt}]


def milliseconds(seconds: float | None) -> str:
    """Write a time as people read it."""
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
