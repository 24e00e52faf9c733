"""Which replicas one request may go to next, and when it has looked for long enough. Pure; time is an argument.

Remembers what became of the request so far: the replicas that broke under it, are full or about to leave. Which of the
candidates gets it, the model's policy says (route.py); flight.py does both, and so does the simulator.
"""

from collections.abc import Callable, Sequence

from router.config import FailoverConfig
from router.errors import NoReplicaError, OverloadedError, ReplicaFailedError, RouterError
from router.model_text import ModelText
from router.prefix_index import ReplicaId
from router.route import LinkT, Route

_POLL_S = 0.25
"""How often a waiting request looks again without being woken: breakers half-open and full queues drain silently."""


class Placing:
    """The places of one request, over its whole life."""

    def __init__(self, config: FailoverConfig, model: str, retry_after_s: Callable[[], float]) -> None:
        """Begin with a request that has been nowhere; `retry_after_s` is the hint for one that is refused."""
        self._config = config
        self._model = model
        self._retry_after_s = retry_after_s
        self._has_begun = False
        self._breaks: list[str] = []
        self._full: set[ReplicaId] = set()
        self._leaving: set[ReplicaId] = set()
        self._left: set[ReplicaId] = set()
        self._seeking_since_s: float | None = None
        """When the wait for a replica that gives tokens began; one that breaks begins it anew, and so does each that
        leaves, once. None: there is none."""

    @property
    def has_begun(self) -> bool:
        """A replica has worked on it."""
        return self._has_begun

    @property
    def _limit_s(self) -> float:
        return self._config.failover_wait_s if self.has_begun else self._config.new_request_wait_s

    def seek(self, now_s: float) -> None:
        """Begin to look for a replica, if it does not already."""
        if self._seeking_since_s is None:
            self._seeking_since_s = now_s

    def seek_anew(self, now_s: float) -> None:
        """Begin the wait for a replica now, whether there was one or not."""
        self._seeking_since_s = now_s

    def find(self, route: Route[LinkT], now_s: float, text: ModelText | None = None) -> Sequence[LinkT]:
        """Return those of the model's replicas that the request may go to now; none: wait for `wait_s`, ask again.

        `text` is what the request was made for; None: what requests are made for now.

        Raises:
            OverloadedError: all are full, and it has not begun.
            NoReplicaError, ReplicaFailedError: none took it for too long.
        """
        found = route.find(self._full | self._leaving, now_s, text)
        if found:  # also past the limit: one that waits for nothing takes what is there
            return found
        if self._full and not self.has_begun:
            raise OverloadedError(
                f"all replicas of model {self._model!r} are full", retry_after_s=self._retry_after_s()
            )
        if now_s >= self._give_up_s:
            has_own_text = text is None or text.is_like(route.text)
            raise self.no_replica_error(self._limit_s, which="" if has_own_text else " with the request's tokenizer")
        self._full.clear()
        self._leaving.clear()
        return ()

    def wait_s(self, now_s: float) -> float:
        """Return how long to wait before the next look, unless something changes before."""
        return min(self._give_up_s - now_s, _POLL_S)

    def note_tokens(self) -> None:
        """Its replica gives tokens."""
        self._has_begun = True
        self._seeking_since_s = None

    def note_full(self, replica_id: ReplicaId) -> None:
        """A replica refused it because too many wait there."""
        self._full.add(replica_id)

    def note_leaving(self, replica_id: ReplicaId) -> None:
        """A replica that goes away refused it or gave it back, perhaps after a time in its queue that is longer than
        the wait for the next one: that begins anew, but not again for the same replica, and so not for ever."""
        self._leaving.add(replica_id)
        if replica_id not in self._left:
            self._left.add(replica_id)
            self._seeking_since_s = None

    def note_loss(self, replica_id: ReplicaId, reason: str, *, was_leaving: bool) -> None:
        """The stream to its replica ended. A replica that had said that it leaves has not broken, and any number may
        leave under one request (see `note_leaving`). After a break the wait begins anew.

        Raises:
            ReplicaFailedError: too many broke.
        """
        self._has_begun = True
        if was_leaving:
            self.note_leaving(replica_id)
            return
        self._breaks.append(f"{replica_id} ({reason})")
        if len(self._breaks) >= self._config.max_attempts:
            raise ReplicaFailedError(
                f"{len(self._breaks)} replicas broke under the request; allowed: fewer than "
                f"{self._config.max_attempts}: {', '.join(self._breaks)}"
            )
        self._seeking_since_s = None

    def no_replica_error(self, waited_s: float, *, which: str = "") -> RouterError:
        """Return what to raise after such a wait for a replica, or for one of which something more is said."""
        text = f"no replica of model {self._model!r}{which} was ready for {waited_s:g} s"
        if self._breaks:
            return ReplicaFailedError(f"{text}, after the request's replicas broke: {', '.join(self._breaks)}")
        return NoReplicaError(text)

    @property
    def _give_up_s(self) -> float:
        assert self._seeking_since_s is not None, "it does not look for a replica"
        return self._seeking_since_s + self._limit_s
