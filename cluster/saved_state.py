"""What outlives a controller: what is wanted and which groups live, written before each deed, read by its successor.

A group that is named here may not exist yet, but none exists that is not named here. Kept in the
key-value store of Ray's head, which lasts as long as the processes that it tells of.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from cluster.config import ModelSection, ModelSpec, build_section
from cluster.errors import ClusterConfigError, SavedStateError
from cluster.log_reader import LogSource
from cluster.revision_files import RevisionText
from cluster.wanted import WantedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """One group that lives, or is about to."""

    group_id: str
    number: int
    revision: int
    section: ModelSection
    hash_key: bytes
    num_lives: int = 0
    """How many replicas it has had; the last one is `group_id`.`num_lives`."""
    is_placed: bool = True
    """Whether the last one had a place, and so may have processes; also where an older version saved."""
    restarts: int = 0
    node_ids: tuple[str, ...] = ()
    """Ray ids of the nodes where its last replica is or is being started; known before any process of it exists."""
    was_ready: bool = False
    """Whether it was READY at any time."""
    has_ended: bool = False
    """Whether its last replica has ended and left no process; False as well where an older version saved."""
    gave_up: str = ""
    """Why it is not formed again; empty: it is."""
    last_failure: str = ""
    """Why it was formed again last; empty: it never was, or an older version saved."""
    failed_ago_s: float = 0.0
    """Seconds from that failure to `SavedState.saved_s`."""
    is_leaving: bool = False
    left_s: float | None = None
    """Seconds until it is to have left, from `SavedState.saved_s` on. None: it stays, or it was saved by a version that
    did not keep it."""
    text: RevisionText | None = None
    """Files of its revision, as they were when the group was wanted; None: saved by a version that kept none."""

    @property
    def spec(self) -> ModelSpec:
        """What the group runs."""
        return self.section.to_spec(self.hash_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRecord:
    """Where a router listens, so that its next life does as well; 0: any free port, for it has not begun."""

    grpc: int
    http: int | None
    metrics: int | None
    restarts: int = 0
    """How many lives it had after the first one; 0 as well where an older version saved."""
    last_failure: str = ""
    """Why it was started again last; empty: it never was, or an older version saved."""
    failed_ago_s: float = field(default=0.0, compare=False)
    """Seconds from that failure to `SavedState.saved_s`; that they pass is no news to be saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """Everything that a controller must know of the one before it."""

    control_port: int | None = None
    """Port of the controller that routers and operators know; None: nothing was saved yet."""
    metrics_port: int | None = None
    """Port of the controller's metrics that Prometheus knows."""
    routers: dict[str, RouterRecord] = field(default_factory=dict)
    """Routers by their ids. One that is named here may not exist yet."""
    settings: bytes = b""
    """What the service was started with, as started_settings.py tells it; empty: an older version saved."""
    num_restarts: int = 0
    """How often the controller was started again."""
    models: dict[str, WantedModel] = field(default_factory=dict)
    groups: tuple[GroupRecord, ...] = ()
    logs: tuple[LogSource, ...] = ()
    """Logs that were known, of the processes that began or ended last."""
    next_numbers: dict[str, int] = field(default_factory=dict)
    """Number of the next group of each model, served now or earlier: a group id is used once."""
    next_revisions: dict[str, int] = field(default_factory=dict)
    """Revision with which each model that is no longer served begins when it is served again."""
    drained_nodes: tuple[str, ...] = ()
    stop_left_s: float | None = None
    """Seconds until the service is to have stopped, from `saved_s` on. None: it serves on."""
    saved_s: float = 0.0
    """When it was saved, by the wall clock: a successor may run on another machine. Where that clock is set anew, what
    is under way has less time, or all that was left."""

    ended_controller: str | None = None
    """Id of the actor whose service was stopped to its end; a later life of the same one has nothing to do. All else is
    forgotten then, and whoever has another id begins with nothing."""

    @property
    def has_service(self) -> bool:
        """Whether there is a controller before whose service goes on."""
        return self.control_port is not None

    def passed_s(self, now_s: float) -> float:
        """Return how long ago this was saved, at a time of the wall clock; never less than nothing."""
        return max(0.0, now_s - self.saved_s)

    def left_of(self, left_s: float, now_s: float) -> float:
        """Return what is left, at a time of the wall clock, of a time that was left when this was saved; never more."""
        return max(0.0, left_s - self.passed_s(now_s))


def encode(state: SavedState) -> bytes:
    """Return the state as JSON."""
    return msgspec.json.encode(state, enc_hook=_to_json)


def decode(data: bytes) -> SavedState:
    """Return what `encode` was given. Raises SavedStateError."""
    try:
        return msgspec.json.decode(data, type=SavedState, dec_hook=_from_json)
    except (msgspec.DecodeError, ClusterConfigError) as error:
        raise SavedStateError(f"what the one before has saved cannot be read: {error}") from error


def _to_json(value: object) -> dict[str, Any]:
    assert isinstance(value, ModelSection), value
    return value.model_dump(mode="json")


def _from_json(kind: type, value: Any) -> ModelSection:
    assert kind is ModelSection, kind
    return build_section(value)


class RayStateStore:
    """The key-value store of the Ray cluster. Calls block for a round trip to its head."""

    _KEY = b"controller"
    _NAMESPACE = b"weft"

    def load(self) -> bytes | None:
        """Return what was saved last; None: nothing was."""
        data: bytes | None = _kv()._internal_kv_get(self._KEY, namespace=self._NAMESPACE)
        return data

    def save(self, data: bytes) -> None:
        """Keep it; when this returns, a successor would find it."""
        _kv()._internal_kv_put(self._KEY, data, namespace=self._NAMESPACE)


def _kv() -> Any:
    from ray.experimental import internal_kv  # the tests of what is saved need no Ray

    return internal_kv
