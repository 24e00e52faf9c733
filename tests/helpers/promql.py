"""What dashboards, rules and alerts ask Prometheus, and which metrics and labels that takes."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
DASHBOARDS = REPOSITORY / "deploy/grafana"
PROMETHEUS = REPOSITORY / "deploy/prometheus"

_METRIC = re.compile(r"(?<![\w:$])(weft[:_][\w:]+)\s*(?:\{([^}]*)\})?")
_SELECTOR_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"$]*)"')
_RATED = re.compile(r"\b(?:rate|increase)\(\s*(weft_\w+)")
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_LEGEND_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")
_LABEL_VALUES = re.compile(r"label_values\((.+),\s*(\w+)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One expression and where it stands."""

    place: str
    expression: str
    legend: str = ""

    @property
    def metrics(self) -> dict[str, set[str]]:
        """The metrics, each with the labels that select among its series."""
        found: dict[str, set[str]] = {}
        for name, selector in _METRIC.findall(self.expression):
            found.setdefault(name, set()).update(_SELECTOR_LABEL.findall(selector))
        return found

    @property
    def values(self) -> set[tuple[str, str, str]]:
        """Metric, label and value wherever a value is spelt out; of alternatives each."""
        return {
            (name, label, value)
            for name, selector in _METRIC.findall(self.expression)
            for label, values in _MATCHER.findall(selector)
            for value in values.split("|")
        }

    @property
    def rated(self) -> set[str]:
        """The metrics whose growth is asked for."""
        return set(_RATED.findall(self.expression))

    @property
    def grouping_labels(self) -> set[str]:
        """The labels by which series are put together."""
        return {label.strip() for part in _GROUPING.findall(self.expression) for label in part.split(",") if part}

    @property
    def legend_labels(self) -> set[str]:
        """The labels that the legend shows."""
        return set(_LEGEND_LABEL.findall(self.legend))

    def substituted(self, rate_interval: str) -> str:
        """Return what Grafana sends when all variables are at All."""
        expression = self.expression.replace("$__rate_interval", rate_interval)
        return re.sub(r"\$\{?\w+\}?", ".*", expression)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableQuery:
    """Where a dashboard's variable gets its values."""

    place: str
    selector: str
    label: str


def load_dashboards() -> dict[str, Any]:
    """Return the committed dashboards by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panel_queries() -> list[Query]:
    """Return every query of every panel."""
    return [
        Query(
            place=f"{name}: {panel['title']}: {target['legendFormat']}",
            expression=target["expr"],
            legend=target["legendFormat"],
        )
        for name, dashboard in load_dashboards().items()
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def variable_queries() -> list[VariableQuery]:
    """Return the query of every variable that has one."""
    return list(_variable_queries())


def _variable_queries() -> Iterator[VariableQuery]:
    for name, dashboard in load_dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                match = _LABEL_VALUES.match(variable["query"])
                assert match, f"{name}: {variable['name']} is no label_values(...)"
                yield VariableQuery(place=f"{name}: ${variable['name']}", selector=match[1], label=match[2])


def rules(file: str) -> list[Mapping[str, Any]]:
    """Return the rules of a file in deploy/prometheus."""
    content = yaml.safe_load((PROMETHEUS / file).read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    """Return the expressions of all recording rules and alerts."""
    return [
        Query(place=rule.get("record") or rule["alert"], expression=rule["expr"])
        for file in ("recording.yml", "alerts.yml")
        for rule in rules(file)
    ]
