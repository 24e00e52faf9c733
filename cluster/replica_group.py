"""One wanted replica group over all of its lives: forms it, notices its end, forms it again as its lifecycle says.

Decides nothing about time (lifecycle.py) and touches no Ray (formation.py); `reconcile` may be called any number of
times.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from weft.v1 import control_pb2

from cluster.config import ModelSpec
from cluster.formation import FormationListener
from cluster.lifecycle import Failure, GroupState, Lifecycle, RestartPolicy
from cluster.log_reader import LogSource
from cluster.plan_groups import LiveGroup
from cluster.rank_values import Outcome, RankPlace, ReplicaAddresses, ReplicaLoad
from cluster.revision_files import RevisionText
from cluster.saved_state import GroupRecord

logger = logging.getLogger(__name__)


class GroupLife(Protocol):
    """One life of a group: formation.Formation, or a double in tests."""

    bundles: list[dict[str, float]]
    """Resources that it takes of the cluster, an entry for each stage; empty before `run`."""

    async def run(self) -> Outcome:
        """Form the group, serve, and return how it ended; when cancelled, end it."""

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and wait for the requests in flight, at most `grace_s`."""

    async def load(self) -> ReplicaLoad | None:
        """Say how busy the replica is; None where it does not say soon."""


class Form(Protocol):
    """Makes one life of a group, from its replica id; with `adopts`, that of the replica that lives already."""

    def __call__(
        self,
        replica_id: str,
        model: ModelSpec,
        listener: FormationListener,
        *,
        text: RevisionText | None,
        adopts: bool,
    ) -> GroupLife:
        """Make a life, of which nothing begins before `run`. `text`: what its folder must hold, where that is known."""


@dataclass(slots=True, kw_only=True)
class _Heard:
    """What a group's present life has told of itself."""

    waits_for_room: bool = False
    node_ids: tuple[str, ...] = ()
    places: tuple[RankPlace, ...] = ()
    addresses: ReplicaAddresses | None = None
    progress: float = 0.0
    slowness: str = ""


class ReplicaGroup:
    """One wanted group of one model. Implements FormationListener for its present life."""

    def __init__(
        self,
        record: GroupRecord,
        *,
        form: Form,
        policy: RestartPolicy,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        on_record: Callable[[], None],
        adopts: bool = False,
    ) -> None:
        """Want a group that does not live yet.

        Args:
            record: which group.
            form: makes its lives.
            policy: when it is formed again.
            clock: monotonic seconds.
            on_change: wakes whoever calls `reconcile`.
            on_record: saves the record, which has changed; a life begins when it returns.
            adopts: its last life may have outlived a former controller and is taken over.
        """
        self.group_id = record.group_id
        self.model = record.spec
        self.lifecycle = Lifecycle(
            policy,
            clock(),
            restarts=record.restarts,
            was_ready=record.was_ready,
            last_failure=Failure(record.last_failure, clock() - record.failed_ago_s) if record.last_failure else None,
            gave_up=record.gave_up,
        )
        self.is_adopting = adopts and record.num_lives > 0 and not record.has_ended
        """Whether it is unknown yet if the group's last life goes on."""
        self.replica_id = f"{self.group_id}.{record.num_lives}" if self.is_adopting else ""
        self.is_placed = self.is_adopting and record.is_placed
        """Whether its last life had a place; before that no process of it exists."""
        self._record = record
        self._form = form
        self._clock = clock
        self._on_change = on_change
        self._on_record = on_record
        self._num_lives = record.num_lives
        self._has_ended = record.has_ended
        self._life: GroupLife | None = None
        self._task: asyncio.Task[Outcome] | None = None
        self._heard = _Heard(node_ids=record.node_ids if self.is_adopting else ())
        self._is_leaving = False
        self._ending: asyncio.Task[None] | None = None
        self._end_by_s = 0.0  # time of the clock; only while it is ending
        self._limit: asyncio.Timeout | None = None  # the same time for the event loop, while the ending waits
        self._is_known = asyncio.Event()  # set when it is not, or no longer, adopting
        if self.is_adopting:
            self.lifecycle.wait("a new controller looks for its processes")
        else:
            self._is_known.set()

    @property
    def record(self) -> GroupRecord:
        """What a successor of the controller must know."""
        failure = self.lifecycle.last_failure
        return replace(
            self._record,
            num_lives=self._num_lives,
            is_placed=self.is_placed,
            node_ids=self._heard.node_ids,
            restarts=self.lifecycle.restarts,
            was_ready=self.lifecycle.was_ready,
            has_ended=self._has_ended,
            gave_up=self.lifecycle.detail if self.lifecycle.state is GroupState.FAILED else "",
            last_failure=failure.reason if failure else "",
            failed_ago_s=self._clock() - failure.at_s if failure else 0.0,
            is_leaving=self.is_leaving,
            left_s=max(0.0, self._end_by_s - self._clock()) if self.is_leaving else None,
        )

    @property
    def is_leaving(self) -> bool:
        """Whether the group is drained and ended, and is not formed again."""
        return self._is_leaving

    @property
    def is_gone(self) -> bool:
        """Whether the group has left, and nothing of it runs."""
        return self._is_leaving and self._ending is not None and self._ending.done()

    @property
    def waits_for_room(self) -> bool:
        """Whether the cluster is too small for the group now."""
        return self._heard.waits_for_room

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Ray ids of the nodes where its ranks run, start, or ran when the controller before ended; else empty."""
        return self._heard.node_ids

    @property
    def live_group(self) -> LiveGroup:
        """The group as plan_groups.py sees it."""
        return LiveGroup(
            group_id=self.group_id,
            number=self._record.number,
            revision=self._record.revision,
            is_ready=self.lifecycle.state is GroupState.READY,
            has_failed=self.lifecycle.state is GroupState.FAILED,
        )

    @property
    def endpoint(self) -> control_pb2.ReplicaEndpoint | None:
        """Where routers find the replica; None while it has no requests and takes none."""
        addresses = self._heard.addresses
        if addresses is None:
            return None
        return control_pb2.ReplicaEndpoint(
            replica_id=self.replica_id,
            model=self.model.name,
            address=addresses.address,
            draining=self.lifecycle.state is GroupState.DRAINING,
            text=self._text,
        )

    @property
    def _text(self) -> control_pb2.ModelText | None:
        text = self._record.text
        if text is None:
            return None
        return control_pb2.ModelText(path=text.path, digest=text.digest, revision=self._record.revision)

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources that it takes of the cluster, or would take; empty while nothing is tried."""
        return [] if self._life is None else self._life.bundles

    async def load(self) -> ReplicaLoad | None:
        """Say how busy the replica is; None where it does not say soon."""
        return None if self._life is None else await self._life.load()

    def observe(self) -> None:
        """Take note of an end that came by itself."""
        if self._task is not None and self._task.done() and not self._task.cancelled():  # else `stop` is about to
            self._note_end(self._task, self._clock())

    def adopt(self) -> None:
        """Begin to look for its last life, where it is adopting. Never blocks; idempotent."""
        if self.is_adopting and self._task is None:
            self._begin_life()

    def reconcile(self) -> None:
        """Take note of an end, and form the group when it should be. Never blocks; idempotent."""
        self.observe()
        if self._task is None and self.lifecycle.may_form(self._clock()) and (self.is_adopting or self._ending is None):
            self._begin_life()

    def leave(self, grace_s: float) -> None:
        """Begin to drain the group and to end it for good; requests still there after `grace_s` move elsewhere.

        When it is ending already, it ends at the earlier of the two times.
        """
        self._is_leaving = True
        self._end_within(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Drain the group if it serves, and end it; as `leave` when it is ending already."""
        await asyncio.shield(self._end_within(grace_s))

    def status(self) -> control_pb2.GroupStatus:
        """Tell how the group is."""
        is_alive = self._task is not None
        addresses = self._heard.addresses
        parallel = self.model.engine.parallel
        failure = self.lifecycle.last_failure
        return control_pb2.GroupStatus(
            group_id=self.group_id,
            replica_id=self.replica_id,
            state=control_pb2.GroupState.Value(f"GROUP_STATE_{self.lifecycle.state.name}"),
            detail=self.lifecycle.detail or self._heard.slowness,
            tensor_parallel=parallel.tensor_parallel,
            pipeline_parallel=parallel.pipeline_parallel,
            ranks=[
                control_pb2.RankStatus(
                    rank=rank, node=place.node, pid=place.pid, alive=is_alive, metrics_address=place.metrics_address
                )
                for rank, place in enumerate(self._heard.places)
            ],
            restarts=self.lifecycle.restarts,
            seconds_in_state=self._clock() - self.lifecycle.since_s,
            address=addresses.address if addresses else "",
            metrics_address=addresses.metrics_address if addresses else "",
            progress=self._heard.progress,
            revision=self._record.revision,
            leaving=self.is_leaving,
            last_failure=failure
            and control_pb2.Failure(reason=failure.reason, seconds_ago=self._clock() - failure.at_s),
        )

    def log_sources(self) -> list[LogSource]:
        """The logs of its ranks, while they run."""
        names = frozenset({self.model.name, self.group_id, self.replica_id})
        return [
            LogSource(name=f"{self.replica_id}/{rank}", belongs_to=names, node_id=place.node_id, path=place.log_file)
            for rank, place in enumerate(self._heard.places)
        ]

    def on_waiting(self, reason: str) -> None:
        """FormationListener."""
        self._heard.waits_for_room = True
        if self.lifecycle.state is GroupState.PENDING and self.lifecycle.detail != reason:
            self.lifecycle.wait(reason)
            self._on_change()

    def on_placed(self, node_ids: Sequence[str] = ()) -> None:
        """FormationListener."""
        self._heard.waits_for_room = False
        self.is_placed = True
        if node_ids:
            self._note_nodes(node_ids)
        if self.lifecycle.state is GroupState.PENDING:
            self.lifecycle.placed(self._clock())
            self._on_change()

    def on_ranks(self, places: Sequence[RankPlace]) -> None:
        """FormationListener."""
        self._heard.places = tuple(places)
        self._note_nodes(place.node_id for place in places)
        if self.lifecycle.state is GroupState.STARTING:
            self.lifecycle.starting("loading the model")

    def on_adopted(self, places: Sequence[RankPlace], addresses: ReplicaAddresses | None) -> None:
        """FormationListener."""
        self.on_placed()
        self.on_ranks(places)
        if addresses is not None:
            self.on_ready(addresses)
        self._end_adoption()

    def on_progress(self, fraction: float) -> None:
        """FormationListener."""
        self._heard.progress = fraction

    def on_slow(self, reason: str) -> None:
        """FormationListener."""
        self._heard.slowness = reason

    def on_ready(self, addresses: ReplicaAddresses) -> None:
        """FormationListener."""
        if self.lifecycle.state is GroupState.STARTING:
            self._heard.addresses = addresses
            self._heard.progress = 1.0
            is_first = not self.lifecycle.was_ready
            self.lifecycle.ready(self._clock())
            if is_first:
                self._on_record()
            logger.info("group %s is ready as %s at %s", self.group_id, self.replica_id, addresses.address)
            self._on_change()

    def _begin_life(self) -> None:
        if not self.is_adopting:
            self._num_lives += 1
            self.is_placed = self._has_ended = False
            self._on_record()
        self.replica_id = f"{self.group_id}.{self._num_lives}"
        self._life = self._form(self.replica_id, self.model, self, text=self._record.text, adopts=self.is_adopting)
        self._task = asyncio.create_task(self._life.run(), name=self.replica_id)
        self._task.add_done_callback(lambda _: self._on_change())

    def _end_within(self, grace_s: float) -> asyncio.Task[None]:
        """Begin to drain and to end the group, or have that end sooner."""
        end_by_s = self._clock() + grace_s
        if self._ending is not None and end_by_s >= self._end_by_s:
            return self._ending
        self._end_by_s = end_by_s
        if self._ending is None:
            self._ending = asyncio.create_task(self._end(), name=f"{self.group_id} ends")
        elif self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time() + grace_s)
        return self._ending

    async def _end(self) -> None:
        if self.is_adopting:
            self.adopt()  # what is not looked for is not ended
            await self._within_grace(self._is_known.wait())
        was_ready = self.lifecycle.state is GroupState.READY
        self.lifecycle.drain(self._clock())
        self._on_change()
        left_s = self._end_by_s - self._clock()
        if was_ready and left_s > 0 and self._life is not None:
            await self._within_grace(self._life.drain(left_s))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._forget_life()
        self.lifecycle.stopped(self._clock())
        self._end_adoption()

    async def _within_grace(self, event: Awaitable[object]) -> None:
        """Wait for an event, at most until the group is to end."""
        try:
            async with asyncio.timeout(self._end_by_s - self._clock()) as self._limit:
                await event
        except TimeoutError:
            logger.warning("group %s (%s) ends at once: its grace is over", self.group_id, self.replica_id)
        finally:
            self._limit = None

    def _note_nodes(self, node_ids: Iterable[str]) -> None:
        distinct = tuple(sorted(set(node_ids)))
        if distinct != self._heard.node_ids:
            self._heard.node_ids = distinct
            self._on_record()

    def _end_adoption(self) -> None:
        self.is_adopting = False
        self._is_known.set()
        self._on_change()

    def _note_end(self, task: asyncio.Task[Outcome], now_s: float) -> None:
        error = task.exception()
        outcome = Outcome(message=f"{type(error).__name__}: {error}") if error else task.result()
        self._forget_life()
        if self.is_adopting and not self.is_placed:
            self._num_lives -= 1  # it waits for room again: nothing was lost
        elif outcome.is_refusal:
            logger.error("group %s cannot run: %s", self.group_id, outcome.message)
            self.lifecycle.refused(outcome.message, now_s)
        else:
            logger.warning("group %s (%s) ended: %s", self.group_id, self.replica_id, outcome.message)
            self.lifecycle.failed(outcome.message, now_s)
        self._has_ended = True
        self._on_record()
        self._end_adoption()

    def _forget_life(self) -> None:
        self._task = self._life = None
        self._heard = _Heard()
