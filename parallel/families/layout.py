"""Where a tensor of the decoder lies in a checkpoint that fuses several matrices into one, or stores them transposed.

A fused matrix has one or several groups of rows, each with some rows of every part:

    stacked  (one group)     | q q q q | k k | v v |                   query heads, then key heads, then value heads
    grouped  (2 groups)      | q q | k | v | q q | k | v |             each key-value head after its query heads
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from parallel.description import DecoderDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """How the rows of several matrices make up those of one."""

    num_groups: int
    part_rows: Mapping[str, int]
    """Rows of each part in each group, in order."""

    @property
    def group_rows(self) -> int:
        """Rows from one group to the next."""
        return sum(self.part_rows.values())

    def runs(self, part: str, start: int, stop: int) -> Iterator[range]:
        """The rows of the fused matrix that are the rows start .. stop - 1 of a part, as runs, in order."""
        names = list(self.part_rows)
        rows = self.part_rows[part]
        first = sum(self.part_rows[name] for name in names[: names.index(part)])
        while start < stop:
            group, offset = divmod(start, rows)
            length = min(rows - offset, stop - start)
            begin = group * self.group_rows + first + offset
            yield range(begin, begin + length)
            start += length


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The place of one tensor of the decoder in a checkpoint."""

    name: str
    """Name of the stored tensor. With "{row}" in it, each row of the decoder's tensor is a stored tensor of its own."""
    fusion: Fusion | None = None
    part: str = ""
    """Part of the fusion that the tensor is; means nothing without a fusion."""
    is_transposed: bool = False
    expert: int | None = None
    """Place of the tensor where the stored one has those of all experts along a first dim; None: it has not."""
    num_experts: int = 0
    """Size of that dim of the stored tensor; 0 where there is none."""

    def names(self, num_rows: int) -> list[str]:
        """Return the names of all stored tensors that make up a tensor of `num_rows`."""
        if "{row}" in self.name:
            return [self.name.format(row=row) for row in range(num_rows)]
        return [self.name]

    def stored_shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what is stored where the decoder's tensor has this one."""
        if "{row}" in self.name:
            return full_shape[1:]
        if self.fusion is not None:
            full_shape = (self.fusion.num_groups * self.fusion.group_rows, *full_shape[1:])
        shape = full_shape[::-1] if self.is_transposed else full_shape
        return shape if self.expert is None else (self.num_experts, *shape)


Fuse = Callable[[DecoderDescription], Fusion]


def stacked_qkv(description: DecoderDescription) -> Fusion:
    """Return the fusion of all queries, then all keys, then all values."""
    rows = description.num_kv_heads * description.head_dim
    parts = {"q": description.num_heads * description.head_dim, "k": rows, "v": rows}
    return Fusion(num_groups=1, part_rows=parts)


def grouped_qkv(description: DecoderDescription) -> Fusion:
    """Return the fusion that has for each key-value head its queries, its key and its value."""
    head_dim, num_groups = description.head_dim, description.num_kv_heads
    parts = {"q": description.num_heads // num_groups * head_dim, "k": head_dim, "v": head_dim}
    return Fusion(num_groups=num_groups, part_rows=parts)


def stacked_gate_up(description: DecoderDescription) -> Fusion:
    """Return the fusion of the gate and, after it, what it is multiplied with."""
    return Fusion(num_groups=1, part_rows={"gate": description.intermediate_size, "up": description.intermediate_size})
