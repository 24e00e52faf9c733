"""The embedding and the head, their vocabulary divided over the tensor-parallel axis.

Each rank holds an equal number of rows; when the vocabulary does not divide, the last ranks hold rows of padding, which
no token id names and whose logits are cut off.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import all_reduce, gather_to_first
from parallel.description import DecoderDescription
from parallel.kernels.base import Lookup
from parallel.kernels.linears import (
    DrawnLinear,
    PackedLinear,
    ScreenedLinear,
    Search,
    SearchedLinear,
    Sift,
    SiftedLinear,
    TableLinear,
)
from parallel.kernels.sampling import TokenChoice
from parallel.layer import LayerContext
from parallel.norm import Norm, make_norm
from parallel.position_description import LearnedPositions
from parallel.shard import Piece, ShardedParameter, vocab_range, vocab_rows


class VocabParallelEmbedding:
    """Looks up token ids: every rank those it holds, zeros for the others, one all-reduce over all.

    Over several ranks the table has a row of zeros at both ends, so that one clamp sends all foreign ids to zeros:

        row      0 | 1 .......... rows | rows + 1         ids of this rank: first .. first + rows - 1
                 0 | first ....... last | 0               row of an id: clamp(id - first + 1, 0, rows + 1)
    """

    def __init__(self, vocab_size: int, hidden_size: int, *, context: LayerContext) -> None:
        self._axis = axis = context.axis
        self._vocab_size = vocab_size
        rows = vocab_rows(vocab_size, axis.size)
        if axis.size == 1:
            self._table = self.weight_VE = context.empty(rows, hidden_size, stays=True)
        else:
            self._table = context.empty(rows + 2, hidden_size, stays=True)
            self._table[0].zero_()
            self._table[-1].zero_()
            self.weight_VE = self._table[1:-1]
            """Also the head's, when it is tied."""
            _zero_padding(self.weight_VE, vocab_size, context)
        self._first = axis.rank * rows
        self._last_row = rows + 1
        self._shared: TableLinear | None = None

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """[T] int64, each in 0 .. vocab_size - 1 -> [T, E] on every rank."""
        if self._axis.size == 1:
            return self._table.index_select(0, token_ids_T) if self._shared is None else self._shared.rows(token_ids_T)
        if self._shared is not None:
            return all_reduce(self._shared.rows(token_ids_T - self._first), self._axis)
        rows_T = token_ids_T.sub(self._first - 1).clamp_(0, self._last_row)
        return all_reduce(self._table.index_select(0, rows_T), self._axis)

    def lookup(self, token_ids_T: Tensor) -> Lookup | None:
        """The same, to be done by others; None where that is not all."""
        return Lookup(self._shared or self._table, token_ids_T) if self._axis.size == 1 else None

    def share(self, linear: TableLinear) -> None:
        """The head has laid `weight_VE` out: from now on rows come from it."""
        self._shared = linear

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The rows of this rank."""
        yield _sharded_rows(f"{prefix}.weight", self.weight_VE, self._vocab_size, self._axis.rank, self._axis.size)

    def finish_loading(self) -> None:
        """Nothing to lay out."""


class PositionEmbedding:
    """A learned vector for each position; every rank holds those of the contexts that are served."""

    def __init__(self, positions: LearnedPositions, max_context: int, hidden_size: int, *, context: LayerContext):
        self._positions = positions
        self._table_PE = context.empty(max_context, hidden_size)

    def __call__(self, positions_T: Tensor) -> Tensor:
        """[T] int64 -> [T, E]."""
        return self._table_PE.index_select(0, positions_T)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The rows of the positions that are served."""
        max_context, hidden_size = self._table_PE.shape
        start = self._positions.offset
        piece = Piece(
            source=f"{prefix}.weight",
            full_shape=(self._positions.num_rows, hidden_size),
            dim=0,
            start=start,
            stop=start + max_context,
        )
        yield ShardedParameter(tensor=self._table_PE, pieces=(piece,))


class InputEmbedding:
    """What the first layer reads: the tokens' vectors and what the model does to them."""

    def __init__(self, description: DecoderDescription, *, context: LayerContext) -> None:
        hidden_size = description.hidden_size
        self.tokens = VocabParallelEmbedding(description.vocab_size, hidden_size, context=context)
        # rounded as the models that have one were trained with
        self._multiplier = torch.tensor(description.embedding_multiplier, dtype=context.dtype).item()
        self._positions: PositionEmbedding | None = None
        self._norm: Norm | None = None
        if description.learned_positions is not None:
            self._positions = PositionEmbedding(
                description.learned_positions, description.max_context, hidden_size, context=context
            )
        if description.embedding_norm:
            self._norm = make_norm(description.norm, hidden_size, description.norm_eps, context=context)

    def __call__(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        """[T] int64 each -> [T, E] on every rank."""
        x_TE = self.tokens(token_ids_T)
        if self._multiplier != 1.0:
            x_TE = x_TE.mul_(self._multiplier)
        if self._positions is not None:
            x_TE = x_TE.add_(self._positions(positions_T))
        return x_TE if self._norm is None else self._norm(x_TE)

    def lookup(self, token_ids_T: Tensor) -> Lookup | None:
        """The same, to be done by others; None where that is not all."""
        is_plain = self._multiplier == 1.0 and self._positions is None and self._norm is None
        return self.tokens.lookup(token_ids_T) if is_plain else None

    def sharded_parameters(self) -> Iterator[ShardedParameter]:
        """The rows of this rank, and whole positions and norm."""
        yield from self.tokens.sharded_parameters("embedding")
        if self._positions is not None:
            yield from self._positions.sharded_parameters("positions")
        if self._norm is not None:
            yield from self._norm.sharded_parameters("embedding_norm")

    def finish_loading(self) -> None:
        """Only the norm has something to lay out."""
        if self._norm is not None:
            self._norm.finish_loading()


class VocabParallelHead:
    """Logits over the whole vocabulary, gathered to the first rank of the axis.

    Args:
        description: says what is done to weights and logits.
        tied: the embedding whose weight is also the head's, where this rank has it. A head that is tied to an embedding
            on another stage loads the tensor of that.
        context: where it lives.
    """

    def __init__(
        self, description: DecoderDescription, *, tied: VocabParallelEmbedding | None, context: LayerContext
    ) -> None:
        self._description = description
        self._axis = context.axis
        self._tied = tied
        num_rows = vocab_rows(description.vocab_size, self._axis.size)
        self._weight_VE: Tensor | None
        if tied is not None:
            self._weight_VE = tied.weight_VE
        else:
            self._weight_VE = context.empty_linear(num_rows, description.hidden_size)
            _zero_padding(self._weight_VE, description.vocab_size, context)
        self._bias_V: Tensor | None = None
        if description.head_bias:
            self._bias_V = context.empty(num_rows)
            _zero_padding(self._bias_V, description.vocab_size, context)
        self._context = context
        self._linear: PackedLinear
        self._searched: SearchedLinear | None = None
        self.finds_largest = False
        """Whether to `find` the largest logits is less work than all of them; the same on every rank."""
        self.draws = False
        """Whether to `find` tokens that are drawn is less work than all logits; the same on every rank."""
        self._sifted: SiftedLinear | None = None

    def __call__(self, hidden_SE: Tensor, sift: Sift | None = None) -> Tensor | None:
        """[S, E] -> [S, vocab_size] on rank 0 of the axis, None on the others; all of them call it.

        As the product gives it, float32 where something more is done to it. With `sift`, if this `sifts` it, logits
        that do not matter may be -inf.
        """
        if sift is None:
            ours_SV = self._linear(hidden_SE)
        else:
            assert self._sifted is not None, "sifts"
            ours_SV = self._sifted.sifted(hidden_SE, sift, self._first_token)
        gathered_SV = gather_to_first(ours_SV, self._axis, dim=1)
        if gathered_SV is None:
            return None
        logits_SV = gathered_SV[:, : self._description.vocab_size]
        if self._description.logit_multiplier != 1.0:
            logits_SV = logits_SV.float() * self._description.logit_multiplier
        if (cap := self._description.logit_soft_cap) is not None:
            logits_SV = (logits_SV.float() / cap).tanh_().mul_(cap)
        return logits_SV

    def find(self, hidden_SE: Tensor, search: Search, choice: TokenChoice) -> Tensor | None:
        """[S, E] -> [S] int64 on rank 0 of the axis, None on the others; all of them call it.

        What `ChooseTokens` gives for the logits and these draws, which limit nothing. Only where `finds_largest`, or
        `draws`: not where logits are rounded anew, and may be equal then, nor where some are padding.
        """
        size, searched = self._axis.size, self._searched_by(search, len(hidden_SE))
        if isinstance(searched, DrawnLinear):
            values_S, indices_S = searched.drawn(hidden_SE, search, self._first_token)
        elif searched is not None:
            values_S, indices_S = searched.largest(hidden_SE)
        else:
            ours_SV = self._linear(hidden_SE)
            if search.edits is not None:
                ours_SV = ours_SV.float()
                choice.edit(ours_SV, search.edits, self._first_token)
            values_S, indices_S = choice.find(ours_SV, search.noise, self._first_token)
        if size == 1:
            return indices_S
        ours_S2 = torch.stack([values_S.double(), indices_S.double()], dim=1)
        gathered_SR = gather_to_first(ours_S2, self._axis, dim=1)
        if gathered_SR is None:
            return None
        values_SR, indices_SR = gathered_SR.view(-1, size, 2).unbind(2)
        ranks_S = values_SR.argmax(1)
        indices_S = indices_SR.gather(1, ranks_S[:, None])[:, 0].long()
        return (indices_S + ranks_S * (self._description.vocab_size // size)).where(indices_S >= 0, -1)

    @property
    def _first_token(self) -> int:
        """First token of this rank's rows, where none has padding."""
        return self._description.vocab_size // self._axis.size * self._axis.rank

    def sifts(self, sift: Sift) -> bool:
        """Whether only the logits that matter are less work than all."""
        return self._sifted is not None and self._sifted.can_sift(sift)

    def spared_bytes(self, num_rows: int) -> int:
        """Return how many bytes of this rank's weight a search for `num_rows` spares at best."""
        return self._searched.spared_bytes(num_rows) if isinstance(self._searched, ScreenedLinear) else 0

    def searched_alone(self, search: Search | Sift, num_rows: int) -> SearchedLinear | None:
        """Return what alone tells rows' tokens; None: ranks compare theirs. A `Sift` is one that it `sifts`."""
        if self._axis.size > 1:
            return None
        return self._sifted if isinstance(search, Sift) else self._searched_by(search, num_rows)

    def _searched_by(self, search: Search, num_rows: int) -> SearchedLinear | None:
        """Return what can search so without logits; None: nothing can."""
        if search.noise is None and search.edits is None:
            return self._searched
        is_drawn = isinstance(self._searched, DrawnLinear) and (
            search.edits is None or num_rows <= self._searched.most_edited_rows
        )
        return self._searched if is_drawn else None

    def sharded_parameters(self) -> Iterator[ShardedParameter]:
        """The rows of this rank; no weight where it is the embedding's."""
        vocab_size, axis = self._description.vocab_size, self._axis
        if self._tied is None:
            assert self._weight_VE is not None, "weights are gone after finish_loading"
            source = "embedding.weight" if self._description.tie_embeddings else "head.weight"
            yield _sharded_rows(source, self._weight_VE, vocab_size, axis.rank, axis.size)
        if self._bias_V is not None:
            yield _sharded_rows("head.bias", self._bias_V, vocab_size, axis.rank, axis.size)

    def finish_loading(self) -> None:
        """Hand the weight to the kernels."""
        assert self._weight_VE is not None, "finish_loading is called once"
        if self._description.is_head_normalized:
            self._weight_VE = F.normalize(self._weight_VE)
        shares = self._tied is not None and not self._description.is_head_normalized
        self._linear = self._context.pack_head(self._weight_VE, self._bias_V, is_shared=shares)
        if self._tied is not None and shares and isinstance(self._linear, TableLinear):
            self._tied.share(self._linear)
        self._weight_VE = self._bias_V = None
        self._searched = self._linear if isinstance(self._linear, SearchedLinear) else None
        description, size = self._description, self._axis.size
        is_final = description.logit_multiplier == 1.0 and description.logit_soft_cap is None
        is_less = size > 1 or self._searched is not None
        is_whole = is_final and description.vocab_size % size == 0
        self.finds_largest = is_whole and is_less
        self.draws = self.finds_largest and (size > 1 or isinstance(self._searched, DrawnLinear))
        self._sifted = self._linear if is_whole and isinstance(self._linear, SiftedLinear) else None


def _sharded_rows(source: str, weight_VE: Tensor, vocab_size: int, rank: int, size: int) -> ShardedParameter:
    rows = vocab_range(vocab_size, rank, size)
    full_shape = (vocab_size, *weight_VE.shape[1:])
    piece = Piece(source=source, full_shape=full_shape, dim=0, start=rows.start, stop=rows.stop)
    return ShardedParameter(tensor=weight_VE, pieces=(piece,))


def _zero_padding(weight_VE: Tensor, vocab_size: int, context: LayerContext) -> None:
    """Zero the rows past the vocabulary: no checkpoint fills them, and what memory happens to hold could be NaN."""
    num_real = len(vocab_range(vocab_size, context.axis.rank, context.axis.size))
    weight_VE[num_real:].zero_()
