"""The tape onto which the machine's own calls go while torch's compiler traces layers; an operation stands for each."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Call = Callable[..., Tensor]
"""(caches, metas, *tensors) -> what one of the machine's own calls returns."""

torch.library.define("weft::call", "(Tensor[] inputs, int index, SymInt[] shape) -> Tensor")


@torch.library.register_fake("weft::call")  # type: ignore[untyped-decorator]
def _(inputs: list[Tensor], index: int, shape: list[int]) -> Tensor:
    """Stands for one of the machine's own calls while layers are traced; it never runs."""
    return inputs[0].new_empty(shape)


class Tape:
    """The machine's own calls, in the order in which they were traced."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_attended = 0
        """Layers whose attention came by."""
        self.written: tuple[Tensor, ...] = ()
        """Keys and values of the attention that comes next."""

    def note(self, call: Call, inputs: list[Tensor], shape: Sequence[int]) -> Tensor:
        """What stands for the result in the trace."""
        self.calls.append(call)
        out: Tensor = torch.ops.weft.call(inputs, len(self.calls) - 1, shape)
        return out
