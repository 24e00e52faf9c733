"""A running service as end-to-end tests see it: its status, its processes, and requests to send to it."""

import asyncio
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from weft.v1 import control_pb2

from cluster.cli_connection import connection_flags
from cluster.service import Service
from router.client import AsyncClient, Client, Completion
from router.client_values import Collector, Options

RECOVERY_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    prompt: str
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The running service."""

    service: Service
    grpc_address: str
    http_address: str
    num_replicas: int

    def status(self) -> control_pb2.GetStatusResponse:
        return self.service.status()

    @property
    def control_flags(self) -> list[str]:
        """By which the `weft` command reaches it."""
        return connection_flags(self.service.control_address, self.service.spec.inner_tls)

    def groups(self) -> list[control_pb2.GroupStatus]:
        return list(self.status().models[0].groups)

    def wait_whole(self) -> None:
        """Wait until every group serves and the router knows it."""
        self.service.wait_ready(timeout_s=RECOVERY_TIMEOUT_S)
        with Client(self.grpc_address) as client:
            client.wait_ready(RECOVERY_TIMEOUT_S, replicas=self.num_replicas)


def wait_until(
    condition: Callable[[], object], what: str, timeout_s: float = RECOVERY_TIMEOUT_S, *, poll_s: float = 0.05
) -> None:
    """Poll a condition; fail when it does not come true in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s:g} s"
        time.sleep(poll_s)


def scrape(address: str, **labels: str) -> dict[str, float]:
    """Return the samples of a metrics page that have these labels, those with further ones added up."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        text = response.read().decode()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if labels.items() <= sample.labels.items():
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return totals


def ask_alone(address: str, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
    """Send one request after the other; return their tokens."""
    with Client(address) as client:
        return [client.complete(ask.prompt, **ask.options).token_ids for ask in asks]


async def ask_together(
    address: str, asks: Sequence[Ask], *, on_running: Callable[[], None] | None = None
) -> list[Completion]:
    """Send all requests at once; call `on_running` when each of them has its first tokens."""
    num_started = 0

    async def run(client: AsyncClient, ask: Ask) -> Completion:
        nonlocal num_started
        collector = Collector()
        has_started = False
        async for delta in client.generate(ask.prompt, **ask.options):
            collector.add(delta)
            if delta.token_ids and not has_started:
                has_started = True
                num_started += 1
                if num_started == len(asks) and on_running is not None:
                    await asyncio.to_thread(on_running)
        return collector.completion()

    async with AsyncClient(address) as client:
        return await asyncio.gather(*(run(client, ask) for ask in asks))
