"""Locust on both front ends: users who send one request after the other, gRPC through the SDK and OpenAI over HTTP.

    locust -f bench/locustfile.py --headless --users 8 --run-time 30s
    locust -f bench/locustfile.py --users 8 GrpcUser        one of the two, with Locust's page on port 8089
    locust -f bench/locustfile.py --prompts prompts.jsonl.gz --output-tokens 16-256       prompts of a file
    locust -f bench/locustfile.py --router-ca ca.crt --host https://HOST:8000             TLS

Needs the extra `bench`. For measuring, `weft bench serve` is the better tool: it says when it is the bottleneck, knows
goodput, and its open loop does not slow down with the service. Locust has the page, and spreads over many machines.
Over HTTP tokens are seen as text: "first token" is the first piece of it, whatever came before.
"""

import itertools
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path

import requests
from grpc.experimental import gevent as grpc_gevent
from locust import HttpUser, User, events, task  # makes the standard library cooperative
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

grpc_gevent.init_gevent()  # before anything of grpc is made

from bench.errors import BenchConfigError  # noqa: E402
from bench.load.calls import Call, Chat, Prompt  # noqa: E402
from bench.load.datasets import DatasetKind, DatasetOptions, make_sessions  # noqa: E402
from bench.load.flags import parse_lengths  # noqa: E402
from bench.load.http_answer import StreamedAnswer  # noqa: E402
from bench.load.http_chunks import refusal_of  # noqa: E402
from bench.load.records import CallError  # noqa: E402
from router.client import Client, ClientError, OverloadedError, UnavailableError  # noqa: E402
from router.client_values import Collector  # noqa: E402
from router.errors import RouterConfigError  # noqa: E402
from router.tls import ClientTls  # noqa: E402

_VOCAB_SIZE = 500  # about every model knows these ids
_TURNED_AWAY = (0, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)  # 0: no connection
_TURNED_AWAY_PAUSE_S = 1.0  # a service that is gone or full would be asked thousands of times a second
_seeds = itertools.count()


def _add_arguments(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Weft")
    group.add_argument("--router", default="127.0.0.1:50051", help="host:port of the router's gRPC service")
    group.add_argument("--router-ca", default=None, help="PEM: authorities of the router's certificate: speak TLS")
    group.add_argument("--router-cert", default=None, help="PEM: a client's certificate chain, where it wants one")
    group.add_argument("--router-key", default=None, help="PEM: key of that certificate")
    group.add_argument("--router-name", default=None, help="name in the router's certificate, gRPC only")
    group.add_argument("--model", default="", help="model to ask; default: the only one served")
    group.add_argument(
        "--prompts", default=None, help="JSON lines, plain or .gz, as `weft bench` takes; default: random"
    )
    group.add_argument("--input-tokens", default="128", help="tokens of each prompt: a number, or 32-256")
    group.add_argument("--output-tokens", default="64", help="tokens to generate: a number, or 16-128")
    parser.add_argument(  # groups know no secrets
        "--api-key", default=None, env_var="WEFT_API_KEY", is_secret=True, help="API key, where the service wants one"
    )


class GrpcUser(User):
    """Asks over gRPC."""

    def on_start(self) -> None:
        """Connect."""
        options = self._options = self.environment.parsed_options
        self._calls = _make_calls(self.environment)
        tls = _find_tls(options)
        self._client = Client(
            options.router,
            timeout_s=300,
            api_key=options.api_key or None,
            credentials=None if tls is None else tls.credentials,
            tls_name=options.router_name,
        )

    def on_stop(self) -> None:
        """End the connection."""
        self._client.close()

    @task
    def generate(self) -> None:
        """Send one request and follow its answer."""
        call = next(self._calls)
        text, messages = _split(call.prompt)
        collector, start_s, failure = Collector(), time.perf_counter(), None
        try:
            for delta in self._client.generate(
                text,
                messages=messages,
                model=self._options.model,
                max_tokens=call.num_out,
                temperature=0.0,
                ignore_eos=self._options.prompts is None,
            ):
                collector.add(delta)
        except ClientError as error:
            failure = error
        total_s = time.perf_counter() - start_s
        if failure is not None:
            _report(self.environment, "gRPC", "generate", total_s, 0, failure)
            if isinstance(failure, OverloadedError | UnavailableError):
                time.sleep(_TURNED_AWAY_PAUSE_S)
            return
        answer = collector.completion()
        _report(self.environment, "gRPC", "generate", total_s, len(answer.token_ids))
        if answer.ttft_s is not None:
            _report(self.environment, "gRPC", "first token", answer.ttft_s, 1)
        if answer.tpot_s is not None:
            _report(self.environment, "gRPC", "each further token", answer.tpot_s, 1)


class CompletionsUser(HttpUser):
    """Asks over HTTP, at Locust's own --host."""

    host = "http://127.0.0.1:8000"

    def on_start(self) -> None:
        """Prepare prompts."""
        options = self._options = self.environment.parsed_options
        self._calls = _make_calls(self.environment)
        if options.api_key:
            self.client.headers["authorization"] = f"Bearer {options.api_key}"
        if options.router_ca is not None:
            self.client.verify = options.router_ca
        if options.router_cert is not None:
            self.client.cert = (options.router_cert, options.router_key)

    @task
    def complete(self) -> None:
        """Send one request and follow its answer; Locust itself counts it when its headers are there."""
        call, options = next(self._calls), self._options
        text, messages = _split(call.prompt)
        path, prompt = (
            ("completions", {"prompt": text}) if messages is None else ("chat/completions", {"messages": messages})
        )
        body = {
            **prompt,
            "model": options.model or None,
            "max_tokens": call.num_out,
            "temperature": 0.0,
            "ignore_eos": options.prompts is None,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer, num_tokens, failure = StreamedAnswer(), 0, None
        sent_s = time.perf_counter()
        times_s = []  # of the pieces of text
        with self.client.post(
            f"/v1/{path}", json=body, stream=True, catch_response=True, name="headers", timeout=300
        ) as response:
            if response.status_code != HTTPStatus.OK:  # which Locust counts as a failure, without what it says
                if words := response.status_code and refusal_of(response.content):
                    response.failure(f"{response.status_code}: {words}")
                if response.status_code in _TURNED_AWAY:
                    time.sleep(_TURNED_AWAY_PAUSE_S)
                return
            try:
                for line in response.iter_lines():
                    times_s += [time.perf_counter() for has_text in answer.add(line) if has_text]
                num_tokens = answer.usage().completion_tokens
            except (CallError, requests.RequestException, ValueError) as error:  # it broke off, or is no JSON
                failure = error
        _report(self.environment, "HTTP", "complete", time.perf_counter() - sent_s, num_tokens, failure)
        if failure is None and times_s:
            _report(self.environment, "HTTP", "first token", times_s[0] - sent_s, 1)
            if num_tokens > 1:
                tpot_s = (times_s[-1] - times_s[0]) / (num_tokens - 1)
                _report(self.environment, "HTTP", "each further token", tpot_s, 1)


def _split(prompt: Prompt) -> tuple[str | tuple[int, ...] | None, list[Mapping[str, str]] | None]:
    """Return text or token ids, or the messages of a conversation."""
    return (None, [*prompt.messages]) if isinstance(prompt, Chat) else (prompt, None)


def _find_tls(options: Namespace | None) -> ClientTls | None:
    assert options is not None, "the command line was read"
    return ClientTls.from_flags(options.router_cert, options.router_key, options.router_ca, options.router_name)


def _make_calls(environment: Environment) -> Iterator[Call]:
    options = environment.parsed_options
    assert options is not None, "the command line was read"
    dataset = DatasetOptions(
        kind=DatasetKind.RANDOM if options.prompts is None else DatasetKind.PROMPTS,
        file=None if options.prompts is None else Path(options.prompts),
        inputs=parse_lengths("--input-tokens", options.input_tokens),
        outputs=parse_lengths("--output-tokens", options.output_tokens),
    )
    return (call for each in make_sessions(dataset, vocab_size=_VOCAB_SIZE, seed=next(_seeds)) for call in each.calls)


def _report(
    environment: Environment, kind: str, name: str, duration_s: float, length: int, failure: Exception | None = None
) -> None:
    environment.events.request.fire(
        request_type=kind,
        name=name,
        response_time=duration_s * 1000,
        response_length=length,
        exception=failure,
        context={},
    )


def _check_options(environment: Environment, **_: object) -> None:
    """End with a line where users could not be made."""
    try:
        next(_make_calls(environment))
        _find_tls(environment.parsed_options)
    except (BenchConfigError, RouterConfigError) as error:
        raise SystemExit(f"Error: {error}") from None


events.init_command_line_parser.add_listener(_add_arguments)
events.init.add_listener(_check_options)
