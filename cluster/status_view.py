"""How the state of a cluster looks on a terminal and as JSON."""

from datetime import datetime
from typing import Any

from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from weft.addresses import join_host_port
from weft.v1 import control_pb2

_STATE_STYLES = {"ready": "green", "starting": "yellow", "pending": "yellow", "draining": "cyan", "failed": "red"}

_WIDE = 1000


def tables_console() -> Console:
    """Return a console for tables, which folds nothing for a program that reads them."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDE)


def state_name(group: control_pb2.GroupStatus) -> str:
    """Return "ready", "starting" and so on; the number of a state that only a newer controller knows."""
    if group.state not in control_pb2.GroupState.values():
        return f"state {group.state}"
    return control_pb2.GroupState.Name(group.state).removeprefix("GROUP_STATE_").lower()


def group_state(state: str) -> Text:
    """Return the name of a group's state in its colour."""
    return Text(state, style=_STATE_STYLES.get(state, "white"))


def router_state(*, alive: bool, draining: bool) -> Text:
    """Return "alive", "draining" or "not alive" in its colour."""
    if not alive:
        return Text("not alive", style="red")
    return group_state("draining") if draining else Text("alive", style="green")


def last_failure(process: control_pb2.GroupStatus | control_pb2.RouterStatus) -> str:
    """Return why it was started again last, where its detail does not say so; else nothing."""
    failure = process.last_failure
    if not failure.reason or failure.reason in process.detail:
        return ""
    return f"failed {duration(failure.seconds_ago)} ago: {failure.reason}"


def bounds(model: control_pb2.ModelStatus) -> str:
    """Return "0 to 4" where the number of replicas follows the load; else nothing."""
    if not model.HasField("autoscaling"):
        return ""
    return f"{model.autoscaling.min_replicas} to {model.autoscaling.max_replicas}"


def status_as_dict(status: control_pb2.GetStatusResponse) -> dict[str, Any]:
    """Return the whole status for `--json`, with the field names of control.proto."""
    return MessageToDict(status, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def print_status(console: Console, status: control_pb2.GetStatusResponse) -> None:
    """Show models, groups, routers and nodes as tables."""
    restarts = f", restarted {status.controller.restarts} times" if status.controller.restarts else ""
    stops = "; the service is stopping" if status.controller.stopping else ""
    console.print(f"Weft {status.version}, controller up {duration(status.uptime_s)}{restarts}{stops}", highlight=False)
    reasons: list[Text] = []
    models = _table("model", "ready", "revision", "tp x pp", "path")
    groups = _table("replica", "state", "for", "rev", "restarts", "ranks (node:pid)", "address")
    for model in status.models:
        models.add_row(*_model_row(model))
        if model.autoscaling.last_change:
            ago = duration(model.autoscaling.seconds_since_change)
            reasons.append(_aside(model.name, f"{model.autoscaling.last_change}, {ago} ago"))
        for group in model.groups:
            groups.add_row(*_group_row(group))
            reasons += _reasons(group.replica_id or group.group_id, group)
    routers = _table("router", "state", "restarts", "pid", "listens")
    router_reasons: list[Text] = []
    for router in status.routers:
        state = router_state(alive=router.alive, draining=router.draining)
        routers.add_row(Text(router.router_id), state, str(router.restarts), str(router.pid or "-"), _listeners(router))
        router_reasons += _reasons(router.router_id, router)
    nodes = _table("node", "CPUs free", "GPUs free", "type", "")
    for node in status.nodes:
        nodes.add_row(
            Text(node.address),
            f"{node.free_cpus:.4g} of {node.cpus:g}",
            f"{node.free_gpus:g} of {node.gpus:g}",
            Text(node.accelerator or "-"),
            Text("drained", style="cyan") if node.drained else "",
        )
    for shown in (models, groups, *reasons, routers, *router_reasons, nodes):
        console.print(shown)


def _reasons(name: str, process: control_pb2.GroupStatus | control_pb2.RouterStatus) -> list[Text]:
    return [_aside(name, each) for each in (process.detail, last_failure(process)) if each]


def _aside(name: str, text: str) -> Text:
    return Text(f"  {name}: {text}", style="dim")


def _model_row(model: control_pb2.ModelStatus) -> tuple[str | Text, ...]:
    revision = str(model.revision) if model.revision else "[cyan]removed"
    number_older = sum(group.revision != model.revision for group in model.groups)
    if model.revision and number_older:
        revision += f" ({number_older} older)"
    style = "green" if model.ready_replicas == model.wanted_replicas else "yellow"
    splits = sorted({f"{group.tensor_parallel} x {group.pipeline_parallel}" for group in model.groups})
    ready = f"[{style}]{model.ready_replicas} of {model.wanted_replicas}"
    if scales := bounds(model):
        ready += f" ({scales})"
    return Text(model.name), ready, revision, ", ".join(splits) or "-", Text(model.path or "-")


def _listeners(router: control_pb2.RouterStatus) -> Text:
    addresses = {"gRPC": router.grpc_address, "HTTP": router.http_address, "metrics": router.metrics_address}
    return Text("\n".join(f"{name} {address}" for name, address in addresses.items() if address) or "-")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _group_row(group: control_pb2.GroupStatus) -> tuple[str | Text, ...]:
    return (
        Text(group.replica_id or group.group_id),  # rich would take brackets in what others have named for a style
        group_state(state_name(group)),
        duration(group.seconds_in_state),
        str(group.revision),
        str(group.restarts),
        Text(_ranks(group)),
        Text(group.address or "-"),
    )


def _ranks(group: control_pb2.GroupStatus) -> str:
    """Name a node once for all of its ranks, as in "10.0.0.1:70, 71"."""
    pids: dict[str, list[str]] = {}
    for rank in group.ranks:
        pids.setdefault(rank.node, []).append(str(rank.pid))
    return "; ".join(join_host_port(node, ", ".join(of_node)) for node, of_node in pids.items()) or "-"


def duration(seconds: float) -> str:
    """Write a time as people read it."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class StartView:
    """A progress bar for each group while they start, inside a `with`; plain lines where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._told: dict[str, str] = {}

    def __enter__(self) -> "StartView":
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def show(self, status: control_pb2.GetStatusResponse) -> None:
        """Bring the bars up to date."""
        for model in status.models:
            for group in model.groups:
                self._show_group(group)

    def _show_group(self, group: control_pb2.GroupStatus) -> None:
        state = state_name(group)
        text = state if state == "ready" else _why(state, group.detail)  # what is ready is told of at the end
        if group.group_id not in self._tasks:
            self._tasks[group.group_id] = self._bars.add_task(group.group_id, total=1.0, state=text)
        self._bars.update(self._tasks[group.group_id], completed=group.progress, state=text)
        if not self._console.is_terminal and self._told.get(group.group_id) != text:
            self._told[group.group_id] = text
            self._console.print(f"{group.group_id}: {text}", highlight=False, markup=False)


class ChangeView:
    """A line for each change of a group, a router or the controller, once the service runs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, str] = {}

    def show(self, status: control_pb2.GetStatusResponse) -> None:
        """Print what has changed since the last call; the first one only looks."""
        told, self._told = self._told, _states(status)
        for name, text in self._told.items():
            if text and told.get(name, text) != text:
                now = datetime.now().strftime("%H:%M:%S")
                self._console.print(f"{now} {name}: {text}", highlight=False, markup=False)


def _states(status: control_pb2.GetStatusResponse) -> dict[str, str]:
    states = {"controller": f"restarted {status.controller.restarts} times, now with pid {status.controller.pid}"}
    for model in status.models:
        if model.HasField("autoscaling"):
            last = model.autoscaling.last_change  # of the controller that runs now
            states[model.name] = last and f"{last} (scales from {bounds(model)})"
        for group in model.groups:
            name = state_name(group)
            states[group.group_id] = f"{name} as {group.replica_id}" if name == "ready" else _why(name, group.detail)
    for router in status.routers:
        state = router_state(alive=router.alive, draining=router.draining).plain
        states[router.router_id] = f"alive with pid {router.pid}" if state == "alive" else _why(state, router.detail)
    return states


def _why(state: str, detail: str) -> str:
    return f"{state}: {detail}" if detail else state
