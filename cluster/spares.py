"""Worker processes that Ray starts ahead, so that who comes next finds Python and everything imported there: spares.

A group that is READY leaves one for each of its ranks on their nodes, a service that stops one for a controller and one
for a router, `weft warm` both. `prepare`, which such a process runs before it takes work, imports what is needed, for a
rank also compiles the kernels where nobody has yet, and notes in Ray's store that a spare waits. Whoever creates actors
looks for these notes and asks for processes of that kind; Ray then hands out those that wait. The kind is told by
environment variables, and one of them by the code: a spare never becomes a rank of other code than it has imported;
those of other code end when new ones are left, when notes of nodes that have gone are dropped too. One that was killed
leaves its notes, until somebody asks for spares of its kind there or an actor that should have become it is started
instead. What goes wrong makes a start slower, and nothing else.

    spare/NODE/KIND/until        when those of this kind on this node end, in seconds since 1970; gone: at once
    spare/NODE/KIND/most         how many of them whoever asked last wants there; gone: any number
    spare/NODE/KIND/kept         how many wait all the same, and until when: what was asked for by no group
    spare/NODE/KIND/PID/begun    one that Ray has started
    spare/NODE/KIND/PID/waits    and that has imported everything
"""

import logging
import math
import os
import signal
import threading
import time
from enum import StrEnum
from functools import cache
from typing import Any

import ray

from cluster.code_id import code_id, code_roots
from cluster.errors import SpareError
from cluster.imports import import_for_good, leave_removed_folder
from cluster.ray_prestart import (
    drop_notes,
    hook_variable,
    leave_note,
    list_notes,
    living_nodes,
    num_started_at_once,
    read_note,
    running_pids,
    start_ahead,
)

logger = logging.getLogger(__name__)

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KIND = "WEFT_SPARE"
_NOTES = "spare/"
_BEGIN_S = 2.0
"""Most processes have started so long after Ray was asked for them."""
_BEGIN_POLL_S = 0.1
_LOOK_S = 5.0
"""How often a spare looks whether its time was prolonged or ended."""
_MARGIN_S = 10.0
"""How long a spare that is no longer counted waits for whoever has counted it before."""


class SpareKind(StrEnum):
    """What a spare can become."""

    RANK = "rank"
    SERVICE = "service"
    """A controller or a router."""

    @property
    def full_name(self) -> str:
        """Name that differs for other code."""
        return f"{code_id()}-{self}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that the spare imports."""
        return ("cluster.leader",) if self is SpareKind.RANK else ("cluster.controller", "router.app")

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its process, beside those of Ray's node. Raises SpareError."""
        # One thread, until the rank that it becomes tells torch how many there are.
        variables = engine_variables(1) if self is SpareKind.RANK else {}
        variables |= {_KIND: self.full_name, hook_variable(): f"{__name__}.{prepare.__name__}"}
        if roots := code_roots():
            variables["PYTHONPATH"] = os.pathsep.join(roots)
        return variables


class _Wait:
    """What a spare knows of itself."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.notes = f"{place}{os.getpid()}/"
        self.is_over = threading.Event()


_wait: _Wait | None = None


def engine_variables(num_threads: int) -> dict[str, str]:
    """Return the environment variables of a rank that are read once, when torch and numpy are imported."""
    # Threads without work leave their cores to the router and the clients on them (docs/experiments/serving.md).
    wait_policy = os.environ.get("OMP_WAIT_POLICY", "passive")
    return dict.fromkeys(_THREADS, str(num_threads)) | {"OMP_WAIT_POLICY": wait_policy}


def spare_options(node_id: str, kind: SpareKind, *, count: int = 1) -> dict[str, Any]:
    """Return the options by which so many actors on a node become spares that wait there; none if these are fewer.

    A controller finds ranks only if it was a spare itself; its router has its environment, and needs no options. Blocks
    for a round trip to Ray's head.
    """
    is_child = kind is SpareKind.RANK
    if is_child and not os.environ.get(_KIND):
        return {}
    try:
        # Where there are no notes at all, the name of the kind, which costs a look at the code, is not needed.
        if list_notes(f"{_NOTES}{node_id}/") and num_waiting(node_id, kind) >= count:
            return {"runtime_env": {"env_vars": kind.variables}}
    except SpareError as error:
        _tell(str(error))
    # A child would have the environment of this process.
    return {"runtime_env": {"env_vars": {_KIND: "", hook_variable(): ""}}} if is_child else {}


def num_waiting(node_id: str, kind: SpareKind) -> int:
    """Return how many wait on a node with everything imported, also killed ones of late. Raises SpareError."""
    return sum(note.endswith("/waits") for note in list_notes(_place(node_id, kind)))


def leave_spares(node_id: str, kind: SpareKind, *, count: int, lifetime_s: float, most: int | None = None) -> None:
    """Have Ray start spares on a node, and those of other code end; what goes wrong is only logged.

    Blocks for a moment; for longer where a node starts fewer at a time.

    Args:
        node_id: Ray's name of the node.
        kind: what they can become.
        count: how many to start.
        lifetime_s: how long they, and those that are there, wait for work at least.
        most: how many there are then at most, and others end; None: `count`, which stay whatever is asked for later.
    """
    try:
        add_spares(node_id, kind, count=count, lifetime_s=lifetime_s, most=most)
    except SpareError as error:
        _tell(str(error))


def add_spares(
    node_id: str,
    kind: SpareKind,
    *,
    count: int,
    lifetime_s: float,
    most: int | None = None,
    give_up_s: float = math.inf,
) -> None:
    """Do as `leave_spares`, but raise SpareError; Ray is asked for no more after a time of the monotonic clock."""
    _end_others()
    place = _place(node_id, kind)
    # By the wall clock, which is all that two machines share; where it is set anew, spares end early or late.
    until = max(float(read_note(f"{place}until") or 0), time.time() + lifetime_s)
    leave_note(f"{place}until", f"{until:.0f}")
    _forget_killed(node_id, place)
    if most is None:
        most = count
        leave_note(f"{place}kept", f"{max(count, _num_kept(place))} {until:.0f}")
    begun = len(_begun(place))
    leave_note(f"{place}most", str(most))
    wanted = min(begun + count, most)
    while begun < wanted:
        batch = min(wanted - begun, num_started_at_once(node_id))
        start_ahead(node_id, batch, variables=kind.variables, has_parent=kind is SpareKind.RANK)
        begun += batch
        if begun < wanted:
            _wait_for(begun, place, give_up_s=min(give_up_s, time.monotonic() + _BEGIN_S))
            if time.monotonic() >= give_up_s:
                return


def prepare() -> None:
    """Make the process that Ray has just started a spare. Raises where it cannot be one, and Ray ends the process.

    Does nothing but import where Ray has started it for an actor that is there.
    """
    code, _, role = os.environ[_KIND].partition("-")
    runtime = ray.get_runtime_context()
    node_id = runtime.get_node_id()
    place = f"{_NOTES}{node_id}/{os.environ[_KIND]}/"
    has_work = runtime.get_job_id() != ray.JobID.nil().hex()
    try:
        if has_work:  # none of the spares that were said to wait was free, or they are gone
            _forget_killed(node_id, place)
        else:
            leave_note(f"{place}{os.getpid()}/begun")
            _check_is_wanted(place)
        leave_removed_folder()
        import_for_good(*SpareKind(role).modules)
        if not has_work:
            if role == SpareKind.RANK:
                _compile_kernels()
            _check_is_wanted(place)  # again: when it began, those that go before it may not have
            _begin_to_wait(place, code)
    except Exception:
        if not has_work:
            drop_notes(f"{place}{os.getpid()}/")
            raise
        logger.exception("this process was to be a spare")


def take_spare() -> None:
    """Note that this process has got work, whether it was a spare or not. Blocks for a round trip if it was."""
    global _wait
    wait, _wait = _wait, None
    if wait is None:
        return
    wait.is_over.set()
    try:
        drop_notes(wait.notes)
    except SpareError as error:
        _tell(str(error))


def _compile_kernels() -> None:
    """Compile what else the first rank on this kind of CPU would. Blocks until it is there."""
    # not imported with this module, which commands read
    from parallel.errors import DeviceError
    from parallel.kernels.native.build import build_library

    try:
        build_library()
    except DeviceError as error:
        _tell(str(error))


def _begin_to_wait(place: str, code: str) -> None:
    global _wait
    if code != code_id():
        raise SpareError("its code is not the one that was asked for")
    _wait = _Wait(place)
    leave_note(f"{_wait.notes}waits")
    threading.Thread(target=_end_unless_taken, args=(_wait,), daemon=True, name="spare").start()


def _end_others() -> None:
    """End spares of other code, and drop the notes of nodes that have gone, which nobody else would."""
    places = {tuple(note.split("/")[1:3]) for note in list_notes(_NOTES)}
    living = living_nodes()  # asked after the notes were read: a node is known before anybody leaves one there
    for node_id, kind in places:
        if not kind.startswith(code_id()) or node_id not in living:
            drop_notes(f"{_NOTES}{node_id}/{kind}/")


def _forget_killed(node_id: str, place: str) -> None:
    """Drop the notes of spares whose processes are gone: they could not do so themselves."""
    noted = {int(note.split("/")[-2]) for note in list_notes(place) if note.endswith(("/begun", "/waits"))}
    if not noted:
        return
    try:
        running = running_pids(node_id)  # asked after the notes were read: who has left one was known to Ray before
    except SpareError as error:
        logger.debug("killed spares are counted: %s", error)
        return
    for pid in noted - running:
        drop_notes(f"{place}{pid}/")


def _end_unless_taken(wait: _Wait) -> None:
    """End this process when its time is over, it is one too many, or somebody has dropped what says so."""
    try:
        while time.time() < float(read_note(f"{wait.place}until") or 0) and _most_beside(wait.place) is None:
            if wait.is_over.wait(_LOOK_S):
                return
        drop_notes(wait.notes)
    except SpareError as error:
        _tell(str(error))
    if not wait.is_over.wait(_MARGIN_S):
        os.kill(os.getpid(), signal.SIGTERM)


def _begun(place: str) -> list[int]:
    """Return the pids of spares in the order in which they stay: those that wait, then by pid."""
    notes = list_notes(place)
    waiting = {int(note.split("/")[-2]) for note in notes if note.endswith("/waits")}
    begun = {int(note.split("/")[-2]) for note in notes if note.endswith("/begun")}
    return sorted(begun, key=lambda pid: (pid not in waiting, pid))


def _check_is_wanted(place: str) -> None:
    """Raise SpareError in a spare too many: where processes start slowly, Ray is asked again for some that come."""
    if (most := _most_beside(place)) is not None:
        raise SpareError(f"there are {most} already")


def _most_beside(place: str) -> int | None:
    """Return how many spares are wanted where this process is one too many; None where it is not."""
    note = read_note(f"{place}most")
    if note is None:
        return None
    most = max(int(note), _num_kept(place))
    return most if os.getpid() in _begun(place)[most:] else None


def _num_kept(place: str) -> int:
    """Return how many spares wait there whatever groups need."""
    count, until = (read_note(f"{place}kept") or "0 0").split()
    return int(count) if time.time() < float(until) else 0


def _wait_for(begun: int, place: str, *, give_up_s: float) -> None:
    while len(_begun(place)) < begun and time.monotonic() < give_up_s:
        time.sleep(_BEGIN_POLL_S)


def _place(node_id: str, kind: SpareKind) -> str:
    return f"{_NOTES}{node_id}/{kind.full_name}/"


@cache  # each reason once
def _tell(reason: str) -> None:
    logger.warning("%s; starts take longer", reason)
