"""The Locust file on a service that fails in every way: each failure is counted, and none asks without end."""

import asyncio
import csv
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

REPOSITORY = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "proto")])}

TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
EMPTY = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
WHOLE = TOKEN * 3 + b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}\n\ndata: [DONE]\n\n'


FAILURES = ("gone", "full", "wrong", "broken", "error")


async def test_every_failure_over_http_is_counted(tmp_path: Path) -> None:
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
                return web.Response(status=400)
            case "broken":
                response = web.StreamResponse()
                await response.prepare(request)
                await response.write(TOKEN)
                request.transport.abort()
                return response
            case "error":
                return web.Response(body=TOKEN + b'data: {"error": {"message": "no more"}}\n\n')
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
        command = [
            *(sys.executable, "-m", "locust", "-f", str(REPOSITORY / "bench" / "locustfile.py"), "--headless"),
            *("CompletionsUser", "--users", "1", "--stop-timeout", "20", "--only-summary"),
            *("--host", f"http://{server.host}:{server.port}", "--csv", str(tmp_path / "locust")),
            *("--api-key", "wk-1", "--exit-code-on-error", "0"),
        ]
        for run_time in ("5s", "60s"):  # a busy machine may not come past the failures in the first
            failures, num_whole = iter(FAILURES), 0
            done = await asyncio.to_thread(
                subprocess.run,
                [*command, "--run-time", run_time],
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stderr
            if num_whole > 2:
                break
    with (tmp_path / "locust_stats.csv").open() as file:
        rows = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    sent, answered, first = rows["POST", "headers"], rows["HTTP", "complete"], rows["HTTP", "first token"]
    assert int(sent["Failure Count"]) == 3, "gone, full, wrong"
    assert int(answered["Failure Count"]) == 2, "broken, error"
    assert int(answered["Request Count"]) == int(sent["Request Count"]) - 3 > 2
    assert float(first["Min Response Time"]) > 150, "text comes long after headers and a first chunk without any"
    assert float(rows["HTTP", "each further token"]["Min Response Time"]) < 100
    assert keys == {"Bearer wk-1"}
