"""What a packing is: a way to store a matrix in few bits, as a tensor of values and one of scales.

Weights are unpacked while they are loaded, slice by slice; the decoder knows nothing of it. A checkpoint says by the
names of its tensors which of its matrices are packed, and how.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Stored(NamedTuple):
    """A tensor that the checkpoint must have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    """Allowed, by their names in safetensors."""


class Slice(Protocol):
    """A stored tensor, of which only what is asked for is read."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """The numbers as they are stored."""


class Packing(Protocol):
    """One way to store matrices."""

    def stored(self, name: str, shape: tuple[int, int]) -> tuple[Stored, Stored]:
        """Values and scales of a matrix [rows, columns] that would have this name if it were not packed."""

    def read(self, values: Slice, scales: Slice, rows: range, columns: range) -> Tensor:
        """A part of the matrix, float32."""
