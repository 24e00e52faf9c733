"""The embedding and the head, their vocabulary divided over the tensor-parallel axis.

Each rank holds an equal number of rows; when the vocabulary does not divide, the last ranks hold rows of padding, which
no token id names and whose logits are cut off.
"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import all_reduce, gather_to_first
from parallel.kernels.base import PackedLinear
from parallel.layer import LayerContext
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
            self._table = self.weight_VE = context.empty(rows, hidden_size)
        else:
            self._table = context.empty(rows + 2, hidden_size)
            self._table[0].zero_()
            self._table[-1].zero_()
            self.weight_VE = self._table[1:-1]
            """Also the head's, when it is tied."""
            _zero_padding(self.weight_VE, vocab_size, context)
        self._first = axis.rank * rows
        self._last_row = rows + 1

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """[T] int64, each in 0 .. vocab_size - 1 -> [T, E] on every rank."""
        if self._axis.size == 1:
            return F.embedding(token_ids_T, self._table)
        rows_T = token_ids_T.sub(self._first - 1).clamp_(0, self._last_row)
        return all_reduce(F.embedding(rows_T, self._table), self._axis)

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The rows of this rank."""
        yield _sharded_rows(f"{prefix}.weight", self.weight_VE, self._vocab_size, self._axis.rank, self._axis.size)

    def finish_loading(self) -> None:
        """Nothing to lay out."""


class VocabParallelHead:
    """Logits over the whole vocabulary, gathered to the first rank of the axis.

    Args:
        tied: the embedding whose weight is also the head's, where this rank has it.
        source: the decoder's name of the tensor to load otherwise: that of the embedding when the head is tied to it on
            another stage.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: VocabParallelEmbedding | None,
        source: str,
        context: LayerContext,
    ) -> None:
        self._axis = context.axis
        self._vocab_size = vocab_size
        self._source = source
        self._is_tied = tied is not None
        self._weight_VE: Tensor | None
        if tied is not None:
            self._weight_VE = tied.weight_VE
        else:
            self._weight_VE = context.empty(vocab_rows(vocab_size, self._axis.size), hidden_size)
            _zero_padding(self._weight_VE, vocab_size, context)
        self._kernels = context.kernels
        self._linear: PackedLinear

    def __call__(self, hidden_SE: Tensor) -> Tensor | None:
        """[S, E] -> float32 [S, vocab_size] on rank 0 of the axis, None on the others; all of them call it."""
        logits_SV = gather_to_first(self._linear(hidden_SE), self._axis, dim=1)
        return None if logits_SV is None else logits_SV[:, : self._vocab_size].float()

    def sharded_parameters(self) -> Iterator[ShardedParameter]:
        """The rows of this rank; none when they are the embedding's."""
        if not self._is_tied:
            assert self._weight_VE is not None, "weights are gone after finish_loading"
            yield _sharded_rows(self._source, self._weight_VE, self._vocab_size, self._axis.rank, self._axis.size)

    def finish_loading(self) -> None:
        """Hand the weight to the kernels."""
        assert self._weight_VE is not None, "finish_loading is called once"
        self._linear = self._kernels.pack_linear(self._weight_VE, None)
        self._weight_VE = None


def _sharded_rows(source: str, weight_VE: Tensor, vocab_size: int, rank: int, size: int) -> ShardedParameter:
    rows = vocab_range(vocab_size, rank, size)
    full_shape = (vocab_size, weight_VE.shape[1])
    piece = Piece(source=source, full_shape=full_shape, dim=0, start=rows.start, stop=rows.stop)
    return ShardedParameter(tensor=weight_VE, pieces=(piece,))


def _zero_padding(weight_VE: Tensor, vocab_size: int, context: LayerContext) -> None:
    """No checkpoint fills these rows, and what memory happens to hold could be NaN."""
    num_real = len(vocab_range(vocab_size, context.axis.rank, context.axis.size))
    weight_VE[num_real:].zero_()
