"""Watches every model that scales by itself, and wants as many replicas of it as autoscaler.py decides.

A look adds up what replicas and routers say now. What another number means for groups is wanted_state.py's business.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cluster.autoscaler import Autoscaler, Observation
from cluster.config import ModelSection
from cluster.demand import Demand, DemandLedger
from cluster.rank_values import ReplicaLoad
from cluster.recording import ScalingRecording

LOOK_S = 2.0
"""Seconds from one look to the next."""


class ScaledState(Protocol):
    """What is watched and changed: wanted_state.WantedState, or a double in tests."""

    @property
    def is_adopting(self) -> bool:
        """Whether it is unknown yet what outlived the former controller."""

    @property
    def is_stopping(self) -> bool:
        """Whether the service is to stop, so that no number can be changed."""

    def sections(self) -> Mapping[str, ModelSection]:
        """The settings of every wanted model, with the number of replicas wanted now."""

    async def loads(self, name: str) -> list[ReplicaLoad | None]:
        """What each READY replica of a model has to do; None for one that does not say."""

    def scale(self, name: str, replicas: int, *, reason: str) -> int:
        """Want so many replicas; return how many were wanted before."""


@dataclass(slots=True, kw_only=True)
class _WatchedModel:
    """One model, as long as nobody else changes its number or its rules; then everything is observed anew."""

    section: ModelSection
    autoscaler: Autoscaler


class Scaling:
    """Follows the load of all models. `run` once, on the controller's event loop."""

    def __init__(
        self,
        state: ScaledState,
        ledger: DemandLedger,
        *,
        recording: ScalingRecording | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._recording = recording
        self._clock = clock
        self._watched: dict[str, _WatchedModel] = {}

    async def run(self) -> None:
        """Look every few seconds, and at once when somebody begins to wait, until cancelled."""
        while True:
            if not self._state.is_adopting:
                await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._ledger.somebody_waits.wait()
            self._ledger.somebody_waits.clear()

    async def look(self) -> None:
        """Observe every model once, and scale those that should be."""
        names = list(self._scaled())
        loads = dict(zip(names, await asyncio.gather(*map(self._state.loads, names)), strict=True))
        demands = self._ledger.take()
        sections = self._scaled()  # an operator may have changed them meanwhile
        self._watched = {name: model for name, model in self._watched.items() if name in sections}
        for name, section in sections.items():
            if name in loads:
                self._follow(name, section, observe(loads[name], demands.get(name, Demand()), self._clock()))

    def _scaled(self) -> dict[str, ModelSection]:
        if self._state.is_stopping:
            return {}
        return {name: section for name, section in self._state.sections().items() if section.autoscaling is not None}

    def _follow(self, name: str, section: ModelSection, observation: Observation) -> None:
        model = self._watched.get(name)
        if model is None or model.section != section:
            model = self._watched[name] = _WatchedModel(section=section, autoscaler=self._autoscaler(name, section))
        decision = model.autoscaler.decide(observation, section.replicas)
        if decision.replicas != section.replicas:
            self._state.scale(name, decision.replicas, reason=decision.reason)
            model.section = self._state.sections()[name]

    def _autoscaler(self, name: str, section: ModelSection) -> Autoscaler:
        assert section.autoscaling is not None
        assert section.max_replicas is not None
        make = Autoscaler if self._recording is None else partial(self._recording.autoscaler, name)
        return make(section.autoscaling, min_replicas=section.min_replicas, max_replicas=section.max_replicas)


def observe(loads: Sequence[ReplicaLoad | None], demand: Demand, now_s: float) -> Observation:
    """Add up what the READY replicas (None: it does not say) and the routers tell of a model."""
    told = [load for load in loads if load is not None]
    return Observation(
        time_s=now_s,
        num_ready=len(loads),
        num_running=sum(load.num_running for load in told),
        num_waiting=sum(load.num_waiting for load in told) + demand.num_held,
        kv_usage=sum(load.kv_usage for load in told) / len(told) if told else 0.0,
        num_finished=demand.num_finished,
        num_on_time=demand.num_on_time,
    )
