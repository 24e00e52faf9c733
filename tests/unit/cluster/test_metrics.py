import socket
import urllib.request
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families
from weft.addresses import split_host_port
from weft.buckets import BUCKETS_S

from cluster.metrics import EngineCollector
from router.metrics_listener import MetricsListener
from workers.engine import EngineLoad
from workers.request import FinishReason
from workers.stats import EngineStats

LABELS = {"model": "m", "replica": "m-0.1"}


def scrape(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
        text = response.read().decode()
    extra = LABELS.items()
    return {
        (sample.name, tuple(item for item in sample.labels.items() if item not in extra)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if LABELS.items() <= sample.labels.items()
    }


@pytest.fixture
def stats() -> EngineStats:
    return EngineStats()


@pytest.fixture
def collector(stats: EngineStats) -> EngineCollector:
    load = EngineLoad(
        num_running=3,
        num_waiting=2,
        num_free_blocks=25,
        num_blocks=100,
        num_pending_tokens=40,
        num_host_blocks=500,
        num_used_host_blocks=30,
    )
    return EngineCollector(stats, load=lambda: load, num_cached_blocks=lambda: 60, block_size=16, labels=LABELS)


def test_everything_an_inference_gateway_expects_is_there(stats: EngineStats, collector: EngineCollector) -> None:
    stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_generation_tokens = 100, 64, 7
    stats.num_preemptions = 2
    stats.num_host_tokens, stats.num_saved_blocks, stats.num_loaded_blocks = 16, 9, 1
    stats.num_finished[FinishReason.STOP] = 5
    listener = MetricsListener("127.0.0.1")
    listener.add(collector)
    try:
        seen = scrape(listener.address)
    finally:
        listener.close()
    assert {name: seen[name, ()] for name in _PLAIN} == _PLAIN
    finished = {labels: value for (name, labels), value in seen.items() if name == "weft_requests_finished_total"}
    cached = {labels: value for (name, labels), value in seen.items() if name == "weft_cached_tokens_total"}
    assert cached == {(("source", "device"),): 48, (("source", "host"),): 16}
    assert finished == {(("reason", "stop"),): 5, (("reason", "length"),): 0, (("reason", "abort"),): 0}


_PLAIN = {
    "weft_requests_running": 3,
    "weft_requests_waiting": 2,
    "weft_kv_usage_ratio": 0.75,
    "weft_kv_blocks": 100,
    "weft_kv_cached_blocks": 60,
    "weft_kv_block_size_tokens": 16,
    "weft_prompt_tokens_total": 100,
    "weft_kv_host_blocks": 500,
    "weft_kv_host_used_blocks": 30,
    "weft_kv_saved_blocks_total": 9,
    "weft_kv_loaded_blocks_total": 1,
    "weft_generation_tokens_total": 7,
    "weft_preemptions_total": 2,
}


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost:"])
def test_who_does_not_ask_to_the_end_is_cut_off(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("router.metrics_listener._Handler.timeout", 0.05)
    listener = MetricsListener("127.0.0.1")
    try:
        with socket.create_connection(split_host_port(listener.address), timeout=5) as stopped:
            stopped.sendall(sent)
            assert stopped.recv(1) == b""
    finally:
        listener.close()
    assert capsys.readouterr().err == ""


def test_who_asks_only_for_the_head_gets_no_body() -> None:
    listener = MetricsListener("127.0.0.1")
    try:
        with socket.create_connection(split_host_port(listener.address), timeout=5) as connection:
            connection.sendall(b"HEAD /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
            with connection.makefile("rb") as answer:
                head, _, body = answer.read().partition(b"\r\n\r\n")
    finally:
        listener.close()
    assert head.startswith(b"HTTP/1.0 200 OK\r\n")
    assert b"content-length" not in head.lower()
    assert body == b""


def test_latencies_go_into_cumulative_buckets_once(stats: EngineStats, collector: EngineCollector) -> None:
    for value_s in (0.0005, 0.001, 0.004, 1000.0):
        stats.ttft_s.add(value_s)
    listener = MetricsListener("127.0.0.1")
    listener.add(collector)
    try:
        scrape(listener.address)
        seen = scrape(listener.address)  # a second reader sees the same
    finally:
        listener.close()
    bucket = {labels[0][1]: value for (name, labels), value in seen.items() if name == "weft_ttft_seconds_bucket"}
    assert (bucket["0.001"], bucket["0.003"], bucket["0.005"], bucket["100.0"], bucket["+Inf"]) == (2, 2, 3, 3, 4)
    assert seen["weft_ttft_seconds_count", ()] == 4
    assert seen["weft_ttft_seconds_sum", ()] == pytest.approx(1000.0055)


def test_observations_are_kept_beyond_what_the_engine_holds(stats: EngineStats, collector: EngineCollector) -> None:
    for _ in range(3):
        for _ in range(50_000):
            stats.itl_s.add(0.01)
        collector.take_observations()
    family = next(family for family in collector.collect() if family.name == "weft_itl_seconds")
    assert next(sample.value for sample in family.samples if sample.name.endswith("_count")) == 150_000


def test_buckets_resolve_one_millisecond_to_hundred_seconds() -> None:
    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (0.001, 100.0)
    assert all(1 < after / before <= 2 for before, after in pairwise(BUCKETS_S))


def test_batch_sizes_go_into_powers_of_two(stats: EngineStats, collector: EngineCollector) -> None:
    for num_sequences, num_tokens in ((1, 700), (3, 3), (4, 4)):
        stats.step_sequences.add(num_sequences)
        stats.step_tokens.add(num_tokens)
    families = {family.name: family for family in collector.collect()}
    buckets = {
        name: {s.labels["le"]: s.value for s in families[name].samples if s.name.endswith("_bucket")}
        for name in ("weft_step_sequences", "weft_step_tokens")
    }
    assert [buckets["weft_step_sequences"][le] for le in ("1.0", "2.0", "4.0", "+Inf")] == [1, 1, 3, 3]
    assert [buckets["weft_step_tokens"][le] for le in ("4.0", "512.0", "1024.0")] == [2, 2, 3]
