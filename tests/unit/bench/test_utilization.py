"""What `weft bench serve` says of a service's ranks: from their metrics pages, or why nothing is known."""

import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router
from rich.console import Console
from weft.v1 import control_pb2

from bench.load.arrivals import ClosedLoop
from bench.load.calls import Lengths
from bench.load.datasets import DatasetKind, DatasetOptions
from bench.load.flag_groups import RankFlags
from bench.load.flags import find_control, parse_peak
from bench.load.rank_observer import RankObserver, measure_peak_here
from bench.load.report import print_limits, print_point, serve_line
from bench.load.sender import Protocol, Target
from bench.load.serve import measure
from bench.load.serve_values import Outcome, ServeOptions
from bench.load.service_ranks import ServiceRanks
from bench.load.utilization import Peak, RankCounters, RanksUnknownError, compare
from cluster.control_client import ControlClient
from cluster.errors import ControllerError
from cluster.metrics_pages import fetch_pages
from cluster.rank_metrics import RankCollector
from router.metrics_listener import MetricsListener
from workers.stats import RankStats

ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737), which no machine has."""
PEAK = Peak(read_bytes_per_s=20e9, flops_per_s=400e9)
START = RankCounters(
    node="127.0.0.1",
    device="cpu",
    dtype="bfloat16",
    quantization="none",
    busy_s=100.0,
    read_bytes=7e12,
    flops=8e12,
    peak_memory_bytes=1e9,
    energy_j=None,
)


def after(
    start: RankCounters, *, busy_s: float, read_bytes: float, flops: float, energy_j: float | None = None
) -> RankCounters:
    return replace(
        start,
        busy_s=start.busy_s + busy_s,
        read_bytes=start.read_bytes + read_bytes,
        flops=None if start.flops is None else start.flops + flops,
        energy_j=None if start.energy_j is None or energy_j is None else start.energy_j + energy_j,
    )


class FakeRanks:
    """Gives one look after the other; an error is raised."""

    def __init__(self, *looks: Mapping[str, RankCounters] | RanksUnknownError) -> None:
        self.looks = list(looks)

    async def look(self, model: str) -> Mapping[str, RankCounters]:
        assert model == "tiny"
        found = self.looks.pop(0)
        if isinstance(found, RanksUnknownError):
            raise found
        return found


async def never(rank: RankCounters) -> Peak:
    raise AssertionError("there is nothing to measure")


# Arithmetic


def test_ranks_of_a_node_share_its_memory() -> None:
    before = {"0": START, "1": replace(START, peak_memory_bytes=3e9)}
    later = {key: after(rank, busy_s=4.0, read_bytes=20e9, flops=100e9) for key, rank in before.items()}
    seen = compare(before, later, duration_s=5.0, peak=PEAK)
    assert (seen.num_ranks, seen.busy_share) == (2, 0.8)
    assert (seen.read_bytes_per_s, seen.flops_per_s) == (5e9, 25e9)
    assert (seen.mbu, seen.flop_utilization) == (40e9 / (5 * 20e9), 200e9 / (5 * 400e9))
    assert (seen.peak_memory_bytes, seen.energy_j) == (3e9, None)


def test_every_gpu_has_memory_of_its_own() -> None:
    gpu = replace(START, device="cuda", energy_j=50.0)
    before = {"0": gpu, "1": gpu}
    later = {
        "0": after(gpu, busy_s=1.0, read_bytes=30e9, flops=0.0, energy_j=700.0),
        "1": after(gpu, busy_s=2.0, read_bytes=50e9, flops=0.0, energy_j=800.0),
    }
    seen = compare(before, later, duration_s=4.0, peak=PEAK)
    assert seen.mbu == 80e9 / (2 * 4 * 20e9)
    assert seen.read_bytes_per_s == 80e9 / 3
    assert seen.energy_j == 1500.0


def test_nodes_of_cpus_have_memory_of_their_own() -> None:
    before = {"0": START, "1": replace(START, node=ELSEWHERE)}
    later = {key: after(rank, busy_s=1.0, read_bytes=10e9, flops=0.0) for key, rank in before.items()}
    assert compare(before, later, duration_s=1.0, peak=PEAK).mbu == 20e9 / (2 * 20e9)


def test_what_one_rank_does_not_tell_is_not_known() -> None:
    before = {"0": START, "1": replace(START, flops=None, peak_memory_bytes=None)}
    later = {key: after(rank, busy_s=1.0, read_bytes=10e9, flops=1e9) for key, rank in before.items()}
    seen = compare(before, later, duration_s=1.0, peak=replace(PEAK, read_bytes_per_s=None))
    assert (seen.flops_per_s, seen.flop_utilization, seen.peak_memory_bytes, seen.mbu) == (None, None, None, None)
    assert seen.read_bytes_per_s == 10e9


@pytest.mark.parametrize("looks", [(50.0, None), (None, 50.0)])
def test_what_a_rank_tells_at_one_look_only_is_not_known(looks: tuple[float | None, float | None]) -> None:
    """A GPU's driver may fail to tell its energy at any time."""
    before, later = ({"0": replace(START, device="cuda", energy_j=energy_j)} for energy_j in looks)
    assert compare(before, later, duration_s=1.0, peak=PEAK).energy_j is None


def test_idle_ranks_have_no_rate() -> None:
    seen = compare({"0": START}, {"0": START}, duration_s=1.0, peak=PEAK)
    assert (seen.busy_share, seen.read_bytes_per_s, seen.mbu) == (0, None, 0)


def test_other_ranks_than_before_are_no_measurement() -> None:
    with pytest.raises(RanksUnknownError, match=r"ranks came or went during the load: a/0 \(1\), a/0 \(2\)"):
        compare({"a/0 (1)": START}, {"a/0 (2)": START}, duration_s=1.0, peak=PEAK)


# Through a benchmark


async def bench(ranks: FakeRanks | None, *, num_loads: int = 1, peak: Peak = PEAK) -> Outcome:
    async with FakeReplica("a") as replica, running_router(router_config(replica.address)) as router:
        await router.wait_ready(1)
        options = ServeOptions(
            target=Target(protocol=Protocol.GRPC, address=router.addresses.grpc, timeout_s=20.0),
            loads=(ClosedLoop(concurrency=4),) * num_loads,
            dataset=DatasetOptions(
                kind=DatasetKind.RANDOM, inputs=Lengths(low=4, high=4), outputs=Lengths(low=3, high=3)
            ),
            num_requests=5,
            duration_s=None,
            num_warmup=0,
            vocab_size=200,
            targets=None,
            seed=0,
            peak=peak,
        )
        outcome = await measure(options, ranks=ranks, measure_peak=never)
        outcome_line = serve_line(options, outcome)
    assert '"ranks_unknown"' in outcome_line
    return outcome


def told(outcome: Outcome) -> str:
    console = Console(width=300, file=StringIO())
    for point in outcome.points:
        print_point(console, point)
    print_limits(console, outcome)
    return cast(StringIO, console.file).getvalue()


async def test_each_load_has_what_the_ranks_did_in_it() -> None:
    first = {"0": replace(START, energy_j=10.0)}
    second = {"0": after(first["0"], busy_s=1e-3, read_bytes=12e6, flops=45e6, energy_j=30.0)}
    third = {"0": after(second["0"], busy_s=1e-3, read_bytes=3e6, flops=0.0, energy_j=0.0)}
    outcome = await bench(FakeRanks(first, first, second, second, third), num_loads=2)
    one, two = (point.utilization for point in outcome.points)
    assert one is not None
    assert two is not None
    assert one.mbu == pytest.approx(12e6 / (outcome.points[0].summary.duration_s * 20e9))
    assert (one.read_bytes_per_s, two.read_bytes_per_s) == (pytest.approx(12e9), pytest.approx(3e9))
    text = told(outcome)
    assert "at 12.0 GB/s and 45 GFLOP/s; MBU " in text
    assert "peak memory 1.00 GB since the start; 2.00 J per output token" in text
    assert "Shares: MBU of 20.0 GB/s, FLOPs of " in text
    assert "Not known" not in text


async def test_service_without_a_controller_is_measured_all_the_same() -> None:
    outcome = await bench(FakeRanks(RanksUnknownError("no controller answers at x:1")), num_loads=2)
    assert [point.utilization for point in outcome.points] == [None, None]
    assert "Not known: what the ranks did in 2 of 2 loads: no controller answers at x:1\n" in told(outcome)


async def test_ranks_that_change_during_a_load_are_left_out_of_it() -> None:
    first = {"0": START}
    outcome = await bench(FakeRanks(first, first, {"1": START}, {"1": START}, {"1": START}), num_loads=2)
    one, two = (point.utilization for point in outcome.points)
    assert one is None
    assert two is not None
    assert "Not known: what the ranks did in 1 of 2 loads: ranks came or went during the load: 0, 1\n" in told(outcome)


@pytest.mark.parametrize(
    "looks", [({"0": START}, RanksUnknownError("gone")), (RanksUnknownError("gone"), {"0": START})]
)
async def test_ranks_that_are_seen_at_one_end_of_a_load_only_are_not_known(
    looks: tuple[Mapping[str, RankCounters] | RanksUnknownError, ...],
) -> None:
    observer = RankObserver(FakeRanks(*looks), "tiny", peak=PEAK, measure_peak=never)
    await observer.begin()
    assert observer.utilization(1.0) is None, "it goes on"
    await observer.end()
    assert (observer.utilization(1.0), observer.unknown) == (None, "gone")


async def test_without_a_source_nothing_is_known_and_nothing_is_guessed() -> None:
    outcome = await bench(None, peak=Peak())
    assert outcome.points[0].utilization is None
    assert outcome.peak == Peak()


# What the machines can


@pytest.mark.parametrize(
    ("rank", "why"),
    [
        (
            replace(START, device="cuda"),
            "the ranks have the GPUs to themselves; --peak-bandwidth and --peak-flops say it",
        ),
        (replace(START, node=ELSEWHERE), "the ranks are not on this machine; --peak-bandwidth and --peak-flops say it"),
    ],
)
async def test_a_machine_that_cannot_be_measured_is_not_guessed(rank: RankCounters, why: str) -> None:
    given = Peak(flops_per_s=1e12)
    observer = RankObserver(FakeRanks({"0": START, "1": rank}), "tiny", peak=given, measure_peak=never)
    await observer.find_peak()
    assert observer.peak == replace(given, unknown=why)
    assert f"Not known: MBU: {why}" in told(Outcome(peak=observer.peak))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (Peak(flops_per_s=1e12), Peak(read_bytes_per_s=1.0, flops_per_s=1e12)),
        (Peak(read_bytes_per_s=1e9), Peak(read_bytes_per_s=1e9, flops_per_s=2.0)),
    ],
)
async def test_what_was_given_goes_before_what_is_measured(given: Peak, expected: Peak) -> None:
    async def measure_peak(rank: RankCounters) -> Peak:
        assert (rank.dtype, rank.quantization) == ("bfloat16", "none")
        return Peak(read_bytes_per_s=1.0, flops_per_s=2.0)

    observer = RankObserver(FakeRanks({"0": START}), "tiny", peak=given, measure_peak=measure_peak)
    await observer.find_peak()
    assert observer.peak == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("""echo '{"read_bytes_per_s": '${#4}', "flops_per_s": '${#3}'}'""", Peak(read_bytes_per_s=4, flops_per_s=8)),
        (
            "echo Traceback >&2; echo no torch here >&2; exit 1",
            Peak(
                unknown="this machine could not be measured (no torch here); --peak-bandwidth and --peak-flops say it"
            ),
        ),
        (
            "exec sleep 300",
            Peak(unknown="measuring this machine took longer than 0.5 s; --peak-bandwidth and --peak-flops say it"),
        ),
    ],
    ids=["measured", "failed", "late"],
)
async def test_this_machine_is_measured_in_a_process_of_its_own(
    script: str, expected: Peak, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("bench.load.rank_observer._MEASURE_TIMEOUT_S", 30.0 if "sleep" not in script else 0.5)
    assert await measure_peak_here(START) == expected


def test_flags_say_it_in_units_of_people() -> None:
    assert parse_peak(RankFlags(peak_bandwidth=4800.0, peak_flops=989e3)) == Peak(
        read_bytes_per_s=4.8e12, flops_per_s=9.89e14
    )
    assert parse_peak(RankFlags()) == Peak()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.1:50051", ("10.0.0.1:50050", 50051)),
        ("http://weft.example:8000", ("weft.example:50050", 8000)),
        ("https://weft.example", ("weft.example:50050", 443)),
        ("[::1]:50051", ("[::1]:50050", 50051)),
    ],
)
def test_controller_is_looked_for_beside_the_router(address: str, expected: tuple[str, int]) -> None:
    target = Target(protocol=Protocol.HTTP if "://" in address else Protocol.GRPC, address=address)
    assert find_control(RankFlags(), target) == expected
    assert find_control(RankFlags(control="elsewhere:1"), target) == ("elsewhere:1", None)


# From the service


class FakeController:
    """Answers with a status, and with the pages that are there."""

    def __init__(self, status: control_pb2.GetStatusResponse | ControllerError) -> None:
        self._status = status

    def status(self) -> control_pb2.GetStatusResponse:
        if isinstance(self._status, ControllerError):
            raise self._status
        return self._status

    def read_metrics(self, addresses: Iterable[str]) -> Mapping[str, bytes]:
        return asyncio.run(fetch_pages(list(addresses)))


def source(status: control_pb2.GetStatusResponse | ControllerError, *, router_port: int | None = None) -> ServiceRanks:
    return ServiceRanks(cast(ControlClient, FakeController(status)), router_port=router_port)


@contextmanager
def page(stats: RankStats) -> Iterator[str]:
    """A rank's metrics page; its address."""
    listener = MetricsListener("127.0.0.1")
    labels = {"model": "m", "replica": "m-0.1", "rank": "0"}
    listener.add(RankCollector(stats, loaded_ratio=lambda: 1.0, labels=labels))
    try:
        yield listener.address
    finally:
        listener.close()


def group(replica_id: str, metrics_address: str, *, state: Any = control_pb2.GROUP_STATE_READY) -> Any:
    rank = control_pb2.RankStatus(rank=0, node="10.0.0.7", pid=42, metrics_address=metrics_address)
    return control_pb2.GroupStatus(replica_id=replica_id, state=state, ranks=[rank])


def service(*groups: Any) -> control_pb2.GetStatusResponse:
    models = [
        control_pb2.ModelStatus(name="m", groups=groups),
        control_pb2.ModelStatus(name="other", groups=[group("other-0.1", "127.0.0.1:1")]),
    ]
    router = control_pb2.RouterStatus(grpc_address="0.0.0.0:50051", http_address="0.0.0.0:8000")
    starting = control_pb2.RouterStatus()
    return control_pb2.GetStatusResponse(models=models, routers=[router, starting])


def busy_stats() -> RankStats:
    stats = RankStats()
    stats.model_busy_s, stats.model_read_bytes, stats.model_flops = 2.5, 1e9, 3e9
    stats.info = {"dtype": "float32", "device": "cpu", "quantization": "int8"}
    stats.peak_memory_bytes = lambda: 10
    stats.energy_j = lambda: 4.0
    return stats


async def test_ranks_of_the_model_that_serve_are_read_from_their_pages() -> None:
    with page(busy_stats()) as address:
        starting = group("m-1.1", "127.0.0.1:1", state=control_pb2.GROUP_STATE_STARTING)
        ranks = await source(service(group("m-0.1", address), starting), router_port=8000).look("m")
    assert ranks == {
        "m-0.1/0 (42)": RankCounters(
            node="10.0.0.7",
            device="cpu",
            dtype="float32",
            quantization="int8",
            busy_s=2.5,
            read_bytes=1e9,
            flops=3e9,
            peak_memory_bytes=10,
            energy_j=4.0,
        )
    }


async def test_pages_that_do_not_tell_are_named() -> None:
    with pytest.raises(RanksUnknownError, match=r"rank m-0\.1/0 \(42\) at 127\.0\.0\.1:1 does not answer"):
        await source(service(group("m-0.1", "127.0.0.1:1"))).look("m")
    with page(RankStats()) as address, pytest.raises(RanksUnknownError, match="has no weights yet, or is of a version"):
        await source(service(group("m-0.1", address))).look("m")
    with pytest.raises(RanksUnknownError, match="no replica that is ready of model 'n'"):
        await source(service()).look("n")


async def test_controller_of_another_service_is_not_believed() -> None:
    with pytest.raises(RanksUnknownError, match=r"no router on port 50099 \(only 0.0.0.0:50051, 0.0.0.0:8000\)"):
        await source(service(), router_port=50099).look("m")
    with pytest.raises(RanksUnknownError, match="nobody is there"):
        await source(ControllerError("nobody is there")).look("m")


def test_a_rank_that_came_during_the_load_is_no_measurement() -> None:
    with pytest.raises(RanksUnknownError, match="ranks came or went during the load: 1"):
        compare({"0": START}, {"0": START, "1": START}, duration_s=1.0, peak=PEAK)
