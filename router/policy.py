"""Choosing a replica: the contract of all policies, and those that look only at load.

Policies are pure: what they know comes as arguments, the random generator from their maker. The one that looks at the
caches is in prefix_policy.py; who is a candidate at all (ready, not draining, breaker closed), route.py says.
"""

import random
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.prefix_index import ReplicaId


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRequest:
    """What a policy may look at in a request."""

    num_tokens: int
    """Prompt tokens, and those generated already when the request moves."""
    block_hashes: Sequence[bytes] = ()
    """Hashes of the full blocks of those tokens, in order."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A candidate as a policy sees it. A Struct, for some policies look at each candidate of each request."""

    replica_id: ReplicaId
    num_requests: int = 0
    """Requests running and waiting there, with those this router has sent and not yet seen in a frame."""
    num_pending_tokens: int = 0
    """Tokens still to be computed there, of prompts and of outputs that are resumed; counted as `num_requests` is."""
    num_cached_blocks: int = 0
    """Leading blocks of the request that the replica holds."""
    block_size: int = 1
    """Tokens in a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a request goes."""

    replica_id: ReplicaId
    reason: str
    """A short constant for logs and metrics."""


class Candidates(Sequence[ReplicaView]):
    """Candidates that are looked at when a policy asks for them: one by one, or cheaper all at once by iterating."""

    @property
    @abstractmethod
    def ids(self) -> Sequence[ReplicaId]:
        """Ids of the candidates, in their order; the same object as long as the candidates are the same."""


class Policy(Protocol):
    """Chooses among candidates. May keep a little state (a counter, a generator), never a reference to a replica."""

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        """Return one of `replicas`, which is not empty."""


class RoundRobin:
    """Each replica in its turn, in the order of their ids."""

    def __init__(self) -> None:
        self._last: ReplicaId | None = None
        self._ids: Sequence[ReplicaId] = ()
        self._sorted_ids: list[ReplicaId] = []

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        """Return the first id after the one chosen last, so that joining and leaving replicas disturb nothing."""
        ids = replicas.ids if isinstance(replicas, Candidates) else [replica.replica_id for replica in replicas]
        if ids is not self._ids:
            self._ids, self._sorted_ids = ids, sorted(ids)
        turn = 0 if self._last is None else bisect_right(self._sorted_ids, self._last)
        self._last = self._sorted_ids[turn % len(self._sorted_ids)]
        return Choice(replica_id=self._last, reason="turn")


class LeastLoaded:
    """The replica with the fewest requests, then the fewest pending tokens; ties are drawn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        """Look at every candidate."""
        views = list(replicas)
        loads = [_load(view) for view in views]
        least = min(loads)
        chosen = self._rng.choice([view for view, load in zip(views, loads, strict=True) if load == least])
        return Choice(replica_id=chosen.replica_id, reason="load")


class PowerOfTwo:
    """The less loaded of two candidates drawn at random: near the best, and many routers do not herd.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        """Look at two candidates, or at the only one."""
        drawn = self._rng.sample(range(len(replicas)), min(2, len(replicas)))
        return Choice(replica_id=min((replicas[i] for i in drawn), key=_load).replica_id, reason="load")


def _load(replica: ReplicaView) -> tuple[int, int]:
    return replica.num_requests, replica.num_pending_tokens
