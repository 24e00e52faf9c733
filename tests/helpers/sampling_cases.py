"""Rows of logits, and what the choice of tokens must do with them, on any device: a GPU, or an interpreter."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.sampling import (
    NOISE,
    Draws,
    Edits,
    LastTokens,
    NoiseArray,
    TokenChoice,
    choose_in_torch,
    gumbel,
    rank_in_torch,
)

CLOSE = 4e-6
"""Of the largest logit and noise of a row: scores that are as close to each other may be taken for one another."""
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

NOISE_ENDS = ((0, 0), (0, 0xC4D4A8BE))
"""Keys that give token 0 the most noise, and the least."""


@dataclass(frozen=True)
class SamplingCase:
    """Logits of a step and how its rows draw; the rows left out take the largest."""

    name: str
    logits: Tensor
    draws: Draws | None

    def check(self, choice: TokenChoice, device: torch.device) -> None:
        """Raises AssertionError where a token is not the reference's, or depends on the other rows or their order, or
        on which parts of the vocabulary are looked through apart.
        """
        before = self.logits.to(device)
        logits, choose = before.clone(), choice.choose
        tokens = choose(logits, self.draws).tolist()
        assert torch.equal(logits.nan_to_num(1e30), before.nan_to_num(1e30)), "logits are left as they are"
        expected = choose_in_torch(self.logits, self.draws).tolist()
        for row, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
            if token != wanted:
                self._check_close(row, token, wanted)
        for row in {0, len(tokens) // 2, len(tokens) - 1}:
            alone = None if self.draws is None else one_of(self.draws, row)
            assert choose(logits[row : row + 1], alone).tolist() == [tokens[row]], (self.name, row)
        noise = None if self.draws is None else self.draws.noise
        no_limits = None if noise is None else _without_limits(noise)
        assert _find_in_parts(choice, logits, noise) == choose(logits, no_limits).tolist(), self.name
        if self.logits.dtype is torch.float32:
            self._check_ranks(choice, logits)

    def _check_ranks(self, choice: TokenChoice, logits: Tensor) -> None:
        """Of some rows, backwards; each is the same alone."""
        is_a_choice = choose_in_torch(self.logits, None) >= 0
        rows = is_a_choice.nonzero()[:, 0].flip(0)[::2].numpy()
        for number in (0, 1, min(7, logits.shape[1]), logits.shape[1]):
            totals, values, tokens = (ranked.cpu() for ranked in choice.rank(logits, rows, number))
            expected_totals, expected_values, _ = rank_in_torch(self.logits, rows, number)
            torch.testing.assert_close(totals, expected_totals, rtol=2e-6, atol=2e-6)
            assert torch.equal(values, expected_values), self.name
            assert torch.equal(self.logits[torch.from_numpy(rows)].gather(1, tokens), values), self.name
            assert all(len(set(row)) == number for row in tokens.tolist()), self.name
            alone = choice.rank(logits, rows[-1:], number)
            for ours, together in zip(alone, (totals, values, tokens), strict=True):
                assert torch.equal(ours.cpu(), together[-1:]), self.name
        everything = np.arange(len(logits))
        assert len(choice.rank(logits, everything, 3)[0]) == len(logits), "rows without a choice change nothing"

    def _check_close(self, row: int, token: int, wanted: int) -> None:
        """Both are kept, and have nearly the same score."""
        assert self.draws is not None, (self.name, row, token, wanted)
        temperature = float(self.draws.noise["temperature"][row])
        assert temperature > 0, (self.name, row, token, wanted)
        assert min(token, wanted) >= 0, (self.name, row, token, wanted)
        assert _is_kept(self.logits[row], self.draws, row)[[token, wanted]].all(), (self.name, row, token, wanted)
        logits = self.logits[row].double()
        noise = temperature * gumbel(keys_of(self.draws)[row : row + 1], len(logits))[0].double()
        scores = logits + noise
        close = CLOSE * float(logits[[token, wanted]].abs().max() + noise[[token, wanted]].abs().max())
        assert abs(float(scores[token] - scores[wanted])) <= close, (self.name, row, token, wanted)


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
    ends = np.array([(1.0, key) for key in NOISE_ENDS], NOISE)
    only_one = torch.tensor([0.0, -math.inf, -math.inf]).expand(len(ends), -1)
    yield SamplingCase("ends of the noise", only_one, _without_limits(ends))


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
    """Each of these rows draws by the kind that is next; the others do not, whatever limits there are."""
    kinds = np.array([KINDS[row % len(KINDS)] for row in range(num_rows)], np.float64)
    temperature, top_k, top_p, min_p = kinds.T
    noise = np.zeros(num_rows, NOISE)
    noise["temperature"][rows] = temperature[rows]
    noise["key"] = np.random.default_rng(num_rows).integers(2**32, size=(num_rows, 2), dtype=np.uint32)
    return Draws(noise=noise, top_k=top_k, top_p=top_p, min_p=min_p)


def make_edits(num_rows: int, num_tokens: int, scale: float) -> Edits:
    """Of logits of this scale: of every third row none, of the others some, and a few of tokens that there are not."""
    generator = np.random.default_rng(num_rows)
    sizes = np.where(np.arange(num_rows) % 3 == 1, 0, np.minimum(np.arange(num_rows) % 7 * 30 + 1, num_tokens))
    tokens = [generator.choice(num_tokens + 50, size, replace=False) for size in sizes]
    offsets = generator.normal(0, 2 * scale, sizes.sum())
    offsets[::4], offsets[1::9] = np.inf, 0
    return Edits(
        starts=np.concatenate([[0], sizes.cumsum()]),
        token_ids=np.concatenate(tokens).astype(np.int64),
        factors=np.resize([1.0, 1.3, 0.5], num_rows).astype(np.float32),
        offsets=offsets.astype(np.float32),
    )


def check_edits(choice: TokenChoice, device: torch.device) -> None:
    """Raises AssertionError where a logit is not exactly what the edits say; of parts of the vocabulary, too."""
    for num_rows, num_tokens in ((1, 40), (9, 3000), (7, 5)):
        before = torch.randn(num_rows, 2, num_tokens, generator=torch.Generator().manual_seed(num_rows))[:, 1]
        for edits in (make_edits(num_rows, num_tokens, 1.0), _with_last(make_edits(num_rows, num_tokens, 1.0))):
            there = edits if edits.last is None else _moved(edits, edits.last, device)
            logits, size = before.clone().to(device), -(-num_tokens // 3)
            for start in range(0, num_tokens, size):
                choice.edit(logits[:, start : start + size], there, start)
            assert torch.equal(logits.cpu(), _edited_one_by_one(before, edits))
    none = Edits(np.zeros(4, np.int64), np.empty(0, np.int64), np.ones(3, np.float32), np.empty(0, np.float32))
    offsets = np.array([np.nan, 0.5, 0.5], np.float32)
    only_last = none._replace(last=LastTokens(torch.tensor([1, 0, 3]), offsets, np.empty(0, np.float32)))
    assert only_last.last is not None
    logits = torch.zeros(3, 4, device=device)
    choice.edit(logits, _moved(only_last, only_last.last, device), 0)
    assert logits.tolist() == [[0.0] * 4, [-0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, -0.5]]


def _with_last(edits: Edits) -> Edits:
    """Each second row has a last token; one of its own, or another one."""
    num_rows, generator = len(edits.factors), np.random.default_rng(0)
    offsets = np.where(np.arange(num_rows) % 2, np.nan, 0.7).astype(np.float32)
    starts = edits.starts[:-1].clip(max=len(edits.token_ids) - 1)
    last = np.where(np.arange(num_rows) % 4, edits.token_ids[starts], 3)
    again = generator.normal(0, 2, len(edits.token_ids)).astype(np.float32)
    again = np.where(np.isnan(offsets).repeat(np.diff(edits.starts)), edits.offsets, again)
    return edits._replace(last=LastTokens(torch.from_numpy(last), offsets, again))


def _moved(edits: Edits, last: LastTokens, device: torch.device) -> Edits:
    return edits._replace(last=last._replace(token_ids=last.token_ids.to(device)))


def _edited_one_by_one(logits: Tensor, edits: Edits) -> Tensor:
    edited = logits.clone()
    for row, factor in enumerate(edits.factors):
        span = slice(*edits.starts[row : row + 2])
        offsets = dict(zip(edits.token_ids[span].tolist(), edits.offsets[span], strict=True))
        if edits.last is not None and not np.isnan(edits.last.offsets[row]):
            again = dict(zip(offsets, edits.last.offsets_again[span], strict=True))
            token = int(edits.last.token_ids[row])
            offsets[token] = again.get(token, edits.last.offsets[row])
        for token, offset in offsets.items():
            if token < logits.shape[1]:
                x = np.float32(logits[row, token].item())
                edited[row, token] = float((x / factor if x > 0 else x * factor) - offset)
    return edited


def _without_limits(noise: NoiseArray) -> Draws:
    none = np.zeros(len(noise))
    return Draws(noise=noise, top_k=none, top_p=none + 1, min_p=none)


def _find_in_parts(choice: TokenChoice, logits: Tensor, noise: NoiseArray | None) -> list[int]:
    """The first token of the best part, a NaN being the best; -1 where that has none."""
    size = -(-logits.shape[1] // 3)
    found = []
    for start, part in zip(range(0, logits.shape[1], size), logits.split(size, dim=1), strict=True):
        scores, columns = choice.find(part, noise, start)
        found.append([(score, column, start) for score, column in zip(scores.tolist(), columns.tolist(), strict=True)])
    best = (max(row, key=lambda part: math.inf if math.isnan(part[0]) else part[0]) for row in zip(*found, strict=True))
    return [column + start if column >= 0 else -1 for _, column, start in best]


def one_of(draws: Draws, row: int) -> Draws:
    """The draw of this row as that of a step of one."""
    return Draws(
        **{name: getattr(draws, name)[row : row + 1].copy() for name in ("noise", "top_k", "top_p", "min_p")},
    )


def keys_of(draws: Draws) -> Tensor:
    """[S, 2] int32, as `gumbel` takes them."""
    return torch.from_numpy(np.ascontiguousarray(draws.noise["key"]).view(np.int32))


def _is_kept(logits: Tensor, draws: Draws, row: int) -> Tensor:
    """As the definitions say, in float64."""
    k, p, min_p = (float(column[row]) for column in (draws.top_k, draws.top_p, draws.min_p))
    temperature = torch.tensor(float(draws.noise["temperature"][row]), dtype=torch.float32)
    weights = ((logits - logits.max()) / temperature).double().exp()
    if 0 < k < len(weights):
        weights = weights.where(weights >= weights.sort(descending=True).values[int(k) - 1], 0.0)
    if p < 1:
        values = weights.sort(descending=True).values
        kept = values[values.cumsum(0) - values < p * values.sum()]
        weights = weights.where(weights >= kept[-1], 0.0)
    return (weights >= min_p) & (weights > 0)
