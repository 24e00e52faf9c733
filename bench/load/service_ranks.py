"""The ranks of a running service: found by its controller, read from their metrics pages."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from weft.addresses import split_host_port
from weft.v1 import control_pb2

from bench.load.utilization import RankCounters, RanksUnknownError
from cluster.control_client import ControlClient
from cluster.errors import ClusterError
from cluster.observe import Page, parse_pages
from cluster.status_view import state_name


class RankSource(Protocol):
    """Where the counters of a model's ranks come from."""

    async def look(self, model: str) -> Mapping[str, RankCounters]:
        """Return the counters by rank. Raises RanksUnknownError."""


class ServiceRanks:
    """The ranks that a controller knows. Implements RankSource."""

    def __init__(self, client: ControlClient, *, router_port: int | None) -> None:
        """Args: `router_port` is one that a router of the controller must listen on; None: any will do."""
        self._client = client
        self._router_port = router_port

    async def look(self, model: str) -> Mapping[str, RankCounters]:
        """See RankSource."""
        return await asyncio.to_thread(self._look, model)

    def _look(self, model: str) -> Mapping[str, RankCounters]:
        try:
            status = self._client.status()
            self._check_router(status.routers)
            places = _places(status, model)
            pages = parse_pages(self._client.read_metrics(rank.metrics_address for rank in places.values()))
        except ClusterError as error:
            raise RanksUnknownError(str(error)) from error
        return {name: _read(name, rank, pages.get(rank.metrics_address)) for name, rank in places.items()}

    def _check_router(self, routers: Iterable[control_pb2.RouterStatus]) -> None:
        addresses = [address for each in routers for address in (each.grpc_address, each.http_address) if address]
        ports = {split_host_port(address)[1] for address in addresses}
        if self._router_port is not None and self._router_port not in ports:
            raise RanksUnknownError(
                f"the controller has no router on port {self._router_port} (only {', '.join(addresses)}); "
                "--control says which controller is meant"
            )


def _places(status: control_pb2.GetStatusResponse, model: str) -> dict[str, control_pb2.RankStatus]:
    """Return the ranks of a model's replicas that are ready, by what tells them from others."""
    places = {
        f"{group.replica_id}/{rank.rank} ({rank.pid})": rank
        for each in status.models
        if each.name == model
        for group in each.groups
        if state_name(group) == "ready"
        for rank in group.ranks
    }
    if not places:
        raise RanksUnknownError(f"the controller knows no replica that is ready of model {model!r}")
    return places


def _read(name: str, rank: control_pb2.RankStatus, page: Page | None) -> RankCounters:
    if page is None:
        raise RanksUnknownError(f"the metrics page of rank {name} at {rank.metrics_address} does not answer")
    info = next((dict(labels) for (each, labels) in page.samples if each == "weft_rank_info"), {})
    busy_s = _value(page, "weft_rank_model_busy_seconds_total")
    read_bytes = _value(page, "weft_rank_model_read_bytes_total")
    if busy_s is None or read_bytes is None or not info:
        raise RanksUnknownError(f"rank {name} has no weights yet, or is of a version that does not tell what it did")
    return RankCounters(
        node=rank.node,
        device=info["device"],
        dtype=info["dtype"],
        quantization=info.get("quantization", "none"),
        busy_s=busy_s,
        read_bytes=read_bytes,
        flops=_value(page, "weft_rank_model_flops_total"),
        peak_memory_bytes=_value(page, "weft_rank_peak_memory_bytes"),
        energy_j=_value(page, "weft_rank_energy_joules_total"),
    )


def _value(page: Page, name: str) -> float | None:
    """Return the only sample of this name; None where there is none."""
    return next((value for (each, _), value in page.samples.items() if each == name), None)
