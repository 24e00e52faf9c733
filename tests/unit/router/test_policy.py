"""Policies with scripted replicas: who is chosen, and how loads and caches are weighed."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest

from router.config import PolicyName, PrefixPolicyConfig
from router.policy import LeastLoaded, PowerOfTwo, ReplicaView, RoundRobin, RouteRequest
from router.prefix_index import ReplicaId
from router.prefix_policy import PrefixAffinity, make_policy, rendezvous

BLOCK = 16


def view(name: str, requests: int = 0, pending: int = 0, cached: int = 0) -> ReplicaView:
    return ReplicaView(
        replica_id=ReplicaId(name),
        num_requests=requests,
        num_pending_tokens=pending,
        num_cached_blocks=cached,
        block_size=BLOCK,
    )


def request(num_tokens: int, key: int = 0) -> RouteRequest:
    hashes = [key.to_bytes(8, "big") + i.to_bytes(8, "big") for i in range(num_tokens // BLOCK)]
    return RouteRequest(num_tokens=num_tokens, block_hashes=hashes)


def affinity(**settings: float) -> PrefixAffinity:
    return PrefixAffinity(PrefixPolicyConfig(**settings), random.Random(0))  # type: ignore[arg-type]


def test_round_robin_takes_turns_and_survives_changes() -> None:
    policy = RoundRobin()
    views = [view("c"), view("a"), view("b")]
    assert [policy.choose(request(1), views).replica_id for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose(request(1), [view("c"), view("a")]).replica_id == "c", "b left: its turn passes to the next"


def test_least_loaded_counts_requests_then_pending_tokens() -> None:
    policy = LeastLoaded(random.Random(0))
    assert policy.choose(request(1), [view("a", 2), view("b", 1, 900), view("c", 1, 100)]).replica_id == "c"
    ties = Counter(policy.choose(request(1), [view("a"), view("b")]).replica_id for _ in range(100))
    assert 25 < ties[ReplicaId("a")] < 75


def test_power_of_two_never_takes_the_most_loaded_and_spreads() -> None:
    policy = PowerOfTwo(random.Random(0))
    views = [view("a", 1), view("b", 5), view("c", 9)]
    chosen: Counter[str] = Counter(policy.choose(request(1), views).replica_id for _ in range(300))
    assert chosen["c"] == 0
    assert chosen["a"] > chosen["b"] > 50
    assert policy.choose(request(1), [view("a", 7)]).replica_id == "a"


def test_affinity_goes_where_the_prefix_is() -> None:
    choice = affinity().choose(request(1000), [view("a", 1), view("b", 2, cached=50), view("c", 0)])
    assert (choice.replica_id, choice.reason) == ("b", "prefix")


def test_affinity_prefers_the_longest_prefix() -> None:
    choice = affinity().choose(request(1000), [view("a", cached=10), view("b", cached=40), view("c", cached=39)])
    assert choice.replica_id == "b"


def test_affinity_gives_way_when_another_would_begin_sooner() -> None:
    views = [view("a", 1, pending=900, cached=50), view("b", 1, pending=0)]
    assert affinity().choose(request(1000), views).replica_id == "b"
    views = [view("a", 8, cached=10), view("b", 0)]
    choice = affinity().choose(request(1000), views)
    assert (choice.replica_id, choice.reason) == ("b", "load")


def test_overloaded_replica_gets_nothing_for_its_cache_and_affinity_holds_among_the_others() -> None:
    policy = affinity(request_cost_tokens=0)
    views = [view("a", 40, cached=60), view("b", 2, cached=50), view("c", 0), view("d", 0)]
    assert policy.choose(request(1000), views).replica_id == "b"
    views = [view("a", 40, cached=60), view("b", 20, cached=50), view("c", 20), view("d", 20)]
    assert policy.choose(request(1000), views).replica_id == "a", "others have half as many: that is not overloaded"


def test_cold_prefix_has_one_home_for_all_routers() -> None:
    names = ["a", "b", "c", "d"]
    first = affinity()
    second = PrefixAffinity(PrefixPolicyConfig(), random.Random(99))
    homes: Counter[str] = Counter()
    for key in range(200):
        choice = first.choose(request(200, key), [view(name) for name in names])
        other = second.choose(request(300, key), [view(name) for name in reversed(names)])
        assert choice == other, "the same first blocks, another length, another router"
        assert choice.reason == "home"
        homes[choice.replica_id] += 1
    assert min(homes[name] for name in names) > 25, "homes spread over all replicas"


def test_busy_home_is_passed_over() -> None:
    names = [ReplicaId("a"), ReplicaId("b")]
    asked = request(200)
    home = rendezvous(asked.block_hashes[3], names)
    views = [view(name, requests=9 if name == home else 0) for name in names]
    assert affinity().choose(asked, views).replica_id != home


def test_leaving_replica_moves_only_its_own_homes() -> None:
    names = [ReplicaId(name) for name in "abcde"]
    keys = [i.to_bytes(16, "big") for i in range(300)]
    before = {key: rendezvous(key, names) for key in keys}
    after = {key: rendezvous(key, names[:-1]) for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != "e")


class Cluster:
    """Replicas that hold what they were sent, and whose requests stay for a number of arrivals."""

    def __init__(self, names: Sequence[str], *, stay: int) -> None:
        self.names = names
        self.stay = stay
        self.running: list[tuple[int, str]] = []
        self.caches: dict[str, set[bytes]] = {name: set() for name in names}
        self.most = 0

    def views(self, asked: RouteRequest) -> list[ReplicaView]:
        loads = Counter(name for _, name in self.running)
        views = []
        for name in self.names:
            cached = 0
            while cached < len(asked.block_hashes) and asked.block_hashes[cached] in self.caches[name]:
                cached += 1
            views.append(view(name, loads[name], cached=cached))
        return views

    def send(self, now: int, name: str, asked: RouteRequest) -> None:
        self.running = [(start, where) for start, where in self.running if now - start < self.stay]
        self.running.append((now, name))
        self.caches[name].update(asked.block_hashes)
        self.most = max(self.most, *Counter(where for _, where in self.running).values())


def test_common_system_prompt_overloads_nobody() -> None:
    policy, cluster = affinity(), Cluster("abcd", stay=100)
    shared = request(8000).block_hashes
    for now in range(1000):
        own = (now + 1).to_bytes(16, "big")
        asked = RouteRequest(num_tokens=8016, block_hashes=[*shared, own])
        cluster.send(now, policy.choose(asked, cluster.views(asked)).replica_id, asked)
    assert cluster.most <= 1.5 * 25 + 8 + 1, "the mean is 25 requests a replica"


def test_conversations_stay_where_they_began() -> None:
    policy, cluster = affinity(), Cluster("abcd", stay=20)
    where: dict[int, list[str]] = {}
    for now in range(400):
        conversation, turn = now % 40, now // 40
        asked = request(400 + 160 * turn, key=conversation)
        name = policy.choose(asked, cluster.views(asked)).replica_id
        where.setdefault(conversation, []).append(name)
        cluster.send(now, name, asked)
    moves = sum(a != b for names in where.values() for a, b in pairwise(names))
    assert moves <= 0.1 * 360
    firsts = Counter(names[0] for names in where.values())
    assert min(firsts[name] for name in cluster.names) >= 4


@pytest.mark.parametrize("name", list(PolicyName))
def test_every_policy_can_be_made_and_chooses_a_candidate(name: PolicyName) -> None:
    policy = make_policy(name, PrefixPolicyConfig(), random.Random(0))
    for num_tokens in (1, 15, 16, 1000):
        views = [view("a", 3), view("b", 1, 50, cached=1)]
        assert policy.choose(request(num_tokens), views).replica_id in ("a", "b")


def test_without_slack_equal_loads_are_all_candidates() -> None:
    policy = affinity(load_factor=1, load_slack=0)
    assert policy.choose(request(1), [view("a", 2), view("b", 2)]).replica_id in ("a", "b")


def test_a_prefix_of_which_somebody_holds_less_than_decides_its_home_is_cold() -> None:
    names = [ReplicaId("a"), ReplicaId("b")]
    asked = request(200)
    home = rendezvous(asked.block_hashes[3], names)
    views = [view(name, cached=0 if name == home else 3) for name in names]
    choice = affinity().choose(asked, views)
    assert (choice.replica_id, choice.reason) == (home, "home")


def test_a_prefix_of_which_somebody_holds_what_decides_its_home_goes_there() -> None:
    names = [ReplicaId("a"), ReplicaId("b")]
    asked = request(200)
    home = rendezvous(asked.block_hashes[3], names)
    views = [view(name, cached=0 if name == home else 4) for name in names]
    choice = affinity().choose(asked, views)
    assert choice.reason == "prefix"
    assert choice.replica_id != home


def test_only_the_longest_prefix_is_a_reason() -> None:
    views = [view("a", 8, cached=20), view("b", cached=10)]
    choice = affinity().choose(request(1000), views)
    assert (choice.replica_id, choice.reason) == ("b", "load")
    assert affinity().choose(request(15), [view("a")]).reason == "load", "no full block"
    assert affinity().choose(request(31), [view("a", cached=1)]).reason == "prefix", "its only block"


def test_home_of_a_short_prompt_gets_no_more_credit_than_it_can_save() -> None:
    names = [ReplicaId("a"), ReplicaId("b")]
    asked = request(64)
    home = rendezvous(asked.block_hashes[3], names)
    views = [view(name, requests=1 if name == home else 0) for name in names]  # a request costs 128 tokens
    assert affinity().choose(asked, views).replica_id != home


def test_work_is_that_of_the_candidates_when_an_overloaded_one_comes_first() -> None:
    policy = affinity(request_cost_tokens=0)
    views = [view("a", 40, cached=60), view("c", 0), view("b", 2, cached=50), view("d", 0)]
    assert policy.choose(request(1000), views).replica_id == "b"
