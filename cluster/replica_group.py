"""One wanted replica group over all of its lives: forms it, notices its end, forms it again as its lifecycle says.

Decides nothing about time (lifecycle.py) and touches no Ray (formation.py); `reconcile` may be called any number of
times.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from weft.v1 import control_pb2

from cluster.config import ModelSpec
from cluster.formation import FormationListener
from cluster.lifecycle import GroupState, Lifecycle, RestartPolicy
from cluster.rank_actor import Outcome, RankPlace, ReplicaAddresses

logger = logging.getLogger(__name__)

_STATES = {
    GroupState.PENDING: control_pb2.GROUP_STATE_PENDING,
    GroupState.STARTING: control_pb2.GROUP_STATE_STARTING,
    GroupState.READY: control_pb2.GROUP_STATE_READY,
    GroupState.DRAINING: control_pb2.GROUP_STATE_DRAINING,
    GroupState.FAILED: control_pb2.GROUP_STATE_FAILED,
    GroupState.STOPPED: control_pb2.GROUP_STATE_STOPPED,
}


class GroupLife(Protocol):
    """One life of a group: formation.Formation, or a double in tests."""

    async def run(self) -> Outcome:
        """Form the group, serve, and return how it ended; when cancelled, end it."""

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and wait for the requests in flight, at most `grace_s`."""


Form = Callable[[str, ModelSpec, FormationListener], GroupLife]
"""Makes one life of a group, from its replica id."""


class ReplicaGroup:
    """One wanted group of one model. Implements FormationListener for its present life."""

    def __init__(
        self,
        group_id: str,
        model: ModelSpec,
        *,
        form: Form,
        policy: RestartPolicy,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.group_id = group_id
        self.model = model
        self.lifecycle = Lifecycle(policy, clock())
        self.replica_id = ""
        self._form = form
        self._clock = clock
        self._on_change = on_change
        self._num_lives = 0
        self._life: GroupLife | None = None
        self._task: asyncio.Task[Outcome] | None = None
        self._places: tuple[RankPlace, ...] = ()
        self._addresses: ReplicaAddresses | None = None
        self._progress = 0.0

    @property
    def endpoint(self) -> control_pb2.ReplicaEndpoint | None:
        """Where routers find the replica; None while it takes no requests."""
        if self.lifecycle.state is not GroupState.READY or self._addresses is None:
            return None
        return control_pb2.ReplicaEndpoint(
            replica_id=self.replica_id, model=self.model.name, address=self._addresses.address
        )

    def reconcile(self) -> None:
        """Take note of an end, and form the group when it should be. Never blocks; idempotent."""
        now_s = self._clock()
        if self._task is not None and self._task.done():
            self._note_end(self._task, now_s)
        if self._task is None and self.lifecycle.may_form(now_s):
            self._num_lives += 1
            self.replica_id = f"{self.group_id}.{self._num_lives}"
            self._life = self._form(self.replica_id, self.model, self)
            self._task = asyncio.create_task(self._life.run(), name=self.replica_id)
            self._task.add_done_callback(lambda _: self._on_change())

    async def stop(self, grace_s: float) -> None:
        """Drain the group if it serves, and end it."""
        was_ready = self.lifecycle.state is GroupState.READY
        self.lifecycle.drain(self._clock())
        self._on_change()
        if was_ready and grace_s > 0 and self._life is not None:
            await self._life.drain(grace_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._forget_life()
        self.lifecycle.stopped(self._clock())
        self._on_change()

    def status(self) -> control_pb2.GroupStatus:
        """Tell how the group is."""
        is_alive = self._task is not None
        addresses = self._addresses
        parallel = self.model.engine.parallel
        return control_pb2.GroupStatus(
            group_id=self.group_id,
            replica_id=self.replica_id,
            state=_STATES[self.lifecycle.state],
            detail=self.lifecycle.detail,
            tensor_parallel=parallel.tensor_parallel,
            pipeline_parallel=parallel.pipeline_parallel,
            ranks=[
                control_pb2.RankStatus(
                    rank=rank, node=place.node, pid=place.pid, alive=is_alive, metrics_address=place.metrics_address
                )
                for rank, place in enumerate(self._places)
            ],
            restarts=self.lifecycle.restarts,
            seconds_in_state=self._clock() - self.lifecycle.since_s,
            address=addresses.address if addresses else "",
            metrics_address=addresses.metrics_address if addresses else "",
            progress=self._progress,
        )

    def on_waiting(self, reason: str) -> None:
        """FormationListener."""
        if self.lifecycle.state is GroupState.PENDING:
            self.lifecycle.wait(reason)
            self._on_change()

    def on_placed(self) -> None:
        """FormationListener."""
        if self.lifecycle.state is GroupState.PENDING:
            self.lifecycle.placed(self._clock())
            self._on_change()

    def on_ranks(self, places: Sequence[RankPlace]) -> None:
        """FormationListener."""
        self._places = tuple(places)
        if self.lifecycle.state is GroupState.STARTING:
            self.lifecycle.starting("loading the model")

    def on_progress(self, fraction: float) -> None:
        """FormationListener."""
        self._progress = fraction

    def on_ready(self, addresses: ReplicaAddresses) -> None:
        """FormationListener."""
        if self.lifecycle.state is GroupState.STARTING:
            self._addresses = addresses
            self._progress = 1.0
            self.lifecycle.ready(self._clock())
            logger.info("group %s is ready as %s at %s", self.group_id, self.replica_id, addresses.address)
            self._on_change()

    def _note_end(self, task: asyncio.Task[Outcome], now_s: float) -> None:
        error = task.exception()
        outcome = Outcome(message=f"{type(error).__name__}: {error}") if error else task.result()
        self._forget_life()
        if outcome.is_refusal:
            logger.error("group %s cannot run: %s", self.group_id, outcome.message)
            self.lifecycle.refused(outcome.message, now_s)
        else:
            logger.warning("group %s (%s) ended: %s", self.group_id, self.replica_id, outcome.message)
            self.lifecycle.failed(outcome.message, now_s)
        self._on_change()

    def _forget_life(self) -> None:
        self._task = None
        self._life = None
        self._places = ()
        self._addresses = None
        self._progress = 0.0
