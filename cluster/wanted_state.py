"""What a cluster should run, and the pass that brings it about: wanted groups and routers against live ones.

`reconcile` never blocks and may be called any number of times. Knows no Ray: lives of groups and routers come from
the callables it is given.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from weft.v1 import control_pb2

from cluster.config import ClusterSpec, ModelSpec
from cluster.lifecycle import RestartPolicy
from cluster.models import resolve_model
from cluster.replica_group import Form, ReplicaGroup
from parallel.families.registry import describe_model


class WantedRouter(Protocol):
    """One router over all of its lives: router_process.RouterProcess, or a double in tests."""

    def reconcile(self) -> None:
        """Start it when it should be; never blocks."""

    async def stop(self, grace_s: float) -> None:
        """Let it finish its requests, at most `grace_s`, and end it."""

    def status(self) -> control_pb2.RouterStatus:
        """Tell where it is and whether it lives."""


class WantedState:
    """The groups of every model and the routers. Implements control_server.ControlState."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        routers: Sequence[WantedRouter],
        form: Form,
        changed: asyncio.Event,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the models, and want their groups. Raises ClusterError or ModelError when a model cannot be read.

        Args:
            spec: what is wanted.
            routers: in front of the models.
            form: makes one life of a group.
            changed: set at every change, to wake whoever calls `reconcile`.
            policy: when a group that failed is formed again.
            clock: monotonic seconds.
        """
        self._models = {model.name: _served_model(model) for model in spec.models}
        self._specs = spec.models
        self._routers = routers
        self._changed = changed
        self._is_stopping = False
        self.is_stopped = False
        self._groups = {
            model.name: [
                ReplicaGroup(
                    f"{model.name}-{index}", model, form=form, policy=policy, clock=clock, on_change=changed.set
                )
                for index in range(model.replicas)
            ]
            for model in spec.models
        }

    def reconcile(self) -> None:
        """Bring every group and router nearer to what is wanted."""
        if self._is_stopping:
            return
        for group in self._all_groups():
            group.reconcile()
        for router in self._routers:
            router.reconcile()

    def models(self) -> list[control_pb2.ServedModel]:
        """The models that are served."""
        return list(self._models.values())

    def replicas(self) -> list[control_pb2.ReplicaEndpoint]:
        """The replicas that take requests now."""
        return [endpoint for group in self._all_groups() if (endpoint := group.endpoint) is not None]

    def model_statuses(self) -> list[control_pb2.ModelStatus]:
        """Every model and its groups."""
        return [
            control_pb2.ModelStatus(
                name=model.name,
                path=self._models[model.name].path,
                wanted_replicas=model.replicas,
                groups=[group.status() for group in self._groups[model.name]],
            )
            for model in self._specs
        ]

    def router_statuses(self) -> list[control_pb2.RouterStatus]:
        """Every router."""
        return [router.status() for router in self._routers]

    async def shut_down(self, grace_s: float) -> None:
        """Stop the routers, which finish the requests in flight, then the groups."""
        self._is_stopping = True
        await asyncio.gather(*(router.stop(grace_s) for router in self._routers))
        await asyncio.gather(*(group.stop(grace_s=0.0) for group in self._all_groups()))
        self.is_stopped = True
        self._changed.set()

    def _all_groups(self) -> list[ReplicaGroup]:
        return [group for groups in self._groups.values() for group in groups]


def _served_model(model: ModelSpec) -> control_pb2.ServedModel:
    folder = resolve_model(model.source)
    max_context = describe_model(folder).max_context
    if model.engine.max_context is not None:
        max_context = min(max_context, model.engine.max_context)
    return control_pb2.ServedModel(name=model.name, path=str(folder), max_context=max_context)
