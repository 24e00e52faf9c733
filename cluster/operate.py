"""What the operator's commands do: `weft apply`, `scale`, `rollout` and `drain`, and waiting until it is done."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from weft.addresses import family_of
from weft.v1 import control_pb2
from weft.yaml_text import read_yaml

from cluster.config import ModelSpec, build_spec, load_cluster_file
from cluster.control_client import ControlClient
from cluster.errors import ClusterConfigError, ControllerError
from cluster.models import absolute_source
from cluster.patience import Patience
from cluster.status_view import ChangeView, bounds, state_name

_POLL_S = 0.2

_MARKS = {
    control_pb2.CHANGE_KIND_ADD: "+ add",
    control_pb2.CHANGE_KIND_REMOVE: "- remove",
    control_pb2.CHANGE_KIND_SCALE: "~ scale",
    control_pb2.CHANGE_KIND_ROLLOUT: "~ roll",
    control_pb2.CHANGE_KIND_IGNORED: "! ignored, read at start only:",
}


def apply_file(client: ControlClient, path: Path, console: Console, *, dry_run: bool, wait_s: float | None) -> None:
    """Want exactly the models of a cluster file, and say what that changes.

    Raises:
        ClusterConfigError: a setting is unknown or wrong.
        ModelNotFoundError: a folder cannot be looked at.
        ControllerError: a model cannot be had or split as wanted, nobody answers, or it is not done in time.
    """
    settings = load_cluster_file(path)
    spec = build_spec(settings)  # a fault is told without a controller too
    if "models" not in settings:  # it would put the default model in place of everything
        raise ClusterConfigError(f"{path}: no models; allowed: a file that names every model to be served")
    models = [_as_served(section, model) for section, model in zip(settings["models"], spec.models, strict=True)]
    changes = client.apply({**settings, "models": models}, dry_run=dry_run)
    for change in changes:
        _print_change(console, change)
    if all(change.kind == control_pb2.CHANGE_KIND_IGNORED for change in changes):
        console.print("Nothing to change.")
    if wait_s is not None and not dry_run:
        wanted = {model.name: None if model.section.autoscaling else model.replicas for model in spec.models}
        wait_as_wanted(client, console, wanted, timeout_s=wait_s, is_all=True)


def scale_model(client: ControlClient, model: str, replicas: int, console: Console, *, wait_s: float | None) -> None:
    """Want so many replicas of a model. Raises as `apply_file`."""
    before = client.scale(model, replicas)
    console.print(f"{model}: {before} -> {replicas} replicas", highlight=False, markup=False)
    if scales := next((bounds(each) for each in _status_after(client).models if each.name == model), ""):
        console.print(f"It scales from {scales} by itself, and goes on from this number.", highlight=False)
    if wait_s is not None:
        wait_as_wanted(client, console, {model: replicas}, timeout_s=wait_s)


def roll_model(
    client: ControlClient,
    model: str,
    settings: Sequence[str],
    console: Console,
    *,
    undo: bool,
    wait_s: float | None,
) -> None:
    """Replace a model's groups, with settings given as "dotted.path=value"; or go back. Raises as `apply_file`."""
    response = client.rollout(model, parse_settings(settings), undo=undo)
    _print_change(console, response.change)
    console.print(f"{model} goes to revision {response.revision}", highlight=False, markup=False)
    if wait_s is not None:
        wait_as_wanted(client, console, {model: None}, timeout_s=wait_s)


def stop_service(client: ControlClient, grace_s: float, patience: Patience | None = None) -> None:
    """Stop everything; a controller that dies meanwhile is asked again when its successor is there.

    Raises ControllerError, as Patience does: also where the successor found all stopped, and ended before it was asked.
    """
    patience = patience or Patience()
    patience.ask(client.status)  # where nobody answers at first, there is nothing to stop
    patience.ask(lambda: client.shut_down(grace_s))


def drain_target(
    client: ControlClient,
    target: str,
    console: Console,
    *,
    grace_s: float | None,
    undo: bool,
    wait_s: float | None,
) -> None:
    """Take a replica or a node out of service, or a node into it again. Raises ControllerError."""
    response = client.drain(target, grace_s=grace_s, undo=undo)
    leaving = set(response.replica_ids)
    if undo:
        console.print(f"{target} takes groups again", highlight=False, markup=False)
    else:
        console.print(f"leaving: {', '.join(sorted(leaving)) or 'nothing'}", highlight=False, markup=False)
        if response.node_id:
            console.print(f"{target} takes no groups until: weft drain {target} --undo", highlight=False, markup=False)
        for failed in _failed_beside(leaving, _status_after(client)):
            console.print(
                f"nothing takes the place: {failed.group_id} has failed: {failed.detail}", highlight=False, markup=False
            )

    def is_done(status: control_pb2.GetStatusResponse) -> bool:
        return not leaving & {group.replica_id or group.group_id for group in _groups(status)}

    if wait_s is not None:
        _wait(client, console, is_done, what="drained", timeout_s=wait_s)


def _failed_beside(leaving: Set[str], status: control_pb2.GetStatusResponse) -> list[control_pb2.GroupStatus]:
    """Return groups that stand for replicas that leave, and have failed: no others are formed."""
    return [
        group
        for model in status.models
        if any((each.replica_id or each.group_id) in leaving for each in model.groups)
        for group in model.groups
        if group.state == control_pb2.GROUP_STATE_FAILED and not group.leaving
    ]


def this_node(client: ControlClient) -> str:
    """Return the address of the node that is on this machine. Raises ControllerError."""
    addresses = {node.address for node in client.status().nodes}
    here = sorted(address for address in addresses if is_of_this_machine(address))
    if len(here) != 1:
        seen = f"{', '.join(here)} are" if here else f"none of {', '.join(sorted(addresses)) or 'no nodes'} is"
        raise ControllerError(f"{seen} on this machine; allowed with --this-node: one node, else name it")
    return here[0]


def wait_as_wanted(
    client: ControlClient,
    console: Console,
    wanted: Mapping[str, int | None],
    *,
    timeout_s: float,
    is_all: bool = False,
) -> None:
    """Wait until models are served as they are wanted; tells what happens meanwhile.

    Args:
        client, console: whom to ask, and where to tell.
        wanted: which, with as many replicas as were asked for; None: any number.
        timeout_s: until they are served so.
        is_all: they are all that is served; those that were before are waited for until they are gone.

    Raises:
        ControllerError: a group of the wanted revision cannot start, the service stops, it is not done in time, or
            others want no such model or another number of it.
    """

    def is_done(status: control_pb2.GetStatusResponse) -> bool:
        if status.controller.stopping:
            raise ControllerError("the service is stopping and carries out no more changes")
        models = [each for each in status.models if is_all or each.name in wanted]
        served = {each.name for each in models if each.revision}
        for name in wanted:
            if name not in served:
                raise ControllerError(f"{name} is no longer served: others have removed it")
        for each in models:
            replicas = wanted.get(each.name)
            if replicas not in (None, each.wanted_replicas) and not each.HasField("autoscaling"):
                raise ControllerError(
                    f"others have changed {each.name} from {replicas} replicas to {each.wanted_replicas}"
                )
            for group in each.groups:
                is_wanted = group.revision == each.revision and not group.leaving  # another one is being replaced
                if is_wanted and group.state == control_pb2.GROUP_STATE_FAILED:
                    raise ControllerError(f"{group.group_id} cannot start: {group.detail}")
        return all(is_as_wanted(each) for each in models)

    status = _wait(client, console, is_done, what="as wanted", timeout_s=timeout_s)
    for each in status.models:
        replicas = wanted.get(each.name)
        if replicas not in (None, each.wanted_replicas):
            console.print(f"It has scaled itself from {replicas} to {each.wanted_replicas} replicas.", highlight=False)


def is_as_wanted(model: control_pb2.ModelStatus) -> bool:
    """Return whether a model has its wanted number of READY groups, all of the wanted revision, and no other one."""
    is_ready = all(
        group.state == control_pb2.GROUP_STATE_READY and group.revision == model.revision for group in model.groups
    )
    return is_ready and len(model.groups) == model.wanted_replicas


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return "dotted.path=value" as a nested mapping, values read as YAML. Raises as `apply_file`."""
    settings: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not (path and equals):
            raise ClusterConfigError(f"--set is {text!r}; allowed: a setting of the model, dotted.path=value")
        section = settings
        *parents, last = path.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise _twice_set(path, parent, section)
        if isinstance(section.get(last), dict):  # what is in it would be lost
            raise _twice_set(path, last, section[last])
        try:
            section[last] = read_yaml(value)
        except yaml.YAMLError as error:
            raise ClusterConfigError(f"--set {path} is {value!r}; allowed: a YAML value") from error
    source = settings.get("path")
    return {**settings, "path": absolute_source(source)} if isinstance(source, str) else settings


def _twice_set(path: str, name: str, seen: object) -> ClusterConfigError:
    return ClusterConfigError(f"--set {path}: {name} is {seen!r} by another --set; allowed: one of them")


def _status_after(client: ControlClient) -> control_pb2.GetStatusResponse:
    """Return the status after a change, which holds already: its controller may die, and a successor answer."""
    return Patience(has_answered=True).ask(client.status)


def _wait(
    client: ControlClient,
    console: Console,
    is_done: Callable[[control_pb2.GetStatusResponse], bool],
    *,
    what: str,
    timeout_s: float,
) -> control_pb2.GetStatusResponse:
    give_up_s = time.monotonic() + timeout_s
    patience = Patience(has_answered=True, give_up_s=give_up_s)  # what is waited for goes on without a controller
    changes = ChangeView(console)
    while True:
        status = patience.ask(client.status)
        patience.note_stopping(is_stopping=status.controller.stopping)
        changes.show(status)
        if is_done(status):
            console.print(f"{what[0].upper()}{what[1:]}.", highlight=False, markup=False)
            return status
        if time.monotonic() > give_up_s:
            states = ", ".join(f"{group.group_id} {state_name(group)}" for group in _groups(status))
            raise ControllerError(f"not {what} within {timeout_s:g} s: {states}")
        time.sleep(_POLL_S)


def is_of_this_machine(address: str) -> bool:
    """Return whether an address is one of this machine's: only those can be bound."""
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _groups(status: control_pb2.GetStatusResponse) -> list[control_pb2.GroupStatus]:
    return [group for model in status.models for group in model.groups]


def _print_change(console: Console, change: control_pb2.Change) -> None:
    mark = _MARKS.get(change.kind, f"? change {change.kind}")  # from a newer controller
    console.print(f"{mark} {change.name}", highlight=False, markup=False)
    for line in change.details:
        console.print(f"    {line}", highlight=False, markup=False)


def _as_served(section: dict[str, Any], model: ModelSpec) -> dict[str, Any]:
    """Return a model's settings for a controller in another folder, with the name that its path gives it here."""
    return {**section, "path": absolute_source(model.source), "name": model.name}
