"""The border between the model and the machine: the operations that a decoder calls, and the data they share.

Plain torch in reference.py defines the meaning; fast versions are held to it by tests. Tensors that a decoder passes
have a dense last dim; heads (q, k, v) may be views into one larger tensor, so their other strides are arbitrary. What
operations return is contiguous unless they return an input. Shape letters, here and in model code:

    T  packed tokens of a step (all sequences one after the other)     S  sequences of a step
    N  query heads of this rank        K  key-value heads of this rank     H  head size
    E  hidden size                     I  inner (MLP) size of this rank    V  vocabulary of this rank
    B  blocks in the pool              P  slots in a block (block size)    M  blocks in the longest table of the step
    X  experts of this rank            C  experts chosen for a token
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from parallel.description import Activation, ClampedGate
from parallel.kernels.choice import SCALE_BYTES
from parallel.kernels.int8_cache import lay_out_half
from parallel.kernels.linears import PackedExperts, PackedLinear, Search, SearchedLinear, Sift, TableLinear
from parallel.mesh import Axis


class LayerCache(NamedTuple):
    """The paged keys and values of one layer on this rank; one and the same tensor where each key is its value."""

    k_BPKH: Tensor  # noqa: N815
    v_BPKH: Tensor  # noqa: N815
    k_scale_BPK: Tensor | None = None  # noqa: N815
    """float32: what the integers of a token's head are multiplied by (int8_cache.py); None: keys are numbers."""
    v_scale_BPK: Tensor | None = None  # noqa: N815


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """What a layer keeps of each token, on one rank."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype
    """Dtype of the memory; int8: integers and their scales, as int8_cache.py says."""
    is_key_value: bool = False
    """Whether keys are their own values, and stored once."""

    @property
    def num_elements(self) -> int:
        """Elements of memory to store a token."""
        head_size = self.head_dim + SCALE_BYTES if self.dtype is torch.int8 else self.head_dim
        return self.num_heads * head_size * (1 if self.is_key_value else 2)

    def lay_out(self, memory: Tensor, block_size: int) -> LayerCache:
        """The cache of one layer in a flat tensor of num_blocks * block_size * num_elements."""
        if self.dtype is torch.int8:
            halves = [lay_out_half(half, block_size, self.num_heads, self.head_dim) for half in memory.chunk(2)]
            (keys, key_scales), (values, value_scales) = halves
            return LayerCache(keys, values, key_scales, value_scales)
        shape = -1, block_size, self.num_heads, self.head_dim
        if self.is_key_value:
            keys = memory.view(shape)
            return LayerCache(keys, keys)
        keys, values = memory.chunk(2)
        return LayerCache(keys.view(shape), values.view(shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeta:
    """Where each packed token of a step belongs, and where its sequence's keys are. Good for one step.

    Sequence s owns the packed tokens `query_starts[s] : query_starts[s + 1]`; they are the last of its
    `context_lens[s]` tokens:

        position   0 ........ context - query | ........ context - 1
                   already in the cache       | this step's tokens (also written to the cache this step)

    Sequences of one query token come first: the first `num_decodes` of them are such.

    A step has one for each group of layers (layer_groups.py), and the layers of the groups alternate. All but
    `block_tables` and `slot_mapping` is the same object in each of them. No other step has the object
    `context_lens_host`: by it kernels tell steps apart.
    """

    query_starts: Tensor
    """[S + 1] int32, on the device of the model."""
    context_lens: Tensor
    """[S] int32, on the device: tokens in the cache after this step."""
    block_tables: Tensor
    """[S, M] int32, on the device: block ids. What an entry past the context refers to must not be read, nor one whose
    tokens all lie before the sliding window of each query: that block may be another sequence's by now."""
    slot_mapping: Tensor
    """[T] int64, on the device: block id * block size + offset, where each token's key and value go."""
    num_decodes: int
    """Leading sequences with exactly one query token."""
    max_query_len: int
    max_context_len: int
    query_starts_host: list[int]
    """`query_starts` on the host, for kernels that plan there without a copy back."""
    context_lens_host: list[int]
    """`context_lens` on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """What is constant for the attention of one layer."""

    scale: float
    sliding_window: int | None = None
    """Each token sees itself and this many - 1 tokens before it; None: all before it."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    key_bias_NP: Tensor | None = field(default=None, compare=False)  # noqa: N815
    """float32 [N, positions], on the device: added to the score of a key (ALiBi), last of all. Columns are positions
    of keys, or, with `is_bias_by_distance`, end with the query's own key, whose column is the last one."""
    is_bias_by_distance: bool = False
    """See `key_bias_NP`."""
    sinks_N: Tensor | None = field(default=None, compare=False)  # noqa: N815
    """float32 [N], on the device: the score of one more key per head, whose value is zero and which every token
    sees."""

    @property
    def is_plain(self) -> bool:
        """Whether scores are products, scaled and masked, and no more."""
        return self.soft_cap is None and self.key_bias_NP is None and self.sinks_N is None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """The experts of one layer on this rank: down_x(activate(into_x(x))) for each of them."""

    into_XJE: Tensor  # noqa: N815
    """[X, 2I, E]: what `activate` multiplies, gate and up; rows as those want them."""
    down_XEI: Tensor  # noqa: N815
    into_bias_XJ: Tensor | None = None  # noqa: N815
    down_bias_XE: Tensor | None = None  # noqa: N815
    activate: Callable[[Tensor], Tensor]
    """[T, 2I] -> [T, I]; see `Kernels.gated`."""
    activation: Activation | None = None
    """That of `activate`, where this is it, and nothing else: gates are the first half of `into`."""
    clamped_gate: ClampedGate | None = None
    """The same where `activate` is this one: the rows of `into` alternate."""


RowGate: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(y [T, E], x [T, E]) -> y times the sigmoid of each token's logit, which is x times a weight; in place of y."""

HeadsLinear: TypeAlias = Callable[[Tensor], Tensor]
"""A matrix of its own for each head: [T, N, in] -> [T, N, out], of which either may be a view."""


class Kernels(Protocol):
    """The operations that the decoder calls; `kernels/select.py` chooses one implementation per process."""

    name: str
    """Name of these kernels, as `select_kernels` takes it."""
    attention_backend: str
    """What computes attention where it can: on CUDA one of its ATTENTION_BACKENDS, "native" (compiled here for a CPU),
    or "torch"."""
    slowness: str
    """Why these compute, in plain torch, where compiled ones were wanted; empty: they are what was wanted."""

    def empty_linear(self, num_out: int, num_in: int, dtype: torch.dtype) -> Tensor:
        """Return an empty weight [out, in] on the CPU for `pack_linear`: where it can stay when it is laid out."""

    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        """Lay out a weight [out, in], once, after loading.

        The caller drops its own references to both tensors; the weight's values may be gone.
        """

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """Lay out the weight of a model's head, as `pack_linear` does others.

        The result may be float32, not rounded to the dtype of x, if it is so for any number of rows.

        Args:
            is_shared: the caller looks its rows up besides: nothing is copied. Where the result is a `TableLinear`,
                the weight lies in another way from now on, and rows are had from that alone.
        """

    def quantize_linear(self, weight_OI: Tensor, bias_O: Tensor | None, *, keeps_weight: bool = False) -> PackedLinear:
        """Lay out a weight for a product in 8 bits, which int8_linear.py defines. Always a copy.

        Args:
            keeps_weight: the caller uses the weight besides; else its values may be gone.
        """

    def pack_experts(self, weights: ExpertWeights) -> PackedExperts:
        """Lay out the experts of a layer, once, after loading. The caller drops its own references to them."""

    quantizes_experts: bool
    """Whether `quantize_experts` does; else experts stay in the dtype of the model."""

    def quantize_experts(self, weights: ExpertWeights) -> PackedExperts:
        """Lay out the experts of a layer for products in 8 bits, each matrix as `quantize_linear` does. Always a copy.

        Called where `quantizes_experts` alone.
        """

    def pack_gate(self, weight_1E: Tensor) -> RowGate:
        """Lay out the weight of one logit per token, once, after loading, as `pack_linear` does others."""

    def pack_heads(self, weight_NIO: Tensor) -> HeadsLinear:
        """Lay out a matrix for each head, once, after loading; its memory may be taken. The weight may be a view."""

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dim in float32, result in the dtype of x. arXiv:1910.07467.

        x is left as it is; it is [T, N, H] when heads are normed, then often a view (see above). The weight may be
        float32 whatever the dtype of x, and [N, H] when each head has its own.
        """

    def add_rms_norm(self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual); may write both in place of its inputs.

        The sum is rounded to the dtype of x before it is normed, so that a stage may send it to the next one.
        """

    def sum_squares(self, *tensors_TNH: Tensor) -> Tensor:
        """[T, tensors] float32: the sum of the squares of all heads of a token, in each of these tensors."""

    def norm_part(self, x_TNH: Tensor, squares_T: Tensor, weight_NH: Tensor, *, num_summed: int, eps: float) -> Tensor:
        """RMSNorm over the heads of all ranks, of which x is a part: x / sqrt(squares / num_summed + eps) * weight.

        In float32, result in the dtype of x, which may be overwritten; squares are float32, and may be a column.
        """

    def layer_norm(self, x_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float) -> Tensor:
        """LayerNorm over the last dim in float32, result in the dtype of x. arXiv:1607.06450. Otherwise as rms_norm."""

    def add_layer_norm(
        self, x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, bias_E: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (layer_norm(x + residual), x + residual), as add_rms_norm does."""

    def rotary(
        self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor, *, is_interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first 2R of the H dims of each head: x1 by x2 in the plane of each pair.

        Pairs are (dims :R, dims R:2R), interleaved ones neighbours: (dims 0, 2, ... 2R - 2, dims 1, 3, ... 2R - 1).
        cos and sin are float32, and so is the arithmetic; results have the dtype of q. May write in place of q and k.
        """

    def rotate_and_write(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        cache: LayerCache,
        slot_mapping_T: Tensor,
        *,
        is_interleaved: bool,
    ) -> Tensor:
        """Do `rotary`, then `write_cache` of rotated keys and values; return the queries.

        What is left in k afterwards means nothing.
        """

    def activated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Return [T, I] -> [T, I]: the activation of each value. Called when a layer is built; may write in place."""

    def gated(self, activation: Activation) -> Callable[[Tensor], Tensor]:
        """Return [T, 2I] -> [T, I]: activation(first half) * second half. Called when a layer is built."""

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """Return silu(first half) * second half, [T, 2I] -> [T, I]."""

    def write_cache(self, k_TKH: Tensor, v_TKH: Tensor, cache: LayerCache, slot_mapping_T: Tensor) -> None:
        """Store each token's key and value at its slot.

        Args:
            k_TKH, v_TKH: [T, K, H], compute dtype; one and the same where each key is its value.
            cache: the layer's blocks, [B, P, K, H] each, to be written to; the dtype of k, or int8 with scales.
            slot_mapping_T: [T] int64, on the device of k: block id * block size + offset.
        """

    def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """Attend each query token to its own sequence's cached keys and values, causally.

        Query head n reads key-value head n // (N // K). PagedAttention, arXiv:2309.06180, section 4.1.

        Args:
            q_TNH: [T, N, H], compute dtype.
            cache: the layer's blocks, [B, P, K, H] each, with the keys and values of this step's tokens.
            meta: where the tokens belong, and the block tables of their sequences, on the device of q.
            params: what is constant for the layer.

        Returns:
            [T, N, H], dtype and device of q.
        """

    def compile_layers(self, run: "RunLayers", axis: Axis) -> "RunLayers":
        """Return what does the same as `run`, a decoder's layers on one rank, with less between the operations.

        Called once, when the decoder is built. It is `run` itself where there is nothing to gain, or where the ranks of
        the tensor-parallel axis communicate between operations that cannot be taken apart.
        """


class RunLayers(Protocol):
    """All layers of a stage on the packed tokens of a step."""

    def __call__(
        self,
        x_TE: Tensor,
        angles: Sequence[tuple[Tensor, ...]],
        caches: Sequence[LayerCache],
        metas: Sequence[AttentionMeta],
    ) -> tuple[Tensor, Tensor]:
        """(what was added last, residual stream before it), [T, E] each; on the last stage the norm of their sum comes
        first. x may be overwritten, and the result by the next call.

        Args:
            x_TE: what goes in.
            angles: cosines and sines [T, R] of each kind of rotation; which layer has which one is known.
            caches, metas: one for each layer.
        """


@runtime_checkable
class RecordedLayers(RunLayers, Protocol):
    """Layers that record steps as graphs of a device, and replay them."""

    @property
    def num_recorded(self) -> int:
        """Number of sizes of steps that are recorded now."""

    @property
    def records_whole_steps(self) -> bool:
        """Whether steps that decode can be recorded whole, as far as is known; the same on all ranks of a group."""

    @property
    def records_chunks(self) -> bool:
        """Whether those with chunks of prompts can be too; else they are recorded in pieces."""


class Lookup(NamedTuple):
    """Rows of a table that are still to be looked up."""

    table: Tensor | TableLinear
    indices_T: Tensor  # noqa: N815
    """[T] int64: the row of each token."""


class StartedStep(NamedTuple):
    """A step that other threads begin."""

    x: Tensor | Lookup
    """What goes in, [T, E], or where it is found."""
    angles: Sequence[tuple[Tensor, ...]]
    """Cosines and sines [positions, R] of each kind of rotation, of all positions."""
    positions_T: Tensor  # noqa: N815
    """[T] int64: the positions of the tokens."""
    caches: Sequence[LayerCache]
    """Cache of each layer; `metas` has one for each of them too."""
    metas: Sequence[AttentionMeta]
    rows_S: Tensor | None  # noqa: N815
    """[S] int64, ascending, the tokens whose results are wanted; None: all. Of the others nothing is computed after the
    last attention."""
    head: SearchedLinear | None
    """Head that is searched with the first part of the result; None: it is not. It is a `DrawnLinear` where `search`
    wants more than the largest, and a `SiftedLinear` that can do it where that is a `Sift` whose draws are known."""
    search: Search | Sift | None


@runtime_checkable
class StartedLayers(RunLayers, Protocol):
    """Layers that other threads can begin, while the caller's does something else."""

    @property
    def starts_steps(self) -> bool:
        """Whether there are steps that other threads can begin; known when one has been run."""

    def is_recorded(self, metas: Sequence[AttentionMeta]) -> bool:
        """Whether a step with these metas can be started."""

    def can_start(self, metas: Sequence[AttentionMeta]) -> bool:
        """Whether other threads can begin it then."""

    def start(self, step: StartedStep) -> Callable[[], tuple[Tensor, Tensor, Tensor | None]]:
        """Begin a step that `is_recorded`, where others can; what is returned joins in, and gives its result. It is
        called once, in the same thread, which runs no other kernels before.

        Returns:
            the results of the wanted tokens, [S, E] each; besides, what the search found: `indices_T` of
            `SearchedLinear.largest`, good until the next start. None if there was none, or where it is not this one's
            business.
        """
