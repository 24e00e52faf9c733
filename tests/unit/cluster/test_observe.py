"""Rates and percentiles of a window, from metrics pages and statuses that tests write."""

import io
from collections.abc import Mapping

import pytest
from rich.console import Console
from weft.v1 import control_pb2

from cluster.observe import Observation, Page, Window, parse_pages, percentile, take_snapshot
from cluster.top import render

ROUTER, REPLICA = "router:1", "replica:1"


def status() -> control_pb2.GetStatusResponse:
    group = control_pb2.GroupStatus(
        group_id="m-0",
        replica_id="m-0.1",
        state=control_pb2.GROUP_STATE_READY,
        metrics_address=REPLICA,
        revision=1,
        ranks=[control_pb2.RankStatus(rank=0, node="10.0.0.1", pid=42, alive=True)],
    )
    waiting = control_pb2.GroupStatus(
        group_id="m-1", state=control_pb2.GROUP_STATE_PENDING, detail="needs 2 GPUs on one node", revision=1
    )
    return control_pb2.GetStatusResponse(
        models=[
            control_pb2.ModelStatus(name="m", wanted_replicas=2, ready_replicas=1, revision=1, groups=[group, waiting])
        ],
        routers=[control_pb2.RouterStatus(router_id="router-0", alive=True, metrics_address=ROUTER)],
        nodes=[control_pb2.NodeStatus(address="10.0.0.1", cpus=8, free_cpus=7, gpus=1, drained=True)],
        uptime_s=61,
    )


def look(time_s: float, router: str = "", replica: str = "") -> Observation:
    pages = {ROUTER: Page.parse(router), REPLICA: Page.parse(replica)}
    return Observation(time_s=time_s, status=status(), pages=pages)


def counters(prefix: str, **values: float) -> str:
    return "".join(f'{prefix}{name}_total{{model="m"}} {value}\n' for name, value in values.items())


def histogram(name: str, buckets: Mapping[str, float]) -> str:
    lines = [f'{name}_bucket{{model="m",le="{bound}"}} {value}\n' for bound, value in buckets.items()]
    return f"# TYPE {name} histogram\n" + "".join(lines)


def test_rates_are_what_grew_between_two_looks() -> None:
    before = counters("weft_router_", generation_tokens=100, prompt_tokens=50, cached_tokens=10, requests=1)
    after = counters("weft_router_", generation_tokens=300, prompt_tokens=150, cached_tokens=60, requests=5)
    (model,) = take_snapshot(look(10, before), look(14, after)).models
    assert (model.output_tokens_per_s, model.prompt_tokens_per_s, model.requests_per_s) == (50, 25, 1)
    assert model.hit_rate == 0.5


def test_counters_that_began_again_count_from_zero() -> None:
    before = counters("weft_router_", generation_tokens=1000)
    after = counters("weft_router_", generation_tokens=40)
    (model,) = take_snapshot(look(0, before), look(2, after)).models
    assert model.output_tokens_per_s == 20


def test_percentiles_are_of_the_window_only() -> None:
    name = "weft_router_ttft_seconds"
    before = histogram(name, {"0.1": 1000, "0.2": 1000, "+Inf": 1000})
    after = histogram(name, {"0.1": 1000, "0.2": 1100, "+Inf": 1100})
    (model,) = take_snapshot(look(0, before), look(2, after)).models
    assert model.ttft_s.p50 == pytest.approx(0.15)
    assert model.ttft_s.p90 == pytest.approx(0.19)


@pytest.mark.parametrize(
    ("buckets", "fraction", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0, float("inf"): 0}, 0.5, None),
        ({1.0: 10, 2.0: 20, float("inf"): 20}, 0.5, 1.0),
        ({1.0: 10, 2.0: 20, float("inf"): 20}, 0.75, 1.5),
        ({1.0: 0, 2.0: 20, float("inf"): 20}, 0.5, 1.5),
        ({1.0: 0, 2.0: 1, float("inf"): 10}, 0.99, 2.0),  # beyond the last bound nothing is known
    ],
)
def test_percentile_is_interpolated_within_its_bucket(
    buckets: dict[float, float], fraction: float, expected: float | None
) -> None:
    assert percentile(buckets, fraction) == (None if expected is None else pytest.approx(expected))


def test_replica_shows_its_queue_and_cache() -> None:
    gauges = 'weft_requests_running{model="m"} 3\nweft_requests_waiting{model="m"} 2\nweft_kv_usage_ratio 0.25\n'
    before = gauges + counters("weft_", generation_tokens=0, prompt_tokens=0, cached_tokens=0, preemptions=0)
    after = gauges + counters("weft_", generation_tokens=20, prompt_tokens=8, cached_tokens=2, preemptions=4)
    ready, pending = take_snapshot(look(0, "", before), look(2, "", after)).groups
    assert (ready.running, ready.waiting, ready.kv_usage) == (3, 2, 0.25)
    assert (ready.output_tokens_per_s, ready.hit_rate, ready.preemptions_per_s) == (10, 0.25, 2)
    assert (pending.running, pending.state, pending.detail) == (None, "pending", "needs 2 GPUs on one node")


def test_page_that_does_not_answer_leaves_gaps_and_no_lies() -> None:
    first = look(0, counters("weft_router_", generation_tokens=100))
    last = Observation(time_s=2, status=status(), pages={})
    snapshot = take_snapshot(first, last)
    assert snapshot.routers[0].in_flight is None
    assert snapshot.groups[0].running is None
    model = snapshot.models[0]
    assert (model.requests_per_s, model.output_tokens_per_s, model.prompt_tokens_per_s) == (None, None, None)


def test_page_that_did_not_answer_at_first_counts_from_where_it_was_first_seen() -> None:
    window = Window(30.0)
    window.add(Observation(time_s=0, status=status(), pages={}))
    rates = [
        window.add(look(time_s, counters("weft_router_", generation_tokens=tokens))).models[0].output_tokens_per_s
        for time_s, tokens in ((2, 1_000_000), (4, 1_000_100), (8, 1_000_300))
    ]
    assert rates == [0, 50, 50]


def test_page_that_is_of_somebody_else_is_left_out() -> None:
    pages = parse_pages({ROUTER: b"weft_requests_running 3\n", REPLICA: b"<html>", "other:1": b"\xff"})
    assert {address: page.total("weft_requests_running") for address, page in pages.items()} == {ROUTER: 3}


def test_window_keeps_its_length() -> None:
    window = Window(10.0)
    spans = [window.add(look(time_s)).window_s for time_s in (0, 4, 8, 12, 16, 40)]
    assert spans == [0, 4, 8, 12, 12, 24]  # the last look before the window, so that it is covered


def test_router_that_finishes_its_requests_is_shown_to_drain() -> None:
    seen = look(2)
    seen.status.routers[0].draining = True
    snapshot = take_snapshot(look(0), seen)
    out = io.StringIO()
    Console(file=out, width=80).print(render(snapshot, 80))
    assert ["router-0", "draining"] in [line.split()[:2] for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [80, 160])
def test_tables_show_models_groups_routers_and_nodes_within_the_width(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(render(take_snapshot(look(0), look(2)), width))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "m scales from" not in words
    for word in (
        "1 min",
        "m-0.1",
        "1/2",
        "pending",
        "needs 2 GPUs on one node",
        "router-0",
        "drained",
        "1/8",
        "p50/p90/p99",
    ):
        assert word in words
    assert ("10.0.0.1:42" in words) == (width == 160)


@pytest.mark.parametrize("name", ["weft-tiny", "meta-llama/Llama-3.1-8B-Instruct", "tiny[/v2][fp8]"])
def test_every_number_of_a_model_is_seen_at_80_columns(name: str) -> None:
    latencies = {"weft_router_ttft_seconds": (2.0, 4.0, 8.0), "weft_router_tpot_seconds": (0.01, 1.0, 40.0)}
    pages = [
        "".join(
            histogram(metric, {f"{bound}": number * share for bound, share in zip(bounds, (50, 90, 100), strict=True)})
            + f'{metric}_bucket{{model="m",le="+Inf"}} {number * 100}\n'
            for metric, bounds in latencies.items()
        ).replace('"m"', f'"{name}"')
        for number in (0, 100)
    ]
    looks = [look(2.0 * number, page) for number, page in enumerate(pages)]
    for each in looks:
        each.status.models[0].name = name
    out = io.StringIO()
    Console(file=out, width=80).print(render(take_snapshot(*looks), 80))
    assert "2000/4000/7600" in out.getvalue()
    assert "10/1000/36100" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_model_that_scales_by_itself_tells_its_bounds_and_why() -> None:
    seen = look(2)
    seen.status.models[0].autoscaling.max_replicas = 4
    seen.status.models[0].autoscaling.last_change = "1 -> 2: 40.0 requests at 32 a replica"
    snapshot = take_snapshot(look(0), seen)
    assert (snapshot.models[0].scales, snapshot.models[0].last_scaling[:6]) == ("0 to 4", "1 -> 2")
    out = io.StringIO()
    Console(file=out, width=80).print(render(snapshot, 80))
    assert "  m scales from 0 to 4: 1 -> 2: 40.0 requests at 32 a replica\n" in out.getvalue()
