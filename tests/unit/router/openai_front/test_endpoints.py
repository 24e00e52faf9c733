"""Bodies, paths, pages of other origins, health and readiness."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import NoReturn

import httpx
import pytest
from helpers.fake_dispatch import FakeDispatch
from helpers.openai_front import MAX_BODY_BYTES, MODEL, complete, serving

from router.openai import create_app


@pytest.mark.parametrize("has_length", [True, False])
async def test_body_that_is_too_large_is_refused(url: str, dispatch: FakeDispatch, has_length: bool) -> None:
    body = json.dumps({"prompt": "x" * 1_500_000}).encode()

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    async with httpx.AsyncClient(base_url=url) as http:
        response = await http.post("/v1/completions", content=body if has_length else parts())
        assert response.status_code == 413
        assert "larger than 100000 bytes" in response.json()["error"]["message"]
        assert (await complete(http)).status_code == 200

    assert len(dispatch.calls) == 1


async def test_body_may_be_as_large_as_is_allowed(http: httpx.AsyncClient) -> None:
    for size, status in ((MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413)):
        response = await http.post("/v1/completions", content=b'{"prompt": "Hi"}'.rjust(size))
        assert response.status_code == status


@pytest.mark.parametrize("encoding", ["gzip", "deflate, gzip", "utf-8"])
async def test_body_that_is_packed_is_refused(http: httpx.AsyncClient, encoding: str) -> None:
    body = gzip.compress(b'{"prompt": "Hi"}')
    response = await http.post("/v1/completions", content=body, headers={"content-encoding": encoding})

    assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
    error = response.json()["error"]
    assert error["message"] == f"Content-Encoding is {encoding!r}; allowed: none, plain JSON"
    assert error["type"] == "invalid_request_error"
    for none in ("identity", ""):
        response = await http.post("/v1/completions", content=b'{"prompt": "Hi"}', headers={"content-encoding": none})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/completions/", "/v1/models/fake/", "/tokenize/", "/chat/completions", "//", "/v1"]
)
async def test_path_that_is_not_served_is_told_and_nobody_is_sent_elsewhere(http: httpx.AsyncClient, path: str) -> None:
    """A redirect would name the scheme that the router sees, plain http behind a proxy that ends TLS."""
    for method in ("GET", "POST"):
        response = await http.request(method, f"http://weft{path}", json={"prompt": "Hi"})

        assert response.status_code in (404, 405)
        assert "location" not in response.headers
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        if response.status_code == 404 and "models" not in path:
            assert error["message"].startswith(f"{method} {path} is not served; allowed: /v1/models, /v1/models/")
            assert "/v1/chat/completions, /tokenize" in error["message"]


class _SlowTokenizers(FakeDispatch):
    """Its tokenizers work until nobody waits any more."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.left = asyncio.Event(), asyncio.Event()

    async def tokenize(self, *_: object, **__: object) -> tuple[int, ...]:
        return await self._work()

    async def detokenize(self, *_: object, **__: object) -> str:
        return await self._work()

    async def _work(self) -> NoReturn:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        raise AssertionError


@pytest.mark.parametrize(("path", "field"), [("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [1]})])
async def test_nobody_works_on_for_a_client_that_left(path: str, field: dict[str, object]) -> None:
    dispatch = _SlowTokenizers()
    async with serving(dispatch) as url, httpx.AsyncClient(base_url=url) as http, asyncio.timeout(10):
        asking = asyncio.create_task(http.post(path, json={"model": MODEL} | field))
        await dispatch.begun.wait()
        asking.cancel()
        await dispatch.left.wait()


async def test_pages_of_other_origins_may_ask_only_where_the_operator_says_so(dispatch: FakeDispatch) -> None:
    page = {"origin": "https://app.example"}
    preflight = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    for allowed, told in (((), None), (("*",), "*"), (("https://app.example", "http://b"), "https://app.example")):
        app = create_app(dispatch, ready=lambda: True, allowed_origins=allowed)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://weft") as http:
            asked = await http.options("/v1/completions", headers=preflight)
            assert asked.is_success == bool(allowed)
            if allowed:
                assert asked.headers["access-control-allow-headers"] == preflight["access-control-request-headers"]
            answers = [
                asked,
                await http.post("/v1/completions", json={"prompt": "Hi"}, headers=page),
                await http.post("/v1/completions", json={"prompt": "Hi", "stream": True}, headers=page),
                await http.post("/v1/completions", json={}, headers=page),
                await http.get("/v1/nothing", headers=page),
            ]
            assert [answer.headers.get("access-control-allow-origin") for answer in answers] == [told] * 5
            if allowed:
                exposed = answers[1].headers["access-control-expose-headers"].lower().split(", ")
                assert exposed == ["x-request-id", "retry-after", "retry-after-ms", "x-should-retry"]
                assert not any("access-control-allow-credentials" in answer.headers for answer in answers)

            other = await http.post(
                "/v1/completions", json={"prompt": "Hi"}, headers={"origin": "https://evil.example"}
            )
            assert other.headers.get("access-control-allow-origin") == ("*" if allowed == ("*",) else None)


async def test_unknown_path_and_method_answer_in_the_same_form(http: httpx.AsyncClient) -> None:
    for response, status in (
        (await http.get("/v1/nothing"), 404),
        (await http.get("/v1/completions"), 405),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_health_readiness_and_version(dispatch: FakeDispatch) -> None:
    is_ready = False
    transport = httpx.ASGITransport(create_app(dispatch, ready=lambda: is_ready))
    async with httpx.AsyncClient(transport=transport, base_url="http://weft") as http:
        for path in ("/health", "/ping"):
            response = await http.get(path)
            assert (response.status_code, response.json()) == (200, {"status": "ok"})
        assert (await http.get("/ready")).status_code == 503
        is_ready = True
        assert (await http.get("/ready")).status_code == 200
        assert "version" in (await http.get("/version")).json()
