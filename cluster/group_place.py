"""Where one life of a replica group runs: its placement group on Ray, from being reserved or found to being given back.

What the bundles must be is decided in placement.py; what runs in them is formation.py's.
"""

import asyncio
from collections.abc import Callable

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.placement import NODE_ID_LABEL, Placement, why_not
from cluster.ray_nodes import cluster_nodes
from cluster.see_through import ask_until_told, see_through

_POLL_S = 0.2
_FIRST_POLL_S = 0.01  # most groups have a place by then


class GroupPlace:
    """The place of one life. `reserve` or `find`, then `give_back` always."""

    def __init__(self, replica_id: str, *, drained_nodes: Callable[[], frozenset[str]]) -> None:
        """Args: `drained_nodes` says where no group may be placed now."""
        self._replica_id = replica_id
        self._drained_nodes = drained_nodes
        self._group: PlacementGroup | None = None

    @property
    def is_held(self) -> bool:
        """Whether there is something to give back."""
        return self._group is not None

    async def reserve(self, placement: Placement, on_waiting: Callable[[str], None]) -> list[str]:
        """Reserve a place, and wait for it as long as it takes; anew when other nodes are to be avoided.

        Args:
            placement: what it must have.
            on_waiting: hears why there is no room yet.

        Returns:
            The Ray id of the node of each stage. None of them was drained when this returns.
        """
        while True:
            avoided = self._drained_nodes()
            group = await self._ask(placement, avoided)
            if node_ids := await self._wait(group, placement, avoided, on_waiting):
                return node_ids
            await see_through(self.give_back())

    async def find(self) -> None:
        """Look for the place that was left, until Ray says which that is."""
        self._group = await ask_until_told(_find_group, self._replica_id)

    async def give_back(self) -> None:
        """Give the place back, if there is one, and do not rest before Ray has heard it."""
        if self._group is not None:
            await ask_until_told(remove_placement_group, self._group)
            self._group = None

    def bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        """Return the option by which an actor runs in a bundle of the place that is held."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=index)

    async def _ask(self, placement: Placement, avoided: frozenset[str]) -> PlacementGroup:
        selector = {NODE_ID_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided else {}
        try:
            group: PlacementGroup = placement_group(
                placement.bundles,
                strategy=placement.strategy,
                name=self._replica_id,
                lifetime="detached",
                bundle_label_selector=[selector] * len(placement.bundles) if selector else None,
            )
        except RayError:  # Ray's head may have made it all the same
            await see_through(self.find())
            raise
        self._group = group
        return group

    async def _wait(
        self, group: PlacementGroup, placement: Placement, avoided: frozenset[str], on_waiting: Callable[[str], None]
    ) -> list[str]:
        """Return the node of each bundle; none when others are to be avoided by now."""
        pause_s = _FIRST_POLL_S
        while True:
            node_ids = await asyncio.to_thread(_nodes_of, group)
            if avoided != self._drained_nodes():
                return []  # the place may be on a node that was drained meanwhile
            if node_ids:
                return node_ids
            if pause_s == _POLL_S:  # before that it may be Ray's answer alone that is missing
                nodes = [node for node in await asyncio.to_thread(cluster_nodes) if node.node_id not in avoided]
                on_waiting(why_not(placement, nodes) or "waits for Ray to place it")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S)


def _find_group(name: str) -> PlacementGroup | None:
    try:
        group: PlacementGroup = ray.util.get_placement_group(name)
        return group
    except ValueError:
        return None


def _nodes_of(group: PlacementGroup) -> list[str]:
    """Return the Ray id of each bundle's node; none while it has no place. Raises RayError when the group is gone."""
    # Not `group.wait(0)`: it says no when Ray's answer is not there at once, which can go on for a second.
    table = placement_group_table(group)
    state = table.get("state", "REMOVED")
    if state == "REMOVED":
        raise RayError("its place was given back by somebody else")
    node_ids: dict[int, str] = table["bundles_to_node_id"]
    return [node_ids[bundle] for bundle in sorted(node_ids)] if state == "CREATED" else []
