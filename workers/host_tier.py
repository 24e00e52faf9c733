"""The second tier of the prefix cache: which slot of host memory holds what evicted blocks held, and what to copy.

Knows slots, contents and the copies of the next plan. Blocks are block_pool.py's, the memory is host_cache.py's. A
content is what one group of layers computed for one block hash.

    evicted   block ──save──> slot     the slot that was used longest ago gives way
    found     block <──load── slot     and the slot keeps it: evicted again, it need not be copied

Ranks execute plans in order, and each saves first, then loads, then computes. Therefore

- a save finds in its block what earlier plans put there, whoever has the block now;
- what a plan saves it can load as well;
- a slot that is to be loaded keeps its content until the plan is made: nothing else is saved into it;
- a block that is evicted before its load was carried out is not loaded, for somebody else writes it.
"""

from collections import OrderedDict
from typing import NamedTuple


class Content(NamedTuple):
    """What a block or a slot holds."""

    block_hash: bytes
    group: int


class Copies(NamedTuple):
    """What a plan copies before it computes: first all saves, then all loads."""

    saves: list[tuple[int, int]]
    """(block, slot)"""
    loads: list[tuple[int, int]]
    """(slot, block)"""


class HostTier:
    """Slots by content, in the order of their use. With no slots it holds nothing, and costs nothing."""

    def __init__(self, num_slots: int = 0) -> None:
        self.num_slots = num_slots
        self.num_saved_blocks = 0
        """Blocks that all plans so far have saved."""
        self.num_loaded_blocks = 0
        self._slots: OrderedDict[Content, int] = OrderedDict()  # used longest ago first
        self._free = list(reversed(range(num_slots)))
        self._held: set[Content] = set()  # found for the next plan
        self._saves: dict[int, int] = {}  # slot -> block
        self._loads: dict[int, int] = {}  # block -> slot

    @property
    def num_used(self) -> int:
        """Slots that hold something."""
        return len(self._slots)

    def __contains__(self, content: Content) -> bool:
        return content in self._slots

    def hashes(self, group: int) -> list[bytes]:
        """Return what it holds of a group."""
        return [content.block_hash for content in self._slots if content.group == group]

    def save(self, block: int, content: Content) -> Content | None:
        """Take over the content of a block that is evicted, unless it is here; return what is lost for it.

        Where every slot is held for the next plan, nothing is taken over.
        """
        self._loads.pop(block, None)
        if content in self._slots:
            self._slots.move_to_end(content)
            return None
        lost = None
        if not self._free:
            lost = next(iter(self._slots), None)
            if lost is None or lost in self._held:
                return None
            self._free.append(self._slots.pop(lost))
        slot = self._free.pop()
        self._slots[content] = slot
        self._saves[slot] = block
        return lost

    def hold(self, contents: list[Content]) -> None:
        """Keep these contents, the head of a chain first, for the next plan."""
        for content in reversed(contents):  # the head is used last, and stays longest
            self._slots.move_to_end(content)
        self._held.update(contents)

    def load(self, block: int, content: Content) -> None:
        """Have the next plan copy a held content into a block."""
        assert content in self._held, "it may be gone before the plan is made"
        self._loads[block] = self._slots[content]

    def discard(self, content: Content) -> None:
        """Give up a content, unless it is held for the next plan."""
        if content in self._slots and content not in self._held:
            slot = self._slots.pop(content)
            self._saves.pop(slot, None)
            self._free.append(slot)

    def take_copies(self) -> Copies:
        """Return the copies of the plan that is made now. It must be executed, and in its place."""
        copies = Copies(
            [(block, slot) for slot, block in self._saves.items()],
            [(slot, block) for block, slot in self._loads.items()],
        )
        self.num_saved_blocks += len(copies.saves)
        self.num_loaded_blocks += len(copies.loads)
        self._saves.clear()
        self._loads.clear()
        self._held.clear()
        return copies

    def check_integrity(self) -> None:
        """Raise AssertionError when slots are lost, or what is held or to be copied is not there."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self.num_slots)), "slots are lost"
        assert self._held <= self._slots.keys(), "what is held is gone"
        assert self._saves.keys() <= set(self._slots.values()), "a save into a slot that holds nothing"
        held = {self._slots[content] for content in self._held}
        assert set(self._loads.values()) <= held, "a load from a slot that may be gone"
        assert len(set(self._saves.values())) == len(self._saves), "a block is saved twice"
