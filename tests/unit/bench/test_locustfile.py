"""The Locust file on a service that fails in every way: each failure is counted, and none asks without end."""

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from aiohttp.test_utils import TestServer
from helpers.certificates import inner_tls
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router

from router.tls import TlsFiles

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "proto")])}
COMMAND = [sys.executable, "-m", "locust", "-f", str(REPOSITORY / "bench" / "locustfile.py"), "--headless"]

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
EMPTY = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
USAGE = b'data: {"choices": null, "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\n'
WHOLE = TOKEN * 3 + USAGE + b"data: [DONE]\n\n"
CUT = b'data: {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'


FAILURES = ("gone", "full", "wrong", "broken", "cut", "error", "abort")


async def test_every_failure_over_http_is_counted_and_told(tmp_path: Path) -> None:
    if find_spec("locust") is None:  # to import it here would make this process cooperative
        pytest.skip("needs locust")
    keys, failures, num_whole = set[str | None](), iter(FAILURES), 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_whole
        keys.add(request.headers.get("authorization"))
        assert request.transport is not None
        match next(failures, "none"):
            case "gone":
                request.transport.abort()
                return web.Response()
            case "full":
                return web.Response(status=503)
            case "wrong":
                return web.json_response({"error": {"message": "no such model"}}, status=400)
            case "broken":
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(TOKEN)
                request.transport.abort()
                return response
            case "cut":
                return web.Response(body=CUT)
            case "error":
                return web.Response(body=TOKEN + b'data: {"error": {"message": "no more"}}\n\n')
            case "abort":
                return web.Response(body=WHOLE.replace(b'"a"', b'"a", "finish_reason": "abort"'))
            case _:
                num_whole += 1
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(EMPTY)
                await asyncio.sleep(0.2)
                await response.write(WHOLE)
                return response

    service = web.Application()
    service.add_routes([web.post("/v1/completions", complete)])
    async with TestServer(service) as server:
        arguments = [
            *("CompletionsUser", "--users", "1", "--host", f"http://{server.host}:{server.port}"),
            *("--api-key", "wk-1", "--exit-code-on-error", "0", "--csv", str(tmp_path / "locust")),
        ]
        for run_time in ("5s", "60s"):  # a busy machine may not come past the failures in the first
            failures, num_whole = iter(FAILURES), 0
            rows = await asyncio.to_thread(drive, [*arguments, "--run-time", run_time])
            if num_whole > 2:
                break
    sent, answered, first = rows["POST", "headers"], rows["HTTP", "complete"], rows["HTTP", "first token"]
    assert sent["num_failures"] == 3, "gone, full, wrong"
    assert answered["num_failures"] == 4, "broken, cut, error, abort"
    assert answered["num_requests"] == sent["num_requests"] - 3 > 2
    assert first["min_response_time"] > 150, "text comes long after headers and a first chunk without any"
    assert rows["HTTP", "each further token"]["min_response_time"] < 100
    assert keys == {"Bearer wk-1"}
    told = (tmp_path / "locust_failures.csv").read_text()
    for words in ("400: no such model", "503 Server Error", "no more", "the service ended the answer"):
        assert words in told


async def test_a_router_that_wants_a_certificate_is_shown_one(tmp_path: Path) -> None:
    if find_spec("locust") is None:
        pytest.skip("needs locust")
    ca = trustme.CA()
    files, mine = inner_tls(ca, tmp_path / "router", name="127.0.0.1"), inner_tls(ca, tmp_path / "user", name="alice")
    tls = TlsFiles(cert_file=files.cert_file, key_file=files.key_file, ca_file=files.ca_file)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    async with FakeReplica("a") as a, running_router(router_config(a.address, http_port=0, tls=tls)) as router:
        arguments = [
            *(
                "--users",
                "2",
                "--spawn-rate",
                "2",
                "--router",
                router.addresses.grpc,
                "--host",
                f"https://{router.addresses.http}",
            ),
            *("--router-ca", mine.ca_file, "--router-cert", mine.cert_file, "--router-key", mine.key_file),
            *("--prompts", str(prompts), "--output-tokens", "4"),
        ]
        wanted = {("gRPC", "generate"), ("HTTP", "complete")}
        for run_time in ("3s", "15s", "60s"):  # a busy machine may answer nothing in the first
            rows = await asyncio.to_thread(drive, [*arguments, "--run-time", run_time])
            if wanted <= rows.keys():
                break
    for each in wanted:
        assert rows[each]["num_requests"] > 0
        assert rows[each]["num_failures"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "nowhere.jsonl"], "Error: nowhere.jsonl cannot be read: "),
        (["--router-key", "key.pem"], "Error: a client's certificate lacks its key, or a key its certificate; "),
    ],
)
def test_a_wrong_option_ends_it_with_a_line(arguments: list[str], said: str) -> None:
    if find_spec("locust") is None:
        pytest.skip("needs locust")
    done = subprocess.run([*COMMAND, *arguments], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def drive(arguments: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Run locust; its last statistics by type and name. Its CSV files may lack what the last second brought."""
    settings = ("--stop-timeout", "20", "--only-summary", "--json")
    done = subprocess.run(
        [*COMMAND, *arguments, *settings], env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return {(row["method"], row["name"]): row for row in json.loads(done.stdout)}
