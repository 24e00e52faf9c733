"""Prometheus for tests: its programs, where they are, and a server that scrapes what a test wants."""

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers.ports import unlisted_port

_START_TIMEOUT_S = 120.0


def find_tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; the test is skipped where it is absent."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft/prometheus/usr/bin"
    found = shutil.which(name) or shutil.which(name, path=cache)
    if found is None:
        pytest.skip(f"needs {name}, which deploy/prometheus/fetch.sh fetches where there is apt-get")
    return found


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running server."""

    address: str

    def query(self, expression: str) -> list[Any]:
        """Return the series of an instant query."""
        return list(self.get("query", query=expression)["result"])

    def label_values(self, label: str, selector: str) -> list[str]:
        """Return what Grafana's label_values(selector, label) gives."""
        return list(self.get(f"label/{label}/values", **{"match[]": selector}))

    def rules(self) -> list[Any]:
        """Return every rule with its health."""
        return [rule for group in self.get("rules")["groups"] for rule in group["rules"]]

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an API call; fail with its error."""
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error


@contextmanager
def running_prometheus(config: Mapping[str, Any], folder: Path) -> Iterator[Prometheus]:
    """Run a server with this configuration; `folder` holds its data, and rule files that the config names."""
    program = find_tool("prometheus")
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(dict(config)))
    address = f"127.0.0.1:{unlisted_port()}"
    arguments = (f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_ready(process, address, folder / "log")
        yield Prometheus(address)
    finally:
        process.terminate()
        process.wait(timeout=20)


def _wait_ready(process: "subprocess.Popen[bytes]", address: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline_s, log.read_text()
        try:
            urllib.request.urlopen(f"http://{address}/-/ready", timeout=5).close()
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
        else:
            return
