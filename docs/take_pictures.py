"""Take the pictures of docs/operations.md: two replicas of the default model under load, a rollout in the middle of it.

    PYTHONPATH=.:proto:tests python docs/take_pictures.py [OUT]      OUT: default docs/images

`weft top` draws itself; the metrics are a screenshot of Prometheus' own page with queries of the committed dashboards.
Needs what `make test` installs, and Debian's prometheus (with its pages) and chromium. Takes two minutes.
"""

import asyncio
import io
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from helpers.live_cluster import Ask, ask_together, wait_until
from helpers.prometheus import Prometheus, running_prometheus
from helpers.promql import PROMETHEUS, panel_queries
from rich.console import Console

from cluster.config import build_spec
from cluster.observe import Window
from cluster.operate import is_as_wanted
from cluster.service import Service
from cluster.top import WINDOW_S, look, render

MODEL = "weft-tiny"
PANELS = ("replicas: Tokens", "replicas: Running", "cluster: Groups by state")
"""Dashboard and title; of each the first query."""
BEFORE_S, DURING_S, AFTER_S = 40.0, 4.0, 10.0
"""Seconds under load before the rollout begins, from there to the picture of `weft top`, and after its end."""
SCRAPE = "2s"
RATE_INTERVAL = "15s"
RANGE = "2m"
COLUMNS = 150
WINDOW_SIZE = "1000,2400"
"""In which the page needs no scrolling."""


def main(out: Path) -> None:
    """Take both pictures."""
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs chromium (Debian package chromium)")
    router = {"port": 0, "http_port": 0, "metrics_port": 0}
    model = {"path": MODEL, "replicas": 2, "tensor_parallel": 2, "device": "cpu", "dtype": "float32"}
    spec = build_spec({"models": [model], "router": router, "controller": {"port": 0}})
    with tempfile.TemporaryDirectory() as folder, Service.start(spec) as service:
        service.wait_ready(timeout_s=120)
        status = service.status()
        with (
            running_prometheus(_configuration(status.metrics_address, Path(folder)), Path(folder)) as prometheus,
            _load_on(status.routers[0].grpc_address),
        ):
            top = _watch(service)
            (out / "weft-top.svg").write_text(top)
            wait_until(lambda: all(map(is_as_wanted, service.status().models)), "rolled")
            time.sleep(AFTER_S)
            _photograph(chromium, prometheus, out / "prometheus.png")
        service.shut_down(5.0)


def _configuration(controller: str, folder: Path) -> dict[str, Any]:
    """The committed one, pointed at this service and quicker."""
    text = (PROMETHEUS / "prometheus.yml").read_text().replace("127.0.0.1:9465", controller)
    config: dict[str, Any] = yaml.safe_load(text.replace("15s", SCRAPE))
    for name in config["rule_files"]:
        shutil.copy(PROMETHEUS / name, folder)
    return config


@contextmanager
def _load_on(address: str) -> Iterator[None]:
    """Keep requests with prompts that repeat on the service."""
    stop = threading.Event()
    story = "Once upon a time there was a little dog that ran to the big tree and saw a red bird. "
    asks = [
        Ask(
            prompt=story + "And then " * (index % 3),
            options={"max_tokens": 40 + 20 * index, "seed": index, "ignore_eos": True, "timeout_s": 60.0},
        )
        for index in range(6)
    ]

    def load() -> None:
        while not stop.is_set():
            asyncio.run(ask_together(address, asks))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(service: Service) -> str:
    """Look on for a while, begin a rollout, and return what `weft top` shows then."""
    window = Window(WINDOW_S)
    rolls_s = time.monotonic() + BEFORE_S
    while time.monotonic() < rolls_s:
        window.add(look(service.client))
        time.sleep(1)
    service.client.rollout(MODEL, {"scheduler": {"max_num_seqs": 64}})
    time.sleep(DURING_S)
    snapshot = window.add(look(service.client))
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(render(snapshot, COLUMNS))
    return console.export_svg(title="weft top")


def _photograph(chromium: str, prometheus: Prometheus, path: Path) -> None:
    parameters = {}
    for number, panel in enumerate(PANELS):
        first = next(query for query in panel_queries() if query.place.startswith(f"{panel}: "))
        expression = first.substituted(RATE_INTERVAL)
        parameters |= {f"g{number}.expr": expression, f"g{number}.tab": "0", f"g{number}.range_input": RANGE}
    url = f"http://{prometheus.address}/graph?{urllib.parse.urlencode(parameters)}"
    arguments = ("--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=0.8")
    until_drawn = "--virtual-time-budget=15000"
    command = [chromium, *arguments, until_drawn, f"--window-size={WINDOW_SIZE}", f"--screenshot={path}", url]
    subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)  # it complains of the desktop it lacks


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "images")
