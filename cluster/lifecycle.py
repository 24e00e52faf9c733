"""The life of one replica group as a pure state machine; replica_group.py performs what it decides.

    PENDING ──placed──> STARTING ──ready──> READY ──drain──> DRAINING ──stopped──> STOPPED
       ^  \\               │  │               │
       │   └───────failed──┴──│───────────────┘      (a backoff, then PENDING again)
       └──────────────────────┘
                              └─ refused, or never READY in `max_start_attempts` ──> FAILED

The clock is an argument. A group keeps its id over all of its formations; each formation is a new replica.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

_MAX_DOUBLINGS = 32  # of a second, more than a century; after 1,023 the number would be too large for a float


class GroupState(StrEnum):
    """Where a group stands."""

    PENDING = "pending"
    """Waits: for room in the cluster, or for the end of its backoff."""
    STARTING = "starting"
    """Its processes run and load the model."""
    READY = "ready"
    """Takes requests."""
    DRAINING = "draining"
    """Finishes what it has and takes nothing new."""
    STOPPED = "stopped"
    """Ended because somebody asked for it."""
    FAILED = "failed"
    """Given up: it cannot start as it is configured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """When a group that failed is formed again."""

    first_delay_s: float = 1.0
    """Wait before the second attempt; the first one is made at once. It doubles with each failure in a row."""
    max_delay_s: float = 30.0
    stable_after_s: float = 30.0
    """A group that was READY for this long has its earlier failures forgotten."""
    max_start_attempts: int = 3
    """A group that was never READY is given up after so many failures in a row."""

    def delay_s(self, failures: int) -> float:
        """Return the wait after this many failures in a row."""
        if failures <= 1:
            return 0.0
        num_doublings = min(failures - 2, _MAX_DOUBLINGS)
        return min(self.max_delay_s, self.first_delay_s * 2.0**num_doublings)


class Failure(NamedTuple):
    """Why a formation ended."""

    reason: str
    at_s: float


class Lifecycle:
    """State of one group over all of its formations. Events that cannot happen in a state are our own bugs: assert."""

    def __init__(
        self,
        policy: RestartPolicy,
        now_s: float,
        *,
        restarts: int = 0,
        was_ready: bool = False,
        last_failure: Failure | None = None,
        gave_up: str = "",
    ) -> None:
        """Begin, or go on from what a former controller knew; `gave_up`: why it is FAILED, empty: it is not."""
        self._policy = policy
        self._failures = 0
        self._not_before_s = now_s
        self.state = GroupState.FAILED if gave_up else GroupState.PENDING
        self.since_s = now_s
        self.detail = gave_up or "waits for its turn"
        self.restarts = restarts
        """Formations after the first one."""
        self.last_failure = last_failure
        """That after which it was formed again last; None: there was none."""
        self.was_ready = was_ready
        """Whether it was READY at any time, also under a former controller: then it is never given up."""

    @property
    def is_over(self) -> bool:
        """No further formation will be made."""
        return self.state in (GroupState.STOPPED, GroupState.FAILED)

    def may_form(self, now_s: float) -> bool:
        """Return whether a formation should be begun now."""
        return self.state is GroupState.PENDING and now_s >= self._not_before_s

    def wait(self, reason: str) -> None:
        """Tell why a PENDING group does not start yet."""
        assert self.state is GroupState.PENDING, self.state
        self.detail = reason

    def placed(self, now_s: float) -> None:
        """Room was found; the processes are being started."""
        assert self.state is GroupState.PENDING, self.state
        self._enter(GroupState.STARTING, now_s, "starting processes")

    def starting(self, detail: str) -> None:
        """Tell how far a STARTING group is."""
        assert self.state is GroupState.STARTING, self.state
        self.detail = detail

    def ready(self, now_s: float) -> None:
        """The group takes requests."""
        assert self.state is GroupState.STARTING, self.state
        self.was_ready = True
        self._enter(GroupState.READY, now_s, "")

    def failed(self, reason: str, now_s: float) -> None:
        """A rank died, hung or could not start: form again after the backoff, or give up."""
        if self.is_over:
            return
        if self.state is GroupState.DRAINING:
            self._enter(GroupState.STOPPED, now_s, reason)
            return
        if self.state is GroupState.READY and now_s - self.since_s >= self._policy.stable_after_s:
            self._failures = 0
        self._failures += 1
        if not self.was_ready and self._failures >= self._policy.max_start_attempts:
            self._enter(GroupState.FAILED, now_s, f"gave up after {self._failures} attempts: {reason}")
            return
        delay_s = self._policy.delay_s(self._failures)
        self._not_before_s = now_s + delay_s
        self.restarts += 1
        self.last_failure = Failure(reason, now_s)
        self._enter(GroupState.PENDING, now_s, f"starts again in {delay_s:.0f} s: {reason}" if delay_s else reason)

    def refused(self, reason: str, now_s: float) -> None:
        """The configuration or the model cannot work: another attempt would end the same way."""
        if not self.is_over:
            self._enter(GroupState.FAILED, now_s, reason)

    def drain(self, now_s: float) -> None:
        """Take nothing new; a group that has nothing yet is stopped at once."""
        match self.state:
            case GroupState.READY:
                self._enter(GroupState.DRAINING, now_s, "finishes its requests")
            case GroupState.PENDING | GroupState.STARTING:
                self._enter(GroupState.STOPPED, now_s, "")
            case GroupState.DRAINING | GroupState.STOPPED | GroupState.FAILED:
                pass

    def stopped(self, now_s: float) -> None:
        """The processes are gone, on request."""
        if not self.is_over:
            self._enter(GroupState.STOPPED, now_s, "")

    def _enter(self, state: GroupState, now_s: float, detail: str) -> None:
        self.state = state
        self.since_s = now_s
        self.detail = detail
