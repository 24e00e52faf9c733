"""What this router knows of one replica: its load and its blocks, how it did lately, which of our requests it has.

Pure; time is an argument. Events come in, and whether the replica takes a request can be asked. replica.py takes them
from a stream; the simulator (bench/simulation/router.py) makes them.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum

from grpc import StatusCode

from router.breaker import Breaker
from router.load import LoadEstimate
from router.model_text import ModelText
from router.prefix_index import PrefixIndex, ReplicaId

_REPLICA_FAULTS = frozenset(code.value[0] for code in (StatusCode.INTERNAL, StatusCode.UNKNOWN))
"""Codes of failed requests that speak against the replica."""


class LinkState(StrEnum):
    """Whether a link takes requests."""

    CONNECTING = "connecting"
    READY = "ready"
    CLOSED = "closed"


class ReplicaBook:
    """One replica as one router sees it."""

    def __init__(
        self, replica_id: ReplicaId, *, index: PrefixIndex, breaker: Breaker, on_change: Callable[[], None]
    ) -> None:
        """Know nothing yet; `on_change` is called when it becomes ready or unready, and its breaker opens or closes."""
        self.replica_id = replica_id
        self.load = LoadEstimate()
        self.breaker = breaker
        self.state = LinkState.CONNECTING
        self.is_draining = False
        """The replica says that it goes away."""
        self.text: ModelText | None = None
        """Tokenizer and template revision that the replica runs; None: the model's current one."""
        self.max_context = 0
        """Longest prompt plus output that the replica takes; 0: not known, as with `vocab_size`."""
        self.vocab_size = 0
        self._index = index
        self._on_change = on_change
        self._is_dismissed = False
        self._unanswered: set[str] = set()
        self._is_indexed = False
        self._is_retired = False

    def takes_requests(self, now_s: float) -> bool:
        """Say whether a new request may come here."""
        return self.is_ready and self.breaker.allows(now_s)

    @property
    def is_ready(self) -> bool:
        """Connected, with a snapshot, and not about to leave."""
        return self.state is LinkState.READY and not self.is_leaving and not self._is_retired

    @property
    def is_leaving(self) -> bool:
        """The replica says that it goes away, or the controller does."""
        return self.is_draining or self._is_dismissed

    def note_snapshot(self, hashes: Iterable[bytes] | None) -> None:
        """The replica's first frame begins: these blocks are there; None: they are hashed otherwise than elsewhere."""
        self._is_indexed = hashes is not None and not self._is_retired
        if hashes is not None and self._is_indexed:
            self._index.store(self.replica_id, hashes)

    def note_ready(self) -> None:
        """The first frame was taken."""
        self.state = LinkState.READY
        self._on_change()

    def note_dismissed(self, is_dismissed: bool) -> None:
        """The controller says whether the replica goes away."""
        if is_dismissed != self._is_dismissed:
            self._is_dismissed = is_dismissed
            self._on_change()

    def note_submit(self, request_id: str, num_pending_tokens: int, now_s: float) -> None:
        """A request was sent."""
        self._unanswered.add(request_id)
        self.load.submit(request_id, num_pending_tokens)
        self.breaker.begin(now_s)

    def note_abort(self, request_id: str) -> None:
        """A request that is there was taken back."""
        if request_id in self._unanswered:
            self.breaker.release()
        self.note_end(request_id)

    def note_blocks(self, stored: Iterable[bytes], evicted: Iterable[bytes]) -> None:
        """A frame says what the cache of the replica has gained and lost."""
        if self._is_indexed:
            self._index.store(self.replica_id, stored)
            self._index.evict(self.replica_id, evicted)

    def note_output(self, request_id: str, failed_code: int | None, now_s: float) -> None:
        """A frame has an output of a request that is there; `failed_code`: it is a failure with this status."""
        was_closed = self.breaker.is_closed
        if request_id in self._unanswered:
            self._unanswered.remove(request_id)
            self.load.answer(request_id)
            if failed_code is None:
                self.breaker.succeed()
        if failed_code in _REPLICA_FAULTS:
            self.breaker.fail(now_s)
        elif failed_code is not None:
            self.breaker.release()  # the request's fault, a full queue, or a drain
        if self.breaker.is_closed != was_closed:
            self._on_change()

    def note_end(self, request_id: str) -> None:
        """A request that is there has ended."""
        self._unanswered.discard(request_id)
        self.load.end(request_id)

    def note_load(self, num_requests: int, num_pending_tokens: int, *, is_draining: bool) -> None:
        """A frame says how much the replica has to do, after its outputs."""
        self.load.report(num_requests, num_pending_tokens)
        if is_draining != self.is_draining:
            self.is_draining = is_draining
            self._on_change()

    def note_disconnected(self) -> None:
        """There is no stream: what the replica held and had to do is forgotten."""
        was_ready = self.state is LinkState.READY
        self.state = LinkState.CONNECTING
        self.is_draining = False
        self._leave_index()
        self.load = LoadEstimate()
        self._unanswered.clear()
        if was_ready:
            self._on_change()

    def note_retired(self) -> None:
        """Membership no longer names the replica; it ends the requests that it has."""
        self._is_retired = True
        self._leave_index()  # a new link may join under the same id before this one ends

    def _leave_index(self) -> None:
        if self._is_indexed:
            self._index.drop(self.replica_id)
            self._is_indexed = False
