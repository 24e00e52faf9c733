"""What a rank tells Prometheus about its steps and collectives."""

import urllib.request
from contextlib import ExitStack, closing

import pytest
from helpers.ipv6 import needs_ipv6
from helpers.ports import unlisted_port
from prometheus_client.parser import text_string_to_metric_families

from cluster import rank_metrics
from cluster.rank_metrics import RankCollector, listen_for_metrics
from parallel.mesh import Axis
from router.metrics_listener import MetricsListener
from workers.stats import RankStats

LABELS = {"model": "m", "replica": "m-0.1", "rank": "1"}


def scrape(listener: MetricsListener) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(f"http://{listener.address}/metrics", timeout=5) as response:
        text = response.read().decode()
    return {
        (sample.name, tuple(value for name, value in sample.labels.items() if name not in LABELS)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if LABELS.items() <= sample.labels.items()
    }


@needs_ipv6
def test_page_is_served_on_an_ipv6_address() -> None:
    listener = MetricsListener("::1")
    try:
        assert listener.address.startswith("[::1]:")
        listener.add(RankCollector(RankStats(), loaded_ratio=lambda: 0.25, labels=LABELS))
        assert scrape(listener)["weft_rank_loaded_ratio", ()] == 0.25
    finally:
        listener.close()


def test_steps_and_collectives_are_told_as_they_are_when_asked() -> None:
    stats, loaded = RankStats(), [0.25]
    listener = MetricsListener("127.0.0.1")
    try:
        listener.add(RankCollector(stats, loaded_ratio=lambda: loaded[0], labels=LABELS))
        assert scrape(listener) == {
            ("weft_rank_loaded_ratio", ()): 0.25,
            ("weft_rank_steps_total", ()): 0,
            ("weft_rank_busy_seconds_total", ()): 0,
            ("weft_rank_model_busy_seconds_total", ()): 0,
            ("weft_rank_model_idle_seconds_total", ()): 0,
            ("weft_rank_model_read_bytes_total", ()): 0,
            ("weft_rank_model_flops_total", ()): 0,
            ("weft_rank_recorded_steps", ()): 0,
            ("weft_rank_recording_seconds", ()): 0,
        }
        loaded[0] = 1.0
        axis = Axis(size=2)
        stats.axes = {"tensor": axis}
        axis.counts["all_reduce"] += 4
        axis.counts["gather"] += 1
        axis.wait_s += 0.5
        stats.add_step(2.0)
        stats.add_step(1.0)
        stats.model_busy_s += 2.5
        stats.model_idle_s += 0.25
        stats.model_read_bytes += 1e9
        stats.model_flops += 3e9
        stats.peak_memory_bytes = lambda: 5_000_000_000
        stats.energy_j = lambda: None
        stats.info = {"kernels": "cuda", "attention_backend": "flashinfer"}
        stats.num_recorded_steps = 11
        stats.recording_s = 1.5
        assert scrape(listener) == {
            ("weft_rank_loaded_ratio", ()): 1,
            ("weft_rank_steps_total", ()): 2,
            ("weft_rank_busy_seconds_total", ()): 3,
            ("weft_rank_model_busy_seconds_total", ()): 2.5,
            ("weft_rank_model_idle_seconds_total", ()): 0.25,
            ("weft_rank_model_read_bytes_total", ()): 1e9,
            ("weft_rank_model_flops_total", ()): 3e9,
            ("weft_rank_peak_memory_bytes", ()): 5e9,
            ("weft_rank_info", ("flashinfer", "cuda")): 1,
            ("weft_rank_recorded_steps", ()): 11,
            ("weft_rank_recording_seconds", ()): 1.5,
            ("weft_rank_collectives_total", ("tensor", "all_reduce")): 4,
            ("weft_rank_collectives_total", ("tensor", "gather")): 1,
            ("weft_rank_collective_seconds_total", ("tensor",)): 0.5,
        }
        stats.energy_j = lambda: 2.5
        assert scrape(listener)["weft_rank_energy_joules_total", ()] == 2.5
    finally:
        listener.close()


def test_ranks_of_a_node_have_the_first_free_ones_of_their_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [unlisted_port() for _ in range(3)]
    monkeypatch.setattr(rank_metrics, "RANK_METRICS_PORTS", ports)
    with ExitStack() as ranks:
        first, second, _ = (ranks.enter_context(closing(listen_for_metrics("127.0.0.1"))) for _ in ports)
        assert (first.address, second.address) == (f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}")
        more = ranks.enter_context(closing(listen_for_metrics("127.0.0.1")))
        assert int(more.address.rpartition(":")[2]) not in ports, "a rank without a port of these serves all the same"
        first.close()
        assert ranks.enter_context(closing(listen_for_metrics("127.0.0.1"))).address == first.address
