"""Kernels under torch.compile's compiler: plain torch where it fuses, the machine's own calls elsewhere.

The compiler sees norms, rotations, activations and products of plain matrices as reference.py has them. Attention with
the write to the cache before it, experts, and products of weights in another layout stay with the machine's kernels,
all-reduces with the ranks. How layers are traced and compiled around those is in inductor_layers.py.
"""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parallel.collectives import all_reduce
from parallel.errors import DeviceError
from parallel.kernels.base import AttentionMeta, AttentionParams, ExpertWeights, Kernels, LayerCache, RunLayers
from parallel.kernels.inductor_tape import Tape
from parallel.kernels.linears import PackedExperts, PackedLinear
from parallel.kernels.native.build import cpu_features
from parallel.kernels.native.cache import default_cache
from parallel.kernels.reference import ReferenceKernels, ReferenceLinear
from parallel.mesh import Axis

if TYPE_CHECKING:
    from parallel.kernels.inductor_layers import CompilePiece, InductorLayers


class InductorKernels(ReferenceKernels):
    """Implements `Kernels`: plain torch for the compiler to see, `inner` for what it must not.

    Args:
        inner: of the device.
        device: where the layers run.
        cache: where compiled code is kept; None: in the user's cache.
        compile_piece: what compiles in place of inductor, for tests.

    Raises DeviceError when the compiler has not what it needs for the device.
    """

    def __init__(
        self,
        inner: Kernels,
        device: torch.device,
        cache: Path | None = None,
        compile_piece: "CompilePiece | None" = None,
    ) -> None:
        _check_tools(device)
        self._inner = inner
        self.name = f"{inner.name}, compiled"
        self.attention_backend = inner.attention_backend
        self.slowness = inner.slowness
        self.quantizes_experts = inner.quantizes_experts
        self._cache = (cache or default_cache()) / "torch" / _machine()
        self._compile_piece = compile_piece
        self._tape: Tape | None = None
        self._layers: InductorLayers | None = None

    def empty_linear(self, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
        """See `Kernels.empty_linear`."""
        return self._inner.empty_linear(num_out, num_in, dtype)

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        num_out = len(weight_OI)
        return self._visible_or_call(self._inner.pack_linear(weight_OI, bias_O), num_out)

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """See `Kernels.pack_head`."""
        return self._visible_or_call(self._inner.pack_head(weight_VE, bias_V, is_shared=is_shared), len(weight_VE))

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> PackedLinear:
        """See `Kernels.quantize_linear`."""
        num_out = len(weight_OI)
        linear = self._inner.quantize_linear(weight_OI, bias_O, keeps_weight=keeps_weight)
        return self._visible_or_call(linear, num_out)

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.pack_experts`."""
        return self._noted(self._inner.pack_experts(weights))

    def quantize_experts(self, weights: ExpertWeights) -> PackedExperts:
        """See `Kernels.quantize_experts`."""
        return self._noted(self._inner.quantize_experts(weights))

    def _noted(self, experts: PackedExperts) -> PackedExperts:
        def run(x_TE: Tensor, experts_TC: Tensor, weights_TC: Tensor) -> Tensor:
            if self._tape is None:
                return experts(x_TE, experts_TC, weights_TC)
            inputs = [x_TE, experts_TC, weights_TC]
            return self._tape.note(lambda _caches, _metas, *given: experts(*given), inputs, x_TE.shape)

        return run

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """See `Kernels.write_cache`; traced, it belongs to the attention after it."""
        if self._tape is None:
            self._inner.write_cache(k_TKH, v_TKH, cache, slot_mapping_T)
        else:
            self._tape.written = k_TKH, v_TKH

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`."""
        if self._tape is None:
            return self._inner.attention(q_TNH, cache, meta, params)
        inner, layer = self._inner, self._tape.num_attended

        def attend(
            caches: Sequence[LayerCache], metas: Sequence[AttentionMeta], q: Tensor, k: Tensor, v: Tensor
        ) -> Tensor:
            inner.write_cache(k, v, caches[layer], metas[layer].slot_mapping)
            return inner.attention(q, caches[layer], metas[layer], params)

        self._tape.num_attended += 1
        return self._tape.note(attend, [q_TNH, *self._tape.written], q_TNH.shape)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        """See `Kernels.compile_layers`."""
        from parallel.kernels.inductor_layers import InductorLayers  # torch's tracer takes 0.3 s to import

        record = partial(self._record, axis)
        self._layers = InductorLayers(run, record, self._cache, self._compile_piece)
        return self._inner.compile_layers(self._layers, axis)

    def compile_ahead(self, x_TE: Tensor, angles: Sequence[tuple[Tensor, ...]], num_layers: int) -> None:
        """Compile now what else the first steps would; x and angles are as in a step of any tokens, see `RunLayers`.

        Raises DeviceError where these layers cannot be compiled.
        """
        assert self._layers is not None, "a decoder was built with these kernels"
        for is_single in (False, True):
            self._layers.program(x_TE, angles, num_layers, is_single=is_single)

    def _visible_or_call(self, linear: PackedLinear, num_out: int) -> PackedLinear:
        """Products in plain torch are for the compiler to see; other layouts of a weight it does not know."""
        if isinstance(linear, ReferenceLinear):
            return linear

        def multiply(x_TI: Tensor) -> Tensor:
            if self._tape is None:
                return linear(x_TI)
            return self._tape.note(lambda _caches, _metas, x: linear(x), [x_TI], (x_TI.shape[0], num_out))

        return multiply

    @contextmanager
    def _record(self, axis: Axis) -> Iterator[Tape]:
        """Put calls onto a tape, instead of doing them, until it is closed."""
        self._tape = tape = Tape()
        axis.stand_in = lambda x: tape.note(lambda _caches, _metas, given: all_reduce(given, axis), [x], x.shape)
        try:
            yield tape
        finally:
            self._tape = axis.stand_in = None


def _check_tools(device: torch.device) -> None:
    """Torch's compiler writes Triton for a GPU, and C++ for a CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # it takes seconds to import

    try:
        if device.type == "cpu":
            get_cpp_compiler()
        else:
            importlib.import_module("triton")
    except (RuntimeError, ModuleNotFoundError) as error:
        wanted = "a C++ compiler: g++, or what CXX names" if device.type == "cpu" else "Triton"
        raise DeviceError(f"compile on {device} needs {wanted}; allowed here: without compile") from error


def _machine() -> str:
    """Machine code is for one kind of CPU, which the compiler's own keys leave out."""
    return hashlib.sha256(cpu_features().encode()).hexdigest()[:16]
