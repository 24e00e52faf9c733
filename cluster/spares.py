"""Worker processes that Ray starts ahead, so that who comes next finds Python and everything imported there: spares.

A group that is READY leaves one for each of its ranks on their nodes, a service that stops one for a controller and one
for a router. `prepare`, which such a process runs before it takes work, imports what is needed, and notes in Ray's
store that a spare waits. Whoever creates actors looks for these notes and asks for processes of that kind; Ray then
hands out those that wait. The kind is told by environment variables, and one of them by the code: a spare never becomes
a rank of other code than it has imported; those of other code end when new ones are left. What goes wrong (a spare has
died, say) makes a start slower, and nothing else.
"""

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray

from cluster.errors import SpareError
from cluster.imports import import_for_good
from cluster.ray_prestart import drop_notes, has_note, hook_variable, leave_note, list_notes, start_ahead

logger = logging.getLogger(__name__)

_OWN_PACKAGES = ("cluster", "parallel", "router", "weft", "workers")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_KIND = "WEFT_SPARE"
_SERVICE = "service"
_NOTES = "spare/"
_MARGIN_S = 10.0
"""A spare that is about to end is not counted: whoever counts it asks for it a moment later."""
_LOOK_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareKind:
    """What a spare can become."""

    num_threads: int | None = None
    """A rank with so many threads; None: a controller or a router."""
    lifetime_s: float
    """After which it ends if nobody has taken it."""

    @property
    def name(self) -> str:
        """Another one for other code, threads or lifetime."""
        return f"{code_id()}-{self.num_threads or _SERVICE}-{self.lifetime_s:g}"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of its process, beside those of Ray's node. Raises SpareError."""
        variables = engine_variables(self.num_threads) if self.num_threads else {}
        variables |= {_KIND: self.name, hook_variable(): f"{__name__}.{prepare.__name__}"}
        if roots := _roots():
            variables["PYTHONPATH"] = os.pathsep.join(roots)
        return variables


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wait:
    """What a spare knows of itself."""

    note: str
    since_s: float
    is_over: threading.Event


_wait: _Wait | None = None


def engine_variables(num_threads: int) -> dict[str, str]:
    """Return the environment variables of a rank that are read once, when torch and numpy are imported."""
    # Threads without work leave their cores to the router and the clients on them (docs/performance.md).
    wait_policy = os.environ.get("OMP_WAIT_POLICY", "passive")
    return dict.fromkeys(_THREADS, str(num_threads)) | {"OMP_WAIT_POLICY": wait_policy}


def spare_options(node_id: str, kind: SpareKind, *, count: int = 1) -> dict[str, Any]:
    """Return the options by which so many actors on a node become spares that wait there; none if these are fewer.

    A controller finds ranks only if it was a spare itself; its router has its environment, and needs no options. Blocks
    for a round trip to Ray's head.
    """
    is_child = kind.num_threads is not None
    if is_child and not os.environ.get(_KIND):
        return {}
    try:
        notes = list_notes(f"{_NOTES}{node_id}/")  # where there are none, the name of the kind is not needed
        own = [note for note in notes if note.startswith(_place(node_id, kind.name))]
        now_s = time.time()
        if sum(float(note.rpartition("/")[2]) > now_s for note in own) >= count:
            return {"runtime_env": {"env_vars": kind.variables}}
        if is_child:  # else it would have the environment of this process
            return {"runtime_env": {"env_vars": {_KIND: "", hook_variable(): ""}}}
    except SpareError as error:
        _tell(str(error))
    return {}


def leave_spares(node_id: str, kind: SpareKind, *, count: int) -> None:
    """Let Ray start so many on a node, and those of other code end; what goes wrong is only logged.

    Blocks for a moment.
    """
    try:
        _end_others()
        has_parent = kind.num_threads is not None
        start_ahead(node_id, count, keep_s=kind.lifetime_s, variables=kind.variables, has_parent=has_parent)
    except SpareError as error:
        _tell(str(error))


def prepare() -> None:
    """Make the process that Ray has just started a spare. Raises nothing, for Ray would end the process."""
    try:
        code, role, lifetime = os.environ[_KIND].split("-")
        import_for_good(*(("cluster.controller", "router.app") if role == _SERVICE else ("cluster.leader",)))
        if code != code_id():
            logger.warning("this process is no spare: its code is not the one that was asked for")
            return
        place = _place(ray.get_runtime_context().get_node_id(), os.environ[_KIND])
        if ray.get_runtime_context().get_job_id() == ray.JobID.nil().hex():
            _begin_to_wait(place, float(lifetime))
        else:  # Ray has started it for an actor that is there: those that were said to wait are gone
            drop_notes(place)
    except Exception:
        logger.exception("this process is no spare")


def take_spare() -> None:
    """Note that this process has got work, whether it was a spare or not. Blocks for a round trip if it was."""
    global _wait
    wait, _wait = _wait, None
    if wait is None:
        return
    wait.is_over.set()
    try:
        drop_notes(wait.note)
    except SpareError as error:
        _tell(str(error))


@cache
def code_id() -> str:
    """Return what tells the code that is here from any other: what our files say, and which packages are installed.

    And where they are, which a spare is told (`_roots`): a checkout and its copy are two.
    """
    digest = sha256(os.pathsep.join(_roots()).encode())
    for package in _OWN_PACKAGES:
        for folder in _folders(package):
            for file in sorted(folder.rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    for place in sorted({folder.parent for package in ("ray", "torch") for folder in _folders(package)}):
        digest.update("\n".join(sorted(info.name for info in place.glob("*.dist-info"))).encode())
    return digest.hexdigest()[:16]


def _begin_to_wait(place: str, lifetime_s: float) -> None:
    global _wait
    note = f"{place}{os.getpid()}/{time.time() + lifetime_s - _MARGIN_S:.0f}"
    _wait = _Wait(note=note, since_s=time.monotonic(), is_over=threading.Event())
    leave_note(note)
    threading.Thread(target=_end_unless_taken, args=(_wait, lifetime_s), daemon=True, name="spare").start()


def _end_others() -> None:
    for note in list_notes(_NOTES):
        _, _, kind, *_ = note.split("/")
        if not kind.startswith(code_id()):
            drop_notes(note)


def _end_unless_taken(wait: _Wait, lifetime_s: float) -> None:
    """End this process when its time is over, or somebody has dropped its note."""
    try:
        while (left_s := wait.since_s + lifetime_s - time.monotonic()) > 0 and has_note(wait.note):
            if wait.is_over.wait(min(left_s, _LOOK_S)):
                return
        drop_notes(wait.note)
    except SpareError as error:
        _tell(str(error))
    if not wait.is_over.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _place(node_id: str, kind: str) -> str:
    return f"{_NOTES}{node_id}/{kind}/"


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]


def _roots() -> list[str]:
    """Where our packages lie, if that is no place where Python looks by itself, as with a checkout."""
    roots = [folder.parent for package in _OWN_PACKAGES for folder in _folders(package)]
    return [str(root) for root in dict.fromkeys(roots) if root.name not in ("site-packages", "dist-packages")]


@cache  # each reason once
def _tell(reason: str) -> None:
    logger.warning("%s; starts take longer", reason)
