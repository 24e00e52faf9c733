"""The operator's half of the `weft` command: what changes a running service, looks into it, or prepares for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from weft.limits import MAX_TIMEOUT_S

from cluster.cli_connection import with_control
from cluster.errors import ClusterConfigError
from cluster.imports import import_for_good

if TYPE_CHECKING:
    from cluster.control_client import ControlClient


def _named(name: str) -> str:
    """Refuse what a variable of a shell is where nobody set it; to the controller it names the only model."""
    if not name:
        raise typer.BadParameter("it is empty; allowed: a name")
    return name


_Model = Annotated[str, typer.Argument(help="Name of the model.", callback=_named)]
_Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is done.")]
_Timeout = Annotated[float, typer.Option(min=0, help="With --wait: give up after so many seconds.")]
_WAIT_S = 1800.0  # as long as a model may take to load, by default
_MAX_TAIL_KB = 1 << 30  # 1 TiB: all of any log


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (apply, scale, rollout, drain, top, logs, warm):
        app.command()(command)


@with_control
def apply(
    client: "ControlClient",
    file: Annotated[Path, typer.Argument(help="A cluster file, as for `weft serve`.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")] = False,
    wait: _Wait = False,
    timeout: _Timeout = _WAIT_S,
) -> None:
    """Serve exactly the models of a file: add, change and remove while the service runs."""
    from cluster.operate import apply_file

    apply_file(client, file, Console(), dry_run=dry_run, wait_s=timeout if wait else None)


@with_control
def scale(
    client: "ControlClient",
    model: _Model,
    replicas: Annotated[int, typer.Argument(min=0, max=2**31 - 1, help="Number of replica groups.")],
    wait: _Wait = False,
    timeout: _Timeout = _WAIT_S,
) -> None:
    """Run another number of replicas of a model."""
    from cluster.operate import scale_model

    scale_model(client, model, replicas, Console(), wait_s=timeout if wait else None)


@with_control
def rollout(
    client: "ControlClient",
    model: _Model,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="dotted.path=value, as in the model's section of the file; may be repeated."),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Go back to the last revision that was READY.")] = False,
    wait: _Wait = False,
    timeout: _Timeout = _WAIT_S,
) -> None:
    """Replace the groups of a model one by one, each when its successor is READY. Without --set: weights read anew."""
    from cluster.operate import roll_model

    roll_model(client, model, settings or [], Console(), undo=undo, wait_s=timeout if wait else None)


@with_control
def drain(
    client: "ControlClient",
    target: Annotated[
        str | None,
        typer.Argument(metavar="REPLICA|NODE", help="A replica or group, or a node's address or Ray id."),
    ] = None,
    here: Annotated[bool, typer.Option("--this-node", help="The node on this machine.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0, max=MAX_TIMEOUT_S, help="Seconds until requests move to other replicas; default: drain_timeout_s."
        ),
    ] = None,
    undo: Annotated[bool, typer.Option("--undo", help="Place groups on a drained node again.")] = False,
    wait: _Wait = False,
    timeout: _Timeout = _WAIT_S,
) -> None:
    """Take a replica, or all of a node, out of service without losing a request; others take its place."""
    from cluster.operate import drain_target, this_node

    if bool(target) == here:  # also where it is a variable of a shell that nobody set
        raise ClusterConfigError("drain takes a REPLICA or NODE, or --this-node; allowed: one of the two")
    if undo and (grace is not None or wait):
        raise ClusterConfigError("--undo: nothing leaves that could take time; allowed: without --grace and --wait")
    target = target or this_node(client)
    drain_target(client, target, Console(), grace_s=grace, undo=undo, wait_s=timeout if wait else None)


@with_control
def top(
    client: "ControlClient",
    interval: Annotated[
        float, typer.Option(min=0.1, max=MAX_TIMEOUT_S, help="Seconds from one look to the next.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object each interval.")] = False,
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="End after so many looks.")] = None,
) -> None:
    """Watch models, groups, ranks and nodes: queues, KV use, cache hits, latencies, tokens per second."""
    from cluster.status_view import tables_console
    from cluster.top import run_top

    run_top(client, tables_console(), interval_s=interval, as_json=as_json, count=count)


@with_control
def logs(
    client: "ControlClient",
    target: Annotated[
        str,
        typer.Argument(
            metavar="[REPLICA|router|controller]",
            help="Or a model, a group, or one process: m-0.1/0, router-0/4711. Default: everything.",
        ),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Also print what is logged from now on.")] = False,
    tail_kb: Annotated[
        int, typer.Option(min=0, max=_MAX_TAIL_KB, help="Begin at most so many KiB before the end of each log.")
    ] = 64,
) -> None:
    """Print what processes have logged, on whichever node, those that died of late included."""
    from cluster.show_logs import show_logs

    show_logs(client, target, follows=follow, tail_bytes=tail_kb << 10)


def warm(
    ray_address: Annotated[str, typer.Option(help='Ray cluster; "auto": the one of this machine.')] = "auto",
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Warm all nodes of the cluster; default: the one on this machine.")
    ] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that each node is ready for; default: one for each GPU, or one.")
    ] = None,
    keep: Annotated[float, typer.Option(min=60, help="Seconds that the processes wait for a service.")] = 86400.0,
    timeout: Annotated[float, typer.Option(min=1, help="Give up after so many seconds.")] = 120.0,
) -> None:
    """After `ray start`: let processes wait with everything imported, so that the first `weft serve` is fast too."""
    import_for_good("cluster.warm")  # Ray
    from cluster.warm import warm as warm_nodes

    warm_nodes(Console(), ray_address=ray_address, all_nodes=all_nodes, ranks=ranks, keep_s=keep, timeout_s=timeout)
