"""The controller in virtual time: the real autoscaler, group planning and group lifecycle, over simulated replicas.

What is simulated is what Ray does for it: a group that is formed is READY after a while, one that dies is gone at once.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.simulation.replica import SimulatedReplica
from bench.simulation.router import MODEL, SimulatedRouter
from bench.simulation.virtual_time import VirtualTime
from cluster.autoscaler import Autoscaler, AutoscalerConfig
from cluster.demand import Demand, DemandLedger
from cluster.lifecycle import GroupState, Lifecycle, RestartPolicy
from cluster.plan_groups import LiveGroup, plan_groups
from cluster.rank_values import ReplicaLoad
from cluster.scaling import LOOK_S, observe
from router.demand import REPORT_S
from router.prefix_index import ReplicaId

_TICK_S = 0.5
"""Time between two looks for backoffs that have passed, as the controller's."""
_REVISION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Autoscaling:
    """When there should be more or fewer replicas."""

    rules: AutoscalerConfig
    min_replicas: int
    max_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How many replicas there are, and what becomes of them."""

    replicas: int
    """Replicas that are READY at the start."""
    autoscaling: Autoscaling | None = None
    """What changes their number; None: it stays."""
    start_s: float = 30.0
    """Time from the decision to form a group until it is READY."""
    drain_timeout_s: float = 30.0
    """Time until requests on a group that leaves move to others."""
    failures: tuple[tuple[float, int], ...] = ()
    """(time, number of the group, from 0) of replicas that die."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)


class SimulatedGroup:
    """One wanted group over its lives, as cluster/replica_group.py."""

    def __init__(self, number: int, restart: RestartPolicy, now_s: float) -> None:
        self.number = number
        self.lifecycle = Lifecycle(restart, now_s)
        self.replica: SimulatedReplica | None = None
        self.is_leaving = False
        self.num_lives = 0
        self.placed_s = 0.0

    @property
    def live_group(self) -> LiveGroup:
        """The group as plan_groups.py sees it."""
        is_ready = self.lifecycle.state is GroupState.READY
        return LiveGroup(group_id=str(self.number), number=self.number, revision=_REVISION, is_ready=is_ready)


class SimulatedController:
    """Brings the groups to what is wanted, and tells the routers which there are."""

    def __init__(
        self,
        settings: FleetSettings,
        routers: Sequence[SimulatedRouter],
        make_replica: Callable[[ReplicaId], SimulatedReplica],
        time: VirtualTime,
    ) -> None:
        self.replicas: list[SimulatedReplica] = []
        """All replicas that were READY once."""
        self.scalings: list[tuple[float, int, str]] = []
        """When, to how many, and why."""
        self.idle_failures = list(settings.failures)
        """The failures of the settings of which no replica has died."""
        self.most_replicas = settings.replicas
        self.wanted = settings.replicas
        self._settings = settings
        self._routers = routers
        self._make_replica = make_replica
        self._time = time
        self._autoscaler = None if settings.autoscaling is None else _autoscaler(settings.autoscaling)
        self._groups: list[SimulatedGroup] = []
        self._num_groups = 0
        self._start_s = 0.0  # of the first groups, which are served at once
        self._held_s = 0.0
        self._is_telling = False
        self._streams = ExitStack()
        self._ledger = DemandLedger()
        self._reports = [self._streams.enter_context(self._ledger.router()) for _ in routers]

    @property
    def ready(self) -> list[SimulatedReplica]:
        """The replicas that are READY now."""
        return self._replicas_in(GroupState.READY)

    def begin(self) -> None:
        """Have the first groups READY, and let the rest happen."""
        self._reconcile()
        for group in self._groups:
            self._serve(group)
        self._tell_routers()  # before the first request comes, though that is now
        self._start_s = self._settings.start_s
        self._time.every(_TICK_S, self._reconcile)
        if self._autoscaler is not None:
            self._time.every(LOOK_S, self._look)
            self._time.every(REPORT_S, self._report)
        for failure in self._settings.failures:
            self._time.at(failure[0], lambda failure=failure: self._fail(failure))  # type: ignore[misc]

    def replica_s(self) -> float:
        """Return the time for which places were held, over all groups."""
        return self._held_s + sum(self._time.now_s - group.placed_s for group in self._groups if _is_placed(group))

    def _look(self) -> None:
        """Do what Scaling.look does."""
        assert self._autoscaler is not None
        loads = [_load(replica) for replica in self.ready]
        demand = self._ledger.take().get(MODEL, Demand())
        decision = self._autoscaler.decide(observe(loads, demand, self._time.now_s), self.wanted)
        if decision.replicas != self.wanted:
            self.wanted = decision.replicas
            self.most_replicas = max(self.most_replicas, self.wanted)
            self.scalings.append((self._time.now_s, self.wanted, decision.reason))
            self._reconcile()

    def _report(self) -> None:
        for router, stream in zip(self._routers, self._reports, strict=True):
            stream.note(router.report())

    def _reconcile(self) -> None:
        """Do what WantedState.reconcile does."""
        staying = [group for group in self._groups if not group.is_leaving]
        plan = plan_groups(self.wanted, _REVISION, [group.live_group for group in staying])
        for group in staying:
            if group.live_group.group_id in plan.leaving:
                self._leave(group)
        for _ in range(plan.num_new):
            self._groups.append(SimulatedGroup(self._num_groups, self._settings.restart, self._time.now_s))
            self._num_groups += 1
        for group in self._groups:
            if group.lifecycle.may_form(self._time.now_s) and not group.is_leaving:
                self._form(group)

    def _form(self, group: SimulatedGroup) -> None:
        group.num_lives += 1
        group.placed_s = self._time.now_s
        group.lifecycle.placed(self._time.now_s)
        self._time.after(self._start_s, lambda: self._serve(group))

    def _serve(self, group: SimulatedGroup) -> None:
        if group.lifecycle.state is GroupState.STARTING:  # it may have been let go
            group.replica = self._make_replica(ReplicaId(f"{MODEL}-{group.number}.{group.num_lives}"))
            self.replicas.append(group.replica)
            group.lifecycle.ready(self._time.now_s)
            self._tell()

    def _leave(self, group: SimulatedGroup) -> None:
        """Do what ReplicaGroup.leave does."""
        group.is_leaving = True
        was_placed = _is_placed(group)
        group.lifecycle.drain(self._time.now_s)
        if group.lifecycle.state is GroupState.DRAINING and group.replica is not None:
            self._tell()
            group.replica.drain(self._settings.drain_timeout_s, lambda: self._stop(group))
        else:
            self._forget(group, was_placed=was_placed)

    def _stop(self, group: SimulatedGroup) -> None:
        group.lifecycle.stopped(self._time.now_s)
        self._forget(group, was_placed=True)
        self._tell()

    def _forget(self, group: SimulatedGroup, *, was_placed: bool) -> None:
        self._groups.remove(group)
        if was_placed:
            self._held_s += self._time.now_s - group.placed_s

    def _fail(self, failure: tuple[float, int]) -> None:
        """Let the replica of a group die, if it has one."""
        group = next((group for group in self._groups if group.number == failure[1]), None)
        if group is None or group.replica is None:
            return
        self.idle_failures.remove(failure)
        group.replica.die()
        group.replica = None
        self._held_s += self._time.now_s - group.placed_s
        group.lifecycle.failed("it died", self._time.now_s)
        if group.is_leaving:
            self._groups.remove(group)
        self._tell()
        self._reconcile()

    def _tell(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self._time.after(0, self._tell_routers)

    def _tell_routers(self) -> None:
        """Say which replicas there are, as WatchReplicas."""
        self._is_telling = False
        draining = self._replicas_in(GroupState.DRAINING)
        replicas = [*self._replicas_in(GroupState.READY), *draining]
        for router in self._routers:
            router.apply(replicas, frozenset(replica.replica_id for replica in draining))

    def _replicas_in(self, state: GroupState) -> list[SimulatedReplica]:
        return [group.replica for group in self._groups if group.replica and group.lifecycle.state is state]


def _autoscaler(scaling: Autoscaling) -> Autoscaler:
    return Autoscaler(scaling.rules, min_replicas=scaling.min_replicas, max_replicas=scaling.max_replicas)


def _is_placed(group: SimulatedGroup) -> bool:
    return group.lifecycle.state in (GroupState.STARTING, GroupState.READY, GroupState.DRAINING)


def _load(replica: SimulatedReplica) -> ReplicaLoad:
    scheduler = replica.scheduler
    return ReplicaLoad(
        num_running=scheduler.num_running, num_waiting=scheduler.num_waiting, kv_usage=replica.cache.usage
    )
