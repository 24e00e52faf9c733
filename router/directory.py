"""Which models are served and where: follows the controller's membership, or a fixed list; one link per replica.

Knows models and links; route.py says what the links of a model hold, and which of them gets a request.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import grpc
from weft.v1 import control_pb2
from weft.v1.control_pb2_grpc import ControlStub

from router.breaker import Breaker
from router.config import RouterConfig
from router.demand import DemandReporter
from router.errors import ModelNotFoundError, NoReplicaError, RouterConfigError
from router.model_text import ModelText
from router.policy import Policy
from router.prefix_index import ReplicaId
from router.prefix_policy import make_policy
from router.recording import RouterRecording
from router.replica import Endpoint, ReplicaLink
from router.route import Route, ServedModel
from router.tls import connect
from router.turns import Turns

if TYPE_CHECKING:
    from weft.v1.control_pb2_grpc import ControlAsyncStub

logger = logging.getLogger(__name__)

_CONTROL_OPTIONS = (
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All models and replicas."""

    models: tuple[ServedModel, ...]
    replicas: tuple[Endpoint, ...]
    draining: frozenset[ReplicaId] = frozenset()
    """Replicas that finish their requests and get no new ones."""


ModelRoute = Route[ReplicaLink]
"""One served model behind links of this router."""


class Directory:
    """The models served now. `run` follows membership and owns the links' tasks; all on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        rng: random.Random,
        on_change: Callable[[], None] | None = None,
        recording: RouterRecording | None = None,
    ) -> None:
        """Make an empty directory.

        Args:
            config: where to look, and the settings of links and policies.
            rng: of the waits before dials, and of policies.
            on_change: called when a replica becomes ready or stops being ready, and when models come or go.
            recording: what writes down whatever policies and breakers decide.
        """
        self._config = config
        self._rng = rng
        self._on_change = on_change
        self._recording = recording
        self._turns = Turns()
        self._changed = asyncio.Event()
        self._routes: dict[str, ModelRoute] = {}
        self._used_routes: WeakValueDictionary[str, ModelRoute] = WeakValueDictionary()
        """Also those of models that have gone, while requests for them are in flight."""
        self._is_known = False
        self._tasks: asyncio.TaskGroup | None = None
        self._reporter = DemandReporter(
            config.router_id, lambda: {name: route.demand for name, route in self._routes.items()}
        )

    @property
    def routes(self) -> list[ModelRoute]:
        """All models, by name; any thread may read them."""
        routes = self._routes  # never one that shrinks: `apply` makes a new dict when a model goes
        return [routes[name] for name in sorted(routes)]

    @property
    def is_ready(self) -> bool:
        """Whether some replica could take a request, or would be started for it."""
        return any(route.num_ready or route.starts_on_demand for route in self._routes.values())

    def resolve(self, model: str) -> ModelRoute:
        """Return the model of this name; the empty name is the only model served.

        Raises:
            ModelNotFoundError: there is none; the message lists those served.
            NoReplicaError: membership is not known yet.
        """
        if not self._is_known:
            raise NoReplicaError("the router does not know yet which models are served; try again soon")
        if not model and len(self._routes) == 1:
            return next(iter(self._routes.values()))
        route = self._routes.get(model)
        if route is None:
            served = ", ".join(repr(name) for name in sorted(self._routes)) or "none"
            seen = f"model is {model!r}" if model else "no model is named"
            raise ModelNotFoundError(f"{seen}; served: {served}")
        return route

    def report_soon(self) -> None:
        """Tell the controller now that a request waits for a first replica."""
        self._reporter.report_soon()

    def say_ports(self, ports: control_pb2.RouterPorts) -> None:
        """Tell the controller where this router listens. Before `run`."""
        self._reporter.say_ports(ports)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when something changed, or after a while."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def run(self) -> None:
        """Follow membership until cancelled; then close all links."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if self._config.control is None:
                self.apply(self._static_membership())
            else:
                await self._follow(self._config.control)

    def apply(self, membership: Membership) -> None:
        """Make links for new replicas and retire those that membership no longer names. Only while `run` runs."""
        for served in membership.models:
            if served.name in self._routes:
                self._routes[served.name].update(served)
            else:
                self._routes[served.name] = self._begin_route(served)
        names = {served.name for served in membership.models}
        wanted = {(each.model, each.replica_id): each for each in membership.replicas if each.model in names}
        for route in self._routes.values():
            for link in list(route.links.values()):
                if wanted.get((route.name, link.replica_id)) != link.endpoint:
                    route.remove(link.replica_id).retire()
        for endpoint in wanted.values():
            self._add(endpoint)
            link = self._routes[endpoint.model].links[endpoint.replica_id]
            link.note_dismissed(endpoint.replica_id in membership.draining)
        for name, route in self._routes.items():
            route.starts_on_demand &= name in names  # else a request that waits for it would wait on
        self._routes = {name: route for name, route in self._routes.items() if name in names}
        self._is_known = True
        self._notify()

    def _begin_route(self, served: ServedModel) -> ModelRoute:
        """Return the route of a model that comes, or comes back: requests that are still in flight find it again."""
        route = self._used_routes.get(served.name)
        if route is None:
            route = self._used_routes[served.name] = ModelRoute(served, self._make_policy(served.name))
        else:
            route.come_back(served)
        return route

    def _make_policy(self, model: str) -> Policy:
        seed = self._rng.getrandbits(64)  # a generator of its own: nobody else draws from it between two choices
        policy = make_policy(self._config.policy, self._config.prefix, random.Random(seed))
        return policy if self._recording is None else self._recording.policy(model, seed, policy)

    def _make_breaker(self, replica_id: ReplicaId) -> Breaker:
        return Breaker(self._config.breaker) if self._recording is None else self._recording.breaker(replica_id)

    def _add(self, endpoint: Endpoint) -> None:
        route = self._routes[endpoint.model]
        if endpoint.replica_id in route.links:
            return
        link = ReplicaLink(
            endpoint,
            router_id=self._config.router_id,
            index=route.index,
            config=self._config.link,
            breaker=self._make_breaker(endpoint.replica_id),
            turns=self._turns,
            accept=route.accept,
            on_change=partial(self._note_change, route),
            rng=self._rng,
        )
        route.add(link)
        assert self._tasks is not None
        self._tasks.create_task(link.run(), name=f"replica {endpoint.replica_id}")

    def _note_change(self, route: ModelRoute) -> None:
        route.note_change()
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        if self._on_change is not None:
            self._on_change()

    def _static_membership(self) -> Membership:
        return Membership(
            models=tuple(ServedModel(name=m.name, path=m.path, max_context=0) for m in self._config.models),
            replicas=tuple(
                Endpoint(replica_id=ReplicaId(address), model=model.name, address=address)
                for model in self._config.models
                for address in model.addresses
            ),
        )

    async def _follow(self, address: str) -> None:
        """Stream membership from the controller, for ever; while it is away, the last one stays."""
        link = self._config.link
        num_failures = 0
        while True:
            try:
                async with connect(address, link.tls, _CONTROL_OPTIONS) as channel, self._reporting(channel) as stub:
                    request = control_pb2.WatchReplicasRequest(router_id=self._config.router_id)
                    async for response in stub.WatchReplicas(request):
                        num_failures = 0
                        self.apply(_membership(response))
                reason = "the controller ended the stream"
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
            except RouterConfigError as error:  # a TLS file that went away
                reason = str(error)
            if num_failures == 0:
                logger.warning("controller at %s: %s; the last membership stays", address, reason)
            num_failures += 1
            await asyncio.sleep(link.next_wait_s(num_failures, self._rng))

    @asynccontextmanager
    async def _reporting(self, channel: grpc.aio.Channel) -> AsyncIterator["ControlAsyncStub"]:
        """Report demand to the controller for the length of the block."""
        assert self._tasks is not None
        stub: ControlAsyncStub = ControlStub(channel)
        task = self._tasks.create_task(self._reporter.run(stub), name="demand")
        try:
            yield stub
        finally:
            task.cancel()
            await asyncio.wait((task,))


def _membership(response: control_pb2.WatchReplicasResponse) -> Membership:
    return Membership(
        models=tuple(
            ServedModel(
                name=m.name,
                path=m.path,
                max_context=m.max_context,
                starts_on_demand=m.starts_on_demand,
                target_ttft_s=m.target_ttft_s,
                target_tpot_s=m.target_tpot_s,
                digest=m.text_digest,
            )
            for m in response.models
        ),
        replicas=tuple(
            Endpoint(
                replica_id=ReplicaId(r.replica_id),
                model=r.model,
                address=r.address,
                text=_text(r.text) if r.HasField("text") else None,
            )
            for r in response.replicas
        ),
        draining=frozenset(ReplicaId(r.replica_id) for r in response.replicas if r.draining),
    )


def _text(text: control_pb2.ModelText) -> ModelText:
    return ModelText(path=text.path, digest=text.digest, revision=text.revision)
