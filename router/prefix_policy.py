"""The prefix-affinity policy: a request goes where most of its prompt is cached, unless another would begin sooner.

The work that stands between a request and its first token on a replica, in tokens still to be computed:

    its own tokens that are not cached there
  + tokens of other requests still to be computed there
  + request_cost_tokens for each request there, running or waiting

The least work wins, so affinity gives way to load step by step and not at a threshold. Two more rules:

- *Bounded load.* A replica with more than load_factor x mean + load_slack requests is no candidate, whatever it holds:
  a system prompt that all requests share pulls them together only so far. Affinity still decides among the others.
  (Consistent hashing with bounded loads, Mirrokni et al., arXiv:1608.01350.)
- *A home for cold prefixes.* While nobody holds the first blocks, the replica that wins a rendezvous hash on them gets
  a credit: equal prompts that arrive together meet there, also when they come through other routers, which find the
  same home without talking.
"""

import random
from collections.abc import Sequence
from hashlib import blake2b

from router.config import PolicyName, PrefixPolicyConfig
from router.policy import Choice, LeastLoaded, Policy, PowerOfTwo, ReplicaView, RoundRobin, RouteRequest
from router.prefix_index import ReplicaId


class PrefixAffinity:
    """Least work, counting what the caches save."""

    def __init__(self, config: PrefixPolicyConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def choose(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> Choice:
        """Return the candidate with the least work; ties are drawn."""
        views = list(replicas)
        home = self._home(request, views)
        candidates = self._within_bound(views)
        work = self._work(request, candidates, home)
        least = min(work)
        chosen = self._rng.choice([view for view, tokens in zip(candidates, work, strict=True) if tokens == least])
        return Choice(replica_id=chosen.replica_id, reason=self._reason(chosen, views, home))

    def _within_bound(self, replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
        mean = sum(replica.num_requests for replica in replicas) / len(replicas)
        bound = self._config.load_factor * mean + self._config.load_slack
        return [replica for replica in replicas if replica.num_requests <= bound]

    def _home(self, request: RouteRequest, replicas: Sequence[ReplicaView]) -> ReplicaId | None:
        """Return where a prefix that nobody holds belongs; None when somebody holds it or there is no full block."""
        first = request.block_hashes[: self._config.home_blocks]
        if not first or any(replica.num_cached_blocks >= len(first) for replica in replicas):
            return None
        return rendezvous(first[-1], [replica.replica_id for replica in replicas])

    def _work(self, request: RouteRequest, replicas: Sequence[ReplicaView], home: ReplicaId | None) -> list[int]:
        num_tokens, cost_tokens = request.num_tokens, self._config.request_cost_tokens
        work = [
            num_tokens
            - replica.num_cached_blocks * replica.block_size
            + replica.num_pending_tokens
            + cost_tokens * replica.num_requests
            for replica in replicas
        ]
        if home is not None:
            for index, replica in enumerate(replicas):
                if replica.replica_id == home:
                    num_full_tokens = len(request.block_hashes) * replica.block_size
                    work[index] -= min(self._config.cold_credit_tokens, num_full_tokens)
        return work

    @staticmethod
    def _reason(chosen: ReplicaView, replicas: Sequence[ReplicaView], home: ReplicaId | None) -> str:
        if chosen.replica_id == home:
            return "home"
        is_cached = chosen.num_cached_blocks > 0
        if is_cached and chosen.num_cached_blocks == max(replica.num_cached_blocks for replica in replicas):
            return "prefix"
        return "load"


def rendezvous(key: bytes, replica_ids: Sequence[ReplicaId]) -> ReplicaId:
    """Return the replica with the highest hash of (key, id): all agree, and one that leaves moves only its own keys."""
    return max(replica_ids, key=lambda replica_id: blake2b(replica_id.encode(), key=key, digest_size=8).digest())


def make_policy(name: PolicyName, config: PrefixPolicyConfig, rng: random.Random) -> Policy:
    """Return a new policy of this name, for one model."""
    match name:
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
        case PolicyName.LEAST_LOADED:
            return LeastLoaded(rng)
        case PolicyName.POWER_OF_TWO:
            return PowerOfTwo(rng)
        case PolicyName.PREFIX_AFFINITY:
            return PrefixAffinity(config, rng)
