"""One decoder, built from a description: this rank's part of it.

A stage holds a run of layers; the first stage has the embedding before them, the last one the final norm and the head
after them. Within a stage every layer is divided over the tensor-parallel axis. The weights come from checkpoint.py,
the cache from the caller.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.alibi import key_bias
from parallel.attention import Angles
from parallel.collectives import share_memory
from parallel.decoder_layer import make_decoder_layer
from parallel.description import DecoderDescription
from parallel.embedding import InputEmbedding, VocabParallelHead
from parallel.errors import ConfigError
from parallel.kernels.base import (
    AttentionMeta,
    CacheEntry,
    Kernels,
    LayerCache,
    Lookup,
    RecordedLayers,
    StartedLayers,
    StartedStep,
)
from parallel.kernels.linears import Search, Sift
from parallel.kernels.sampling import TokenChoice
from parallel.layer import LayerContext
from parallel.layer_groups import group_layers
from parallel.mesh import Mesh
from parallel.norm import Norm, make_norm
from parallel.rotary import LayerRotations
from parallel.shard import ShardedParameter, check_split, even_range, kv_head_range, split_layers
from parallel.weight_sizes import WeightSizes


class DecoderPart(NamedTuple):
    """A part of a decoder that is loaded by itself."""

    parameters: tuple[ShardedParameter, ...]
    finish_loading: Callable[[], None]
    """Lays the weights out for the kernels; once, when they are filled."""


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
        layer_partition: Sequence[int] = (),
        expert_parallel: bool = False,
        int8_linears: bool = False,
        int8_cache: bool = False,
    ) -> None:
        check_split(
            description,
            tensor_parallel=mesh.tp.size,
            pipeline_parallel=mesh.pp.size,
            layer_partition=layer_partition,
            expert_parallel=expert_parallel,
        )
        self.description = description
        self.mesh = mesh
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self._cache_dtype = torch.int8 if int8_cache else dtype
        context = LayerContext(
            axis=mesh.tp,
            kernels=kernels,
            device=device,
            dtype=dtype,
            expert_parallel=expert_parallel,
            int8_linears=int8_linears,
        )
        stages = split_layers(description.num_layers, mesh.pp.size, layer_partition)
        self.layer_indices = stages[mesh.pp.rank]
        """Layers of the whole model that this stage holds."""
        self.layer_groups = group_layers(
            description.sliding_windows, stages=stages, max_context=description.max_context
        )
        """Which layers of the whole model have a block table in common, and where in a block each one's cache is."""
        with _telling_positions(description.max_context):
            bias_NP = self._key_bias()
        self._layers = [make_decoder_layer(description, i, bias_NP, context=context) for i in self.layer_indices]
        rotaries = [description.rotaries[i] for i in self.layer_indices]
        with _telling_positions(description.max_context):
            self._rotations = LayerRotations(rotaries, description.max_context, device=device)
        share_memory(mesh.tp, kernels)
        self._run = kernels.compile_layers(self._run_layers, mesh.tp)
        self._started = self._run if isinstance(self._run, StartedLayers) else None
        self._embedding: InputEmbedding | None = None
        self._final_norm: Norm | None = None
        self._head: VocabParallelHead | None = None
        if mesh.is_first_stage:
            self._embedding = InputEmbedding(description, context=context)
        if mesh.is_last_stage:
            self._final_norm = make_norm(
                description.norm, description.hidden_size, description.norm_eps, context=context
            )
            tied = self._embedding.tokens if self._embedding is not None and description.tie_embeddings else None
            self._head = VocabParallelHead(description, tied=tied, context=context)
        self.weight_sizes = WeightSizes.of(
            self.sharded_parameters(),
            description,
            dtype,
            has_head=mesh.is_last_stage,
            int8_linears=int8_linears,
            int8_experts=int8_linears and kernels.quantizes_experts,
        )
        """Sizes of this rank's weights."""

    @property
    def num_local_layers(self) -> int:
        """Layers of this stage: how many caches `forward` takes."""
        return len(self._layers)

    @property
    def cache_entry(self) -> CacheEntry:
        """What each of the caches holds of a token."""
        description, axis = self.description, self.mesh.tp
        latent = description.latent_kv
        if latent is not None:
            head_dim = latent.rank + latent.rotary_dim
            return CacheEntry(num_heads=1, head_dim=head_dim, dtype=self.dtype, is_key_value=True)
        num_heads = len(kv_head_range(description.num_kv_heads, axis.rank, axis.size))
        return CacheEntry(num_heads=num_heads, head_dim=description.head_dim, dtype=self._cache_dtype)

    def forward(
        self,
        x: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        metas: Sequence[AttentionMeta],
        rows_S: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers on a step's packed tokens. All ranks of the stage call it with the same tokens.

        Args:
            x: token ids, [T] int64, on the first stage; elsewhere the previous stage's result, which is overwritten.
            positions_T: [T] int64, each below `description.max_context`.
            caches: one for each layer of this stage; this step's keys and values are written to them.
            metas: where the tokens belong in each of the caches.
            rows_S: the tokens whose result is wanted, [S] int64, ascending, the same on all ranks; None: all.

        Returns:
            [T, E], or [S, E] of those rows, the same on all ranks of the stage: normed, for `logits`, on the last
            stage, and good until the next call; elsewhere what the next stage takes.

        Raises:
            CollectiveError: a rank of the stage is gone.
        """
        if rows_S is not None and self._started is not None and self._started.is_recorded(metas):
            return self.start(x, positions_T, caches, metas, rows_S=rows_S, search=None)()[0]
        x_TE = x if self._embedding is None else self._embedding(x, positions_T)
        hidden_TE = self._result(*self._run(x_TE, self._rotations(positions_T), caches, metas))
        return hidden_TE if rows_S is None else hidden_TE[rows_S]

    __call__ = forward

    @property
    def starts_steps(self) -> bool:
        """Whether `can_start` is true of some steps; known when one has been run."""
        return self._started is not None and self._started.starts_steps

    def can_start(self, metas: Sequence[AttentionMeta]) -> bool:
        """Whether the layers of such a step can be begun by other threads than the caller's."""
        return self._started is not None and self._started.can_start(metas)

    def start(
        self,
        x: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        metas: Sequence[AttentionMeta],
        *,
        rows_S: Tensor | None,
        search: Search | Sift | None,
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Begin a `forward` that `can_start`; what is returned joins in, and gives the result of the tokens `rows_S`.

        These are [S] int64, ascending, or None for all. It is called once, in the same thread, which has nothing else
        of the model computed before. Besides, it gives what `find` gives for these tokens and this search, good until
        the next start, or None if that is still to be asked for.
        """
        assert self._started is not None, "is_recorded"
        into: Tensor | Lookup = x
        if self._embedding is not None:
            into = self._embedding.lookup(x) or self._embedding(x, positions_T)
        num_rows = len(x if rows_S is None else rows_S)
        head = None if search is None or self._head is None else self._head.searched_alone(search, num_rows)
        finish = self._started.start(
            StartedStep(into, self._rotations.angles, positions_T, caches, metas, rows_S, head, search)
        )

        def result() -> tuple[Tensor, Tensor | None]:
            x_TE, residual_TE, found_T = finish()
            return self._result(x_TE, residual_TE), found_T

        return result

    def layer_inputs(self) -> tuple[Tensor, list[Angles]]:
        """What goes into the layers of this stage in a step of one token, for those who look at the shapes."""
        x_TE = torch.zeros(1, self.description.hidden_size, dtype=self.dtype, device=self.device)
        positions_T = torch.zeros(1, dtype=torch.int64, device=self.device)
        return x_TE, self._rotations(positions_T)

    @property
    def num_recorded(self) -> int:
        """Sizes of steps that the layers have recorded as graphs of the device; 0 where they do not record."""
        return self._run.num_recorded if isinstance(self._run, RecordedLayers) else 0

    @property
    def records_whole_steps(self) -> bool:
        """Whether the layers record steps that decode as one graph, as far as is known; the same on all ranks."""
        return isinstance(self._run, RecordedLayers) and self._run.records_whole_steps

    @property
    def records_chunks(self) -> bool:
        """Whether they also record steps with chunks of prompts as one graph, as far as is known; as above."""
        return isinstance(self._run, RecordedLayers) and self._run.records_chunks

    def drop_recordings(self) -> None:
        """Let go of what `Kernels.compile_layers` has recorded; from now on every operation is called."""
        self._run, self._started = self._run_layers, None
        gc.collect()  # what was recorded may refer to itself

    def logits(self, hidden_SE: Tensor, sift: Sift | None = None) -> Tensor | None:
        """Logits of rows of `forward`'s result, on the last stage, all of whose ranks call this.

        Args:
            hidden_SE: the rows.
            sift: says which logits matter, if this stage `sifts` it; others may be -inf.

        Returns:
            [S, vocab_size] on tensor-parallel rank 0, in float32 or the dtype of the model; None on the others.
        """
        assert self._head is not None, "only the last stage has the head"
        return self._head(hidden_SE, sift)

    def sifts(self, sift: Sift) -> bool:
        """Whether only the logits that matter are less work than all; `logits` then takes this `sift`."""
        return self._head is not None and self._head.sifts(sift)

    @property
    def finds_largest(self) -> bool:
        """Whether to `find` the largest is less work than `logits` and a choice; the same on all ranks of the last
        stage.
        """
        return self._head is not None and self._head.finds_largest

    @property
    def draws(self) -> bool:
        """Whether to `find` tokens that are drawn is less work than `logits` and a choice; the same on all ranks of the
        last stage.
        """
        return self._head is not None and self._head.draws

    def find(self, hidden_SE: Tensor, search: Search, choice: TokenChoice) -> Tensor | None:
        """Return what `ChooseTokens` gives for `logits`, without these, where this stage `finds_largest`, or `draws`.

        Args:
            hidden_SE: rows of `forward`'s result, on the last stage, all of whose ranks call this.
            choice: for logits that the head's weight cannot tell without.

        Returns:
            [S] int64 on tensor-parallel rank 0, None on the others.
        """
        assert self._head is not None, "only the last stage has the head"
        return self._head.find(hidden_SE, search, choice)

    def spared_bytes(self, num_rows: int) -> int:
        """Return how many bytes of this rank's head `find` spares at best for `num_rows`."""
        return 0 if self._head is None else self._head.spared_bytes(num_rows)

    def sharded_parameters(self) -> Iterator[ShardedParameter]:
        """Every parameter of this rank, once, and the slices of the full tensors that fill it."""
        for part in self.parts():
            yield from part.parameters

    def finish_loading(self) -> None:
        """Lay all weights out for the kernels; once, when they are filled."""
        for part in self.parts():
            part.finish_loading()

    def parts(self) -> list[DecoderPart]:
        """What can be filled and laid out by itself, in this order.

        The head, whose matrix is the largest, comes early: while kernels copy it, the layers are not there yet.
        """
        parts = []
        if self._embedding is not None:
            parts.append(DecoderPart((*self._embedding.sharded_parameters(),), self._embedding.finish_loading))
        if self._head is not None:
            parts.append(DecoderPart((*self._head.sharded_parameters(),), self._head.finish_loading))
        for index, layer in zip(self.layer_indices, self._layers, strict=True):
            parts.append(DecoderPart((*layer.sharded_parameters(f"layers.{index}"),), layer.finish_loading))
        if self._final_norm is not None:
            norm = self._final_norm
            parts.append(DecoderPart((*norm.sharded_parameters("final_norm"),), norm.finish_loading))
        return parts

    def _result(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor:
        return x_TE + residual_TE if self._final_norm is None else x_TE

    def _run_layers(
        self, x_TE: Tensor, angles: Sequence[Angles], caches: Sequence[LayerCache], metas: Sequence[AttentionMeta]
    ) -> tuple[Tensor, Tensor]:
        """Run the layers as `RunLayers` says; on the last stage return (the norm of their sum, their sum)."""
        residual_TE: Tensor | None = None
        kinds = self._rotations.kind_of_layer
        for layer, kind, cache, meta in zip(self._layers, kinds, caches, metas, strict=True):
            x_TE, residual_TE = layer(x_TE, residual_TE, angles[kind], cache, meta)
        assert residual_TE is not None, "every stage has a layer"
        # with the layers, so that it is compiled with them
        return (x_TE, residual_TE) if self._final_norm is None else self._final_norm.add(x_TE, residual_TE)

    def _key_bias(self) -> Tensor | None:
        """Return the table of ALiBi that all layers add to their scores; None: they add none."""
        description, axis = self.description, self.mesh.tp
        if description.alibi is None:
            return None
        heads = even_range(description.num_heads, axis.rank, axis.size, what="num_heads")
        return key_bias(description.alibi, heads, description.max_context, device=self.device)


@contextmanager
def _telling_positions(max_context: int) -> Iterator[None]:
    """Tell by whose number there is no memory for a table: a config may claim any context."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"no memory for tables of {max_context} positions; allowed: a smaller max_context; {reason}"
        ) from error
