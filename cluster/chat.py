"""`weft chat`: a conversation with a running service, a line of input for each turn."""

import dataclasses
import json
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

from cluster.errors import ClusterConfigError, RequestError
from cluster.generate import connect, summary, to_request_error
from router.client import Client, ClientError
from router.client_values import Collector, Options
from router.tls import ClientTls


def chat(
    *,
    router: str,
    api_key: str | None = None,
    tls: ClientTls | None = None,
    model: str,
    system: str | None,
    as_json: bool,
    timeout_s: float,
    options: dict[str, Any],
    read_line: Callable[[str], str] = input,
) -> None:
    """Answer each line until the input ends; every request is sent with all that was said before.

    Ctrl-C ends an answer, and between answers the conversation. Who types is told of a request that failed, which is
    then as if it had not been; where input comes from elsewhere, it ends the conversation.

    Raises:
        ClusterConfigError: a line is no UTF-8.
        RequestError: a request failed.
    """
    asked: Options = {"model": model, "timeout_s": timeout_s, **options}  # type: ignore[typeddict-item]
    is_typed = sys.stdin.isatty()
    messages = [{"role": "system", "content": system}] if system is not None else []
    with connect(router, api_key=api_key, tls=tls) as client:
        while True:
            try:
                text = read_line("> " if is_typed and not as_json else "")
                text.encode()  # some locales read what is no UTF-8 as surrogates
            except EOFError:
                return
            except UnicodeError as error:
                raise ClusterConfigError(f"a line of the input is no text: {error}; allowed: UTF-8") from error
            if not text.strip():
                continue
            messages.append({"role": "user", "content": text})
            try:
                answer = _answer(client, messages, as_json=as_json, options=asked)
            except RequestError as error:
                if not is_typed:
                    raise
                print(f"Error: {error}", file=sys.stderr)
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, messages: list[dict[str, str]], *, as_json: bool, options: Options) -> str:
    """Print an answer as it comes and return it, or what there is of it after Ctrl-C. Raises RequestError."""
    collector, text = Collector(), ""
    try:
        with closing(client.generate(messages=messages, **options)) as deltas:
            for delta in deltas:
                collector.add(delta)
                text += delta.text
                if not as_json:
                    print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print()
        return text
    except ClientError as error:
        if text and not as_json:
            print()
        raise to_request_error(error) from error
    completion = collector.completion()
    print(json.dumps(dataclasses.asdict(completion)) if as_json else "", flush=True)
    if not as_json:
        print(summary(completion), file=sys.stderr)
    return text
