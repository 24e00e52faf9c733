"""Whatever Ray does to one life of a group, and whenever it ends: nothing of it is left, and somebody hears why.

One that is left alone after all that is READY soon, or has ended.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import model_spec
from ray.exceptions import ActorDiedError, GetTimeoutError

from cluster import formation, group_place
from cluster.formation import Formation, FormationSpec
from cluster.placement import NodeResources
from cluster.rank_values import Outcome, RankPlace, RankReport, ReplicaAddresses

NODES = [
    NodeResources(node_id=f"node-{name}", cpus=8, gpus=0, free_cpus=8, free_gpus=0, address=f"10.0.0.{index}")
    for index, name in enumerate("abc")
]
NUM_RUNS = 300
FAULT = 0.03
"""Of each call."""


class Chance:
    """Lets calls take their time, and some of them fail."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults = self.random.choice([0.0, FAULT, 5 * FAULT])

    async def pass_time(self) -> None:
        for _ in range(self.random.choice([0, 1, 2, 5])):
            await asyncio.sleep(0)

    async def call(self, answer: Callable[[], Any]) -> Any:
        await self.pass_time()
        if self.random.random() < self.faults:
            raise ActorDiedError
        return answer()

    def may_be_lost(self) -> None:
        """What Ray's head is told may not reach it."""
        if self.random.random() < self.faults:
            raise GetTimeoutError("there was a timeout")


class Rank:
    """A process. What is called on it is answered until it dies, and at once after that by the reason."""

    def __init__(self, ray: "Ray", name: str) -> None:
        self.name = name
        self._ray = ray
        self._death = asyncio.get_running_loop().create_future()
        self._addresses = ReplicaAddresses(address=f"{name}:1", metrics_address=f"{name}:2")

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *_: self._ask(method))})

    def _ask(self, method: str) -> "asyncio.Task[Any]":
        task = asyncio.ensure_future(self._answer(method))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _answer(self, method: str) -> Any:
        chance = self._ray.chance
        work = asyncio.ensure_future(chance.call(lambda: self._result(method)))
        if method == "ended":
            work.cancel()
            await asyncio.wait([self._death])
        else:
            await asyncio.wait([self._death, work], return_when=asyncio.FIRST_COMPLETED)
        if not self._death.done():
            return work.result()
        work.cancel()
        if method == "ended" and chance.random.random() < 0.5:
            return Outcome(message="failed")
        raise ActorDiedError

    def _result(self, method: str) -> Any:
        place = RankPlace(node="10.0.0.0", pid=1, node_id="node-a")
        match method:
            case "begin":
                return place
            case "open_rendezvous":
                return "10.0.0.0", 1
            case "report":
                has_begun = self._ray.chance.random.random() < 0.9
                return RankReport(place=place, has_begun=has_begun, addresses=self._addresses)
            case "progress":
                return 0.5
            case "ready":
                return self._addresses
            case "load":
                return None
        raise AssertionError(method)


class Ray:
    """Processes and places that exist, and what may happen to them at any time."""

    def __init__(self, chance: Chance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chance = chance
        self.ranks: list[Rank] = []
        self.groups: list[object] = []
        self.nodes = list(NODES)
        for name in ("placement_group", "placement_group_table", "remove_placement_group", "cluster_nodes"):
            monkeypatch.setattr(group_place, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(formation, "cluster_nodes", self._cluster_nodes)
        monkeypatch.setattr(formation, "_RANK_ACTOR", self)
        monkeypatch.setattr(formation, "_find_actor", self._find_actor)
        monkeypatch.setattr(group_place, "_find_group", lambda name: self.groups[0] if self.groups else None)
        monkeypatch.setattr("cluster.see_through.ray.kill", self._kill)
        monkeypatch.setattr("cluster.formation.ray.cluster_resources", dict)
        monkeypatch.setattr("cluster.formation.asyncio.to_thread", self._to_thread)

    async def _to_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        if work.__name__ == "_leave_spares":  # whatever goes wrong there is only logged
            return await self.chance.pass_time()
        return await self.chance.call(lambda: work(*arguments))

    def options(self, *, name: str, **_: Any) -> Any:
        return type("Options", (), {"remote": staticmethod(lambda spec: self.add_rank(name))})

    def add_rank(self, name: str) -> Rank:
        self.ranks.append(Rank(self, name))
        return self.ranks[-1]

    def _kill(self, rank: Rank, *, no_restart: bool) -> None:
        assert no_restart
        self.chance.may_be_lost()
        rank.die()
        if rank in self.ranks:
            self.ranks.remove(rank)

    def _find_actor(self, name: str) -> Rank | None:
        return next((rank for rank in self.ranks if rank.name == name), None)

    def _placement_group(self, *_: Any, **__: Any) -> Any:
        group = object()
        self.groups.append(group)
        self.chance.may_be_lost()
        return group

    def _placement_group_table(self, _: object) -> dict[str, Any]:
        return {
            "state": "CREATED" if self.chance.random.random() < 0.5 else "PENDING",
            "bundles_to_node_id": {stage: self.chance.random.choice(NODES).node_id for stage in range(2)},
        }

    def _remove_placement_group(self, group: object) -> None:
        self.chance.may_be_lost()
        self.groups.remove(group)

    def _cluster_nodes(self) -> list[NodeResources]:
        return self.nodes


class Listener:
    """Hears nothing once its life has ended."""

    def __init__(self) -> None:
        self.is_over = False
        self.is_ready = asyncio.Event()

    def _hear(self, *_: object) -> None:
        assert not self.is_over

    on_waiting = on_ranks = on_progress = on_slow = _hear

    def on_placed(self, node_ids: Sequence[str] = ()) -> None:
        self._hear()

    def on_adopted(self, places: Sequence[RankPlace], addresses: ReplicaAddresses | None) -> None:
        self._hear()
        if addresses is not None:
            self.is_ready.set()

    def on_ready(self, addresses: ReplicaAddresses) -> None:
        self._hear()
        self.is_ready.set()


async def test_nothing_of_a_life_is_left_however_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(formation, "_POLL_S", 0.0)
    monkeypatch.setattr(group_place, "_POLL_S", 0.0)
    monkeypatch.setattr(formation, "_DEATH_TIMEOUT_S", 0.0)
    monkeypatch.setattr("cluster.see_through._RETRY_S", 0.0)
    monkeypatch.setattr(formation, "leave_spares", lambda *_, **__: None)
    monkeypatch.setattr(formation, "spare_options", lambda *_, **__: {})
    for seed in range(NUM_RUNS):
        with monkeypatch.context() as patch:
            await live_and_end(seed, patch, str(tmp_path))


async def live_and_end(seed: int, patch: pytest.MonkeyPatch, folder: str) -> None:
    """One life of two stages that is begun or adopted, and ended at any point."""
    chance = Chance(seed)
    ray, listener, drained = Ray(chance, patch), Listener(), set[str]()
    adopts = chance.random.random() < 0.3
    spec = FormationSpec(
        replica_id="m-0.1",
        model=model_spec(folder, device="cpu", pipeline_parallel=2, start_timeout_s=60.0),
        num_cluster_ranks=2,
        spare_s=chance.random.choice([0.0, 60.0]),
        may_grow=chance.random.random() < 0.8,
        adopts=adopts,
        log_level="warning",
    )
    if adopts:
        ray.groups.append(object())
        for rank in range(chance.random.choice([1, 2, 2, 2])):
            ray.add_rank(f"m-0.1/{rank}")
    life = Formation(spec, listener, drained_nodes=lambda: frozenset(drained), num_placed_ranks=lambda: 2)
    running = asyncio.create_task(life.run())
    for _ in range(1, chance.random.randrange(2, 120)):
        await asyncio.sleep(0)
        match chance.random.randrange(150):
            case 0 if ray.ranks:
                chance.random.choice(ray.ranks).die()
            case 1 if len(ray.nodes) > 1:
                ray.nodes = ray.nodes[1:]
            case 2:
                drained ^= {"node-a"}
            case 3:
                await asyncio.wait([asyncio.ensure_future(life.drain(0.0))])
    if chance.random.random() < 0.5:
        chance.faults = 0.0
        ready = asyncio.ensure_future(listener.is_ready.wait())
        await asyncio.wait([ready, running], timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert ready.done() or running.done(), f"seed {seed}"
        ready.cancel()
    running.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([running])
    listener.is_over = True
    for _ in range(10):
        await asyncio.sleep(0)
    assert not ray.ranks, f"seed {seed}"
    assert not ray.groups, f"seed {seed}"
    if not running.cancelled():
        assert running.result().message, f"seed {seed}"
