"""Rows of logits, and what the choice of tokens must do with them, on any device: a GPU, or an interpreter."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.sampling import ChooseTokens, Draws, choose_in_torch

BORDER = 1e-6
"""A draw may be another token where its noise is so near to the border of two: the reference sums in float32."""
KINDS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 0, 1.0, 0.05),
    (2.0, 50, 0.95, 0.01),
    (1.0, 10**9, 1e-4, 0.0),
    (1e-5, 3, 0.5, 0.0),
    (100.0, 1, 1.0, 0.0),
)
"""temperature, top-k, top-p, min-p"""


@dataclass(frozen=True)
class SamplingCase:
    """Logits of a step and how its rows draw; the rows left out take the largest."""

    name: str
    logits: Tensor
    draws: Draws | None

    def check(self, choose: ChooseTokens, device: torch.device) -> None:
        """Raises AssertionError where a token is not the reference's, or depends on the other rows or their order."""
        before = self.logits.to(device)
        logits = before.clone()
        tokens = choose(logits, self.draws).tolist()
        assert torch.equal(logits.nan_to_num(1e30), before.nan_to_num(1e30)), "logits are left as they are"
        expected = choose_in_torch(self.logits, self.draws).tolist()
        drawn = {} if self.draws is None else {int(row): i for i, row in enumerate(self.draws.rows)}
        for row, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if token != wanted:
                assert row in drawn, (self.name, row, token, wanted)
                self._check_border(row, drawn[row], token, wanted)
        for row in {0, len(tokens) // 2, len(tokens) - 1}:
            alone = one_of(self.draws, drawn[row]) if row in drawn else None
            assert choose(logits[row : row + 1], alone).tolist() == [tokens[row]], (self.name, row)

    def _check_border(self, row: int, index: int, token: int, wanted: int) -> None:
        """Between the two tokens there is hardly any weight, and the noise is where they meet."""
        assert self.draws is not None
        assert min(token, wanted) >= 0, (self.name, row, token, wanted)
        ends = _weights(self.logits[row], self.draws, index).cumsum(0)
        border = float(ends[min(token, wanted)] / ends[-1])
        assert abs(border - float(self.draws.noise[index])) < BORDER, (self.name, row, token, wanted)
        assert float((ends[max(token, wanted) - 1] - ends[min(token, wanted)]) / ends[-1]) < BORDER


def sampling_cases() -> Iterator[SamplingCase]:
    """Random rows, and those at which a choice goes wrong."""
    generator = torch.Generator().manual_seed(0)
    for vocab_size in (3, 300, 2048, 5000):
        logits = torch.randn(9, vocab_size, generator=generator) * 4
        yield SamplingCase(f"greedy {vocab_size}", logits, None)
        yield SamplingCase(f"random {vocab_size}", logits, make_draws(9, list(range(9))))
        yield SamplingCase(f"mixed {vocab_size}", logits, make_draws(9, [1, 2, 5, 8]))
    huge = torch.randn(3, 151_936, generator=generator) * 6
    yield SamplingCase("huge", huge, make_draws(3, [0, 2]))
    view = torch.randn(8, 2, 999, generator=generator)[:, 1]
    yield SamplingCase("rows apart", view, make_draws(8, list(range(8))))
    yield SamplingCase("odd rows", _odd_rows(generator), None)
    rows = _odd_rows(generator).repeat_interleave(len(KINDS), 0)
    yield SamplingCase("odd rows of each kind", rows, make_draws(len(rows), list(range(len(rows)))))


def _odd_rows(generator: torch.Generator) -> Tensor:
    inf = math.inf
    rows = torch.randn(8, 4500, generator=generator)
    rows[0] = 0.0  # all are equal
    rows[0, ::3] = -0.0
    rows[1, 7:4100] = 5.0  # ties of the largest over slices
    rows[2] = -inf
    rows[2, 4321] = -3.0  # one is allowed
    rows[3] = -inf  # none is
    rows[4, 4400] = math.nan
    rows[5, 2] = inf
    rows[6] = -3e38
    rows[6, 3000] = 3e38
    rows[7] = rows[7].round()  # few values, each many times
    return rows


def make_draws(num_rows: int, rows: list[int]) -> Draws:
    """Each row draws by the kind that is next; noise spread over [0, 1), both ends with it."""
    kinds = np.array([KINDS[row % len(KINDS)] for row in rows], np.float64)
    noise = np.random.default_rng(num_rows).random(len(rows))
    noise[0], noise[-1] = 0.0, 1 - 2.0**-53
    temperature, top_k, top_p, min_p = kinds.T
    return Draws(rows=np.array(rows), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, noise=noise)


def one_of(draws: Draws | None, index: int) -> Draws:
    """The draw of this index as that of a step of one row."""
    assert draws is not None
    return Draws(
        rows=np.array([0]),
        **{
            name: getattr(draws, name)[index : index + 1]
            for name in ("temperature", "top_k", "top_p", "min_p", "noise")
        },
    )


def _weights(logits: Tensor, draws: Draws, index: int) -> Tensor:
    """As the definitions say, in float64."""
    temperature, k, p, min_p = (
        float(column[index]) for column in (draws.temperature, draws.top_k, draws.top_p, draws.min_p)
    )
    weights = ((logits - logits.max()) / torch.tensor(temperature, dtype=torch.float32)).double().exp()
    if 0 < k < len(weights):
        weights = weights.where(weights >= weights.sort(descending=True).values[int(k) - 1], 0.0)
    if p < 1:
        values = weights.sort(descending=True).values
        kept = values[values.cumsum(0) - values < p * values.sum()]
        weights = weights.where(weights >= kept[-1], 0.0)
    return weights.where(weights >= min_p, 0.0)
