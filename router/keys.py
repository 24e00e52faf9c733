"""Who may ask, and how much: API keys from a file, with a rate of requests and of tokens for each.

The file holds no key, only the SHA-256 of each; `python -m router.keys NAME` makes both. It is read again when it
changes:

    keys:
      - name: alice                  # in metrics and logs
        sha256: 2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b
        requests_per_minute: 600     # optional, as are the following
        tokens_per_minute: 1000000
        isolate_cache: true          # shares no cached prefix with other keys

Each router counts for itself: behind n routers a key has up to n times its rate. Owned by the event loop.
"""

import argparse
import asyncio
import hashlib
import logging
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import yaml
from msgspec import Meta
from weft.yaml_text import read_yaml

from router.errors import RateLimitedError, RouterConfigError, UnauthenticatedError

logger = logging.getLogger(__name__)

_SCHEME = "bearer "
_RELOAD_S = 5.0
_Rate: TypeAlias = Annotated[float, Meta(ge=1e-3, le=1e15)]  # beyond, times until the next request are no numbers


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the file has it."""

    name: Annotated[str, Meta(min_length=1)]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", max_length=64)]
    requests_per_minute: _Rate | None = None
    tokens_per_minute: _Rate | None = None
    isolate_cache: bool = False


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: list[KeyEntry]


@dataclass(slots=True)
class Bucket:
    """A rate with room for one minute's worth at once; what is spent beyond is owed."""

    per_minute: float
    level: float
    filled_s: float

    def wait_s(self, now_s: float) -> float:
        """Time until something may be taken; 0: now."""
        self._fill(now_s)
        return 0.0 if self.level >= 1 else (1 - self.level) * 60 / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Take this much, whether it is there or not."""
        self._fill(now_s)  # first: what there was no room for until now pays for nothing
        self.level -= amount

    def _fill(self, now_s: float) -> None:
        self.level = min(max(self.per_minute, 1.0), self.level + (now_s - self.filled_s) * self.per_minute / 60)
        self.filled_s = now_s


@dataclass(slots=True)
class OneRequest:
    """A request as its client sent it, however many calls it has become.

    It counts once, and has failed as soon as one of its calls has.
    """

    is_counted: bool = False
    failure: str = ""
    """Outcome of the first of its calls that failed, for which the others are ended, with the same one. Empty: none."""


class Tenant:
    """Who holds a key, and what is left of its rates."""

    def __init__(self, entry: KeyEntry, clock: Callable[[], float]) -> None:
        self.name = entry.name
        self.isolate_cache = entry.isolate_cache
        self._clock = clock
        self._requests = _bucket(entry.requests_per_minute, clock())
        self._tokens = _bucket(entry.tokens_per_minute, clock())

    def admit(self, request: OneRequest) -> None:
        """Count a request, once. Raises RateLimitedError, and counts nothing, when either rate is used up."""
        if request.is_counted:
            return
        now_s = self._clock()
        named = (("requests", self._requests), ("tokens", self._tokens))
        used = [(wait_s, what, b) for what, b in named if b is not None and (wait_s := b.wait_s(now_s)) > 0]
        if used:
            wait_s, what, bucket = max(used, key=itemgetter(0))
            raise RateLimitedError(
                f"key {self.name!r} has used its {what}; allowed: {bucket.per_minute:g} a minute", retry_after_s=wait_s
            )
        if self._requests is not None:
            self._requests.take(1, now_s)
        request.is_counted = True

    def spend(self, num_tokens: int) -> None:
        """Count tokens of a prompt or of an answer. A request that is under way is never cut off for them."""
        if self._tokens is not None:
            self._tokens.take(num_tokens, self._clock())

    def keep_rates_of(self, before: "Tenant") -> None:
        """Go on with what was left of the rates that have not changed."""
        for name in ("_requests", "_tokens"):
            old, new = getattr(before, name), getattr(self, name)
            if old is not None and new is not None and old.per_minute == new.per_minute:
                setattr(self, name, old)


class KeyRing:
    """The known keys. Tells who a client is, and follows the file."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """Read the file. Raises RouterConfigError when it cannot be read or says something that is not allowed."""
        self._path = path
        self._clock = clock
        self._content = _read(path)
        self._tenants = self._parse()

    def identify(self, authorization: str | None) -> Tenant:
        """Return the holder of the key in `authorization`, which is the HTTP header or gRPC metadata of this name.

        Raises:
            UnauthenticatedError: there is none, or it is not known.
        """
        if not authorization or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise UnauthenticatedError("the request has no API key; allowed: 'authorization: Bearer KEY'")
        tenant = self._tenants.get(hash_key(authorization[len(_SCHEME) :].strip()))
        if tenant is None:
            raise UnauthenticatedError("the API key is not known")
        return tenant

    async def follow(self) -> None:
        """Read the file again whenever it changes, for ever. One that is broken is reported, and the old keys stay."""
        while True:
            await asyncio.sleep(_RELOAD_S)
            await asyncio.to_thread(self.reload)  # a thousand keys are 0.3 s

    def reload(self) -> None:
        """Read the file if it has changed. Whatever it holds, nothing is raised. In any thread, one at a time."""
        content = _read(self._path)
        if content == self._content:  # times of files have ticks, in which one may change twice
            return
        self._content = content
        try:
            tenants = self._parse()
        except RouterConfigError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        before = {tenant.name: tenant for tenant in self._tenants.values()}
        for tenant in tenants.values():
            if tenant.name in before:
                tenant.keep_rates_of(before[tenant.name])
        self._tenants = tenants
        logger.info("%d API keys from %s", len(tenants), self._path)

    def _parse(self) -> Mapping[str, Tenant]:
        if isinstance(self._content, str):
            raise RouterConfigError(f"the API keys in {self._path} cannot be read: {self._content}")
        try:
            data = read_yaml(self._content)
            if not isinstance(data, dict):
                seen = "an empty file" if data is None else f"a {type(data).__name__}"
                raise ValueError(f"{seen}; allowed: `keys:` and the entries below it")
            entries = msgspec.convert(data, _File).keys
        except Exception as error:  # yaml lets out whatever a text makes its parts raise, such as ValueError
            reason = " ".join(str(error).split())  # yaml's has lines
            if "unknown field" in reason:  # msgspec's
                reason += f"; allowed: `keys:`, and of each entry {', '.join(KeyEntry.__struct_fields__)}"
            raise RouterConfigError(f"the API keys in {self._path} cannot be read: {reason}") from error
        for what in ("name", "sha256"):
            counts = Counter(getattr(entry, what) for entry in entries)
            twice = next((value for value, count in counts.items() if count > 1), None)
            if twice is not None:
                raise RouterConfigError(f"{self._path}: {what} {twice!r} appears twice; allowed: once")
        return {entry.sha256: Tenant(entry, self._clock) for entry in entries}


def check_keys(path: Path) -> None:
    """Raise RouterConfigError when a file of keys cannot be read or says something that is not allowed."""
    KeyRing(path, lambda: 0.0)


def cache_space(tenant: Tenant | None, cache_salt: str) -> str:
    """Return what a request's block hashes are salted with: each isolated key has spaces of its own, all others share
    those of their salts. Whatever clients send, no two meet."""
    if tenant is not None and tenant.isolate_cache:
        return f"key/{len(tenant.name)}/{tenant.name}/{cache_salt}"  # the length: names and salts may hold a slash
    return f"salt/{cache_salt}" if cache_salt.startswith(("key/", "salt/")) else cache_salt


def hash_key(key: str) -> str:
    """Return what the file holds of a key. Keys are long and random, so a plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


def _bucket(per_minute: float | None, now_s: float) -> Bucket | None:
    # a rate below one a minute still has room for one
    return None if per_minute is None else Bucket(per_minute, max(per_minute, 1.0), now_s)


def _read(path: Path) -> bytes | str:
    """Return the file's content, or why it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        return str(error)


def main() -> None:
    """Make a key for a name; show it once, on stderr, and print its entry, which may go straight into the file."""
    parser = argparse.ArgumentParser(prog="python -m router.keys", description="Make an API key.")
    parser.add_argument("name", help="whose it is")
    name = parser.parse_args().name
    if not name:
        parser.error("the name is empty; allowed: at least one character")
    key = f"wk-{secrets.token_urlsafe(32)}"
    print(f"The key, shown this once: {key}", file=sys.stderr)
    print(yaml.safe_dump([{"name": name, "sha256": hash_key(key)}], sort_keys=False), end="")


if __name__ == "__main__":
    main()
