"""What a dashboard of Weft is made of, and how it becomes Grafana's JSON by way of its foundation SDK.

The dashboards themselves are in service_boards.py and inside_boards.py; build.py writes them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    DataSourceRef,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    Dashboard,
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

_WIDTH = 24
_STAT_HEIGHT = 4
_GRAPH_HEIGHT = 8
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One question and its answer over time, or now."""

    title: str
    text: str
    """What the panel shows and what to make of it."""
    unit: str
    queries: Mapping[str, str]
    """Legend -> PromQL. A legend may hold {{labels}}."""
    is_stat: bool = False
    """One number instead of lines."""
    is_stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    name: str
    """Of its file, and with `weft-` its uid, which links keep pointing to."""
    title: str
    text: str
    variables: Mapping[str, str]
    """Name -> query for its values, in the order in which they depend on each other."""
    rows: Mapping[str, Sequence[Panel]]


def to_json(board: Board) -> str:
    """Return the dashboard as Grafana imports it."""
    return json.dumps(_build(board), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _build(board: Board) -> Dashboard:
    builder = (
        dashboard.Dashboard(f"Weft / {board.title}")
        .uid(f"weft-{board.name}")
        .description(board.text)
        .tags(["weft"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(dashboard.DashboardLink("Weft").type(DashboardLinkType.DASHBOARDS).tags(["weft"]).keep_time(True))
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, query in board.variables.items():
        builder = builder.with_variable(_variable(name, query))
    ids = count(1)
    for title, panels in board.rows.items():
        builder = builder.with_row(dashboard.Row(title).id(next(ids)))
        for panel in panels:
            builder = builder.with_panel(_panel(panel, next(ids), len(panels)))
    return builder.build()


def _variable(name: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(text="All", value="$__all"))
    )


def _panel(panel: Panel, panel_id: int, num_in_row: int) -> stat.Panel | timeseries.Panel:
    builder = _stat(panel, num_in_row) if panel.is_stat else _graph(panel, num_in_row)
    builder = builder.id(panel_id).title(panel.title).description(panel.text).unit(panel.unit).datasource(_SOURCE)
    for index, (legend, expression) in enumerate(panel.queries.items()):
        builder = builder.with_target(
            prometheus.Dataquery()
            .ref_id(chr(ord("A") + index))
            .expr(expression)
            .legend_format(legend)
            .datasource(_SOURCE)
            .range()
        )
    return builder


def _stat(panel: Panel, num_in_row: int) -> stat.Panel:
    last = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().span(_WIDTH // num_in_row).height(_STAT_HEIGHT).reduce_options(last)


def _graph(panel: Panel, num_in_row: int) -> timeseries.Panel:
    legend = (
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    builder = (
        timeseries.Panel()
        .span(_WIDTH // min(num_in_row, 3))
        .height(_GRAPH_HEIGHT)
        .min(0)
        .fill_opacity(10)
        .legend(legend)
    )
    if panel.is_stacked:
        builder = builder.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    return builder
