"""Whatever operators ask for, and whatever dies meanwhile, the controller included: capacity, order and convergence."""

import asyncio
import json
import logging
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from helpers.cluster import LLAMA, FakeClock, FakeLife, FakeRouter, Formations, turns, write_tokenizer
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from weft.v1 import control_pb2

from cluster.config import build_spec
from cluster.errors import ClusterConfigError
from cluster.lifecycle import RestartPolicy
from cluster.rank_values import Outcome
from cluster.revision_files import RevisionText
from cluster.saved_state import SavedState, decode, encode
from cluster.wanted_state import WantedState

T = TypeVar("T")

NAMES = ("a", "b")
SURGE = 1

sections = st.fixed_dictionaries(
    {
        "replicas": st.integers(0, 3),
        "max_context": st.sampled_from([None, 64, 128]),
        "max_replicas": st.just(3),
        "autoscaling": st.sampled_from([None, {}, {"target_requests": 8}]),
    }
)
files = st.dictionaries(st.sampled_from(NAMES), sections, min_size=1)


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Groups die here all the time."""
    logger = logging.getLogger("cluster")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


picks = st.integers(0, 1000)


class Operations(RuleBasedStateMachine):
    """A controller over fake lives; processes outlive it."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        (Path(self.folder.name) / "config.json").write_text(json.dumps(LLAMA))
        write_tokenizer(Path(self.folder.name))
        self.clock = FakeClock()
        self.saved = encode(SavedState())
        self.lives: dict[str, FakeLife] = {}
        """By replica id: every process group that runs."""
        self.placed: set[str] = set()
        """Replica ids of all that had a place at any time."""
        self.run(self.restart())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        try:
            self.run(self.converge())
        finally:
            self.runner.close()
            self.folder.cleanup()

    async def restart(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()  # of the controller before
        await turns()
        self.state = WantedState(
            decode(self.saved),
            routers=[FakeRouter()],
            form=self.form,
            save=self.save,
            nodes=list,
            changed=asyncio.Event(),
            policy=RestartPolicy(),
            clock=self.clock,
        )

    def save(self, state: SavedState) -> None:
        self.saved = encode(state)

    def form(self, *arguments: Any, text: RevisionText | None, adopts: bool) -> FakeLife:
        life = Formations()(*arguments, text=text, adopts=adopts)
        if not adopts:
            assert life.replica_id not in self.placed, "formed a second time"
            assert life.replica_id not in self.running()
            assert life.replica_id.rpartition(".")[0] not in {name.rpartition(".")[0] for name in self.running()}
            saved = {f"{group.group_id}.{group.num_lives}" for group in decode(self.saved).groups}
            assert life.replica_id in saved, "formed before a successor would know of it"
        self.lives[life.replica_id] = life
        return life

    def running(self) -> dict[str, FakeLife]:
        self.lives = {name: life for name, life in self.lives.items() if not (life.is_over or life.was_cancelled)}
        return self.lives

    def place(self, life: FakeLife) -> None:
        self.placed.add(life.replica_id)
        life.become_ready()

    def pick(self, number: int) -> FakeLife:
        running = self.running()
        return running[sorted(running)[number % len(running)]]

    def num_serving(self, model: str) -> int:
        """Replicas that run and take requests."""
        running = self.running()
        endpoints = [each for each in self.state.replicas() if each.model == model and not each.draining]
        return sum(endpoint.replica_id in running for endpoint in endpoints)

    async def reconcile(self) -> None:
        """One pass, which may not take away capacity that is wanted."""
        await turns()
        before = {name: self.num_serving(name) for name in NAMES}
        self.state.reconcile()
        await turns()
        if self.state.is_adopting:
            return
        for model in self.state.model_statuses():
            kept = min(model.wanted_replicas, before[model.name])
            assert self.num_serving(model.name) >= kept, (model, before)
            staying = [group for group in model.groups if not group.leaving]
            assert len(staying) <= model.wanted_replicas + SURGE
            assert sum(group.revision == model.revision for group in staying) <= model.wanted_replicas

    async def converge(self) -> None:
        for _ in range(12):
            await self.reconcile()
            self.clock.advance(60.0)
            for group in self.failed_groups():  # as an operator does, once the cause is mended
                await self.state.drain(group, 0.0)
            for life in list(self.running().values()):
                life.requests_ended.set()
                if life.adopts:
                    life.be_adopted()
                self.place(life)
            await turns()
        await self.reconcile()
        wanted = [model for model in self.state.model_statuses() if model.revision]
        for model in wanted:
            assert [group.revision for group in model.groups] == [model.revision] * model.wanted_replicas
            assert model.ready_replicas == model.wanted_replicas
        expected = {group.replica_id for model in wanted for group in model.groups}
        assert set(self.running()) == expected, "nothing else runs"

    def failed_groups(self) -> list[str]:
        return [
            group.group_id
            for model in self.state.model_statuses()
            for group in model.groups
            if group.state == control_pb2.GROUP_STATE_FAILED
        ]

    @rule(file=files)
    def apply(self, file: dict[str, dict[str, Any]]) -> None:
        models = [{"path": self.folder.name, "name": name, **section} for name, section in file.items()]
        specs = build_spec({"models": models}).models
        self.run(self.state.apply(specs))
        assert self.run(self.state.apply(specs)) == []

    @precondition(lambda self: self.state.models())
    @rule(number=picks, replicas=st.integers(0, 3))
    def scale(self, number: int, replicas: int) -> None:
        self.state.scale(self.served(number), replicas)

    @precondition(lambda self: self.state.models())
    @rule(number=picks, max_context=st.sampled_from([None, 64, 128]), undo=st.booleans())
    def rollout(self, number: int, max_context: int | None, undo: bool) -> None:
        try:
            if undo:
                self.run(self.state.undo(self.served(number)))
            else:
                self.run(self.state.roll(self.served(number), {"max_context": max_context}))
        except ClusterConfigError as error:
            assert "one revision only" in str(error)  # noqa: PT017

    def served(self, number: int) -> str:
        names = [model.name for model in self.state.models()]
        return names[number % len(names)]

    @rule()
    def tick(self) -> None:
        self.clock.advance(0.5)
        self.run(self.reconcile())

    @precondition(lambda self: self.running())
    @rule(number=picks)
    def become_ready(self, number: int) -> None:
        life = self.pick(number)
        life.holds_requests = True
        self.place(life)
        self.run(self.reconcile())

    @precondition(lambda self: self.running())
    @rule(number=picks)
    def requests_end(self, number: int) -> None:
        self.pick(number).requests_ended.set()
        self.run(self.reconcile())

    @precondition(lambda self: self.running())
    @rule(number=picks, refuses=st.booleans())
    def die(self, number: int, refuses: bool) -> None:
        life = self.pick(number)
        was_ready = life.replica_id in {endpoint.replica_id for endpoint in self.state.replicas()}
        self.run(life.end(Outcome(message="rank 0 died", is_refusal=refuses and not was_ready and not life.adopts)))

    @precondition(lambda self: self.running())
    @rule(number=picks)
    def drain(self, number: int) -> None:
        replica_id = self.pick(number).replica_id
        self.run(self.state.drain(replica_id, 5.0))
        self.run(turns())  # one that has no request ends now, and cannot be picked to die

    @rule(number=picks)
    def controller_dies(self, number: int) -> None:
        """Its successor finds every group that had a place, but perhaps one."""
        self.run(self.replace_controller(number))

    async def replace_controller(self, number: int) -> None:
        before = self.running()
        self.lives = {}
        await self.restart()
        await self.reconcile()
        for index, (name, life) in enumerate(sorted(self.lives.items())):
            if name in before and name in self.placed and index != number:
                life.be_adopted(is_ready=number % 3 != 0)
            else:
                await life.end(Outcome(message="was lost while no controller watched it"))
        await self.reconcile()
        assert not self.state.is_adopting


TestOperations = Operations.TestCase
TestOperations.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.reuse, Phase.generate),  # shrinking would take minutes; a failing run is short enough to read
    print_blob=True,
)
