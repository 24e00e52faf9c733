"""The dashboards and rules: fresh, valid, and asking only for metrics and labels that exist.

That every query returns data on a live cluster, tests/e2e/test_boards_and_traces.py proves.
"""

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers.exposition import Labels, labels_of, metrics_pages
from helpers.prometheus import find_tool
from helpers.promql import (
    DASHBOARDS,
    Query,
    load_dashboards,
    panel_queries,
    rule_queries,
    rules,
    variable_queries,
)
from prometheus_client.parser import text_string_to_metric_families

_TARGET_LABELS = {"instance", "job", "router", "node", "installation"}
"""Labels that Prometheus adds to what it scrapes: router and node come from the controller's list, installation from
the chart's ServiceMonitor and ScrapeConfig."""


def test_dashboards_are_those_that_the_script_builds(tmp_path: Path) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs grafana-foundation-sdk, which `make test` installs")
    subprocess.run([sys.executable, DASHBOARDS / "build.py", tmp_path], check=True, timeout=240)
    fresh = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in DASHBOARDS.glob("*.json")}
    assert committed == fresh, "run `.venv/bin/python deploy/grafana/build.py` and commit the result"


@pytest.mark.parametrize("name", sorted(load_dashboards()))
def test_dashboards_are_what_grafana_reads(shared: Path, name: str) -> None:
    path = shared / "deploy-schemas/grafana-dashboard.jsonschema.json"
    if not path.is_file():
        pytest.skip("needs Grafana's schema in ../shared/deploy-schemas")
    jsonschema.validate(load_dashboards()[name], json.loads(path.read_text()))


@pytest.mark.parametrize("dashboard", load_dashboards().values(), ids=lambda dashboard: str(dashboard["uid"]))
def test_panels_have_a_place_of_their_own_and_say_what_they_show(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["targets"], panel["title"]


def test_dashboards_have_uids_of_their_own() -> None:
    uids = [dashboard["uid"] for dashboard in load_dashboards().values()]
    assert len(set(uids)) == len(uids) >= 6


def test_queries_ask_for_metrics_and_labels_that_exist(exposed: Labels) -> None:
    faults = [fault for query in (*panel_queries(), *rule_queries()) for fault in _faults(query, exposed)]
    assert not faults, "\n".join(faults)


def test_queries_ask_for_label_values_that_exist(pages: list[str]) -> None:
    told = {
        (sample.name, label, value)
        for page in pages
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        for label, value in sample.labels.items()
    }
    asked = {each for query in (*panel_queries(), *rule_queries()) for each in query.values}
    assert ("weft_router_slo_requests_total", "result", "ttft_missed") in asked
    assert asked - told == set()


def test_only_what_grows_has_a_rate() -> None:
    rated = {name for query in (*panel_queries(), *rule_queries()) for name in query.rated}
    assert len(rated) > 30
    assert {name for name in rated if not re.search("_(total|bucket|sum|count)$", name)} == set()


def test_panels_show_the_models_that_were_chosen(exposed: Labels) -> None:
    assert [
        f"{query.place}: {name}"
        for query in panel_queries()
        for name, selected in query.metrics.items()
        if "model" in exposed[name] - selected
    ] == []


def test_every_query_is_of_the_installations_that_were_chosen() -> None:
    for dashboard in load_dashboards().values():
        named = [variable["name"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
        assert named[0] == "installation", dashboard["uid"]
    variables = [
        Query(place=variable.place, expression=variable.selector)
        for variable in variable_queries()
        if variable.label != "installation"
    ]
    assert [
        f"{query.place}: {name}"
        for query in (*panel_queries(), *variables)
        for name in query.metrics
        if f'{name}{{installation=~"$installation"' not in query.expression
    ] == []


def test_lines_of_replicas_are_of_one_installation() -> None:
    grouped = [query for query in panel_queries() if "replica" in query.grouping_labels]
    assert grouped
    assert [query.place for query in grouped if "installation" not in query.grouping_labels] == []


def test_variables_ask_for_metrics_and_labels_that_exist(exposed: Labels) -> None:
    for variable in variable_queries():
        (name,) = Query(place=variable.place, expression=variable.selector).metrics
        assert not list(_faults(Query(place=variable.place, expression=variable.selector), exposed))
        assert variable.label in exposed[name] | _TARGET_LABELS, variable.place


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(weft_router_retrys_total[5m])", "unknown metric weft_router_retrys_total"),
        ('weft_kv_blocks{modell="m"}', "weft_kv_blocks has no label modell"),
        ("sum by (tenant) (weft_kv_blocks)", "weft_kv_blocks has no label tenant"),
        ("weft:no_rule:ratio > 1", "unknown metric weft:no_rule:ratio"),
    ],
)
def test_a_wrong_name_is_found(exposed: Labels, expression: str, fault: str) -> None:
    assert list(_faults(Query(place="here", expression=expression), exposed)) == [f"here: {fault}"]


def test_every_metric_is_on_a_dashboard_or_in_a_rule(exposed: Labels) -> None:
    asked = {name for query in (*panel_queries(), *rule_queries()) for name in query.metrics}
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in exposed if name.startswith("weft_")}
    unseen = {name for name in families if not any(name in asked_name for asked_name in asked)}
    assert unseen == {"weft_kv_block_size_tokens"}


@pytest.fixture(scope="module")
async def pages() -> list[str]:
    """The metrics pages of the real collectors."""
    return await metrics_pages()


@pytest.fixture(scope="module")
def exposed(pages: list[str]) -> Labels:
    """Labels of every metric of the real collectors, and of what the recording rules make of them."""
    labels: Labels = {}
    for page in pages:
        labels |= labels_of(page)
    for rule in rules("recording.yml"):
        query = Query(place=rule["record"], expression=rule["expr"])
        first = next(iter(query.metrics))
        is_sum = query.expression.startswith("sum by")
        labels[rule["record"]] = query.grouping_labels if is_sum else labels[first]
    return labels


def test_metrics_have_names_and_units_as_prometheus_wants_them(pages: list[str]) -> None:
    promtool = find_tool("promtool")
    for page in pages:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=page, capture_output=True, text=True, timeout=240, check=False
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def _faults(query: Query, exposed: Labels) -> list[str]:
    faults = []
    for name, selected in query.metrics.items():
        if name not in exposed:
            faults.append(f"{query.place}: unknown metric {name}")
            continue
        wanted = selected | query.grouping_labels - {"le"}
        missing = wanted - exposed[name] - _TARGET_LABELS
        faults += [f"{query.place}: {name} has no label {label}" for label in sorted(missing)]
    return faults
