"""The layers of a decoder through torch.compile's compiler: few kernels for what is between the machine's own calls.

    layers, in Python --trace once--> graph --cut--> piece, call, piece, call, ... piece
                                                     compiled  the machine's own (inductor.py)

A call between pieces may plan on the host, and takes caches and metas as they are. All layers of a kind are one piece,
compiled once. The number of tokens is a symbol in it; only a single token, which compilers treat apart, has pieces of
its own. As with a captured CUDA graph, what was traced is what runs: layers depend on their inputs alone.

Inductor finds what it compiled before by the graph, its own version and the device: a second start traces the layers,
which takes a second, and compiles nothing.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import SymInt, Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from parallel.errors import DeviceError
from parallel.kernels.base import AttentionMeta, LayerCache, RunLayers
from parallel.kernels.graph_pieces import Piece, cut
from parallel.kernels.inductor_tape import Call, Tape

logger = logging.getLogger(__name__)

Angles = Sequence[tuple[Tensor, ...]]
CompilePiece = Callable[[GraphModule, Sequence[Tensor | SymInt]], Callable[..., Any]]
"""(a graph, stand-ins for its inputs) -> what does the same for inputs like these."""

MOST_TOKENS = 1 << 15
"""Most tokens of a step that is compiled: beyond, offsets might need more bits than the compiler chose."""
_TYPICAL_TOKENS = 64
"""Tokens of the step that is traced; the compiler's choices lean on it, and always being the same it is found again."""


class InductorLayers:
    """Implements `RunLayers`. One thread.

    Args:
        run: the layers, one operation at a time.
        record: the kernels that `run` calls put their calls on this tape instead, while it is open.
        cache: the folder of compiled code.
        compile_piece: None: inductor.
    """

    def __init__(
        self,
        run: RunLayers,
        record: Callable[[], AbstractContextManager[Tape]],
        cache: Path,
        compile_piece: CompilePiece | None,
    ) -> None:
        self._run = run
        self._record = record
        self._cache = cache
        self._compile_piece = compile_piece or _compile
        self._programs: dict[bool, Program] = {}

    def __call__(
        self, x_TE: Tensor, angles: Angles, caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> tuple[Tensor, Tensor]:
        """See `RunLayers`. Raises DeviceError where they cannot be compiled."""
        if len(x_TE) > MOST_TOKENS:
            return self._run(x_TE, angles, caches, metas)
        program = self.program(x_TE, angles, len(caches), is_single=len(x_TE) == 1)
        return program([x_TE, *_flat(angles)], caches, metas)

    def program(self, x_TE: Tensor, angles: Angles, num_layers: int, *, is_single: bool) -> "Program":
        """What runs steps of a single token, or of several; compiled when first asked for."""
        if is_single not in self._programs:
            self._programs[is_single] = self._compile(x_TE, angles, num_layers, is_single=is_single)
        return self._programs[is_single]

    def _compile(self, x_TE: Tensor, angles: Angles, num_layers: int, *, is_single: bool) -> "Program":
        started, num_missing = time.monotonic(), _num_missing()
        kind = "a single token" if is_single else "several tokens"
        try:
            with torch.inference_mode(mode=False), torch.no_grad(), _code_in(self._cache):
                program = self._trace(x_TE, angles, num_layers, 1 if is_single else _TYPICAL_TOKENS)
        except Exception as error:  # torch raises whatever its parts raise
            reason = str(error).strip().partition("\n")[0]
            raise DeviceError(
                f"torch cannot compile the layers of this model for {kind}: {type(error).__name__}: {reason}; "
                "allowed: without compile"
            ) from error
        how = f"{_num_missing() - num_missing} of {program.num_pieces} kinds of pieces anew"
        logger.info("layers for %s compiled in %.1f s, %s", kind, time.monotonic() - started, how)
        return program

    def _trace(self, x_TE: Tensor, angles: Angles, num_layers: int, num_tokens: int) -> "Program":
        shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        inputs = [_stand_in(mode, tensor, num_tokens) for tensor in (x_TE, *_flat(angles))]

        def run(x_TE: Tensor, *flat: Tensor) -> tuple[Tensor, Tensor]:
            tables = iter(flat)
            kinds = [tuple(next(tables) for _ in kind) for kind in angles]
            places = [_Place()] * num_layers
            # a copy, for layers may write in place of x: as part of the trace it costs nothing
            return self._run(x_TE.clone(), kinds, places, places)  # type: ignore[arg-type]  # see _Place

        with self._record() as tape, mode:
            traced = make_fx(
                torch.func.functionalize(run, remove="mutations"), tracing_mode="symbolic", _allow_non_fake_inputs=True
            )(*inputs)
        with tracing(TracingContext(mode)):
            program = Program(traced, tape.calls, mode, self._compile_piece)
        _check_any_number(shapes)
        return program


class Program:
    """Compiled pieces and the machine's own calls, one after the other."""

    def __init__(
        self, traced: GraphModule, calls: Sequence[Call], mode: FakeTensorMode, compile_piece: CompilePiece
    ) -> None:
        self._steps: list[_ProgramStep] = []
        compiled: dict[str, Callable[..., Any]] = {}
        slots: dict[Node, int] = {}
        for part in cut(traced.graph, lambda node: node.target is torch.ops.weft.call.default):
            if isinstance(part, Piece):
                examples = [_example(node, traced, mode) for node in part.inputs]
                key = part.text + "".join(map(_describe, examples))
                if key not in compiled:
                    compiled[key] = compile_piece(part.module, examples)
                inputs, outputs, run = part.inputs, part.outputs, compiled[key]
                is_call = False
            else:
                given, index, _ = cast(tuple[Sequence[Node], int, object], part.args)
                inputs, outputs, run = tuple(given), (part,), calls[index]
                is_call = True
            for node in (*inputs, *outputs):
                slots.setdefault(node, len(slots))
            step = _ProgramStep(run, is_call, [slots[node] for node in inputs], [slots[node] for node in outputs], [])
            self._steps.append(step)
        self.num_pieces = len(compiled)
        """Number of pieces that differ."""
        nodes = list(traced.graph.nodes)
        self._inputs = [slots.get(node, -1) for node in nodes if node.op == "placeholder"]
        self._results = [slots[node] for node in nodes[-1].args[0]]
        constants = {slots[node]: getattr(traced, node.target) for node in nodes if node.op == "get_attr"}
        self._values: list[Any] = [constants.get(slot) for slot in range(len(slots))]
        self._forget(constants)

    def __call__(
        self, inputs: Sequence[Tensor], caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> tuple[Tensor, Tensor]:
        """What the layers give for x and the angles, one after the other."""
        values = self._values.copy()
        for slot, tensor in zip(self._inputs, inputs, strict=True):
            values[slot] = tensor
        for run, is_call, given, to, over in self._steps:
            if is_call:
                values[to[0]] = run(caches, metas, *[values[slot] for slot in given])
            else:
                for slot, value in zip(to, run(*[values[slot] for slot in given]), strict=True):
                    values[slot] = value
            for slot in over:
                values[slot] = None
        added_TE, residual_TE = (values[slot] for slot in self._results)
        return added_TE, residual_TE

    def _forget(self, constants: dict[int, Any]) -> None:
        """Let each step drop what no later one reads."""
        kept = {*constants, *self._results}
        for step in reversed(self._steps):
            for slot in (*step.inputs, *step.outputs):
                if slot not in kept:
                    kept.add(slot)
                    step.over.append(slot)


class _ProgramStep(NamedTuple):
    """A step of a program; values have slots."""

    run: Callable[..., Any]
    is_call: bool
    inputs: list[int]
    outputs: list[int]
    over: list[int]
    """Slots that nothing reads afterwards."""


class _Place:
    """Stands for the cache and the meta of a layer while layers are traced."""

    slot_mapping = None


def _flat(angles: Angles) -> list[Tensor]:
    return [table for kind in angles for table in kind]


def _stand_in(mode: FakeTensorMode, tensor: Tensor, num_tokens: int) -> Tensor:
    """A tensor of so many tokens without memory, whose number of tokens is a symbol unless it is one."""
    tokens = DimDynamic.STATIC if num_tokens == 1 else DimDynamic.DUCK  # equal numbers are one symbol
    context: Any = StatelessSymbolicContext(dynamic_sizes=[tokens, *[DimDynamic.STATIC] * (tensor.dim() - 1)])
    return mode.from_tensor(tensor.new_empty(num_tokens, *tensor.shape[1:]), symbolic_context=context)


def _example(node: Node, traced: GraphModule, mode: FakeTensorMode) -> Tensor | SymInt:
    if node.op == "get_attr":
        return mode.from_tensor(getattr(traced, str(node.target)), static_shapes=True)
    example: Tensor | SymInt = node.meta["val"]
    return example


def _describe(example: Tensor | SymInt) -> str:
    if isinstance(example, Tensor):
        return f"{tuple(example.shape)} {example.stride()} {example.dtype} {example.device} {example.layout}\n"
    return f"{example}\n"


def _compile(module: GraphModule, examples: Sequence[Tensor | SymInt]) -> Callable[..., Any]:
    """Compile a graph by inductor, or take the result from its cache."""
    patches = {"cpp.threads": torch.get_num_threads()}  # generated code has their number in it
    return torch._inductor.standalone_compile(
        module, list(examples), dynamic_shapes="from_tracing_context", options={"config_patches": patches}
    )


def _check_any_number(shapes: ShapeEnv) -> None:
    """Raise ValueError where what was traced and compiled is only right for some numbers of tokens."""
    for guard in shapes.guards:
        for num_tokens in (2, MOST_TOKENS):
            if guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, num_tokens)) != True:  # noqa: E712  # of sympy
                raise ValueError(f"layers differ by the number of tokens: {guard.expr}")


@contextmanager
def _code_in(folder: Path) -> Iterator[None]:
    """Let inductor keep its code there; it knows no other way to be told."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what lies in it is run
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _num_missing() -> int:
    """Pieces that this process did not find in the cache."""
    return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"])
