"""What multiplies rows with packed weights, in the layout that is fastest on a machine, and what else that can do.

A part of the border between the model and the machine; shape letters as in base.py.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from parallel.description import MoeDescription
from parallel.kernels.host_arrays import Int32Array
from parallel.kernels.sampling import Draws, Edits, NoiseArray


class Search(NamedTuple):
    """The head is asked for tokens, in place of logits."""

    noise: NoiseArray | None
    """Noise that the rows draw with; None: each takes its largest."""
    edits: Edits | None = None
    """What is done to the logits before tokens are chosen."""


class Sift(NamedTuple):
    """The head is asked for logits, of which only the largest matter, each with its row's noise."""

    noise: NoiseArray
    """Noise that is added to the logits of each row: none where its temperature is 0."""
    numbers: Int32Array
    """[S], at least 1: how many of a row's largest matter, and any that are equal to the last one."""
    edits: Edits | None = None
    """What is done to the logits before the largest are found."""
    draws: Draws | None = None
    """How the rows draw from these logits, where that is known."""


class PackedLinear(Protocol):
    """A linear layer's weight in the layout that is fastest on the machine."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, out], dtype of x, bias added."""


@runtime_checkable
class GatedLinear(PackedLinear, Protocol):
    """A linear layer that can do `Kernels.silu_mul` before it writes its outputs."""

    def gated(self, x_TI: Tensor) -> Tensor:
        """[T, in] -> [T, out / 2]: silu(first half) * second half of the outputs."""


@runtime_checkable
class SearchedLinear(PackedLinear, Protocol):
    """A linear layer that can tell the largest of its outputs without writing them all."""

    def largest(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest output of each row, [T] float32, NaN where there is one; and the first place where that
        is, [T] int64, -1 where it is not finite.
        """


@runtime_checkable
class DrawnLinear(SearchedLinear, Protocol):
    """A linear layer that can draw from its outputs without writing them all."""

    @property
    def most_edited_rows(self) -> int:
        """Up to so many rows their outputs can be edited."""

    def drawn(self, x_TI: Tensor, search: Search, first_token: int) -> tuple[Tensor, Tensor]:
        """Return what `TokenChoice.find` gives for its outputs after the edits, which want float32."""


@runtime_checkable
class SiftedLinear(DrawnLinear, Protocol):
    """A linear layer that need not compute outputs that do not matter."""

    def can_sift(self, sift: Sift) -> bool:
        """Whether to compute only the outputs that matter is less work than all of them."""

    def sifted(self, x_TI: Tensor, sift: Sift, first_token: int) -> Tensor:
        """[T, in] -> [T, out] float32: the outputs, of tokens from the first one on, -inf in place of some that do not
        matter among these; where it `can_sift`.
        """


@runtime_checkable
class ScreenedLinear(SearchedLinear, Protocol):
    """A linear layer that may find what it searches without reading all of its weight."""

    def spared_bytes(self, num_rows: int) -> int:
        """Return how many bytes of the weight a search for `num_rows` spares at best."""


@runtime_checkable
class TableLinear(PackedLinear, Protocol):
    """A linear layer whose weight is a table as well, and lies as the product likes it."""

    def rows(self, indices_T: Tensor) -> Tensor:
        """Return rows of the weight as they were given, [T] int64 -> [T, in]; zeros for an index that names none."""


class PackedExperts(Protocol):
    """The experts of a layer in the layout that is fastest on the machine."""

    def __call__(self, x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
        """[T, E]: for each token the sum of what its experts give for it, times their weights.

        The sum is made in float32 and rounded to the dtype of x once. Ids (int64) of no expert here, those outside
        0 .. X - 1, add nothing; weights are float32. On an accelerator nothing waits for the device to learn how many
        tokens each expert has.
        """


@runtime_checkable
class RoutingExperts(PackedExperts, Protocol):
    """Experts that may choose for themselves."""

    def routed_by(
        self, moe: MoeDescription, weight_XE: Tensor, bias_X: Tensor | None, choice_bias_X: Tensor | None
    ) -> Callable[[Tensor], Tensor] | None:
        """Return [T, E] -> [T, E]: the same for the experts that a router with this weight chooses.

        Logits are compared in its dtype; the choice's bias is float32. None: the caller chooses.
        """
