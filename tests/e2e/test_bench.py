"""`weft bench serve` and the Locust file on the real service: both front ends, and numbers that fit together."""

import csv
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.live_cluster import Cluster, scrape

from bench.load.arrivals import ClosedLoop, OpenLoop
from bench.load.calls import Lengths
from bench.load.datasets import DatasetKind, DatasetOptions
from bench.load.sender import Protocol, Target
from bench.load.serve import measure
from bench.load.serve_values import ServeOptions
from bench.load.service_ranks import ServiceRanks
from bench.load.statistics import Targets

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
DATASET = DatasetOptions(
    kind=DatasetKind.SHARED_PREFIX,
    prefix_tokens=64,
    inputs=Lengths(low=8, high=24),
    outputs=Lengths(low=4, high=12),
)


def address_of(cluster: Cluster, protocol: Protocol) -> str:
    return cluster.grpc_address if protocol is Protocol.GRPC else f"http://{cluster.http_address}"


def seen_by(cluster: Cluster) -> tuple[Counter[str], Counter[str]]:
    """What router and engines have counted, all engines together, under the names without their beginning."""
    router, engines = Counter[str](), Counter[str]()
    for name, value in scrape(cluster.status().routers[0].metrics_address).items():
        router[name.removeprefix("weft_router_")] += value  # type: ignore[assignment]
    for group in cluster.groups():
        for name, value in scrape(group.metrics_address).items():
            engines[name.removeprefix("weft_")] += value  # type: ignore[assignment]
    return router, engines


@pytest.mark.parametrize("protocol", list(Protocol))
async def test_numbers_of_a_bench_fit_together(cluster: Cluster, protocol: Protocol) -> None:
    before, address = seen_by(cluster), address_of(cluster, protocol)
    outcome = await measure(
        ServeOptions(
            target=Target(protocol=protocol, address=address, timeout_s=120.0),
            loads=(OpenLoop(rate=20.0), ClosedLoop(concurrency=4)),
            dataset=DATASET,
            num_requests=12,
            duration_s=None,
            num_warmup=0,
            vocab_size=None,
            targets=Targets(ttft_s=100.0, tpot_s=100.0),
            seed=0,
        ),
        ranks=ServiceRanks(cluster.service.client, router_port=int(address.rpartition(":")[2])),
    )
    points = outcome.points
    for point in points:
        summary = point.summary
        assert (summary.num_requests, summary.num_answered, summary.num_short, summary.errors) == (12, 12, 0, {})
        assert 12 * (64 + 8) <= summary.input_tokens <= 12 * (64 + 24)
        assert 12 * 4 <= summary.output_tokens <= 12 * 12
        assert summary.ttft_s is not None
        assert summary.e2e_s is not None
        assert summary.tpot_s is not None
        assert 0 < summary.ttft_s.p50 <= summary.e2e_s.p50 <= summary.e2e_s.max <= summary.duration_s
        assert 0 < summary.tpot_s.mean < summary.e2e_s.max
        assert summary.output_rate == pytest.approx(summary.output_tokens / summary.duration_s)
        assert summary.goodput is not None
        assert summary.goodput.output_rate == summary.output_rate
        assert summary.cached_tokens > 0
        ranks = point.utilization
        assert ranks is not None, outcome.ranks_unknown
        assert ranks.num_ranks == sum(len(group.ranks) for group in cluster.groups())
        assert 0 < ranks.busy_share < 1
        assert ranks.peak_memory_bytes is not None
        assert ranks.peak_memory_bytes > 50e6, "torch alone takes more"
        assert ranks.energy_j is None, "there is no GPU"
        assert ranks.mbu is not None, outcome.peak
        assert ranks.flop_utilization is not None
        assert ranks.read_bytes_per_s is not None
        assert ranks.flops_per_s is not None
        # 4 bytes of a weight are 2 operations for each token of a step, which are fewer than 100; keys are read too
        assert 0.02 < ranks.read_bytes_per_s / ranks.flops_per_s < 2.5
        # against what was measured here, however much of this machine others had then
        assert outcome.peak is not None
        assert outcome.peak.read_bytes_per_s is not None
        assert outcome.peak.flops_per_s is not None
        reads, computes = ranks.mbu * outcome.peak.read_bytes_per_s, ranks.flop_utilization * outcome.peak.flops_per_s
        assert reads > 0
        assert reads / computes == pytest.approx(ranks.read_bytes_per_s / ranks.flops_per_s)
    assert points[0].summary.output_tokens == points[1].summary.output_tokens, "every load sends the same requests"
    num_tokens, num_requests = sum(point.summary.output_tokens for point in points), 24
    ttft_s = sum(point.summary.ttft_s.mean * 12 for point in points if point.summary.ttft_s is not None)
    for seen, then in zip(seen_by(cluster), before, strict=True):
        seen.subtract(then)
        assert seen["generation_tokens_total"] == num_tokens
        assert seen["ttft_seconds_count"] == num_requests
        assert seen["itl_seconds_count"] == num_tokens - num_requests
        assert 0 < seen["ttft_seconds_sum"] < ttft_s, "each lies within what the one before it measured"
        ttft_s = seen["ttft_seconds_sum"]


@pytest.mark.parametrize("is_real", [False, True])
def test_locust_drives_both_front_ends(cluster: Cluster, tmp_path: Path, is_real: bool) -> None:
    if find_spec("locust") is None:  # to import it here would make this process cooperative
        pytest.skip("needs locust")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once upon a time"}\n{"messages": [{"role": "user", "content": "Who are you?"}]}\n')
    arguments = [
        *("--users", "2", "--spawn-rate", "2", "--stop-timeout", "20", "--only-summary"),
        *("--router", cluster.grpc_address, "--host", f"http://{cluster.http_address}"),
        *(("--prompts", str(prompts)) if is_real else ("--input-tokens", "8-16")),
        *("--output-tokens", "4", "--csv", str(tmp_path / "locust")),
    ]
    wanted = {
        ("gRPC", "generate"),
        ("gRPC", "first token"),
        ("POST", "headers"),
        ("HTTP", "first token"),
        ("HTTP", "complete"),
        ("HTTP", "each further token"),
    }
    for run_time in ("3s", "15s", "60s"):  # a busy machine may answer nothing in the first
        rows = _drive([*arguments, "--run-time", run_time], tmp_path / "locust_stats.csv")
        if wanted <= rows.keys():
            break
    for kind, name in wanted:
        row = rows[kind, name]
        assert int(row["Request Count"]) > 0
        assert int(row["Failure Count"]) == 0
    for kind, name in (("gRPC", "generate"), ("HTTP", "complete")):
        assert float(rows[kind, name]["Average Content Size"]) == 4, "tokens of an answer"


def _drive(arguments: list[str], stats: Path) -> dict[tuple[str, str], dict[str, str]]:
    """Run locust; its statistics by type and name."""
    command = [sys.executable, "-m", "locust", "-f", str(REPOSITORY / "bench" / "locustfile.py"), "--headless"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "proto")])}
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    with stats.open() as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
