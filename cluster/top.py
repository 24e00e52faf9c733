"""`weft top`: what a service does right now, on a terminal or as one JSON object each interval."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from weft.addresses import join_host_port

from cluster.control_client import ControlClient
from cluster.observe import (
    GroupView,
    ModelView,
    NodeView,
    Observation,
    Percentiles,
    RouterView,
    Snapshot,
    Window,
    parse_pages,
)
from cluster.patience import Patience, tell_aside
from cluster.status_view import duration, group_state, router_state

WINDOW_S = 30.0
"""The time that rates and percentiles span."""
_LATENCY = "ms\np50/p90/p99"
"""What the head of a column of latencies says."""
_NARROW = 120
"""On a terminal of fewer columns a table leaves out what is least missed."""


def run_top(
    client: ControlClient, console: Console, *, interval_s: float, as_json: bool, count: int | None = None
) -> None:
    """Show a snapshot each interval, until interrupted or `count` times. Raises what Patience does."""
    window = Window(WINDOW_S)
    live = Live(console=console, screen=count is None, auto_refresh=False)

    def tell(line: str) -> None:
        if live.is_started:  # its screen hides what is written beside it
            live.update(Group(Text(line, "yellow"), live.get_renderable()), refresh=True)
        else:
            tell_aside(line)

    patience = Patience(tell)

    def next_look() -> Snapshot:
        observation = patience.ask(lambda: look(client))
        patience.note_stopping(is_stopping=observation.status.controller.stopping)
        return window.add(observation)

    next_look()
    if as_json:
        _repeat(lambda: print(json.dumps(_to_json(next_look())), flush=True), interval_s, count)
    elif not console.is_terminal:
        _repeat(lambda: console.print(render(next_look(), console.width)), interval_s, count)
    else:
        with live:
            _repeat(lambda: live.update(render(next_look(), console.width), refresh=True), interval_s, count)


def look(client: ControlClient) -> Observation:
    """Take one observation: the status, and the pages of routers and replicas. Raises ControllerError."""
    status = client.status()
    addresses = [router.metrics_address for router in status.routers]
    addresses += [group.metrics_address for model in status.models for group in model.groups]
    pages = parse_pages(client.read_metrics(addresses))
    return Observation(time_s=time.monotonic(), status=status, pages=pages)


def render(snapshot: Snapshot, width: int) -> RenderableType:
    """Return the tables of a snapshot."""
    up, window = duration(snapshot.uptime_s), f"{snapshot.window_s:.0f} s"
    title = Text(f"Weft, controller up {up}; rates over {window}", style="bold")
    is_wide = width >= _NARROW
    return Group(
        title,
        Text(),
        _models(snapshot.models, is_wide=is_wide),
        *_scalings(snapshot.models),
        Text(),
        _groups(snapshot.groups, is_wide=is_wide),
        *_reasons(snapshot.groups),
        Text(),
        _routers(snapshot.routers),
        Text(),
        _nodes(snapshot.nodes),
    )


def _models(models: Sequence[ModelView], *, is_wide: bool) -> Table:
    columns = ["model", "ready", "req/s", "out tok/s", *(("in tok/s", "rev") if is_wide else ()), "hits"]
    table = _table(*columns, f"TTFT {_LATENCY}", f"TPOT {_LATENCY}")
    for model in models:
        short = model.ready_replicas < model.wanted_replicas
        table.add_row(
            Text(model.name),
            Text(f"{model.ready_replicas}/{model.wanted_replicas}", style="yellow" if short else "green"),
            "-" if model.requests_per_s is None else f"{model.requests_per_s:.1f}",
            _number(model.output_tokens_per_s),
            *((_number(model.prompt_tokens_per_s), str(model.revision)) if is_wide else ()),
            _percent(model.hit_rate),
            _latency(model.ttft_s),
            _latency(model.tpot_s),
        )
    return table


def _scalings(models: Sequence[ModelView]) -> list[Text]:
    """Return a line for each model whose number of replicas follows the load."""
    scaled = [model for model in models if model.scales]
    return [Text(f"  {model.name} scales from {model.scales}: {model.last_scaling or '-'}", "dim") for model in scaled]


def _groups(groups: Sequence[GroupView], *, is_wide: bool) -> Table:
    columns = ["replica", "state", "for", "restarts", "run", "wait", "KV", "out tok/s", "hits"]
    table = _table(*columns, *((f"step {_LATENCY}", "preempt/s", "ranks node:pid") if is_wide else ("ranks",)))
    for group in groups:
        row: list[str | Text] = [
            Text(group.replica_id or group.group_id),
            group_state(group.state),
            duration(group.seconds_in_state),
            str(group.restarts),
            _number(group.running),
            _number(group.waiting),
            _percent(group.kv_usage),
            _number(group.output_tokens_per_s),
            _percent(group.hit_rate),
        ]
        if is_wide:
            preemptions = "-" if group.preemptions_per_s is None else f"{group.preemptions_per_s:.2g}"
            ranks = " ".join(join_host_port(rank.node, rank.pid) for rank in group.ranks)
            row += [_latency(group.step_s), preemptions, Text(ranks or "-")]
        else:
            row.append(str(len(group.ranks)))
        table.add_row(*row)
    return table


def _reasons(groups: Sequence[GroupView]) -> list[Text]:
    told = [(group, each) for group in groups for each in (group.detail, group.last_failure) if each]
    return [Text(f"  {group.replica_id or group.group_id}: {each}", "dim") for group, each in told]


def _routers(routers: Sequence[RouterView]) -> Table:
    table = _table("router", "state", "in flight", "queued", "failovers/s")
    for router in routers:
        failovers = "-" if router.failovers_per_s is None else f"{router.failovers_per_s:.2g}"
        state = router_state(alive=router.alive, draining=router.draining)
        table.add_row(Text(router.router_id), state, _number(router.in_flight), _number(router.queued), failovers)
    return table


def _nodes(nodes: Sequence[NodeView]) -> Table:
    table = _table("node", "ranks", "CPUs used", "GPUs used", "type", "")
    for node in nodes:
        table.add_row(
            Text(node.address),
            str(node.ranks),
            f"{node.cpus - node.free_cpus:.3g}/{node.cpus:g}",
            f"{node.gpus - node.free_gpus:.3g}/{node.gpus:g}",
            Text(node.accelerator or "-"),
            Text("drained", style="cyan") if node.drained else "",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_text = column in ("model", "replica", "state", "router", "node", "type", "ranks node:pid", "")
        longest_word = max(map(len, column.split()), default=0)
        justify: Literal["left", "right"] = "left" if is_text else "right"
        is_whole = column.endswith(_LATENCY)  # what is narrowed below its least width pushes others out of sight
        table.add_column(column, justify=justify, overflow="fold", min_width=longest_word, no_wrap=is_whole)
    return table


def _latency(percentiles: Percentiles) -> str:
    """Return latencies in milliseconds, with three digits, which are enough, or as whole ones."""
    values = (percentiles.p50, percentiles.p90, percentiles.p99)
    if percentiles.p50 is None:
        return "-"
    times_ms = (value * 1000 for value in values if value is not None)
    return "/".join(f"{time_ms:.3g}" if time_ms < 1000 else f"{time_ms:.0f}" for time_ms in times_ms)


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _to_json(snapshot: Snapshot) -> dict[str, object]:
    return {"time": time.time(), **dataclasses.asdict(snapshot)}


def _repeat(act: Callable[[], None], interval_s: float, count: int | None) -> None:
    due_s = time.monotonic()
    while count is None or count > 0:
        due_s = max(due_s + interval_s, time.monotonic())  # no look that was missed is made up for
        time.sleep(max(0.0, due_s - time.monotonic()))
        act()
        count = None if count is None else count - 1
