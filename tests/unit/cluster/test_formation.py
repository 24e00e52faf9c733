"""One life of a group on a Ray that does what a test says."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.cluster import model_spec

from cluster import formation
from cluster.formation import Formation, FormationSpec
from cluster.rank_actor import RankPlace, ReplicaAddresses


class FakeRay:
    """What is killed and removed, and the actors and the group that are found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.killed: list[str] = []
        self.removed: list[str] = []
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        monkeypatch.setattr(formation, "_find_actor", self.find_actor)
        monkeypatch.setattr(formation, "_find_group", lambda name: f"group of {name}")
        monkeypatch.setattr(formation, "remove_placement_group", self.removed.append)
        monkeypatch.setattr("cluster.formation.ray.kill", lambda actor, **_: self.killed.append(actor))
        monkeypatch.setattr("cluster.formation.ray.cluster_resources", dict)

    def find_actor(self, name: str) -> str:
        self.is_asked.set()
        assert self.may_answer.wait(10)
        return name


class Listener:
    """Remembers what it was told."""

    def on_waiting(self, reason: str) -> None:
        pass

    def on_placed(self) -> None:
        pass

    def on_ranks(self, places: Sequence[RankPlace]) -> None:
        pass

    def on_adopted(self, places: Sequence[RankPlace], addresses: ReplicaAddresses | None) -> None:
        pass

    def on_progress(self, fraction: float) -> None:
        pass

    def on_ready(self, addresses: ReplicaAddresses) -> None:
        pass


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


def make_formation(folder: Path, *, adopts: bool = False, **settings: object) -> Formation:
    spec = FormationSpec(
        replica_id="m-0.1",
        model=model_spec(str(folder), device="cpu", **settings),
        num_cluster_ranks=1,
        may_grow=True,
        adopts=adopts,
        log_level="warning",
    )
    return Formation(spec, Listener(), frozenset)


async def test_adoption_that_is_cancelled_ends_what_it_was_about_to_find(fake_ray: FakeRay, tmp_path: Path) -> None:
    life = make_formation(tmp_path, adopts=True, tensor_parallel=2)
    running = asyncio.create_task(life.run())
    assert await asyncio.to_thread(fake_ray.is_asked.wait, 10)
    running.cancel()
    fake_ray.may_answer.set()
    async with asyncio.timeout(10):
        await asyncio.wait([running])
    assert running.cancelled()
    assert fake_ray.killed == ["m-0.1/0", "m-0.1/1"]
    assert fake_ray.removed == ["group of m-0.1"]
