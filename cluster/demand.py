"""What the routers say of each model's demand, added up. Plain numbers; control_server.py hears, scaling.py asks."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from weft.v1 import control_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What clients ask of one model, over all routers."""

    num_held: int = 0
    """Requests that are on no replica now."""
    num_finished: int = 0
    """Requests that were served since the demand was last taken."""
    num_on_time: int = 0
    """How many of `num_finished` were within both targets."""

    def __add__(self, other: "Demand") -> "Demand":
        return Demand(
            num_held=self.num_held + other.num_held,
            num_finished=self.num_finished + other.num_finished,
            num_on_time=self.num_on_time + other.num_on_time,
        )


class RouterDemand:
    """What one router says, while its stream lasts."""

    def __init__(self, somebody_waits: asyncio.Event) -> None:
        self._somebody_waits = somebody_waits
        self._demands: dict[str, Demand] = {}

    def note(self, reported: Iterable[control_pb2.ModelDemand]) -> None:
        """Take a report: what it holds now, and what ended since the report before."""
        before = self._demands
        self._demands = {}
        for each in reported:
            last = before.get(each.model, Demand())
            if each.num_held and not last.num_held:
                self._somebody_waits.set()
            self._demands[each.model] = Demand(
                num_held=each.num_held,
                num_finished=last.num_finished + each.num_finished,
                num_on_time=last.num_on_time + each.num_on_time,
            )

    def take(self) -> Mapping[str, Demand]:
        """Return the demand by model, and count what ends from zero again."""
        taken = self._demands
        self._demands = {model: Demand(num_held=demand.num_held) for model, demand in taken.items()}
        return taken


class DemandLedger:
    """Keeps what all routers say that report now. Lives on the controller's event loop."""

    def __init__(self) -> None:
        self.somebody_waits = asyncio.Event()
        """Set when a router begins to hold requests of a model; whoever looks clears it."""
        self._routers: list[RouterDemand] = []

    @contextmanager
    def router(self) -> Iterator[RouterDemand]:
        """Add a router for the length of the block; then nothing that it said counts any more."""
        router = RouterDemand(self.somebody_waits)
        self._routers.append(router)
        try:
            yield router
        finally:
            self._routers.remove(router)

    def take(self) -> Mapping[str, Demand]:
        """Return the demand by model, summed over the routers; what ended is counted once."""
        total: dict[str, Demand] = {}
        for router in self._routers:
            for model, demand in router.take().items():
                total[model] = total.get(model, Demand()) + demand
        return total
