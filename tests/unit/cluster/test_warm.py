import time
from typing import Any

import pytest

from cluster import warm
from cluster.errors import SpareError
from cluster.spares import SpareKind
from cluster.warm import Wish, plan_spares


def node(name: str, *, is_head: bool = False, **resources: float) -> dict[str, Any]:
    head = {"node:__internal_head__": 1.0} if is_head else {}
    return {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "Alive": True, "Resources": resources | head}


HEAD = node("1", is_head=True)
GPUS = node("2", CPU=48, GPU=4)
CPUS = node("3", CPU=2)


def plan(here: str, *, all_nodes: bool = False, ranks: int | None = None) -> list[tuple[str, str, int]]:
    wishes = plan_spares([HEAD, GPUS, CPUS], here=here, all_nodes=all_nodes, ranks=ranks)
    return [(wish.node_id, wish.kind.value, wish.count) for wish in wishes]


def test_head_without_cpus_is_ready_for_a_service_and_takes_no_ranks() -> None:
    assert plan("1", ranks=3) == [("1", "service", 2)]


@pytest.mark.parametrize(("here", "count"), [("2", 4), ("3", 1)])
def test_other_node_is_ready_for_a_rank_on_each_gpu_or_for_one(here: str, count: int) -> None:
    assert plan(here) == [(here, "rank", count)]
    assert plan(here, ranks=2) == [(here, "rank", 2)]


def test_whole_cluster_is_ready_for_a_service_where_it_is_told_so() -> None:
    assert plan("3", all_nodes=True) == [("2", "rank", 4), ("3", "rank", 1), ("3", "service", 2)]


class Starts:
    """Ray, which forgets the first requests; what it has started waits at once."""

    def __init__(self, num_forgotten: int) -> None:
        self.num_forgotten = num_forgotten
        self.waiting = 0

    def add_spares(self, node_id: str, kind: SpareKind, *, count: int, lifetime_s: float, give_up_s: float) -> None:
        self.give_up_s = give_up_s
        self.num_forgotten -= 1
        if self.num_forgotten < 0:
            self.waiting = count

    def num_waiting(self, node_id: str, kind: SpareKind) -> int:
        return self.waiting


@pytest.fixture
def wishes() -> list[Wish]:
    return [Wish(node_id="n", address="10.0.0.4", kind=SpareKind.RANK, count=2)]


def fulfil(monkeypatch: pytest.MonkeyPatch, starts: Starts, wishes: list[Wish], *, timeout_s: float) -> None:
    monkeypatch.setattr(warm, "add_spares", starts.add_spares)
    monkeypatch.setattr(warm, "num_waiting", starts.num_waiting)
    monkeypatch.setattr(warm, "_POLL_S", 0.001)
    monkeypatch.setattr(warm, "_AGAIN_S", 0.002)
    warm._fulfil(wishes, keep_s=60.0, timeout_s=timeout_s)


def test_ray_is_asked_until_all_wait(monkeypatch: pytest.MonkeyPatch, wishes: list[Wish]) -> None:
    starts = Starts(num_forgotten=2)
    begun_s = time.monotonic()
    fulfil(monkeypatch, starts, wishes, timeout_s=30.0)
    assert starts.waiting == 2
    assert begun_s + 30 <= starts.give_up_s <= time.monotonic() + 30


def test_what_does_not_come_in_time_is_named(monkeypatch: pytest.MonkeyPatch, wishes: list[Wish]) -> None:
    with pytest.raises(SpareError, match=r"after 0.02 s, among: 2 for ranks on 10\.0\.0\.4"):
        fulfil(monkeypatch, Starts(num_forgotten=10**9), wishes, timeout_s=0.02)
