"""One served model as a router sees it: its replicas, what they hold, and which of them gets a request.

Pure. directory.py keeps the links up to date, flight.py asks; the simulator (bench/simulation/router.py) does both.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from weft.block_hash import block_hashes, root_hash
from weft.v1 import replica_pb2

from router.demand import Demand
from router.model_text import ModelText
from router.policy import Candidates, Policy, ReplicaView, RouteRequest
from router.prefix_index import PrefixIndex, ReplicaId
from router.replica_book import ReplicaBook

logger = logging.getLogger(__name__)

LinkT = TypeVar("LinkT", bound=ReplicaBook)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as membership names it."""

    name: str
    path: str
    max_context: int
    """Longest prompt plus output; 0: not known, and what the replicas say is taken."""
    digest: str = ""
    """Digest of its tokenizer and templates, as in ModelText."""
    starts_on_demand: bool = False
    """Its first replica is started when somebody asks."""
    target_ttft_s: float = 0.0
    """Target of the time to the first token; 0: the router's own setting, as with `target_tpot_s`."""
    target_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(Generic[LinkT]):
    """Where a request goes."""

    link: LinkT
    reason: str
    """A short constant for logs and metrics."""
    num_cached_tokens: int
    """Tokens of the request that the replica should find in its cache."""


class _Limits(NamedTuple):
    """What all replicas of a text take; 0: there were none."""

    max_context: int = 0
    """Longest prompt plus output."""
    vocab_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready(Generic[LinkT]):
    """The replicas that could take a request, looked at once for each change of them."""

    links: tuple[LinkT, ...]
    tripped: tuple[LinkT, ...]
    """Links whose breaker is not closed."""
    text: ModelText
    """The tokenizer that most of them run, the newest of several: requests are made for it."""
    takers: tuple[LinkT, ...]
    """Links whose replicas run that tokenizer."""
    limits: _Limits
    """Of the takers; without one, of the last that there were of this text."""


class Route(Generic[LinkT]):
    """One served model: its links, what they hold, and how one of them is chosen.

    During a rollout its replicas may run two tokenizers. A request goes only where its own one runs.
    """

    def __init__(self, served: ServedModel, policy: Policy) -> None:
        self.name = served.name
        self.policy = policy
        self.index = PrefixIndex()
        self.links: dict[ReplicaId, LinkT] = {}
        self.block_size = 0
        """Tokens in a block; 0 until a replica was connected."""
        self.held: set[object] = set()
        """Requests that were accepted and are to go to a replica: those that wait for their place included, and not
        those that a replica has answered and whose clients have yet to read it."""
        self.num_waiting = 0
        """Requests that were accepted and wait while there is no replica, and have been on none."""
        self.num_finished = 0
        """Requests that were served, without those that began while there was no replica."""
        self.num_on_time = 0
        """Finished requests within both targets, of TTFT and TPOT."""
        self._seen: _Ready[LinkT] | None = None
        """What `_ready` found last; None: something has changed since."""
        self._candidates: Sequence[LinkT] = ()
        self._candidate_ids: Sequence[ReplicaId] = ()
        self._hash_key = b""
        self._last_limits = (ModelText(path=served.path), _Limits())
        self.update(served)

    @property
    def text(self) -> ModelText:
        """The tokenizer that requests are made for now: that of most ready replicas, or of the wanted revision."""
        return self._ready.text

    @property
    def texts(self) -> list[ModelText]:
        """Every tokenizer that requests may need with these replicas, ready or not; some more than once."""
        return [self._served_text, *(self._text_of(link) for link in self.links.values())]

    @property
    def max_context(self) -> int:
        """Longest prompt plus output that each replica of this text takes; 0 while nobody has said it."""
        ready = self._ready
        if self._served_context and not ready.takers:
            return self._served_context
        return ready.limits.max_context or self._served_context

    @property
    def vocab_size(self) -> int | None:
        """Entries of the model's vocabulary; None while no replica of this text has said it."""
        return self._ready.limits.vocab_size or None

    @property
    def num_ready(self) -> int:
        """Replicas that could take a request."""
        return len(self._ready.takers)

    @property
    def demand(self) -> Demand:
        """What clients ask of it, for the controller."""
        return Demand(num_held=len(self.held), num_finished=self.num_finished, num_on_time=self.num_on_time)

    def update(self, served: ServedModel) -> None:
        """Take over what membership says now."""
        self._served_text = ModelText(path=served.path, digest=served.digest)
        self.starts_on_demand = served.starts_on_demand
        self.target_ttft_s, self.target_tpot_s = served.target_ttft_s, served.target_tpot_s
        self._served_context = served.max_context
        self.note_change()

    def come_back(self, served: ServedModel) -> None:
        """Membership names the model again; what was reported of it counts anew."""
        self.num_finished = self.num_on_time = 0
        self.update(served)

    def accept(self, snapshot: replica_pb2.Snapshot) -> bool:
        """Learn from a replica's snapshot; False when its blocks are hashed otherwise than those of the others."""
        scheme = (snapshot.block_size, snapshot.hash_key)
        if scheme == (self.block_size, self._hash_key):
            return True
        if len(self.index):
            logger.warning(
                "replica %s of model %s hashes its blocks otherwise than the others; it gets no request for its cache",
                snapshot.replica_id,
                self.name,
            )
            return False
        self.block_size, self._hash_key = scheme
        return True

    def hash_blocks(self, token_ids: Sequence[int], cache_salt: str) -> list[bytes]:
        """Return the hashes of the full blocks of a prompt, as the replicas name them."""
        if not self.block_size:
            return []
        return block_hashes(root_hash(self._hash_key, cache_salt), token_ids, self.block_size)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A request that was accepted waits for a first replica, for the length of the block."""
        self.num_waiting += 1
        try:
            yield
        finally:
            self.num_waiting -= 1

    def note_served(self, *, is_on_time: bool) -> None:
        """A request that began while there was a replica was served; `is_on_time`: within both targets."""
        self.num_finished += 1
        self.num_on_time += is_on_time

    def add(self, link: LinkT) -> None:
        """Add the link of a new replica."""
        self.links[link.replica_id] = link
        self.note_change()

    def remove(self, replica_id: ReplicaId) -> LinkT:
        """Remove a replica that is no longer the model's, and return its link; it may end the requests that it has."""
        self.note_change()
        return self.links.pop(replica_id)

    def note_change(self) -> None:
        """A link has become ready or unready, or its breaker has opened or closed."""
        self._seen = None

    def find(self, avoided: AbstractSet[ReplicaId], now_s: float, text: ModelText | None = None) -> Sequence[LinkT]:
        """Return the links that take requests made for a text, without the avoided ones, in the order of their coming.

        Where all breakers are closed, none is avoided and the text is that of most links, no link is looked at.
        """
        ready = self._ready
        links = ready.takers if text is None or text.is_like(ready.text) else self._running(text, ready.links)
        barred = {link.replica_id for link in ready.tripped if not link.takes_requests(now_s)} | avoided
        return [link for link in links if link.replica_id not in barred] if barred else links

    @property
    def _ready(self) -> _Ready[LinkT]:
        if self._seen is None:
            links = tuple(link for link in self.links.values() if link.is_ready)
            text = self._text_of_most(links)
            takers = self._running(text, links)
            if takers:
                contexts, sizes = (link.max_context for link in takers), (link.vocab_size for link in takers)
                self._last_limits = text, _Limits(min(contexts), min(sizes))
            last_text, limits = self._last_limits
            self._seen = _Ready(
                links=links,
                tripped=tuple(link for link in links if not link.breaker.is_closed),
                text=text,
                takers=takers,
                limits=limits if last_text.is_like(text) else _Limits(),
            )
        return self._seen

    def _text_of_most(self, links: Sequence[LinkT]) -> ModelText:
        texts = [self._text_of(link) for link in links]
        counts = Counter(text.identity for text in texts)
        return max(texts, key=lambda text: (counts[text.identity], text.revision), default=self._served_text)

    def _running(self, text: ModelText, links: tuple[LinkT, ...]) -> tuple[LinkT, ...]:
        found = tuple(link for link in links if self._text_of(link).is_like(text))
        return links if len(found) == len(links) else found

    def _text_of(self, link: LinkT) -> ModelText:
        return link.text or self._served_text

    def choose(self, links: Sequence[LinkT], hashes: Sequence[bytes], num_tokens: int) -> Chosen[LinkT]:
        """Let the policy choose among links, not none, for a request of so many tokens with these full blocks."""
        request = RouteRequest(num_tokens=num_tokens, block_hashes=hashes)
        choice = self.policy.choose(request, _Views(self, links, hashes))
        num_cached_blocks = self.index.num_cached(choice.replica_id, hashes)
        # A replica computes at least the last token anew.
        num_cached = min(num_cached_blocks * self.block_size, num_tokens - 1)
        return Chosen(link=self.links[choice.replica_id], reason=choice.reason, num_cached_tokens=num_cached)

    def ids(self, links: Sequence[LinkT]) -> Sequence[ReplicaId]:
        """Return the ids of links; the same object for the same links as in the call before."""
        if links is not self._candidates:
            self._candidates, self._candidate_ids = links, tuple(link.replica_id for link in links)
        return self._candidate_ids


class _Views(Candidates):
    """Links as a policy sees them."""

    def __init__(self, route: Route[LinkT], links: Sequence[LinkT], hashes: Sequence[bytes]) -> None:
        self._route = route
        self._links = links
        self._hashes = hashes

    @property
    def ids(self) -> Sequence[ReplicaId]:
        return self._route.ids(self._links)

    def __len__(self) -> int:
        return len(self._links)

    def __getitem__(self, index: Any) -> Any:
        link = self._links[index]
        return self._view(link, self._route.index.num_cached(link.replica_id, self._hashes))

    def __iter__(self) -> Iterator[ReplicaView]:
        cached = self._route.index.match(self._hashes)
        return (self._view(link, cached.get(link.replica_id, 0)) for link in self._links)

    def _view(self, link: ReplicaBook, num_cached_blocks: int) -> ReplicaView:
        return ReplicaView(
            replica_id=link.replica_id,
            num_requests=link.load.num_requests,
            num_pending_tokens=link.load.num_pending_tokens,
            num_cached_blocks=num_cached_blocks,
            block_size=self._route.block_size,
        )
