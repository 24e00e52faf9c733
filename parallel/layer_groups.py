"""Which layers share a block table: those that need the keys of the same tokens. Pure arithmetic.

Layers of one kind (they see everything, or a sliding window of one size) need the same blocks, so that a sequence has
one block table for each *group* of such layers. Blocks of all groups come from one pool, so they must have one size: a
block has a number of *planes*, each the keys and values of one layer, and holds one group's layers.

    4 layers: full, window, window, window      planes   groups                    a block of one holds layers
                                                   3     full | window             0       | 1 2 3
                                                   1     full | window x 3         0 | 1 | 2 | 3

With many planes those kinds with few layers leave some unused; with few planes a kind falls into several groups, each
with a table of its own to keep. arXiv:2503.18292 says why one pool is worth it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_MAX_GROUPS = 8
"""More only where there are more kinds: each costs a block table and some host time in each step."""
_MAX_WASTE = 1.05
"""Memory of a long sequence over the least that any division needs."""

_Kind = int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The groups of a whole model, the same on every rank."""

    windows: tuple[int | None, ...]
    """Window of each group: its layers see a token and this many - 1 before it; None: all before it."""
    group_of_layer: tuple[int, ...]
    plane_of_layer: tuple[int, ...]
    """Where in its group's blocks, on the rank that has it, each layer's keys and values are."""
    num_planes: tuple[int, ...]
    """Planes of each pipeline stage's blocks: as many as its largest group has layers there."""


def group_layers(windows: Sequence[int | None], *, stages: Sequence[range], max_context: int) -> LayerGroups:
    """Divide layers, given the sliding window of each, so that blocks on every stage are well filled."""
    kinds = [effective_window(window, max_context) for window in windows]
    counts = {kind: [sum(kinds[i] == kind for i in stage) for stage in stages] for kind in _ordered(kinds)}
    num_groups = _choose(counts, max_context)
    first_group, group_windows = {}, list[_Kind]()
    for kind, num in num_groups.items():
        first_group[kind] = len(group_windows)
        group_windows += [kind] * num
    groups, planes = [], []
    for stage in stages:
        num_seen = dict.fromkeys(counts, 0)
        for i in stage:
            kind = kinds[i]
            plane, offset = divmod(num_seen[kind], num_groups[kind])
            num_seen[kind] += 1
            groups.append(first_group[kind] + offset)
            planes.append(plane)
    return LayerGroups(
        windows=tuple(group_windows),
        group_of_layer=tuple(groups),
        plane_of_layer=tuple(planes),
        num_planes=tuple(max(planes[i] for i in stage) + 1 for stage in stages),
    )


def effective_window(window: int | None, max_context: int) -> int | None:
    """Return the window, None also where it is no shorter than any context."""
    return None if window is None or window >= max_context else window


def _ordered(kinds: Sequence[_Kind]) -> list[_Kind]:
    """The distinct kinds, that without a window first."""
    return sorted(set(kinds), key=lambda kind: -1 if kind is None else kind)


def _choose(counts: dict[_Kind, list[int]], max_context: int) -> dict[_Kind, int]:
    """How many groups each kind gets: the fewest that waste little memory of a sequence of max_context tokens."""
    most = max(max(nums) for nums in counts.values())
    best: dict[tuple[int, ...], int] = {}
    for num_planes in range(1, most + 1):
        division = tuple(max(-(-num // num_planes) for num in nums) for nums in counts.values())
        if sum(division) <= max(_MAX_GROUPS, len(counts)):
            num_tokens = sum(
                num * min(max_context, kind or max_context) for kind, num in zip(counts, division, strict=True)
            )
            best[division] = _num_planes(counts, division) * num_tokens
    allowed = [division for division, cost in best.items() if cost <= _MAX_WASTE * min(best.values())]
    chosen = min(allowed, key=lambda division: (sum(division), best[division]))
    return dict(zip(counts, chosen, strict=True))


def _num_planes(counts: dict[_Kind, list[int]], division: tuple[int, ...]) -> int:
    return max(-(-num // groups) for nums, groups in zip(counts.values(), division, strict=True) for num in nums)
