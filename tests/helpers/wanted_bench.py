"""A controller's wanted state over a cluster of fakes, for the tests of what it does."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.v1 import control_pb2

from cluster.config import ModelSpec, build_spec
from cluster.lifecycle import RestartPolicy
from cluster.placement import NodeResources
from cluster.saved_state import SavedState, decode, encode
from cluster.wanted_state import WantedState
from helpers.cluster import FakeClock, FakeRouter, Formations, turns

NODES = [
    NodeResources(node_id=f"node-{name}", cpus=8, gpus=0, free_cpus=8, free_gpus=0, address=f"10.0.0.{index}")
    for index, name in enumerate("ab")
]


@dataclass
class Bench:
    """A cluster of fakes whose controller can die and come back."""

    folder: Path
    forms: Formations = field(default_factory=Formations)
    router: FakeRouter = field(default_factory=FakeRouter)
    other_router: FakeRouter = field(default_factory=lambda: FakeRouter("router-1"))
    saved: bytes = encode(SavedState())
    clock: FakeClock = field(default_factory=FakeClock)
    wall_ahead_s: float = 1.8e9
    """How far the wall clock is ahead of `clock`."""
    nodes: list[NodeResources] = field(default_factory=lambda: list(NODES))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_saves: int = 0
    state: WantedState = field(init=False)
    _states: list[WantedState] = field(default_factory=list)
    """Kept, because asyncio logs a pending task whose last reference goes."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A new controller, from what the last one saved."""
        self.forms = Formations()
        self.state = self._start()
        self._states.append(self.state)

    def _start(self) -> WantedState:
        return WantedState(
            decode(self.saved),
            routers=[self.router, self.other_router],
            form=self.forms,
            save=self.save,
            nodes=lambda: self.nodes,
            changed=self.changed,
            policy=RestartPolicy(),
            clock=self.clock,
            wall_clock=lambda: self.clock() + self.wall_ahead_s,
        )

    def move(self, *, booted_s: float) -> None:
        """Be on another machine from now on, that started so long ago."""
        self.wall_ahead_s += self.clock.now_s - booted_s
        self.clock.now_s = booted_s

    def save(self, state: SavedState) -> None:
        self.saved = encode(state)
        self.num_saves += 1

    def specs(self, *sections: dict[str, Any]) -> tuple[ModelSpec, ...]:
        return build_spec(
            {"models": [{"path": str(self.folder), "name": "m"} | section for section in sections]}
        ).models

    async def apply(self, *sections: dict[str, Any]) -> list[str]:
        changes = await self.state.apply(self.specs(*sections))
        self.state.reconcile()
        await turns()
        return [f"{change.kind} {change.name}" for change in changes]

    async def settle(self) -> None:
        """Let every group that can become READY, until nothing changes."""
        for _ in range(20):
            self.state.reconcile()
            await turns()
            for life in self.forms.lives:
                if not life.was_cancelled and not life.is_over:
                    life.become_ready()

    def replicas(self) -> list[str]:
        return [endpoint.replica_id for endpoint in self.state.replicas() if not endpoint.draining]

    def model(self, name: str = "m") -> control_pb2.ModelStatus:
        return next(model for model in self.state.model_statuses() if model.name == name)
