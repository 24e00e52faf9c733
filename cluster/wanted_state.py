"""The pass that brings a cluster to what is wanted of it: groups that are planned, formed, drained and forgotten.

What is wanted is kept and changed in wanted_models.py, which groups that means is said in plan_groups.py. `reconcile`
never blocks and may be called any number of times; whatever a successor must know is saved before it is done. Knows no
Ray: lives of groups and routers come from the callables it is given.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from weft.v1 import control_pb2

from cluster.config import ModelSection, ModelSpec
from cluster.errors import NotServedError
from cluster.lifecycle import GroupState, RestartPolicy
from cluster.log_reader import LogSource
from cluster.placement import NodeResources
from cluster.plan_groups import plan_groups
from cluster.rank_values import ReplicaLoad
from cluster.replica_group import Form, ReplicaGroup
from cluster.saved_state import GroupRecord, RouterRecord, SavedState
from cluster.see_through import see_through
from cluster.state_messages import (
    autoscaling_status,
    model_status,
    node_status,
    served_model,
)
from cluster.wanted import Change, WantedModel
from cluster.wanted_models import BY_OPERATOR, WantedModels

logger = logging.getLogger(__name__)


class WantedRouter(Protocol):
    """One router over all of its lives: router_process.RouterProcess, or a double in tests."""

    @property
    def router_id(self) -> str:
        """The router's name, over all of its lives."""

    @property
    def is_adopting(self) -> bool:
        """Whether it is unknown yet if the router's last life goes on."""

    @property
    def record(self) -> RouterRecord:
        """What a successor of the controller must know: where it listens in every life, and its restarts."""

    def reconcile(self) -> None:
        """Start it when it should be; never blocks."""

    async def stop(self, grace_s: float) -> None:
        """Let it finish its requests, at most `grace_s`, and end it."""

    def status(self) -> control_pb2.RouterStatus:
        """Tell where it is and whether it lives."""

    def log_sources(self) -> list[LogSource]:
        """Return the log of the router's process, while it runs."""


class WantedState:
    """The models, their groups and the routers. Implements control_server.ControlState and scaling.ScaledState."""

    def __init__(
        self,
        saved: SavedState,
        *,
        routers: Sequence[WantedRouter],
        form: Form,
        save: Callable[[SavedState], None],
        nodes: Callable[[], list[NodeResources]],
        changed: asyncio.Event,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Go on from what was saved, or begin with nothing.

        Args:
            saved: its groups may live, and are adopted.
            routers: in front of the models.
            form: makes one life of a group.
            save: keeps what a successor must know; it is kept when the call returns.
            nodes: of the Ray cluster; blocks for a moment.
            changed: set at every change, to wake whoever calls `reconcile`.
            policy: when a group that failed is formed again.
            clock: monotonic seconds.
            wall_clock: seconds since the epoch, the same for a successor on another machine.
        """
        self._saved = saved
        self._is_saved = False
        """Whether the store holds `_saved`: at first it lacks what the new controller has changed, its restarts."""
        self._routers = routers
        self._form = form
        self._save_state = save
        self._nodes = nodes
        self._changed = changed
        self._policy = policy
        self._clock = clock
        self._wall_clock = wall_clock
        self._stop_by_s: float | None = None
        if saved.stop_left_s is not None:
            self._stop_by_s = clock() + saved.left_of(saved.stop_left_s, wall_clock())
        self._wanted = WantedModels(
            saved.models, next_revisions=saved.next_revisions, on_change=self._note_wanted, clock=clock
        )
        self._next_numbers = dict(saved.next_numbers)
        self._drained_nodes = frozenset(saved.drained_nodes)
        self.is_stopped = False
        if self.is_stopping:
            self._wanted.close()
        passed_s = saved.passed_s(wall_clock())
        records = [replace(record, failed_ago_s=record.failed_ago_s + passed_s) for record in saved.groups]
        self._groups = [self._make_group(record, adopts=True) for record in records]
        for group, record in zip(self._groups, saved.groups, strict=True):
            if record.is_leaving:
                group.leave(self._left_s(record))

    @property
    def is_adopting(self) -> bool:
        """Whether it is unknown yet of some group or router if it outlived the former controller."""
        return any(router.is_adopting for router in self._routers) or any(group.is_adopting for group in self._groups)

    @property
    def is_stopping(self) -> bool:
        """Whether the service is to stop, and forms nothing any more. A successor goes on with that: `finish_stop`."""
        return self._stop_by_s is not None

    @property
    def drained_nodes(self) -> frozenset[str]:
        """Ray ids of the nodes where no group is placed."""
        return self._drained_nodes

    @property
    def num_ranks(self) -> int:
        """Number of rank processes that are wanted, over all groups."""
        return sum(model.replicas * model.spec.engine.parallel.world_size for model in self._models.values())

    @property
    def num_placed_ranks(self) -> int:
        """Number of rank processes of the groups that stay and have a place, or had one until their last end."""
        placed = [group for group in self._groups if group.is_placed and not group.is_leaving]
        return sum(group.model.engine.parallel.world_size for group in placed)

    def reconcile(self) -> None:
        """Bring every group and router nearer to what is wanted."""
        if self.is_stopping:
            for group in self._groups:
                group.observe()  # an adoption may end, for which a stop waits
                group.adopt()  # and begins before its turn to stop comes, after the routers'
            self._groups = [group for group in self._groups if not group.is_gone]
            return
        num_groups = len(self._groups)
        for group in self._groups:
            group.observe()  # before anything is planned: a group that has just died is no reason to let another go
        self._groups = [group for group in self._groups if not group.is_gone]
        has_left, is_news = self._leave_drained_nodes(), self._note_ready()
        if self._plan() or has_left or is_news or len(self._groups) != num_groups or not self._is_saved:
            self._save()
        for group in self._groups:
            group.reconcile()
        for router in self._routers:
            router.reconcile()
        if self._router_records() != self._saved.routers:
            self._save()

    # What operators and autoscalers want

    async def apply(self, specs: Sequence[ModelSpec], *, dry_run: bool = False) -> list[Change]:
        """Want exactly these models; say what that changes. Raises, as the three below, what WantedModels does."""
        return await self._wanted.apply(specs, dry_run=dry_run)

    def scale(self, name: str, replicas: int, *, reason: str = BY_OPERATOR) -> int:
        """Want so many replicas of a model, for a reason; return how many were wanted before."""
        return self._wanted.scale(name, replicas, reason=reason)

    async def roll(self, name: str, settings: Mapping[str, Any]) -> tuple[Change, int]:
        """Replace a model's groups by ones with these settings changed; return what that means and the revision."""
        return await self._wanted.roll(name, settings)

    async def undo(self, name: str) -> tuple[Change, int]:
        """Go back to a model's revision before; as `roll`."""
        return await self._wanted.undo(name)

    async def drain(self, target: str, grace_s: float | None) -> tuple[list[str], str]:
        """Let a replica, a group, or every group of a node leave; others are formed in their stead.

        Args:
            target: a replica id, a group id, or a node's address or Ray id.
            grace_s: until requests in flight move to other replicas; None: what the model's settings say.

        Returns:
            The replicas that leave, and the Ray id of the node, which takes no groups until `undrain`.

        Raises:
            NotServedError: there is none of this name; the message lists those there are.
        """
        groups = [group for group in self._groups if target in (group.group_id, group.replica_id or group.group_id)]
        node_id = ""
        if not groups:
            nodes = await asyncio.to_thread(self._nodes)
            replicas = ", ".join(sorted(group.replica_id or group.group_id for group in self._groups)) or "none"
            node_id = _find_node(target, nodes, missing=f"no replica or node is {target!r}; replicas: {replicas}")
            self._drained_nodes = self._drained_nodes & {node.node_id for node in nodes} | {node_id}
            groups = [group for group in self._groups if node_id in group.node_ids]
        for group in groups:
            group.leave(group.model.drain_timeout_s if grace_s is None else grace_s)
        logger.info("%s is drained: %d groups leave", target, len(groups))
        self._save()
        self._changed.set()
        return [group.replica_id or group.group_id for group in groups], node_id

    async def undrain(self, target: str) -> str:
        """Place groups on a node again; return its Ray id. Raises NotServedError or StoppingError."""
        self._wanted.check_open()
        nodes = await asyncio.to_thread(self._nodes)
        node_id = _find_node(target, nodes, missing=f"no node is {target!r}, and only a node's drain can be undone")
        self._drained_nodes -= {node_id}
        self._save()
        self._changed.set()
        return node_id

    async def shut_down(self, grace_s: float) -> None:
        """Stop the routers, which finish their requests, then the groups, which finish those of routers elsewhere.

        Both together take at most `grace_s`. What has begun goes on when the caller is cancelled: nothing is formed any
        more, so that half a service would be left. A successor is told of it first.
        """
        stop_by_s = self._clock() + grace_s
        if self._stop_by_s is None or stop_by_s < self._stop_by_s:
            self._stop_by_s = stop_by_s
            self._wanted.close()
            self._save()
        await see_through(self._stop_all(grace_s))

    async def finish_stop(self) -> None:
        """Go on with what `shut_down` began under the controller before, within what is left of its time."""
        assert self._stop_by_s is not None
        await self._stop_all(max(0.0, self._stop_by_s - self._clock()))

    async def _stop_all(self, grace_s: float) -> None:
        give_up_s = self._clock() + grace_s
        await asyncio.gather(*(router.stop(grace_s) for router in self._routers))
        left_s = max(0.0, give_up_s - self._clock())
        await asyncio.gather(*(group.stop(grace_s=left_s) for group in self._groups))
        self.is_stopped = True
        self._changed.set()

    # What is told

    def sections(self) -> Mapping[str, ModelSection]:
        """The settings of every wanted model, with the number of replicas wanted now."""
        return self._wanted.sections()

    async def loads(self, name: str) -> list[ReplicaLoad | None]:
        """What each READY replica of a model has to do; None for one that does not say."""
        ready = [group for group in self._groups_of(name) if group.lifecycle.state is GroupState.READY]
        return await asyncio.gather(*(group.load() for group in ready))

    def missing_bundles(self) -> list[dict[str, float]]:
        """What all groups take that should live, while the cluster is too small for one of them; else nothing."""
        groups = [group for group in self._groups if not group.is_leaving]
        is_too_small = any(group.waits_for_room for group in groups)
        return [bundle for group in groups for bundle in group.bundles] if is_too_small else []

    def models(self) -> list[control_pb2.ServedModel]:
        """The models that are served."""
        return [served_model(model, self._groups_of(name)) for name, model in self._models.items()]

    def replicas(self) -> list[control_pb2.ReplicaEndpoint]:
        """The replicas that take requests now, and those that finish what they have."""
        groups = [group for group in self._groups if group.model.name in self._models]
        return [endpoint for group in groups if (endpoint := group.endpoint) is not None]

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        """Every model and its groups; models that are no longer wanted as long as groups of them live."""
        return [self._model_status(name) for name in self._names()]

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        """Every router."""
        return [router.status() for router in self._routers]

    async def node_statuses(self) -> list[control_pb2.NodeStatus]:
        """Every node of the Ray cluster that lives."""
        nodes = await asyncio.to_thread(self._nodes)
        return [node_status(node, is_drained=node.node_id in self._drained_nodes) for node in nodes]

    def log_sources(self) -> list[LogSource]:
        """The logs of every process that runs now."""
        sources = [group.log_sources() for group in self._groups] + [router.log_sources() for router in self._routers]
        return [source for each in sources for source in each]

    def _model_status(self, name: str) -> control_pb2.ModelStatus:
        model = self._models.get(name)
        if model is None:
            return model_status(name, None, self._groups_of(name))
        status = model_status(name, model, self._groups_of(name))
        section, last = model.current.section, self._wanted.scalings.get(name)
        if (scaling := autoscaling_status(section, last, self._clock())) is not None:
            status.autoscaling.CopyFrom(scaling)
        return status

    @property
    def _models(self) -> dict[str, WantedModel]:
        return self._wanted.current

    def _groups_of(self, name: str) -> list[ReplicaGroup]:
        return [group for group in self._groups if group.model.name == name]

    # How it is done

    def _leave_drained_nodes(self) -> bool:
        """Let groups go that turn out to be on a drained node; return whether there were any."""
        staying = [group for group in self._groups if not group.is_leaving]
        groups = [group for group in staying if self._drained_nodes.intersection(group.node_ids)]
        for group in groups:
            logger.info("%s is on a drained node, and leaves", group.replica_id)
            group.leave(group.model.drain_timeout_s)
        return bool(groups)

    def _note_ready(self) -> bool:
        """Note which revisions have been READY; return whether there is a new one."""
        ready = [group for group in self._groups if group.lifecycle.was_ready]
        return self._wanted.note_ready((group.model.name, group.live_group.revision) for group in ready)

    def _plan(self) -> bool:
        """Make and dismiss groups as plan_groups.py says; return whether anything changed."""
        has_changed = False
        for name in self._names():
            model = self._models.get(name)
            groups = [group for group in self._groups_of(name) if not group.is_leaving]
            if any(group.is_adopting for group in groups):
                continue  # soon known
            plan = plan_groups(
                model.replicas if model else 0,
                model.current.number if model else 0,
                [group.live_group for group in groups],
            )
            for group in groups:
                if group.group_id in plan.leaving:
                    group.leave(group.model.drain_timeout_s)
                    has_changed = True
            for _ in range(plan.num_new):
                assert model is not None
                self._groups.append(self._make_group(self._new_record(model), adopts=False))
                has_changed = True
        return has_changed

    def _left_s(self, record: GroupRecord) -> float:
        """Return how long a group that was leaving under the controller before still has to leave."""
        if record.left_s is None:
            return record.section.drain_timeout_s
        return self._saved.left_of(record.left_s, self._wall_clock())

    def _names(self) -> list[str]:
        """Return the models that are wanted, and those of which groups are left."""
        return [
            *self._models,
            *sorted({group.model.name for group in self._groups} - set(self._models)),
        ]

    def _new_record(self, model: WantedModel) -> GroupRecord:
        number = self._next_numbers.get(model.name, 0)
        self._next_numbers[model.name] = number + 1
        return GroupRecord(
            group_id=f"{model.name}-{number}",
            number=number,
            revision=model.current.number,
            section=model.current.section,
            hash_key=model.hash_key,
            text=model.current.text,
        )

    def _make_group(self, record: GroupRecord, *, adopts: bool) -> ReplicaGroup:
        return ReplicaGroup(
            record,
            form=self._form,
            policy=self._policy,
            clock=self._clock,
            on_change=self._changed.set,
            on_record=self._save,
            adopts=adopts,
        )

    def _note_wanted(self) -> None:
        self._save()
        self._changed.set()

    def _router_records(self) -> dict[str, RouterRecord]:
        return {router.router_id: router.record for router in self._routers}

    def _save(self) -> None:
        self._saved = replace(
            self._saved,
            routers=self._router_records(),
            models=self._models,
            groups=tuple(group.record for group in self._groups),
            next_numbers=self._next_numbers,
            next_revisions=self._wanted.next_revisions,
            drained_nodes=tuple(sorted(self._drained_nodes)),
            stop_left_s=None if self._stop_by_s is None else max(0.0, self._stop_by_s - self._clock()),
            saved_s=self._wall_clock(),
        )
        self._save_state(self._saved)
        self._is_saved = True


def _find_node(target: str, nodes: Sequence[NodeResources], *, missing: str) -> str:
    """Return the Ray id of the node of this id or address. Raises NotServedError, which says `missing` where none is.

    Two nodes may have one address: Ray lets a machine be several.
    """
    found = [node.node_id for node in nodes if target in (node.node_id, node.address)]
    if len(found) > 1:
        raise NotServedError(
            f"several nodes are at {target}; allowed: one of their Ray ids, {', '.join(sorted(found))}"
        )
    if not found:
        raise NotServedError(f"{missing}; nodes: {', '.join(sorted(node.address for node in nodes)) or 'none'}")
    return found[0]
