"""Which groups of a model to form and which to let go, from what is wanted and what lives. Pure and without memory.

A rollout is nothing but two revisions at once: one group more than wanted may live meanwhile, and a group of an older
revision leaves when one of the wanted revision is READY in its stead. Called at every pass, it always gives the next
steps from where things stand, so it may be interrupted, repeated and reversed at any point.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SURGE = 1
"""Groups beyond the wanted number during a rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGroup:
    """A group as the plan sees it; those that leave already are not shown to it."""

    group_id: str
    number: int
    """Its place in the order in which the model's groups were made."""
    revision: int
    is_ready: bool
    has_failed: bool = False
    """The group was given up, and is not formed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What to do now."""

    num_new: int
    """Groups of the wanted revision to form."""
    leaving: tuple[str, ...]
    """Groups to drain and end."""


def plan_groups(replicas: int, revision: int, groups: Sequence[LiveGroup]) -> GroupPlan:
    """Return the next steps towards `replicas` groups of `revision`.

    Never lets a READY group go while fewer than `replicas` others are READY, unless there are more groups than wanted.
    """
    wanted = _most_useful_first(group for group in groups if group.revision == revision)
    older = _most_useful_first(group for group in groups if group.revision != revision)
    num_ready = min(replicas, sum(group.is_ready for group in wanted))
    # An older group keeps its place until a wanted one is READY for it.
    num_older = min(len(older), replicas - num_ready)
    room = min(replicas, replicas + _SURGE - num_older)
    leaving = [*wanted[room:], *older[num_older:]]
    return GroupPlan(num_new=max(0, room - len(wanted)), leaving=tuple(group.group_id for group in leaving))


def _most_useful_first(groups: Iterable[LiveGroup]) -> list[LiveGroup]:
    """Order groups: READY ones, then older ones, whose caches are warm and whose start is further; failed ones last."""
    return sorted(groups, key=lambda group: (not group.is_ready, group.has_failed, group.number))
