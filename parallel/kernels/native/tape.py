"""Records what the kernels do while the layers of a decoder run once, as the operations of a program.

As with a captured CUDA graph, what ran is what is run again: tensors are told apart by their memory, and whatever
torch itself computes in between cannot be recorded, and is told.
"""

from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.description import Activation
from parallel.kernels.base import LayerCache
from parallel.kernels.native.structures import (
    ACTIVATIONS,
    ExpertLayer,
    Kind,
    LayerParams,
    Operation,
    Place,
    SharedRanks,
)

_NONE = Place(buffer=-1, column=0)
_HARMLESS = frozenset(
    f"aten::{name}"
    for name in (
        *("empty", "new_empty", "empty_strided", "empty_like", "detach", "alias", "view", "_unsafe_view", "reshape"),
        *("flatten", "unflatten", "as_strided", "split", "split_with_sizes", "chunk", "unbind", "slice", "select"),
        *("unsqueeze", "squeeze", "transpose", "t"),
    )
)
"""Operations of torch that compute nothing."""


P = ParamSpec("P")


class CannotRecordError(Exception):
    """What ran is more than a program can do; the message says what. Never leaves the recorder."""


class Tape:
    """The operations so far. Every tensor is a run of columns of a buffer that has a row for each token, or one of each
    head; columns are counted in numbers of x, whatever they hold."""

    def __init__(self, x_TE: Tensor, angles: Sequence[tuple[Tensor, ...]], caches: Sequence[LayerCache]) -> None:
        self.operations: list[Operation] = []
        self.failure: str | None = None
        """Why an operation that ran is not on the tape; None: all are."""
        self.widths: list[int] = []
        """Columns of each buffer; the first is x."""
        self.num_heads: set[int] = set()
        """Query heads of the attentions."""
        self._num_tokens = len(x_TE)
        self._itemsize = x_TE.itemsize
        self._buffers: dict[int, int] = {}
        self._kept: list[Any] = []  # while these live, no other tensor gets their memory, no other object their id
        self.num_angles = len(angles)
        """Kinds of rotation, that of layers which do not rotate included."""
        self._angles = {_memory(pair[0]): index for index, pair in enumerate(angles) if pair}
        self._layers = {id(cache): index for index, cache in enumerate(caches)}  # several may share their memory
        self.write(x_TE)

    def write(self, x: Tensor) -> Place:
        """The place of a tensor that is written for the first time."""
        memory = _memory(x)
        if memory not in self._buffers:
            self._buffers[memory] = len(self.widths)
            self.widths.append(x.nbytes // self._itemsize // self._num_tokens)
            self._kept.append(x)
        return self.read(x)

    def read(self, x: Tensor) -> Place:
        """The place of a tensor that an operation has written, or of a part of its columns."""
        if not x[:1].is_contiguous():
            raise CannotRecordError(f"a tensor {tuple(x.shape)} that is no run of columns")
        return self._find(x)

    def read_heads(self, x_TNH: Tensor) -> Place:
        """The place of heads of which each is a run of columns."""
        if x_TNH.dim() != 3 or x_TNH.stride(2) != 1:
            raise CannotRecordError(f"a tensor {tuple(x_TNH.shape)} whose heads are no runs of columns")
        return self._find(x_TNH)

    def _find(self, x: Tensor) -> Place:
        buffer = self._buffers.get(_memory(x))
        if buffer is None:
            raise CannotRecordError(f"a tensor {tuple(x.shape)} that no kernel made")
        width, column = self.widths[buffer], x.storage_offset() * x.itemsize // self._itemsize
        is_of_rows = len(x) == self._num_tokens and column < width
        if not is_of_rows or (len(x) > 1 and x.stride(0) * x.itemsize != width * self._itemsize):
            raise CannotRecordError(f"a tensor {tuple(x.shape)} that is not a part of rows")
        return Place(buffer=buffer, column=column)

    def rms_norm(self, out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> None:
        """See `NativeCpuKernels`, as for the others."""
        self._norm(Kind.RMS_NORM, out, x, residual, weight, None, eps)

    def layer_norm(
        self, out: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> None:
        """See `NativeCpuKernels`."""
        self._norm(Kind.LAYER_NORM, out, x, residual, weight, bias, eps)

    def _norm(
        self,
        kind: Kind,
        out: Tensor,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
    ) -> None:
        self._kept += [weight, bias]
        self._add(
            kind,
            input=self.read(x),
            second=_NONE if residual is None else self.read(residual),
            output=self.write(out),
            num_heads=x.shape[1] if x.dim() == 3 else 1,
            size=x.shape[-1],
            flag=weight.dtype is torch.float32,
            eps=eps,
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            weight_stride=x.shape[-1] if weight.dim() == 2 else 0,
        )

    def sum_squares(self, sums: Tensor, column: int, x_TNH: Tensor) -> None:
        """Note that a column of these becomes the sums of the squares of heads."""
        self.write(sums)
        places = {"input": self.read(x_TNH), "output": self.read(sums[:, column])}
        self._add(Kind.SUM_SQUARES, **places, size=x_TNH.shape[1:].numel())

    def norm_part(self, x_TNH: Tensor, squares_T: Tensor, weight_NH: Tensor, num_summed: int, eps: float) -> None:
        """Note that heads are normed in place, by a sum of squares of as many numbers."""
        self._kept.append(weight_NH)
        self._add(
            Kind.NORM_PART,
            input=self.read(x_TNH),
            second=self.read(squares_T),
            size=x_TNH.shape[1:].numel(),
            num_in=num_summed,
            eps=eps,
            weight=weight_NH.data_ptr(),
        )

    def rotary(self, x_TNH: Tensor, cos_TR: Tensor, *, is_interleaved: bool) -> None:
        """Note the rotation of queries, or of keys, in place."""
        index = self._angles.get(_memory(cos_TR))
        if index is None:
            raise CannotRecordError("angles that are not those of the step")
        _, num_heads, head_dim = x_TNH.shape
        self._add(
            Kind.ROTARY,
            input=self.read_heads(x_TNH),
            in_head_stride=x_TNH.stride(1),
            index=index,
            num_heads=num_heads,
            size=head_dim,
            flag=is_interleaved,
        )

    def gate(self, out_TI: Tensor, gate_up_T2I: Tensor, activation: Activation) -> None:
        """Note the gated activation; both tensors are dense."""
        places = {"input": self.read(gate_up_T2I), "output": self.write(out_TI)}
        self._add(Kind.GATE, **places, size=out_TI.shape[1], flag=ACTIVATIONS.index(activation))

    def activate(self, x_TI: Tensor, activation: Activation) -> None:
        """Note an activation in place."""
        self._add(Kind.ACTIVATE, input=self.read(x_TI), size=x_TI.shape[1], flag=ACTIVATIONS.index(activation))

    def gate_rows(self, y_TE: Tensor, x_TE: Tensor, weight_E: Tensor) -> None:
        """Note that rows of y are multiplied in place with the sigmoids of those of x times a weight."""
        self._kept.append(weight_E)
        places = {"input": self.read(y_TE), "second": self.read(x_TE)}
        self._add(Kind.GATE_ROWS, **places, size=x_TE.shape[1], weight=weight_E.data_ptr())

    def scale(self, x: Tensor, factor: float) -> None:
        """Note that a tensor is multiplied in place."""
        self._add(Kind.SCALE, input=self.read(x), size=x.shape[1:].numel(), eps=factor)

    def clamp(self, x: Tensor, least: float | None, most: float | None) -> None:
        """Note that numbers outside a range become its ends, in place."""
        if least is None or most != -least:
            raise CannotRecordError(f"numbers clamped to {least} .. {most}")
        self._add(Kind.CLAMP, input=self.read(x), size=x.shape[1:].numel(), eps=most)

    def concatenate(self, out_TNH: Tensor, parts: Sequence[Tensor], dim: int) -> None:
        """Note that parts of heads are put one after the other."""
        if out_TNH.dim() != 3 or dim not in (-1, 2):
            raise CannotRecordError(f"a tensor {tuple(out_TNH.shape)} put together along dim {dim}")
        to = self.write(out_TNH)
        for part_TNH in parts:
            _, num_heads, size = part_TNH.shape
            self._add(
                Kind.COPY,
                input=self.read_heads(part_TNH),
                output=to,
                num_heads=num_heads,
                size=size,
                in_head_stride=part_TNH.stride(1),
                out_head_stride=out_TNH.stride(1),
            )
            to = Place(buffer=to.buffer, column=to.column + size)

    def multiply_heads(self, out_TNO: Tensor, x_TNI: Tensor, packed_NOI: Tensor) -> None:
        """A product with a packed matrix for each head."""
        self._kept.append(packed_NOI)
        num_heads, num_out, num_in = packed_NOI.shape
        self._add(
            Kind.MULTIPLY_HEADS,
            input=self.read_heads(x_TNI),
            output=self.write(out_TNO),
            weight=packed_NOI.data_ptr(),
            num_heads=num_heads,
            num_in=num_in,
            num_out=num_out,
            in_head_stride=x_TNI.stride(1),
            out_head_stride=out_TNO.stride(1),
        )

    def add(self, x: Tensor, y: Tensor) -> None:
        """Note that y is added to x in place: as much as x, or a weight that is added to each row."""
        size = x.shape[1:].numel()
        if y.dim() == 1:
            self._kept.append(y)
            self._add(Kind.ADD, input=self.read(x), size=size, weight=y.data_ptr())
        else:
            self._add(Kind.ADD, input=self.read(x), second=self.read(y), size=size)

    def all_reduce(self, x: Tensor, ranks: SharedRanks) -> None:
        """Note that a tensor is added up over ranks, in place; `ranks` is kept by the caller."""
        if x[0].nbytes != self.widths[self.read(x).buffer] * self._itemsize:
            raise CannotRecordError(f"a sum over ranks of {tuple(x.shape)}, a part of rows")
        is_float32 = x.dtype is torch.float32
        places = {"input": self.read(x)}
        self._add(Kind.ALL_REDUCE, **places, size=x.shape[1:].numel(), flag=is_float32, weight=addressof(ranks))

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache) -> None:
        """Note that keys and values are written to the cache of one of the layers."""
        _, num_heads, head_dim = k_TKH.shape
        places = {"input": self.read(k_TKH), "second": self.read(v_TKH)}
        self._add(Kind.WRITE_CACHE, **places, index=self._layer(cache), num_heads=num_heads, size=head_dim)

    def attention(self, out_TNH: Tensor, q_TNH: Tensor, cache: LayerCache, params: LayerParams) -> None:
        """Note the attention of one of the layers; `params` is kept by the caller."""
        num_heads = q_TNH.shape[1]
        self.num_heads.add(num_heads)
        places = {"input": self.read(q_TNH), "output": self.write(out_TNH)}
        self._add(Kind.ATTENTION, **places, index=self._layer(cache), params=addressof(params))

    def multiply(self, out_TO: Tensor, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> None:
        """A product with a packed matrix, rounded or in float32 as it was summed."""
        kind = Kind.MULTIPLY if out_TO.dtype is x_TI.dtype else Kind.MULTIPLY_FLOAT
        self._multiply(kind, out_TO, x_TI, packed, bias_O)

    def multiply_int8(self, out_TO: Tensor, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> None:
        """A product in 8 bits."""
        self._multiply(Kind.MULTIPLY_INT8, out_TO, x_TI, packed, bias_O)

    def experts(self, out_TE: Tensor, x_TE: Tensor, logits_TX: Tensor, layer: ExpertLayer) -> None:
        """Experts that are chosen by their logits, which may be fewer than those; `layer` is kept by the caller."""
        places = {"input": self.read(x_TE), "second": self.read(logits_TX), "output": self.write(out_TE)}
        self._add(Kind.EXPERTS, **places, weight=addressof(layer))

    def _multiply(self, kind: Kind, out_TO: Tensor, x_TI: Tensor, packed: Tensor, bias_O: Tensor | None) -> None:
        self._kept += [packed, bias_O]
        self._add(
            kind,
            input=self.read(x_TI),
            output=self.write(out_TO),
            weight=packed.data_ptr(),
            bias=None if bias_O is None else bias_O.data_ptr(),
            num_in=x_TI.shape[1],
            num_out=out_TO.shape[1],
        )

    def _layer(self, cache: LayerCache) -> int:
        index = self._layers.get(id(cache))
        if index is None:
            raise CannotRecordError("a cache that is not that of a layer")
        return index

    def _add(self, kind: Kind, **fields: Any) -> None:
        places = dict.fromkeys(("input", "second", "output"), _NONE)
        self.operations.append(Operation(kind=kind, **(places | fields)))


class Recorder:
    """Whom the kernels of a model tell what they do: the tape, while there is one."""

    def __init__(self) -> None:
        self.tape: Tape | None = None

    def note(self, record: Callable[Concatenate[Tape, P], None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Put one operation on the tape. What cannot be recorded spoils the tape, not the run."""
        if self.tape is None or self.tape.failure is not None:
            return
        try:
            record(self.tape, *args, **kwargs)
        except CannotRecordError as error:
            self.tape.failure = str(error)


class OnlyKernels(TorchDispatchMode):
    """While this is entered, whatever torch computes by itself spoils the tape.

    All but products with a number, limits of numbers, sums of two tensors and of rows with a weight, all in place, and
    parts of heads that are put together.
    """

    def __init__(self, recorder: Recorder, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As torch asks; to skip torch's compiler it would import it, more than a second of the first request."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; its name is why there is no program, unless it computes nothing."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul_.Tensor and isinstance(args[1], float):
            self._recorder.note(Tape.scale, *args)
        elif func is torch.ops.aten.clamp_.default and len(args) == 3:
            self._recorder.note(Tape.clamp, *args)
        elif func is torch.ops.aten.add_.Tensor and not kwargs and _are_alike(*args):
            self._recorder.note(Tape.add, *args)
        elif func is torch.ops.aten.cat.default and len(args) == 2:
            self._recorder.note(Tape.concatenate, result, *args)
        elif func._schema.name not in _HARMLESS and self._tape.failure is None:
            self._tape.failure = f"{func._schema.name} between the kernels"
        return result


def _are_alike(x: Tensor, y: Any) -> bool:
    """Whether y is as much as x, or a dense row of it."""
    if not isinstance(y, Tensor) or x.dtype is not y.dtype:
        return False
    return x.shape == y.shape or (x.dim() == 2 and y.shape == x.shape[1:] and y.is_contiguous())


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
