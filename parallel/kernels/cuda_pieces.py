"""Attention in steps that are recorded in pieces: a piece ends before it, and the next one begins after it.

    recorded   norm ... cache write, queries kept |           | product, norm ... queries kept |
    called                                        | attention |                                | attention ...

What attends is called in each step with the step's own metas, so that it may plan on the host, and no length is fixed
but the number of rows. It is given the rows of the step only; what is past them in its result is of an earlier step,
which nobody looks at: nothing else in a layer mixes rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache

Attend = Callable[[Tensor, LayerCache, AttentionMeta, AttentionParams], Tensor]
"""Does what `Kernels.attention` does."""
Cut = Callable[[Callable[[], None]], None]
"""Ends a piece and begins the next one; what it is given is called between the two, in each replay."""


def call_at_once(between: Callable[[], None]) -> None:
    """A `Cut` where nothing is recorded."""
    between()


class CutAttention:
    """`attend`, except while layers are recorded in pieces. One for the kernels of a process; one thread."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._cut: Cut | None = None
        self._step_metas: Callable[[], Sequence[AttentionMeta]] = tuple
        self._num_attended = 0
        """Layers whose attention came by since the recording began."""
        self._kept: dict[tuple[torch.Size, torch.dtype], tuple[Tensor, Tensor]] = {}
        """Queries and results of the attention under way: all layers and all recordings share them."""

    def __call__(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        """See `Kernels.attention`. While layers are recorded, what it returns is filled in between pieces."""
        if self._cut is None:
            return self._attend(q_TNH, cache, meta, params)
        kept_TNH, out_TNH = self._places(q_TNH)
        kept_TNH.copy_(q_TNH)
        step_metas, layer = self._step_metas, self._num_attended
        self._num_attended += 1

        def between() -> None:
            meta = step_metas()[layer]
            num_tokens = len(meta.slot_mapping)
            out_TNH[:num_tokens].copy_(self._attend(kept_TNH[:num_tokens], cache, meta, params))

        self._cut(between)
        return out_TNH

    @contextmanager
    def cutting(self, cut: Cut, step_metas: Callable[[], Sequence[AttentionMeta]]) -> Iterator[None]:
        """Make calls (one for each layer, in order) cuts until it is closed; `step_metas`: of the step replayed."""
        self._cut, self._step_metas, self._num_attended = cut, step_metas, 0
        try:
            yield
        finally:
            self._cut, self._step_metas = None, tuple

    def _places(self, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for as many queries, and for their results. It is made in the run before a recording, outside
        of its memory.
        """
        kind, num_rows = (q_TNH.shape[1:], q_TNH.dtype), len(q_TNH)
        if kind not in self._kept or len(self._kept[kind][0]) < num_rows:
            self._kept[kind] = q_TNH.new_zeros(q_TNH.shape), q_TNH.new_zeros(q_TNH.shape)
        kept_TNH, out_TNH = self._kept[kind]
        return kept_TNH[:num_rows], out_TNH[:num_rows]
