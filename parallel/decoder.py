"""One decoder, built from a description: this rank's part of it.

A stage holds a run of layers; the first stage has the embedding before them, the last one the final norm and the head
after them. Within a stage every layer is divided over the tensor-parallel axis. The weights come from checkpoint.py,
the cache from the caller.

The residual stream is kept apart from what the last block added to it, so that one kernel adds and norms:

    x, residual -> add, norm -> attention -> add, norm -> MLP -> x', residual'
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel.attention import Attention
from parallel.description import DecoderDescription
from parallel.embedding import VocabParallelEmbedding, VocabParallelHead
from parallel.kernels.base import AttentionMeta, Kernels, LayerCache
from parallel.layer import LayerContext
from parallel.mesh import Mesh
from parallel.mlp import GatedMLP
from parallel.norm import RMSNorm
from parallel.rotary import RotaryTable
from parallel.shard import ShardedParameter, check_split, kv_head_range, layer_range


class DecoderLayer:
    """Attention and MLP, each after a norm, each added to the residual stream."""

    def __init__(self, description: DecoderDescription, layer_index: int, *, context: LayerContext) -> None:
        self._attention_norm = RMSNorm(description.hidden_size, description.norm_eps, context=context)
        self._attention = Attention(description, layer_index, context=context)
        self._mlp_norm = RMSNorm(description.hidden_size, description.norm_eps, context=context)
        self._mlp = GatedMLP(description, context=context)

    def __call__(
        self,
        x_TE: Tensor,
        residual_TE: Tensor | None,
        cos_TR: Tensor,
        sin_TR: Tensor,
        cache: LayerCache,
        meta: AttentionMeta,
    ) -> tuple[Tensor, Tensor]:
        """(what was added last, residual stream before it) -> the same after this layer; None: nothing added yet."""
        if residual_TE is None:
            residual_TE = x_TE
            x_TE = self._attention_norm(x_TE)
        else:
            x_TE, residual_TE = self._attention_norm.add(x_TE, residual_TE)
        x_TE = self._attention(x_TE, cos_TR, sin_TR, cache, meta)
        x_TE, residual_TE = self._mlp_norm.add(x_TE, residual_TE)
        return self._mlp(x_TE), residual_TE

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """Those of both blocks and their norms."""
        yield from self._attention_norm.sharded_parameters(f"{prefix}.attention_norm")
        yield from self._attention.sharded_parameters(f"{prefix}.attention")
        yield from self._mlp_norm.sharded_parameters(f"{prefix}.mlp_norm")
        yield from self._mlp.sharded_parameters(f"{prefix}.mlp")

    def finish_loading(self) -> None:
        """Lay out the matrices."""
        self._attention.finish_loading()
        self._mlp.finish_loading()


class Decoder:
    """This rank's part of a decoder. Fill `sharded_parameters`, then `finish_loading`, then call it.

    Raises ParallelismError when the model cannot be divided over the mesh.
    """

    def __init__(
        self,
        description: DecoderDescription,
        *,
        mesh: Mesh,
        device: torch.device,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        check_split(description, tensor_parallel=mesh.tp.size, pipeline_parallel=mesh.pp.size)
        self.description = description
        self.mesh = mesh
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        context = LayerContext(axis=mesh.tp, kernels=kernels, device=device, dtype=dtype)
        self.layer_indices = layer_range(description.num_layers, mesh.pp.rank, mesh.pp.size)
        """Of the whole model, those that this stage holds."""
        self._rotary = RotaryTable(description.rotary, description.max_context, device=device)
        self._layers = [DecoderLayer(description, index, context=context) for index in self.layer_indices]
        self._embedding: VocabParallelEmbedding | None = None
        self._final_norm: RMSNorm | None = None
        self._head: VocabParallelHead | None = None
        if mesh.is_first_stage:
            self._embedding = VocabParallelEmbedding(description.vocab_size, description.hidden_size, context=context)
        if mesh.is_last_stage:
            self._final_norm = RMSNorm(description.hidden_size, description.norm_eps, context=context)
            self._head = VocabParallelHead(
                description.vocab_size,
                description.hidden_size,
                tied=self._embedding if description.tie_embeddings else None,
                source="embedding.weight" if description.tie_embeddings else "head.weight",
                context=context,
            )

    @property
    def num_local_layers(self) -> int:
        """Layers of this stage: how many caches `forward` takes."""
        return len(self._layers)

    @property
    def num_local_kv_heads(self) -> int:
        """Key-value heads in each of the caches."""
        return len(kv_head_range(self.description.num_kv_heads, self.mesh.tp.rank, self.mesh.tp.size))

    def forward(self, x: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], meta: AttentionMeta) -> Tensor:
        """Run this stage's layers on a step's packed tokens. All ranks of the stage call it with the same tokens.

        Args:
            x: token ids, [T] int64, on the first stage; elsewhere the previous stage's result, which is overwritten.
            positions_T: [T] int64, each below `description.max_context`.
            caches: one for each layer of this stage; this step's keys and values are written to them.
            meta: where the tokens belong.

        Returns:
            [T, E], the same on all ranks of the stage: normed, for `logits`, on the last stage; elsewhere what the next
            stage takes.

        Raises:
            CollectiveError: a rank of the stage is gone.
        """
        x_TE = x if self._embedding is None else self._embedding(x)
        cos_TR, sin_TR = self._rotary(positions_T)
        residual_TE: Tensor | None = None
        for layer, cache in zip(self._layers, caches, strict=True):
            x_TE, residual_TE = layer(x_TE, residual_TE, cos_TR, sin_TR, cache, meta)
        assert residual_TE is not None, "every stage has a layer"
        if self._final_norm is None:
            return x_TE.add_(residual_TE)
        return self._final_norm.add(x_TE, residual_TE)[0]

    __call__ = forward

    def logits(self, hidden_SE: Tensor) -> Tensor | None:
        """Logits of rows of `forward`'s result, on the last stage, all of whose ranks call this.

        Returns:
            float32 [S, vocab_size] on tensor-parallel rank 0; None on the others.
        """
        assert self._head is not None, "only the last stage has the head"
        return self._head(hidden_SE)

    def sharded_parameters(self) -> Iterator[ShardedParameter]:
        """Every parameter of this rank, once, and the slices of the full tensors that fill it."""
        if self._embedding is not None:
            yield from self._embedding.sharded_parameters("embedding")
        for index, layer in zip(self.layer_indices, self._layers, strict=True):
            yield from layer.sharded_parameters(f"layers.{index}")
        if self._final_norm is not None:
            yield from self._final_norm.sharded_parameters("final_norm")
        if self._head is not None:
            yield from self._head.sharded_parameters()

    def finish_loading(self) -> None:
        """Lay all weights out for the kernels; once, when they are filled."""
        for layer in self._layers:
            layer.finish_loading()
        if self._head is not None:
            self._head.finish_loading()
