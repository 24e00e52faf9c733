"""Which part of the model belongs to which rank: pure arithmetic, and the values that tell a loader what to read.

A layer owns its sharding rule. It names, for each of its parameters, the slices of the full tensors that fill it; the
checkpoint loader reads exactly those and knows nothing of tensor parallelism:

    for parameter in decoder.sharded_parameters():
        for piece in parameter.pieces:
            parameter.target(piece).copy_(read(piece))      # read: full[piece.source][start:stop along dim]
    decoder.finish_loading()

Sources carry the decoder's own names, which a family maps to those of its checkpoints; i counts the layers of the
whole model, not those of a stage:

    embedding.weight  [V, E]                          final_norm.weight  [E]       head.weight  [V, E]  (not when tied)
    positions.weight  [P, E]                          embedding_norm.weight  [E]   head.bias  [V]
    layers.{i}.attention_norm.weight  [E]             layers.{i}.mlp_norm.weight  [E]
    layers.{i}.attention_post_norm.weight  [E]        layers.{i}.mlp_post_norm.weight  [E]
    layers.{i}.attention.q.weight  [N * H, E]         layers.{i}.attention.{k,v}.weight  [K * H, E]
    layers.{i}.attention.{q,k,v}.bias                 layers.{i}.attention.{q_norm,k_norm}.weight  [H], [N, H], [N * H]
    layers.{i}.attention.output.weight  [E, N * H]    layers.{i}.attention.output.bias  [E]
    layers.{i}.attention.sinks  [N]
    layers.{i}.mlp.{gate,up}.weight  [I, E]           layers.{i}.mlp.{gate,up}.bias  [I]
    layers.{i}.mlp.down.weight  [E, I]                layers.{i}.mlp.down.bias  [E]

or, where layer i has X experts, of inner size I; gate_up where rows of gate and up alternate:

    layers.{i}.mlp.router.weight  [X, E]              layers.{i}.mlp.router.{bias,choice_bias}  [X]
    layers.{i}.mlp.experts.{x}.{gate,up}.weight  [I, E]        layers.{i}.mlp.experts.{x}.{gate,up}.bias  [I]
    layers.{i}.mlp.experts.{x}.gate_up.weight  [2 I, E]        layers.{i}.mlp.experts.{x}.gate_up.bias  [2 I]
    layers.{i}.mlp.experts.{x}.down.weight  [E, I]             layers.{i}.mlp.experts.{x}.down.bias  [E]
    layers.{i}.mlp.shared.{gate,up,down}.weight, as in an MLP  layers.{i}.mlp.shared_gate.weight  [1, E]

With latent keys and values (latent_attention.py says the letters; Q is the rank of the queries):

    layers.{i}.attention.q_down.weight  [Q, E]        layers.{i}.attention.kv_down.weight  [L + A, E], and their biases
    layers.{i}.attention.q_down_norm.weight  [Q]      layers.{i}.attention.kv_down_norm.weight  [L]
    layers.{i}.attention.{q or q_up}.weight  [N * H, E or Q]
    layers.{i}.attention.{k_up,v_up}.weight  [N * D, L], [N * V, L]

Norms with a bias have one beside each weight. Where these tensors lie in the files is not said here: several may be
fused into one, or be stored transposed (families/layout.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from parallel.description import DecoderDescription, MoeDescription
from parallel.errors import ParallelismError

if TYPE_CHECKING:
    from torch import Tensor  # a split can be checked without the seconds that importing torch takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A slice of one full tensor, and where it goes in a parameter of this rank."""

    source: str
    """The decoder's name of the full tensor."""
    full_shape: tuple[int, ...]
    """What the full tensor must look like in the checkpoint."""
    dim: int
    """The dim along which the source is cut and the parameter is filled; the other dims are taken whole."""
    start: int
    stop: int
    offset: int = 0
    """Where the slice starts along `dim` of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardedParameter:
    """A parameter of this rank and the pieces that fill it."""

    tensor: "Tensor"
    pieces: tuple[Piece, ...]

    def target(self, piece: Piece) -> "Tensor":
        """The part of the parameter that `piece` fills, as a view."""
        return self.tensor.narrow(piece.dim, piece.offset, piece.stop - piece.start)


def check_split(
    description: DecoderDescription,
    *,
    tensor_parallel: int,
    pipeline_parallel: int,
    layer_partition: Sequence[int] = (),
    expert_parallel: bool = False,
) -> None:
    """Raise ParallelismError when the model cannot be divided so; needs no weights and no other rank."""
    even_range(description.num_heads, 0, tensor_parallel, what="num_heads")
    kv_head_range(description.num_kv_heads, 0, tensor_parallel)
    if description.has_dense_layers:
        even_range(description.intermediate_size, 0, tensor_parallel, what="intermediate_size")
    moe = description.moe
    if moe is None:
        if expert_parallel:
            raise ParallelismError("expert_parallel is asked for; allowed: for models with experts")
    else:
        expert_ranges(moe, 0, tensor_parallel, expert_parallel=expert_parallel)
        if moe.shared_intermediate_size is not None:
            even_range(moe.shared_intermediate_size, 0, tensor_parallel, what="shared_intermediate_size")
    split_layers(description.num_layers, pipeline_parallel, layer_partition)


def replicated(source: str, tensor: "Tensor") -> ShardedParameter:
    """A parameter that every rank holds whole."""
    piece = Piece(source=source, full_shape=tuple(tensor.shape), dim=0, start=0, stop=tensor.shape[0])
    return ShardedParameter(tensor=tensor, pieces=(piece,))


def even_range(total: int, rank: int, size: int, *, what: str) -> range:
    """The `rank`th of `size` equal parts of `total`. Raises ParallelismError naming `what` when it does not divide."""
    if total % size:
        raise ParallelismError(
            f"{what} is {total}, which does not divide over tensor_parallel {size}; allowed: divisors of {total}"
        )
    part = total // size
    return range(rank * part, (rank + 1) * part)


def kv_head_range(num_kv_heads: int, rank: int, size: int) -> range:
    """The key-value heads of `rank`; with more ranks than heads, neighbours hold the same one.

    K = 2, size 4:   rank 0 1 2 3
                     head 0 0 1 1
    """
    if size <= num_kv_heads:
        return even_range(num_kv_heads, rank, size, what="num_kv_heads")
    if size % num_kv_heads:
        raise ParallelismError(
            f"tensor_parallel is {size} with {num_kv_heads} key-value heads; allowed: a divisor or a multiple of "
            f"{num_kv_heads}"
        )
    head = rank * num_kv_heads // size
    return range(head, head + 1)


def expert_ranges(moe: MoeDescription, rank: int, size: int, *, expert_parallel: bool) -> tuple[range, range]:
    """The experts of `rank`, and of each of them its inner dims: some of the experts whole, or a part of every one.

    X = 4, I = 8, size 2:     tensor parallel   rank 0: experts 0..3, dims 0..3      rank 1: experts 0..3, dims 4..7
                              expert parallel   rank 0: experts 0..1, dims 0..7      rank 1: experts 2..3, dims 0..7
    """
    experts, inner = range(moe.num_experts), range(moe.intermediate_size)
    if expert_parallel:
        return even_range(len(experts), rank, size, what="num_experts"), inner
    return experts, even_range(len(inner), rank, size, what="intermediate_size of the experts")


def vocab_rows(vocab_size: int, size: int) -> int:
    """Vocabulary rows of each rank; the last ranks are padded when `size` does not divide."""
    return -(-vocab_size // size)


def vocab_range(vocab_size: int, rank: int, size: int) -> range:
    """The real vocabulary entries of `rank`, without padding; may be empty on the last ranks."""
    rows = vocab_rows(vocab_size, size)
    return range(min(rank * rows, vocab_size), min((rank + 1) * rows, vocab_size))


def split_layers(num_layers: int, num_stages: int, partition: Sequence[int] = ()) -> list[range]:
    """The layers of each stage: as many as `partition` says; without one, equally many. Early stages take the
    remainder then, for the last one also has the head. Raises ParallelismError where that cannot be.
    """
    if num_stages > num_layers:
        raise ParallelismError(
            f"pipeline_parallel is {num_stages}; allowed: at most the number of layers, {num_layers}"
        )
    base, extra = divmod(num_layers, num_stages)
    sizes = partition or [base + (stage < extra) for stage in range(num_stages)]
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 1:
        raise ParallelismError(
            f"layer_partition is {[*sizes]}; allowed: a number of layers, at least 1, for each of pipeline_parallel "
            f"{num_stages} stages, {num_layers} together"
        )
    return [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
