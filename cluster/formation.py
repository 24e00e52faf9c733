"""One life of a replica group on Ray: its place, its rank processes and the replica that they are together.

Performs; when to form, and what to do after an end, is decided in lifecycle.py by way of replica_group.py.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.exceptions import NodeDiedError, RayError
from weft.recording import RecordingConfig

from cluster.config import ModelSpec
from cluster.group_place import GroupPlace
from cluster.placement import Placement, why_never
from cluster.rank_actor import RankActor, rank_name
from cluster.rank_values import NodeShare, Outcome, RankPlace, RankReport, RankSpec, ReplicaAddresses, ReplicaLoad
from cluster.ray_errors import in_a_line
from cluster.ray_nodes import cluster_nodes
from cluster.revision_files import RevisionText
from cluster.see_through import ask_actor, ask_until_told, end_actor, see_through
from cluster.spares import SpareKind, leave_spares, spare_options
from router.config import TracingConfig
from router.tls import InnerTls

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_ADOPT_TIMEOUT_S = 10.0  # for every rank to answer a new controller
_LOAD_TIMEOUT_S = 2.0  # for a leader to say how busy it is: as long as from one look of scaling.py to the next
_HEAR_TIMEOUT_S = 1.0  # for a rank, which may hang, to be told that its end is wanted
_NUM_QUESTIONS = 10  # a leader that leaves so many unanswered is taken for dead
_DEATH_TIMEOUT_S = 10.0  # for a rank that does not answer to be known as dead, with the reason
_RANK_ACTOR = ray.remote(RankActor)


class FormationListener(Protocol):
    """Hears how a formation goes."""

    def on_waiting(self, reason: str) -> None:
        """There is no room for the group yet."""

    def on_placed(self, node_ids: Sequence[str] = ()) -> None:
        """The group has its place, on these Ray nodes; its processes are being started."""

    def on_ranks(self, places: Sequence[RankPlace]) -> None:
        """All processes run."""

    def on_adopted(self, places: Sequence[RankPlace], addresses: ReplicaAddresses | None) -> None:
        """All processes run, since before this controller; `addresses` is given where the replica serves already."""

    def on_progress(self, fraction: float) -> None:
        """This fraction of the weights is loaded."""

    def on_slow(self, reason: str) -> None:
        """The replica computes slower than it could."""

    def on_ready(self, addresses: ReplicaAddresses) -> None:
        """The replica serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormationSpec:
    """What one formation of a group is."""

    replica_id: str
    model: ModelSpec
    text: RevisionText | None = None
    """What the model's folder must hold; None: not known."""
    num_cluster_ranks: int
    """Ranks wanted in the whole cluster, to share the cores of its nodes."""
    spare_s: float = 0.0
    """How long processes that are started ahead wait for work; 0: there are none."""
    may_grow: bool
    """Nodes may join the cluster: a group that fits on none of today's waits for them."""
    adopts: bool
    """The group's processes may run already: take them over, or end what is left of them."""
    log_level: str
    tracing: TracingConfig = field(default_factory=TracingConfig)
    recording: RecordingConfig = field(default_factory=RecordingConfig)
    inner_tls: InnerTls | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """How the ranks of one stage are started."""

    node_share: NodeShare
    options: dict[str, Any]
    """Options by which the actors of the ranks become spares; empty: too few spares wait on the node."""


class Formation:
    """One life of a group. `run` lasts as long as it does; cancelling `run` ends every process of it."""

    def __init__(
        self,
        spec: FormationSpec,
        listener: FormationListener,
        *,
        drained_nodes: Callable[[], frozenset[str]],
        num_placed_ranks: Callable[[], int],
    ) -> None:
        """Make a life that has not begun.

        Args:
            spec: what it is.
            listener: hears how it goes.
            drained_nodes: says where no group may be placed now.
            num_placed_ranks: says how many ranks the whole cluster has now, for which spares are left.
        """
        self.bundles: list[dict[str, float]] = []
        """Resources that the group takes of the cluster, an entry for each stage; empty before `run`."""
        self._spec = spec
        self._listener = listener
        self._num_placed_ranks = num_placed_ranks
        self._place = GroupPlace(spec.replica_id, drained_nodes=drained_nodes)
        self._actors: list[Any] = []
        self._stage_nodes: Sequence[str] = ()
        """The node of each stage; empty before the ranks are created or found."""
        self._begun: list[Any] = []  # the actors that answer
        self._start_by_s = 0.0  # time of the event loop; set when it has its place, or was found
        self._leaving: asyncio.Task[None] | None = None

    async def run(self) -> Outcome:
        """Form the group, serve, and return how it ended; nothing of it is left then."""
        is_stopped = False
        try:
            placement = self._placement()
            self.bundles = placement.bundles
            refusal = await (self._adopt() if self._spec.adopts else self._form(placement))
            return refusal or await self._serve()
        except RayError as error:
            return Outcome(message=in_a_line(error))
        except asyncio.CancelledError:
            is_stopped = True
            raise
        finally:
            await see_through(self._tear_down(is_wanted=is_stopped))
            if self._leaving is not None:
                await self._leaving
                if is_stopped:  # waiting spares wait for longer, and others replace those that have gone
                    await asyncio.to_thread(self._leave_spares, self._num_placed_ranks())

    async def drain(self, grace_s: float) -> None:
        """Take nothing new and wait until the requests in flight have ended, at most `grace_s`."""
        if not self._actors:
            return
        try:
            async with asyncio.timeout(grace_s):
                await ask_actor(self._actors[0].drain.remote)
        except (TimeoutError, RayError) as error:
            logger.warning("%s: not drained: %s", self._spec.replica_id, in_a_line(error))

    async def load(self) -> ReplicaLoad | None:
        """Say how busy the replica is; None where it does not say soon."""
        if not self._actors:
            return None
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                load: ReplicaLoad | None = await self._actors[0].load.remote()
        except (TimeoutError, RayError):
            return None
        return load

    async def _form(self, placement: Placement) -> Outcome | None:
        """Place the group and begin every rank; an outcome when it cannot be."""
        if not self._spec.may_grow and (reason := why_never(placement, await asyncio.to_thread(cluster_nodes))):
            return Outcome(message=reason, is_refusal=True)
        node_ids = await self._place.reserve(placement, self._listener.on_waiting)
        self._listener.on_placed(node_ids)  # nothing else runs in between: who drains a node now knows of the group
        self._limit_start()
        try:
            async with asyncio.timeout_at(self._start_by_s):
                await self._begin(placement, node_ids)
        except TimeoutError:
            return self._too_late()
        return None

    async def _begin(self, placement: Placement, node_ids: Sequence[str]) -> None:
        await self._create_actors(placement, node_ids)
        host, port = "", 0
        if len(self._actors) > 1:
            host, port = await self._actors[0].open_rendezvous.remote()
        places = await asyncio.gather(*(self._begin_rank(actor, host, port) for actor in self._actors))
        self._listener.on_ranks(places)

    async def _begin_rank(self, actor: Any, host: str, port: int) -> RankPlace:
        place: RankPlace = await actor.begin.remote(host, port)
        self._begun.append(actor)
        return place

    async def _adopt(self) -> Outcome | None:
        """Find the processes of the replica; an outcome when not every one of them runs."""
        await see_through(self._find())  # what is not found is not torn down
        if len(self._actors) < self._spec.model.engine.parallel.world_size or not self._place.is_held:
            return Outcome(message="was lost while no controller watched it")
        try:
            async with asyncio.timeout(_ADOPT_TIMEOUT_S):
                reports = await self._reports()
        except TimeoutError:
            return Outcome(message=f"did not answer a new controller within {_ADOPT_TIMEOUT_S:g} s")
        if not all(report.has_begun for report in reports):
            return Outcome(message="its controller died while it was being started")
        self._begun = self._actors
        tensor_parallel = self._spec.model.engine.parallel.tensor_parallel
        self._stage_nodes = [report.place.node_id for report in reports[::tensor_parallel]]
        self._limit_start()
        self._listener.on_adopted([report.place for report in reports], reports[0].addresses)
        return None

    async def _find(self) -> None:
        """Look for the ranks and the place that were left, until Ray says which those are."""
        replica_id = self._spec.replica_id
        names = [rank_name(replica_id, rank) for rank in range(self._spec.model.engine.parallel.world_size)]
        found = await asyncio.gather(*(ask_until_told(_find_actor, name) for name in names))
        self._actors = [actor for actor in found if actor is not None]
        await self._place.find()

    def _placement(self) -> Placement:
        engine = self._spec.model.engine
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        return Placement(
            parallel=engine.parallel,
            gpus_per_rank=int(engine.device == "cuda" or (engine.device == "auto" and has_gpus)),
            cpus_per_rank=self._spec.model.cpus_per_rank,
            accelerator=self._spec.model.accelerator,
        )

    async def _create_actors(self, placement: Placement, node_ids: Sequence[str]) -> None:
        stages = await asyncio.to_thread(self._look_at_stages, node_ids)
        self._stage_nodes = node_ids
        interval_s = self._spec.model.stream_interval_s
        for rank in range(placement.parallel.world_size):
            index = placement.stage_of(rank)
            stage = stages[index]
            spec = RankSpec(
                replica_id=self._spec.replica_id,
                model=self._spec.model.name,
                rank=rank,
                engine=self._spec.model.engine,
                text=self._spec.text,
                node_share=stage.node_share,
                drain_timeout_s=self._spec.model.drain_timeout_s,
                stream_interval_s=placement.default_stream_interval_s if interval_s is None else interval_s,
                log_level=self._spec.log_level,
                tracing=self._spec.tracing,
                recording=self._spec.recording,
                inner_tls=self._spec.inner_tls,
            )
            actor = _RANK_ACTOR.options(
                num_cpus=placement.cpus_per_rank,
                num_gpus=placement.gpus_per_rank,
                max_restarts=0,
                name=rank_name(self._spec.replica_id, rank),
                lifetime="detached",  # else it would end with the controller
                scheduling_strategy=self._place.bundle(index),
                **stage.options,
            )
            self._actors.append(actor.remote(spec))

    def _look_at_stages(self, node_ids: Sequence[str]) -> list[_Stage]:
        """Say how the ranks of each stage are started, on the node where it lies."""
        nodes = {node.node_id: node for node in cluster_nodes()}
        if lost := sorted(set(node_ids) - nodes.keys()):
            raise NodeDiedError(f"node {lost[0]} was lost before its ranks were started")
        engine = self._spec.model.engine
        evenly = math.ceil(self._spec.num_cluster_ranks / len(nodes))
        stages = []
        for node_id in node_ids:
            own = node_ids.count(node_id) * engine.parallel.tensor_parallel
            share = NodeShare(num_ranks=max(own, evenly), num_cpus=nodes[node_id].cpus)
            options = spare_options(node_id, SpareKind.RANK, count=own) if self._spec.spare_s else {}
            stages.append(_Stage(node_share=share, options=options))
        return stages

    async def _serve(self) -> Outcome:
        """Wait for the first rank to end: a group lives and dies as one."""
        runs = [asyncio.create_task(_watch(rank, actor)) for rank, actor in enumerate(self._actors)]
        tasks: list[asyncio.Task[Any]] = [*runs]
        try:
            start = asyncio.create_task(self._watch_start())
            end = asyncio.create_task(_telling(runs))
            tasks += [start, end]
            await asyncio.wait([start, end], return_when=asyncio.FIRST_COMPLETED)
            if start.done() and (error := start.exception()) is not None:
                await asyncio.wait([end], timeout=_DEATH_TIMEOUT_S)
                return end.result() if end.done() else Outcome(message=f"lost sight of its ranks: {in_a_line(error)}")
            if start.done() and (late := start.result()) is not None:
                return late
            silence = asyncio.create_task(self._watch_leader())
            tasks.append(silence)
            await asyncio.wait([end, silence], return_when=asyncio.FIRST_COMPLETED)
            return end.result() if end.done() else silence.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_start(self) -> Outcome | None:
        """Report progress until the leader serves; an outcome when that takes too long."""
        ready = asyncio.ensure_future(ask_actor(self._actors[0].ready.remote))
        try:
            async with asyncio.timeout_at(self._start_by_s):
                while not ready.done():
                    fractions = await asyncio.gather(*(ask_actor(actor.progress.remote) for actor in self._actors))
                    self._listener.on_progress(sum(fractions) / len(fractions))
                    await asyncio.wait([ready], timeout=_POLL_S)
                for report in await self._reports():
                    if report.slowness:
                        slow = f"node {report.place.node} computes in plain torch, several times slower"
                        self._listener.on_slow(f"{slow}: {report.slowness}")
                self._listener.on_ready(await ready)
                if self._spec.spare_s:  # only now, when nothing else waits for the cores
                    leaving = asyncio.to_thread(self._leave_spares, self._num_placed_ranks())
                    self._leaving = asyncio.create_task(leaving)
        except TimeoutError:
            return self._too_late()
        finally:
            ready.cancel()
        return None

    async def _reports(self) -> list[RankReport]:
        reports: list[RankReport] = await asyncio.gather(*(ask_actor(actor.report.remote) for actor in self._actors))
        return reports

    async def _watch_leader(self) -> Outcome:
        """Ask the leader whether it is there, until it does not answer for twice as long as a step may take."""
        limit_s = 2 * self._spec.model.engine.step_timeout_s
        num_silent = 0
        while num_silent < _NUM_QUESTIONS:  # not by a clock: this process may have stood still
            try:
                async with asyncio.timeout(limit_s / _NUM_QUESTIONS):
                    await self._actors[0].load.remote()
                num_silent = 0
                await asyncio.sleep(limit_s / _NUM_QUESTIONS)
            except TimeoutError:
                num_silent += 1
            except RayError:  # if it has ended, that is heard elsewhere
                num_silent += 1
                await asyncio.sleep(limit_s / _NUM_QUESTIONS)
        return Outcome(message=f"rank 0 has not answered for {limit_s:g} s")

    def _limit_start(self) -> None:
        self._start_by_s = asyncio.get_running_loop().time() + self._spec.model.start_timeout_s

    def _too_late(self) -> Outcome:
        return Outcome(message=f"not ready within {self._spec.model.start_timeout_s:g} s")

    def _leave_spares(self, num_placed_ranks: int) -> None:
        count, lifetime_s = self._spec.model.engine.parallel.tensor_parallel, self._spec.spare_s
        with suppress(RayError):  # its head does not answer: no processes, and nothing else
            evenly = math.ceil(num_placed_ranks / max(1, len(cluster_nodes())))
            for node_id in self._stage_nodes:
                most = max(self._stage_nodes.count(node_id) * count, evenly)
                leave_spares(node_id, SpareKind.RANK, count=count, most=most, lifetime_s=lifetime_s)

    async def _announce_end(self) -> None:
        """Tell the ranks that their end is wanted, so that they do not warn of it; one that misses it does no harm."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_HEAR_TIMEOUT_S):
                heard = (actor.expect_end.remote() for actor in self._begun)
                await asyncio.gather(*heard, return_exceptions=True)

    async def _tear_down(self, *, is_wanted: bool) -> None:
        """End what is left of the processes and give the place back, and do not rest before Ray has heard it."""
        if is_wanted:
            await self._announce_end()
        actors, self._actors = self._actors, []
        await asyncio.gather(*(ask_until_told(end_actor, actor) for actor in actors))
        await self._place.give_back()


def _find_actor(name: str) -> Any:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def _watch(rank: int, actor: Any) -> Outcome:
    """Wait for the end of one rank, whichever way it comes."""
    try:
        outcome: Outcome = await ask_actor(actor.ended.remote)
    except RayError as error:
        return Outcome(message=f"rank {rank}: {in_a_line(error)}")
    return outcome


async def _telling(runs: Sequence[asyncio.Task[Outcome]]) -> Outcome:
    """Return the most telling of the outcomes that come together: a refusal, or else the first one."""
    first, _ = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
    ended, _ = await asyncio.wait(runs, timeout=_POLL_S)
    refusals = (task.result() for task in ended if task.result().is_refusal)
    return next(refusals, first.pop().result())
