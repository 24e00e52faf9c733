"""Dashboards, rules and traces of a live cluster: every query on a Prometheus that scrapes it under load.

Named to come before test_cluster.py, at whose end the cluster is stopped.
"""

import asyncio
import math
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import yaml
from helpers.live_cluster import Ask, Cluster, ask_together, wait_until
from helpers.otlp import Collector
from helpers.prometheus import Prometheus, running_prometheus
from helpers.promql import PROMETHEUS, Query, panel_queries, variable_queries

from router.client import Client
from router.config import TracingConfig
from router.spans import make_tracer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SCRAPE_S = 1.0
RATE_INTERVAL = "8s"
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def prometheus(session_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A server with the committed configuration, pointed at this cluster and quicker."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    every = f"{int(SCRAPE_S * 1000)}ms"
    config["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    controller = session_cluster.status().metrics_address
    seen = yaml.safe_dump(config["scrape_configs"])
    config["scrape_configs"] = yaml.safe_load(seen.replace("127.0.0.1:9465", controller).replace("15s", every))
    for job in config["scrape_configs"]:
        job["relabel_configs"] = [{"target_label": "installation", "replacement": "here"}]
    for name in config["rule_files"]:
        shutil.copy(PROMETHEUS / name, folder)
    session_cluster.wait_whole()
    with running_prometheus(config, folder) as server, load_on(session_cluster):
        yield server


@contextmanager
def load_on(cluster: Cluster) -> Iterator[None]:
    """Keep several tenants' requests, with prompts that repeat, on the cluster."""
    stop = threading.Event()
    thread = threading.Thread(target=_load, args=(cluster.grpc_address, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _load(address: str, stop: threading.Event) -> None:
    story = "Once upon a time there was a little dog that ran to the big tree and saw a red bird. "
    asks = [
        Ask(
            prompt=story + "And then " * index,
            options={"max_tokens": 12, "seed": index, "ignore_eos": True, "cache_salt": salt, "timeout_s": 60.0},
        )
        for index, salt in enumerate(("", "red", "blue", "red"))
    ]
    while not stop.is_set():
        asyncio.run(ask_together(address, asks))


def _fault(prometheus: Prometheus, query: Query) -> str | None:
    """Return what is wrong with the answer to a query."""
    series: list[Any] = prometheus.query(query.substituted(RATE_INTERVAL))
    if not any(math.isfinite(float(each["value"][1])) for each in series):
        return f"no data: {series}"
    missing = query.legend_labels - set.intersection(*(set(each["metric"]) for each in series))
    return f"the legend shows labels that the series lack: {missing}" if missing else None


def test_every_panel_shows_data(prometheus: Prometheus) -> None:
    waiting, faults = panel_queries(), {}
    assert len(waiting) > 80
    deadline_s = time.monotonic() + PATIENCE_S
    while waiting and time.monotonic() < deadline_s:
        faults = {query.place: fault for query in waiting if (fault := _fault(prometheus, query))}
        waiting = [query for query in waiting if query.place in faults]
        time.sleep(SCRAPE_S)
    assert not faults, "\n".join(f"{place}: {fault}" for place, fault in faults.items())


def test_every_variable_has_values(prometheus: Prometheus) -> None:
    for variable in variable_queries():
        selector = Query(place=variable.place, expression=variable.selector).substituted(RATE_INTERVAL)
        wait_until(partial(prometheus.label_values, variable.label, selector), variable.place, timeout_s=PATIENCE_S)


def test_every_process_of_the_cluster_is_scraped(prometheus: Prometheus, session_cluster: Cluster) -> None:
    status = session_cluster.status()
    wanted = {
        status.metrics_address: "weft-controller",
        **{router.metrics_address: "weft-router" for router in status.routers},
        **{rank.metrics_address: "weft-rank" for group in session_cluster.groups() for rank in group.ranks},
    }
    assert len(wanted) == 1 + 1 + 2 * session_cluster.num_replicas

    def all_up() -> bool:  # one scrape may come too late on a busy machine, and the first ones come one by one
        return {each["metric"]["instance"]: each["metric"]["job"] for each in prometheus.query("up == 1")} == wanted

    wait_until(all_up, "every page scraped", timeout_s=PATIENCE_S)
    assert len(prometheus.query("up")) == len(wanted)


def test_rules_work_on_what_is_scraped_and_nothing_is_alarming(prometheus: Prometheus) -> None:
    wait_until(lambda: all(rule["health"] != "unknown" for rule in prometheus.rules()), "rules", timeout_s=PATIENCE_S)
    rules = prometheus.rules()
    assert len(rules) > 15
    assert {rule["name"]: rule.get("lastError", "") for rule in rules if rule["health"] != "ok"} == {}
    for rule in rules:
        if rule["type"] == "recording":
            wait_until(partial(prometheus.query, rule["name"]), rule["name"], timeout_s=PATIENCE_S)
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_index_of_the_router_is_what_replicas_hold(prometheus: Prometheus) -> None:
    def drift() -> set[float]:
        series = prometheus.query("min_over_time(weft:index_drift:ratio[10s])")
        return {float(each["value"][1]) for each in series}

    wait_until(lambda: drift() == {0.0}, "no drift", timeout_s=PATIENCE_S)


def test_traced_request_leaves_the_spans_of_router_and_replica(session_cluster: Cluster, collector: Collector) -> None:
    session_cluster.wait_whole()
    tracer = make_tracer(TracingConfig(endpoint=collector.endpoint), service="test", instance="test")
    with Client(session_cluster.grpc_address, tracer=tracer) as client:
        completion = client.complete("Once upon a time", max_tokens=8, ignore_eos=True)
    tracer.close()
    parents = {
        "weft.request": "weft.client",
        "weft.replica_call": "weft.request",
        "weft.replica": "weft.replica_call",
        "weft.queue": "weft.replica",
        "weft.prefill": "weft.replica",
        "weft.decode": "weft.replica",
    }
    wait_until(lambda: parents.keys() <= {span.name for span in collector.spans}, "spans exported")
    for child, parent in parents.items():
        assert collector.named(child).span.parent_span_id == collector.named(parent).span.span_id, child
    assert len({span.span.trace_id for span in collector.spans}) == 1, "only what a client asked for is traced"
    (replica_id,) = completion.replica_ids
    assert (collector.named("weft.decode").service, collector.named("weft.decode").instance) == (
        "weft-replica",
        replica_id,
    )
    assert collector.named("weft.request").service == "weft-router"
