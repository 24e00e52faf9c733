"""One life of a group on a Ray that does what a test says."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.cluster import model_spec
from helpers.fake_actor import FakeMethod
from helpers.polling import until
from ray.exceptions import ActorUnavailableError, RayError
from weft.recording import RecordingConfig

from cluster import formation, group_place
from cluster.formation import Formation, FormationSpec
from cluster.placement import NODE_ID_LABEL, NodeResources
from cluster.rank_values import NodeShare, Outcome, RankPlace, RankReport, RankSpec, ReplicaAddresses, ReplicaLoad
from cluster.revision_files import RevisionText
from router.config import TracingConfig
from router.tls import InnerTls

NODES = [
    NodeResources(node_id=f"node-{name}", cpus=8, gpus=0, free_cpus=8, free_gpus=0, address=f"10.0.0.{index}")
    for index, name in enumerate("ab")
]


class FakeRank:
    """A rank process; it begins at once and is never ready."""

    def __init__(self) -> None:
        self.begin = FakeMethod(self._begin)
        self.open_rendezvous = FakeMethod(self._open_rendezvous)
        self.ready = FakeMethod(hang)
        self.ended = FakeMethod(lambda: asyncio.ensure_future(hang()))
        self.progress = FakeMethod(self._progress)
        self.expect_end = FakeMethod(self._expect_end)
        self.load = FakeMethod(hang)
        self.drain = FakeMethod(hang)
        self.report = FakeMethod(self._report)
        self.has_begun = True
        self.slowness = ""
        self.num_expected = 0
        self.told_to_meet: list[tuple[str, int]] = []
        self.was_given: dict[str, Any] = {}
        self.spec: RankSpec | None = None
        self.remote: Callable[[RankSpec], FakeRank] = self._make

    def options(self, **options: object) -> "FakeRank":
        """As of its class, of which it is the only one."""
        self.was_given = options
        return self

    def _make(self, spec: RankSpec) -> "FakeRank":
        self.spec = spec
        return self

    async def _begin(self, host: str, port: int) -> RankPlace:
        self.told_to_meet.append((host, port))
        return RankPlace(node="10.0.0.0", pid=1, node_id="node-a")

    async def _open_rendezvous(self) -> tuple[str, int]:
        return "10.0.0.0", 29500

    async def _progress(self) -> float:
        return 0.5

    async def _report(self) -> RankReport:
        place = RankPlace(node="10.0.0.0", pid=1, node_id="node-a")
        return RankReport(place=place, has_begun=self.has_begun, addresses=None, slowness=self.slowness)

    def will_end(self, outcome: Outcome, *, after_s: float = 0.0) -> None:
        async def end() -> Outcome:
            await asyncio.sleep(after_s)
            return outcome

        self.ended = FakeMethod(lambda: asyncio.ensure_future(end()))

    def will_be_ready(self) -> None:
        async def ready() -> ReplicaAddresses:
            return ReplicaAddresses(address="10.0.0.0:1", metrics_address="10.0.0.0:2")

        self.ready = FakeMethod(ready)

    async def _expect_end(self) -> None:
        self.num_expected += 1


class FakePlace:
    """A placement group, which Ray has placed when it was asked for it often enough."""

    def __init__(
        self, node_id: str, selector: list[dict[str, str]] | None, on_wait: Callable[[], None], num_asked_in_vain: int
    ) -> None:
        self.node_id = node_id
        self.selector = selector
        self._on_wait = on_wait
        self._num_asked_in_vain = num_asked_in_vain

    def table(self) -> dict[str, Any]:
        self._on_wait()
        self._num_asked_in_vain -= 1
        is_placed = self._num_asked_in_vain < 0
        return {
            "state": "CREATED" if is_placed else "PENDING",
            "bundles_to_node_id": {0: self.node_id if is_placed else ""},
        }


class FakeRay:
    """What was reserved, killed and removed, and what is found."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = FakeRank()
        self.places: list[FakePlace] = []
        self.place_options: dict[str, object] = {}
        self.num_gpus = 0
        self.on_wait: Callable[[], None] = lambda: None
        self.num_asked_in_vain = 0
        """How often places are asked for before there is one."""
        self.killed: list[object] = []
        self.removed: list[object] = []
        self.found: dict[str, FakeRank | None] = {}
        """By their names; others are found as these."""
        self.found_place: str | None = "a place"
        self.spares_left: list[str] = []
        self.spares_wanted: dict[str, float] = {}
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        monkeypatch.setattr(formation, "_RANK_ACTOR", self.rank)
        monkeypatch.setattr(formation, "_find_actor", self.find_actor)
        monkeypatch.setattr(group_place, "_find_group", lambda name: self.found_place and f"group of {name}")
        monkeypatch.setattr(formation, "spare_options", lambda node_id, _, count: {"spares": (node_id, count)})
        monkeypatch.setattr(formation, "leave_spares", self.leave_spares)
        monkeypatch.setattr(formation, "cluster_nodes", lambda: NODES)
        monkeypatch.setattr(group_place, "cluster_nodes", lambda: NODES)
        monkeypatch.setattr(group_place, "placement_group", self.reserve)
        monkeypatch.setattr(group_place, "placement_group_table", lambda place: place.table())
        monkeypatch.setattr(group_place, "remove_placement_group", self.removed.append)
        monkeypatch.setattr("cluster.formation.ray.kill", lambda actor, **_: self.killed.append(actor))
        monkeypatch.setattr(
            "cluster.formation.ray.cluster_resources", lambda: {"GPU": self.num_gpus} if self.num_gpus else {}
        )

    def find_actor(self, name: str) -> "FakeRank | str | None":
        self.is_asked.set()
        assert self.may_answer.wait(10)
        return self.found.get(name, name)

    def find(self, num_ranks: int) -> list[FakeRank]:
        """Let these be found of a life before."""
        ranks = [FakeRank() for _ in range(num_ranks)]
        self.found = {f"m-0.1/{rank}": actor for rank, actor in enumerate(ranks)}
        self.may_answer.set()
        return ranks

    def leave_spares(self, node_id: str, _: object, **wanted: float) -> None:
        self.spares_left.append(node_id)
        self.spares_wanted = wanted

    def reserve(self, _: object, *, bundle_label_selector: list[dict[str, str]] | None, **options: object) -> FakePlace:
        self.place_options = options
        node_id = "node-a" if self.places else "node-b"
        self.places.append(FakePlace(node_id, bundle_label_selector, self.on_wait, self.num_asked_in_vain))
        return self.places[-1]


class Listener:
    """Remembers where the group was placed."""

    def __init__(self) -> None:
        self.placed_on: list[str] = []
        self.waited_for: list[str] = []
        self.slow: list[str] = []
        self.loaded = 0.0
        self.has_ranks = asyncio.Event()
        self.is_adopted = asyncio.Event()
        self.is_ready = asyncio.Event()

    def on_waiting(self, reason: str) -> None:
        self.waited_for.append(reason)

    def on_placed(self, node_ids: Sequence[str] = ()) -> None:
        self.placed_on += node_ids

    def on_ranks(self, places: Sequence[RankPlace]) -> None:
        self.has_ranks.set()

    def on_adopted(self, places: Sequence[RankPlace], addresses: ReplicaAddresses | None) -> None:
        self.is_adopted.set()

    def on_progress(self, fraction: float) -> None:
        self.loaded = fraction

    def on_slow(self, reason: str) -> None:
        assert not self.is_ready.is_set(), "who waits for it reads the reason then"
        self.slow.append(reason)

    def on_ready(self, addresses: ReplicaAddresses) -> None:
        self.is_ready.set()


async def hang(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return FakeRay(monkeypatch)


@pytest.fixture
async def listener() -> Listener:
    return Listener()


def make_formation(
    folder: Path,
    listener: Listener,
    drained: set[str] | None = None,
    *,
    adopts: bool = False,
    may_grow: bool = True,
    spare_s: float = 0.0,
    device: str = "cpu",
    num_cluster_ranks: int = 1,
    num_placed_ranks: int = 1,
    **settings: object,
) -> Formation:
    spec = FormationSpec(
        replica_id="m-0.1",
        model=model_spec(str(folder), device=device, **settings),
        num_cluster_ranks=num_cluster_ranks,
        spare_s=spare_s,
        may_grow=may_grow,
        adopts=adopts,
        log_level="warning",
    )
    return Formation(
        spec, listener, drained_nodes=lambda: frozenset(drained or ()), num_placed_ranks=lambda: num_placed_ranks
    )


async def test_group_without_a_place_looks_for_it_at_times_and_soon_says_why(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_place, "_FIRST_POLL_S", 0.005)
    monkeypatch.setattr(group_place, "_POLL_S", 0.02)
    fake_ray.num_asked_in_vain = 5
    begun_s = time.monotonic()
    running = asyncio.create_task(make_formation(tmp_path, listener, cpus_per_rank=64).run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
        assert time.monotonic() - begun_s >= 0.005 + 0.01 + 3 * 0.02
        running.cancel()
        await asyncio.wait([running])
    assert listener.waited_for == ["needs 64 CPUs on one node; the largest node has 8"] * 3


@pytest.mark.parametrize("table", [{}, {"state": "REMOVED", "bundles_to_node_id": {0: "node-a"}}])
async def test_group_whose_place_somebody_else_has_given_back_ends(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, Any]
) -> None:
    monkeypatch.setattr(group_place, "placement_group_table", lambda _: table)
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener).run()
    assert (outcome.message, outcome.is_refusal) == ("its place was given back by somebody else", False)
    assert not fake_ray.rank.was_given, "no rank was started"


async def test_group_whose_node_is_lost_as_soon_as_it_has_its_place_ends(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formation, "cluster_nodes", lambda: NODES[:1])
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener).run()
    assert (outcome.message, outcome.is_refusal) == ("node node-b was lost before its ranks were started", False)
    assert fake_ray.removed == fake_ray.places


@pytest.mark.parametrize(("num_ranks", "told"), [(1, [("", 0)]), (2, [("10.0.0.0", 29500)] * 2)])
async def test_ranks_that_are_several_meet_where_the_first_waits_for_them(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, num_ranks: int, told: list[tuple[str, int]]
) -> None:
    running = asyncio.create_task(make_formation(tmp_path, listener, tensor_parallel=num_ranks).run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
        running.cancel()
        await asyncio.wait([running])
    assert fake_ray.rank.told_to_meet == told


async def test_successor_of_the_controller_finds_the_group_and_its_ranks_by_their_names(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    running = asyncio.create_task(make_formation(tmp_path, listener).run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
    running.cancel()
    await asyncio.wait([running])
    assert fake_ray.place_options == {"strategy": "STRICT_PACK", "name": "m-0.1", "lifetime": "detached"}
    given = fake_ray.rank.was_given
    assert (given["name"], given["lifetime"], given["max_restarts"]) == ("m-0.1/0", "detached", 0)
    assert "spares" not in given, "none are left here"
    assert given["scheduling_strategy"].placement_group is fake_ray.places[0]


@pytest.mark.parametrize(("settings", "interval_s"), [({}, 0.02), ({"stream_interval_s": 0.5}, 0.5)])
async def test_rank_is_told_what_the_service_and_its_model_are_set_to(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, settings: dict[str, float], interval_s: float
) -> None:
    model = model_spec(str(tmp_path), device="cpu", drain_timeout_s=7.0, num_threads=3, **settings)
    text = RevisionText(path=str(tmp_path), max_context=512)
    tracing = TracingConfig(endpoint="http://10.0.0.9:4317")
    recording = RecordingConfig(folder="/records")
    tls = InnerTls(cert_file="cert", key_file="key", ca_file="ca")
    spec = FormationSpec(
        replica_id="m-0.1",
        model=model,
        text=text,
        num_cluster_ranks=1,
        may_grow=True,
        adopts=False,
        log_level="debug",
        tracing=tracing,
        recording=recording,
        inner_tls=tls,
    )
    life = Formation(spec, listener, drained_nodes=frozenset, num_placed_ranks=lambda: 1)
    running = asyncio.create_task(life.run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
    running.cancel()
    await asyncio.wait([running])
    assert fake_ray.rank.spec == RankSpec(
        replica_id="m-0.1",
        model=model.name,
        rank=0,
        engine=model.engine,
        node_share=NodeShare(num_ranks=1, num_cpus=8.0),
        text=text,
        drain_timeout_s=7.0,
        stream_interval_s=interval_s,
        log_level="debug",
        tracing=tracing,
        recording=recording,
        inner_tls=tls,
    )


@pytest.mark.parametrize(("num_cluster_ranks", "num_ranks"), [(1, 2), (8, 4)])
async def test_ranks_share_a_node_with_those_that_should_be_there(
    fake_ray: FakeRay,
    listener: Listener,
    tmp_path: Path,
    num_cluster_ranks: int,
    num_ranks: int,
) -> None:
    fake_ray.rank.will_be_ready()
    life = make_formation(
        tmp_path, listener, spare_s=60.0, num_cluster_ranks=num_cluster_ranks, tensor_parallel=2, cpus_per_rank=2
    )
    running = asyncio.create_task(life.run())
    async with asyncio.timeout(10):
        await listener.is_ready.wait()
        running.cancel()
        await asyncio.wait([running])
    given, spec = fake_ray.rank.was_given, fake_ray.rank.spec
    assert (given["num_cpus"], given["spares"]) == (2, ("node-b", 2))
    assert given["scheduling_strategy"].placement_group_bundle_index == 0, "one stage"
    assert spec is not None
    assert spec.node_share == NodeShare(num_ranks=num_ranks, num_cpus=8.0)
    assert fake_ray.spares_wanted == {"count": 2, "most": 2, "lifetime_s": 60.0}


@pytest.mark.parametrize(
    ("device", "num_gpus", "wanted"), [("auto", 0, 0), ("auto", 1, 1), ("cpu", 8, 0), ("cuda", 0, 1)]
)
async def test_ranks_take_gpus_where_they_compute_on_them(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, device: str, num_gpus: int, wanted: int
) -> None:
    fake_ray.num_gpus = num_gpus
    life = make_formation(tmp_path, listener, device=device, accelerator="A100" if wanted else "")
    running = asyncio.create_task(life.run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
    running.cancel()
    await asyncio.wait([running])
    (bundle,) = life.bundles
    assert bundle.get("GPU", 0) == fake_ray.rank.was_given["num_gpus"] == wanted
    assert ("accelerator_type:A100" in bundle) == bool(wanted)


async def test_leader_is_asked_to_drain_and_how_busy_it_is_and_nobody_waits_for_one_that_hangs(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, drained = ReplicaLoad(num_running=3, num_waiting=1, kv_usage=0.5), asyncio.Event()

    async def drain() -> None:
        drained.set()

    async def load() -> ReplicaLoad:
        return busy

    life = make_formation(tmp_path, listener)
    await life.drain(60.0)
    assert await life.load() is None, "it has no ranks yet"
    fake_ray.rank.drain, fake_ray.rank.load = FakeMethod(drain), FakeMethod(load)
    running = asyncio.create_task(life.run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
        await life.drain(60.0)
        assert drained.is_set()
        assert await life.load() == busy
        monkeypatch.setattr(formation, "_LOAD_TIMEOUT_S", 0.01)
        fake_ray.rank.drain, fake_ray.rank.load = FakeMethod(hang), FakeMethod(hang)
        await life.drain(0.01)
        assert await life.load() is None
        running.cancel()
        await asyncio.wait([running])


async def test_adoption_that_is_cancelled_ends_what_it_was_about_to_find(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    running = asyncio.create_task(make_formation(tmp_path, listener, adopts=True, tensor_parallel=2).run())
    assert await asyncio.to_thread(fake_ray.is_asked.wait, 10)
    running.cancel()
    fake_ray.may_answer.set()
    async with asyncio.timeout(10):
        await asyncio.wait([running])
    assert running.cancelled()
    assert sorted(map(str, fake_ray.killed)) == ["m-0.1/0", "m-0.1/1"]
    assert fake_ray.removed == ["group of m-0.1"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("a rank is gone", "was lost while no controller watched it"),
        ("its place is gone", "was lost while no controller watched it"),
        ("a rank has not begun", "its controller died while it was being started"),
        ("a rank hangs", "did not answer a new controller within 0.05 s"),
    ],
)
async def test_what_cannot_be_adopted_ends_and_says_why(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    monkeypatch.setattr(formation, "_ADOPT_TIMEOUT_S", 0.05)
    left: list[FakeRank] = fake_ray.find(2)
    match fault:
        case "a rank is gone":
            fake_ray.found["m-0.1/1"] = None
            left = left[:1]
        case "its place is gone":
            fake_ray.found_place = None
        case "a rank has not begun":
            left[1].has_begun = False
        case "a rank hangs":
            left[1].report = FakeMethod(hang)
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, adopts=True, tensor_parallel=2).run()
    assert outcome == Outcome(message=message)
    assert not listener.is_adopted.is_set()
    assert Counter(fake_ray.killed) == Counter(left), "each once, by threads: in any order"
    assert len(fake_ray.removed) == (0 if fault == "its place is gone" else 1)


async def test_ranks_that_were_adopted_hear_of_an_end_that_is_wanted(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    ranks = fake_ray.find(2)
    running = asyncio.create_task(make_formation(tmp_path, listener, adopts=True, tensor_parallel=2).run())
    async with asyncio.timeout(10):
        await listener.is_adopted.wait()
        running.cancel()
        await asyncio.wait([running])
    assert [rank.num_expected for rank in ranks] == [1, 1]


async def test_a_group_has_loaded_as_much_as_its_ranks_on_average(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    async def progress() -> float:
        return 1.0

    fake_ray.find(2)[0].progress = FakeMethod(progress)
    running = asyncio.create_task(make_formation(tmp_path, listener, adopts=True, tensor_parallel=2).run())
    await until(lambda: listener.loaded > 0)
    running.cancel()
    await asyncio.wait([running])
    assert listener.loaded == 0.75


@pytest.mark.parametrize(("refuses", "after_s"), [(True, 0.0), (True, 0.02), (False, 0.02)])
async def test_of_ends_that_come_together_a_refusal_is_told_or_else_the_first(
    fake_ray: FakeRay,
    listener: Listener,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuses: bool,
    after_s: float,
) -> None:
    monkeypatch.setattr(formation, "_POLL_S", 5.0)
    first, *others, last = fake_ray.find(8)
    lost = Outcome(message="rank 0 died")
    first.will_end(lost)
    for other in others:
        other.will_end(Outcome(message="lost rank 0"), after_s=0.0 if refuses else after_s)
    refusal = Outcome(message="no such tensor", is_refusal=True)
    last.will_end(refusal if refuses else Outcome(message="lost rank 0"), after_s=after_s)
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, adopts=True, tensor_parallel=8).run()
    assert outcome == (refusal if refuses else lost)


@pytest.mark.parametrize("may_grow", [True, False])
async def test_group_that_fits_on_no_node_is_refused_where_no_other_can_join(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, may_grow: bool
) -> None:
    fake_ray.rank.will_end(Outcome(message="it was placed"))
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, may_grow=may_grow, cpus_per_rank=9).run()
    assert outcome.is_refusal is not may_grow
    assert len(fake_ray.places) == may_grow


@pytest.mark.parametrize("spare_s", [0.0, 60.0])
@pytest.mark.parametrize("is_stopped", [True, False])
async def test_processes_are_left_to_wait_once_it_is_ready_and_again_when_it_is_stopped(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, spare_s: float, is_stopped: bool
) -> None:
    """At most one for each rank that has a place: eight are wanted, five have one, on two nodes."""
    died = asyncio.Event()

    async def end() -> Outcome:
        await died.wait()
        return Outcome(message="rank 0 died")

    fake_ray.rank.will_be_ready()
    fake_ray.rank.ended = FakeMethod(lambda: asyncio.ensure_future(end()))
    running = asyncio.create_task(make_formation(tmp_path, listener, spare_s=spare_s, num_placed_ranks=5).run())
    async with asyncio.timeout(10):
        await listener.is_ready.wait()
        if is_stopped:
            running.cancel()
        died.set()
        await asyncio.wait([running])
    assert fake_ray.spares_left == ["node-b"] * ((1 + is_stopped) if spare_s else 0)
    assert fake_ray.spares_wanted.get("most") == (3 if spare_s else None)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("adopts", [False, True])
async def test_rank_that_computes_slower_than_it_could_is_told_of_with_its_node(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, adopts: bool
) -> None:
    rank = fake_ray.find(1)[0] if adopts else fake_ray.rank
    rank.slowness = "no C++ compiler"
    rank.will_be_ready()
    running = asyncio.create_task(make_formation(tmp_path, listener, adopts=adopts).run())
    async with asyncio.timeout(10):
        await listener.is_ready.wait()
        running.cancel()
        await asyncio.wait([running])
    assert listener.slow == ["node 10.0.0.0 computes in plain torch, several times slower: no C++ compiler"]


async def test_rank_of_earlier_code_which_tells_less_is_taken_over(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    async def report() -> RankReport:
        told = RankReport.__new__(RankReport)  # as it is read from what the rank pickled: values in order, no names
        told.__setstate__([RankPlace(node="10.0.0.0", pid=1), True, None])
        return told

    rank = fake_ray.find(1)[0]
    rank.report = FakeMethod(report)
    rank.will_be_ready()
    running = asyncio.create_task(make_formation(tmp_path, listener, adopts=True).run())
    async with asyncio.timeout(10):
        ready = asyncio.create_task(listener.is_ready.wait())
        await asyncio.wait([ready, running], return_when=asyncio.FIRST_COMPLETED)
        assert listener.is_ready.is_set(), running.result()
        running.cancel()
        await asyncio.wait([running])
    assert listener.slow == []


async def test_processes_are_left_to_wait_by_a_group_that_was_taken_over_too(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    fake_ray.find(1)[0].will_be_ready()
    life = make_formation(tmp_path, listener, adopts=True, spare_s=60.0, num_placed_ranks=5)
    running = asyncio.create_task(life.run())
    async with asyncio.timeout(10):
        await listener.is_ready.wait()
        running.cancel()
        await asyncio.wait([running])
    assert fake_ray.spares_left == ["node-a", "node-a"]
    assert fake_ray.spares_wanted["most"] == 3


async def test_group_that_is_placed_on_a_node_that_is_drained_meanwhile_is_placed_anew(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    drained: set[str] = set()
    fake_ray.on_wait = lambda: drained.add("node-b")
    running = asyncio.create_task(make_formation(tmp_path, listener, drained).run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
    assert listener.placed_on == ["node-a"]
    first, second = fake_ray.places
    assert fake_ray.removed == [first]
    assert second.selector == [{NODE_ID_LABEL: "!in(node-b)"}]
    running.cancel()
    await asyncio.wait([running])
    assert fake_ray.removed == [first, second]
    assert fake_ray.killed == [fake_ray.rank]


@pytest.mark.parametrize("answers", [True, False])
async def test_ranks_hear_of_an_end_that_is_wanted_before_it_comes(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(formation, "_HEAR_TIMEOUT_S", 0.05)
    if not answers:  # it hangs
        fake_ray.rank.expect_end = FakeMethod(hang)
    running = asyncio.create_task(make_formation(tmp_path, listener).run())
    async with asyncio.timeout(10):
        await listener.has_ranks.wait()
    assert (fake_ray.rank.num_expected, fake_ray.killed) == (0, [])
    running.cancel()
    async with asyncio.timeout(10):
        await asyncio.wait([running])
    assert (fake_ray.rank.num_expected, fake_ray.killed) == (int(answers), [fake_ray.rank])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_of_a_group_that_is_being_started_only_ranks_that_answer_are_told_of_its_end(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    ranks = [FakeRank(), FakeRank()]
    has_begun = asyncio.Event()

    async def begin(host: str, port: int) -> RankPlace:
        has_begun.set()
        return RankPlace(node=host, pid=port)

    ranks[0].begin, ranks[1].begin = FakeMethod(begin), FakeMethod(hang)
    fake_ray.rank.remote = lambda spec: ranks[spec.rank]
    running = asyncio.create_task(make_formation(tmp_path, listener, tensor_parallel=2).run())
    async with asyncio.timeout(10):
        await has_begun.wait()
        running.cancel()
        await asyncio.wait([running])
    assert [rank.num_expected for rank in ranks] == [1, 0]
    assert Counter(fake_ray.killed) == Counter(ranks)


async def test_rank_that_never_begins_ends_the_life_at_its_start_timeout(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path
) -> None:
    fake_ray.rank.begin = FakeMethod(hang)
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, start_timeout_s=0.05).run()
    assert outcome == Outcome(message="not ready within 0.05 s")
    assert not listener.has_ranks.is_set()
    assert fake_ray.killed == [fake_ray.rank]
    assert fake_ray.removed == fake_ray.places


async def test_a_start_that_ray_can_no_longer_follow_ends_though_its_ranks_live(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost() -> float:
        raise RayError("Ray knows no such actor")

    monkeypatch.setattr(formation, "_DEATH_TIMEOUT_S", 0.05)
    fake_ray.rank.progress = FakeMethod(lost)
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, start_timeout_s=60.0).run()
    assert outcome.message == "lost sight of its ranks: Ray knows no such actor"
    assert fake_ray.killed == [fake_ray.rank]
    assert fake_ray.rank.num_expected == 0, "nobody wanted that"


@pytest.mark.parametrize("adopts", [True, False])
async def test_broken_connections_to_its_ranks_cost_a_group_nothing(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adopts: bool
) -> None:
    monkeypatch.setattr("cluster.see_through._RETRY_S", 0.0)
    rank = fake_ray.find(1)[0] if adopts else fake_ray.rank
    rank.will_be_ready()
    rank.will_end(Outcome(message="its engine failed"), after_s=0.05)
    methods = (rank.report, rank.progress, rank.ready, rank.ended)
    for method in methods:
        method.break_once()
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, adopts=adopts).run()
    assert listener.is_adopted.is_set() is adopts
    assert listener.is_ready.is_set()
    assert outcome == Outcome(message="its engine failed")
    assert [method.num_broken for method in methods] == [1, 1, 1, 1]


@pytest.mark.parametrize("error", [ActorUnavailableError("the connection broke", None), RayError("it has died")])
async def test_a_rank_that_dies_while_it_starts_tells_why(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, error: RayError
) -> None:
    died = asyncio.Event()

    async def lost() -> float:
        asyncio.get_running_loop().call_later(0.05, died.set)
        raise error

    async def end() -> Outcome:
        await died.wait()
        return Outcome(message="no such tensor", is_refusal=True)

    fake_ray.rank.progress = FakeMethod(lost)
    fake_ray.rank.ended = FakeMethod(lambda: asyncio.ensure_future(end()))
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, start_timeout_s=60.0).run()
    assert outcome == Outcome(message="no such tensor", is_refusal=True)


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_leader_that_no_longer_answers_is_taken_for_dead(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, breaks: bool
) -> None:
    """It answers now and then first, which starts the count anew; at last it hangs, or Ray loses it."""
    num_asked = 0

    async def load() -> ReplicaLoad:
        nonlocal num_asked
        num_asked += 1
        if num_asked % 9 and num_asked < 30:
            return ReplicaLoad(num_running=0, num_waiting=0, kv_usage=0.0)
        if breaks:
            raise ActorUnavailableError("the connection broke", None)
        await hang()
        raise AssertionError

    fake_ray.rank.will_be_ready()
    fake_ray.rank.load = FakeMethod(load)
    async with asyncio.timeout(30):
        outcome = await make_formation(tmp_path, listener, step_timeout_s=0.05).run()
    assert outcome == Outcome(message="rank 0 has not answered for 0.1 s")
    assert num_asked == 29 + 10
    assert fake_ray.killed == [fake_ray.rank]


async def test_start_timeout_is_one_from_the_place_to_a_ready_replica(
    fake_ray: FakeRay, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float] = []

    def timeout_at(when_s: float) -> asyncio.Timeout:
        limits_s.append(when_s)
        return asyncio.Timeout(when_s)

    monkeypatch.setattr("cluster.formation.asyncio.timeout_at", timeout_at)
    async with asyncio.timeout(10):
        outcome = await make_formation(tmp_path, listener, start_timeout_s=0.2).run()
    assert outcome == Outcome(message="not ready within 0.2 s")
    assert listener.has_ranks.is_set()
    assert listener.loaded == 0.5, "as far as its rank was"
    begin_s, ready_s = limits_s
    assert begin_s == ready_s
