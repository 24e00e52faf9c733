"""API keys: who may ask through both front ends, and how much; the file, its errors, and its changes."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.fake_replica import FakeReplica
from helpers.polling import until
from helpers.router_harness import router_config, running_router

from router.client import AsyncClient, NotFoundError, OverloadedError, UnauthenticatedError
from router.errors import RateLimitedError, RouterConfigError
from router.errors import UnauthenticatedError as NotKnown
from router.keys import KeyRing, OneRequest, cache_space, hash_key, main

ALICE = "wk-alice"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(*entries: dict[str, object]) -> Path:
        path = tmp_path / "keys.yaml"
        path.write_text(yaml.safe_dump({"keys": [{"name": "alice", "sha256": hash_key(ALICE), **e} for e in entries]}))
        return path

    return write


def ring(path: Path, now_s: list[float] | None = None) -> KeyRing:
    now_s = now_s or [0.0]
    return KeyRing(path, lambda: now_s[0])


def test_a_known_key_is_found_and_others_are_refused(write: Callable[..., Path]) -> None:
    keys = ring(write({}))
    assert keys.identify(f"Bearer {ALICE}").name == "alice"
    assert keys.identify(f"bearer  {ALICE} ").name == "alice"
    for authorization in (None, "", ALICE, f"Basic {ALICE}", "Bearer", "Bearer wk-bob", f"Bearer {hash_key(ALICE)}"):
        with pytest.raises(NotKnown):
            keys.identify(authorization)


def test_requests_and_tokens_are_limited_and_come_back_with_time(write: Callable[..., Path]) -> None:
    now_s = [100.0]
    alice = ring(write({"requests_per_minute": 2, "tokens_per_minute": 600}), now_s).identify(f"Bearer {ALICE}")
    alice.admit(OneRequest())
    alice.admit(OneRequest())
    with pytest.raises(RateLimitedError, match="'alice' has used its requests; allowed: 2 a minute") as refused:
        alice.admit(OneRequest())
    assert refused.value.retry_after_s == pytest.approx(30)
    now_s[0] += 30
    alice.admit(OneRequest())
    alice.spend(900)
    now_s[0] += 30
    with pytest.raises(RateLimitedError, match="its tokens; allowed: 600 a minute") as refused:
        alice.admit(OneRequest())
    assert refused.value.retry_after_s == pytest.approx(0.1)  # 900 of 600 taken, 300 came back: one is missing
    now_s[0] += 0.11
    alice.admit(OneRequest())


def test_tokens_that_come_late_are_owed_all_the_same(write: Callable[..., Path]) -> None:
    now_s = [100.0]
    alice = ring(write({"tokens_per_minute": 600}), now_s).identify(f"Bearer {ALICE}")
    alice.admit(OneRequest())
    now_s[0] += 600  # as where it waits for a model that is started for it
    alice.spend(900)
    with pytest.raises(RateLimitedError, match="its tokens; allowed: 600 a minute") as refused:
        alice.admit(OneRequest())
    assert refused.value.retry_after_s == pytest.approx(30.1)


@pytest.mark.parametrize(("num_tokens", "longer"), [(60, "tokens"), (10, "requests")])
def test_who_has_used_both_rates_is_told_the_longer_wait(
    write: Callable[..., Path], num_tokens: int, longer: str
) -> None:
    now_s = [100.0]
    alice = ring(write({"requests_per_minute": 1, "tokens_per_minute": 10}), now_s).identify(f"Bearer {ALICE}")
    alice.admit(OneRequest())
    alice.spend(num_tokens)
    with pytest.raises(RateLimitedError, match=f"its {longer}") as refused:
        alice.admit(OneRequest())
    now_s[0] += refused.value.retry_after_s + 0.01
    alice.admit(OneRequest())


def test_a_request_of_many_calls_counts_once_when_it_is_admitted(write: Callable[..., Path]) -> None:
    now_s = [0.0]
    alice = ring(write({"requests_per_minute": 1}), now_s).identify(f"Bearer {ALICE}")
    first, second = OneRequest(), OneRequest()
    for _ in range(3):
        alice.admit(first)
    for _ in range(2):
        with pytest.raises(RateLimitedError):
            alice.admit(second)
    now_s[0] += 60
    alice.admit(second)


async def test_choices_and_prompts_of_one_http_request_count_once(write: Callable[..., Path]) -> None:
    path = write({"requests_per_minute": 3})
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, api_keys=str(path), http_port=0, metrics_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}") as http,
    ):
        known = {"authorization": f"Bearer {ALICE}"}
        choices = []
        for asked in ({"prompt": "x", "n": 8}, {"prompt": ["x"] * 8}, {"prompt": ["x", "y"], "n": 4, "stream": True}):
            answer = await http.post("/v1/completions", json={"max_tokens": 2, **asked}, headers=known)
            choices.append((answer.status_code, answer.text.count('"finish_reason":"length"')))
        assert choices == [(200, 8)] * 3
        refused = await http.post("/v1/completions", json={"prompt": "x", "n": 8}, headers=known)
        assert refused.status_code == 429


def test_a_slow_rate_still_allows_one(write: Callable[..., Path]) -> None:
    now_s = [0.0]
    alice = ring(write({"requests_per_minute": 0.5}), now_s).identify(f"Bearer {ALICE}")
    alice.admit(OneRequest())
    now_s[0] += 119
    with pytest.raises(RateLimitedError):
        alice.admit(OneRequest())
    now_s[0] += 1.1
    alice.admit(OneRequest())


def test_spaces_of_cached_prefixes_cannot_meet(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    names = ("alice", "alice/", "alice/x", "5/alice")
    entries = [{"name": name, "sha256": hash_key(name), "isolate_cache": True} for name in names]
    path.write_text(yaml.safe_dump({"keys": [*entries, {"name": "bob", "sha256": hash_key("bob")}]}))
    tenants = [ring(path).identify(f"Bearer {name}") for name in (*names, "bob")]
    salts = {"", "/", "x", "x/", "/x", "/x/", *names}
    salts |= {cache_space(tenant, salt) for tenant in (*tenants, None) for salt in salts}  # known to all

    spaces = [cache_space(tenant, salt) for tenant in tenants for salt in sorted(salts)]

    assert len(set(spaces)) == len(spaces)
    for salt in ("", "x"):
        assert cache_space(tenants[-1], salt) == cache_space(None, salt) == salt


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: [", "cannot be read"),
        ("# Keys\n\n- `a`: b\n", r'cannot be read: [^\n]+ in "<byte string>", line 3, column 3: [^\n]+$'),
        ("keys: []\nkeys: []", "cannot be read: the key 'keys' comes twice"),
        ("keys: [{name: 2026-02-30}]", "cannot be read: day [^:]*range"),
        ("keys: !!bool perhaps", "cannot be read"),
        pytest.param("keys: " + "[" * 5000, "cannot be read: maximum recursion depth", id="deep"),
        ("key: []", "unknown field|missing required field"),
        ("", "cannot be read: an empty file; allowed: `keys:` and the entries below it"),
        ("- name: alice", "cannot be read: a list; allowed: `keys:` and the entries below it"),
        ("keys: [{name: a, sha256: 00}]", "Expected `str`"),
        (
            "keys: [{name: a, sha256: abc}]",
            r"matching regex '\^\[0-9a-f\]\{64\}\$' - at `\$\.keys\[0\]\.sha256`",
        ),
        (f"keys: [{{name: '', sha256: {hash_key('a')}}}]", r"Expected `str` of length >= 1 - at `\$\.keys\[0\]\.name`"),
        (
            f"keys: [{{name: a, sha256: {hash_key('a')}, requests_per_minute: 1e-320}}]",
            r"Expected `float` >= 0\.001 - at `\$\.keys\[0\]\.requests_per_minute`",
        ),
        (
            f"keys: [{{name: a, sha256: {hash_key('a')}, tokens_per_minute: .inf}}]",
            r"Expected `float` <= 1000000000000000\.0 - at `\$\.keys\[0\]\.tokens_per_minute`",
        ),
        (
            f"keys: [{{name: a, sha256: {hash_key('a')}, tokens: 1}}]",
            "unknown field `tokens` .*allowed: `keys:`, and of each entry name, sha256, requests_per_minute, ",
        ),
        (
            f"keys: [{{name: a, sha256: {hash_key('a')}}}, {{name: a, sha256: {hash_key('b')}}}]",
            "name 'a' appears twice",
        ),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(RouterConfigError, match=message):
        ring(tmp_path / "keys.yaml")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match="No such file"):
        ring(tmp_path / "keys.yaml")


def test_a_changed_file_is_read_again_and_rates_go_on(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    keys = ring(write({"requests_per_minute": 1}))
    keys.identify(f"Bearer {ALICE}").admit(OneRequest())
    path = write({"requests_per_minute": 1}, {"name": "bob", "sha256": hash_key("wk-bob")})
    keys.reload()
    assert keys.identify("Bearer wk-bob").name == "bob"
    with pytest.raises(RateLimitedError):
        keys.identify(f"Bearer {ALICE}").admit(OneRequest())
    path.write_text("keys: [{name: 2026-02-30}]")
    keys.reload()
    assert "the API keys stay as they were" in caplog.text
    assert keys.identify("Bearer wk-bob").name == "bob"
    write({"name": "bob", "sha256": hash_key("wk-bob")})
    keys.reload()
    with pytest.raises(NotKnown):
        keys.identify(f"Bearer {ALICE}")


def test_a_change_within_a_tick_of_the_clock_of_files_is_seen(write: Callable[..., Path]) -> None:
    path = write({})
    keys = ring(path)
    before = path.stat()
    write({"name": "bobby"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    keys.reload()
    assert keys.identify(f"Bearer {ALICE}").name == "bobby"


def test_a_file_that_is_gone_is_told_once_and_its_keys_stay(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write({})
    keys = ring(path)
    path.unlink()
    keys.reload()
    keys.reload()
    assert caplog.text.count("No such file") == 1
    assert keys.identify(f"Bearer {ALICE}").name == "alice"


async def test_nobody_waits_while_the_file_is_read_again(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ring(write({}))
    is_reading, may_read = threading.Event(), threading.Event()

    def read(text: bytes) -> object:
        is_reading.set()
        assert may_read.wait(10)
        return {"keys": [{"name": "bob", "sha256": hash_key("wk-bob")}]}

    monkeypatch.setattr("router.keys.read_yaml", read)
    monkeypatch.setattr("router.keys._RELOAD_S", 0.01)
    write({}, {"name": "bob", "sha256": hash_key("wk-bob")})
    following = asyncio.create_task(keys.follow())
    await until(is_reading.is_set)
    assert keys.identify(f"Bearer {ALICE}").name == "alice", "the keys from before hold meanwhile"
    may_read.set()
    async with asyncio.timeout(10):
        while True:
            with suppress(NotKnown):
                assert keys.identify("Bearer wk-bob").name == "bob"
                break
            await asyncio.sleep(0.005)
    following.cancel()


async def test_both_front_ends_want_a_key_and_keep_its_rate(write: Callable[..., Path]) -> None:
    path = write({"requests_per_minute": 2, "isolate_cache": True})
    async with FakeReplica("a") as a:
        config = router_config(a.address, api_keys=str(path), http_port=0)
        async with (
            running_router(config) as router,
            httpx.AsyncClient(base_url=f"http://{router.addresses.http}") as http,
        ):
            async with AsyncClient(router.addresses.grpc, api_key=ALICE, timeout_s=10) as client:
                await client.wait_ready(10)
                assert (await client.complete("hi", max_tokens=2)).usage.completion_tokens == 2
                body = {"model": "tiny", "prompt": "hi", "max_tokens": 2}
                known = {"authorization": f"Bearer {ALICE}"}
                assert (await http.post("/v1/completions", json=body, headers=known)).status_code == 200
                with pytest.raises(OverloadedError, match="has used its requests") as refused:
                    await client.complete("hi", max_tokens=2)
                assert refused.value.retry_after_s is not None
                answer = await http.post("/v1/completions", json=body, headers=known)
                assert answer.status_code == 429
                assert int(answer.headers["retry-after"]) >= 1
            for key in (None, "wk-bob"):
                async with AsyncClient(router.addresses.grpc, api_key=key, timeout_s=10) as stranger:
                    for call in (
                        stranger.complete("hi"),
                        stranger.models(),
                        stranger.tokenize("hi"),
                        stranger.detokenize([1]),
                    ):
                        with pytest.raises(UnauthenticatedError):
                            await call
                headers = {} if key is None else {"authorization": f"Bearer {key}"}
                for response in await asyncio.gather(
                    http.post("/v1/completions", json=body, headers=headers),
                    http.post("/v1/chat/completions", json={}, headers=headers),
                    http.get("/v1/models", headers=headers),
                    http.get("/v1/models/tiny", headers=headers),
                    http.post("/tokenize", json={"prompt": "hi"}, headers=headers),
                    http.post("/detokenize", json={"tokens": [1]}, headers=headers),
                ):
                    assert response.status_code == 401
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["error"]["code"] == "invalid_api_key"
            assert (await http.get("/health")).status_code == 200
            async with grpc.aio.insecure_channel(router.addresses.grpc) as channel:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())  # type: ignore[no-untyped-call]
        assert {submit.cache_salt for submit in a.submits} == {"key/5/alice/"}


@asynccontextmanager
async def asked_by_alice(keys: Path) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncClient]]:
    """A router with a replica, and clients of both fronts with her key."""
    known = {"authorization": f"Bearer {ALICE}"}
    async with (
        FakeReplica("a") as a,
        running_router(router_config(a.address, api_keys=str(keys), http_port=0)) as router,
        httpx.AsyncClient(base_url=f"http://{router.addresses.http}", headers=known) as http,
        AsyncClient(router.addresses.grpc, api_key=ALICE, timeout_s=10) as client,
    ):
        await client.wait_ready(10)
        yield http, client


async def test_tokenizing_counts_as_a_request_and_its_tokens_do_not(write: Callable[..., Path]) -> None:
    path = write({"requests_per_minute": 4, "tokens_per_minute": 10})
    async with asked_by_alice(path) as (http, client):
        assert len(await client.tokenize("twenty and one bytes.", model="tiny")) == 22
        assert await client.detokenize([104, 105], model="tiny") == "hi"
        assert (await http.post("/tokenize", json={"prompt": "hi"})).status_code == 200
        assert (await http.post("/detokenize", json={"tokens": [104]})).status_code == 200
        for call in (
            client.tokenize("hi", model="tiny"),
            client.detokenize([104], model="tiny"),
            client.complete("hi"),
        ):
            with pytest.raises(OverloadedError, match="'alice' has used its requests; allowed: 4 a minute"):
                await call
        for path_of, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [104]})):
            assert (await http.post(path_of, json=body)).status_code == 429


async def test_a_request_that_is_no_call_counts_too(write: Callable[..., Path]) -> None:
    path = write({"requests_per_minute": 4})
    async with asked_by_alice(path) as (http, client):
        nobody: dict[str, object] = {"model": "nobody", "prompt": "hi", "n": 3}
        statuses = [
            (await http.post("/v1/completions", json=body)).status_code
            for body in (nobody, [], nobody | {"model": "tiny", "temperature": "hot"})
        ]
        with pytest.raises(NotFoundError):
            await client.complete("hi", model="nobody")
        with pytest.raises(OverloadedError, match="'alice' has used its requests; allowed: 4 a minute"):
            await client.complete("hi")
        statuses.append((await http.post("/v1/completions", json=nobody)).status_code)
    assert statuses == [404, 400, 400, 404], "who has used up the rate is still told what is wrong"


async def test_prompt_of_several_choices_is_spent_once(write: Callable[..., Path]) -> None:
    path = write({"tokens_per_minute": 30})
    async with asked_by_alice(path) as (http, _):
        body = {"prompt": "x" * 12, "n": 4, "max_tokens": 1}  # 13 and 4 tokens
        statuses = [(await http.post("/v1/completions", json=body)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]


def test_a_rate_that_changed_in_the_file_is_the_new_one(write: Callable[..., Path]) -> None:
    keys = ring(write({"requests_per_minute": 1}))
    keys.identify(f"Bearer {ALICE}").admit(OneRequest())
    write({"requests_per_minute": 2})
    keys.reload()
    alice = keys.identify(f"Bearer {ALICE}")
    alice.admit(OneRequest())
    alice.admit(OneRequest())
    with pytest.raises(RateLimitedError, match="allowed: 2 a minute"):
        alice.admit(OneRequest())


def test_a_new_key_is_shown_apart_from_its_entry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["router.keys", "alice"])
    main()
    entry, shown = capsys.readouterr()
    key = shown.removeprefix("The key, shown this once: ").rstrip()
    assert key.startswith("wk-")
    assert yaml.safe_load(entry) == [{"name": "alice", "sha256": hash_key(key)}]


def test_no_key_is_made_for_an_empty_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["router.keys", ""])
    with pytest.raises(SystemExit) as ended:
        main()
    entry, shown = capsys.readouterr()
    assert ended.value.code == 2
    assert not entry, "it would break the file that it is appended to"
    assert "the name is empty; allowed: at least one character" in shown
