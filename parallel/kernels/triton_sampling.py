"""The choice of tokens in Triton: two launches where tokens are drawn or not, five more where rows keep some of them.

Not tuned. Means what sampling.py means.

The largest logit of a row has distance 0, and any other one (largest - logit) / temperature: top-k, top-p and min-p say
up to which distance tokens are kept. Bits of distances are in the order of the distances, so that a search for the last
one kept, by bisection over those bits, is exact; nothing is sorted. What adds up are integers, weights of
exp(-distance) in units of 2**-42: no order of summation, and so no size of a tile or a batch, can change a token.

One program searches a row, and reads it some fifty times. So all programs first gather what may be kept, which is
little where a model is not undecided: of top-k the tokens that are as large as the k-th of the largest of each run of
128, since k are at least that large; of top-p those of distance up to log(V / (1 - p)), since the others, of weights
below (1 - p) / V, weigh less than 1 - p of the largest alone. Where that is too much, it reads all.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.kernels.host_arrays import Int32Array, to_device
from parallel.kernels.sampling import Draws, Edits, NoiseArray

_SLICE = 2048
"""Logits of a row that one program reads."""
_RUN = 128
"""Length of a run of logits, of each of which the largest is noted."""
_SEARCH_TILE = 8192
"""Logits that the one program which searches a row has in flight."""
_MOST_GATHERED = 8192
"""Most tokens of a row that are gathered to search its limits."""
_EDIT_TILE = 1024
"""Edits of a row that its program has in flight."""
_UNITS = tl.constexpr(2.0**42)
"""Units of the largest weight; the sum over 2**21 tokens still fits in an int64."""
_INFINITE = tl.constexpr(0x7F800000)
"""The bits of an infinite distance."""


def choose_in_triton(logits_SV: Tensor, draws: Draws | None) -> Tensor:
    """Implements `ChooseTokens`."""
    if draws is None:
        return _find(logits_SV, None, None, 0)[1]
    is_ranked = bool(((draws.top_k > 0) | (draws.top_p < 1)).any())
    settings = _settings(draws.noise, logits_SV.device, draws)
    largest_S = None
    if is_ranked:
        num_rows, vocab_size = logits_SV.shape
        num_runs = triton.cdiv(vocab_size, _SLICE) * (_SLICE // _RUN)
        runs_SR = logits_SV.new_empty(num_rows, num_runs, dtype=torch.float32)
        largest_S, _ = _find(logits_SV, None, None, 0, runs_SR)
        _find_limits(logits_SV, largest_S, runs_SR, settings)
    elif (draws.min_p > 0).any():
        largest_S, _ = _find(logits_SV, None, None, 0)
    return _find(logits_SV, settings, largest_S, 0)[1]


def _find_limits(logits_SV: Tensor, largest_S: Tensor, runs_SR: Tensor, settings: Tensor) -> None:
    """Lower the limits in the settings to what top-k and top-p keep."""
    num_rows, vocab_size = logits_SV.shape
    state = torch.empty(3, num_rows, dtype=torch.int64, device=logits_SV.device)
    gathered = logits_SV.new_empty(num_rows, _MOST_GATHERED, dtype=torch.float32)
    of_rows, sizes = (largest_S, settings, state), (num_rows, vocab_size)
    _cut[num_rows,](runs_SR, *of_rows, *sizes, runs_SR.shape[1], TILE=_SLICE)
    row = logits_SV, logits_SV.stride(0), gathered
    slices = num_rows, triton.cdiv(vocab_size, _SLICE)
    _gather[slices](*row, *of_rows, *sizes, TILE=_SLICE, MOST=_MOST_GATHERED)
    _limit[num_rows,](*row, *of_rows, *sizes, TILE=_SEARCH_TILE, MOST=_MOST_GATHERED, num_warps=16)


def find_in_triton(logits_SV: Tensor, noise: NoiseArray | None, first_token: int) -> tuple[Tensor, Tensor]:
    """Implements `FindTokens`."""
    settings = None if noise is None else _settings(noise, logits_SV.device, None)
    return _find(logits_SV, settings, None, first_token)


def edit_in_triton(logits_SV: Tensor, edits: Edits, first_token: int) -> None:
    """Implements `EditLogits`."""
    num_rows, num_columns = logits_SV.shape
    packed = to_device(_pack(edits), logits_SV.device)
    last_tokens = packed[:2].view(torch.int64) if edits.last is None else edits.last.token_ids
    sizes = num_rows, len(edits.token_ids), num_columns
    row = logits_SV, packed, last_tokens, logits_SV.stride(0)
    _edit[num_rows,](*row, *sizes, first_token, TILE=_EDIT_TILE, enable_fp_fusion=False)  # to the bit as in torch


def _pack(edits: Edits) -> Int32Array:
    """All of the host's in one piece: [3, S + 1], starts, factors and offsets of the last tokens; [3, N], ids, offsets
    and those of tokens that are a last one. Of float32 the bits.
    """
    num_rows, num_edits = len(edits.factors), len(edits.token_ids)
    none = np.full(num_rows, np.nan, np.float32)
    last_offsets, offsets_again = (none, edits.offsets) if edits.last is None else edits.last[1:]
    packed = np.empty(3 * (num_rows + 1 + num_edits), np.int32)
    by_row, by_token = packed[: 3 * (num_rows + 1)].reshape(3, -1), packed[3 * (num_rows + 1) :].reshape(3, -1)
    by_row[0], by_token[0] = edits.starts, edits.token_ids
    by_row[1:, :-1] = edits.factors.view(np.int32), last_offsets.view(np.int32)
    by_token[1:] = edits.offsets.view(np.int32), offsets_again.view(np.int32)
    return packed


def _find(
    logits_SV: Tensor,
    settings: Tensor | None,
    largest_S: Tensor | None,
    first_token: int,
    runs_SR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `FindTokens`; with the largest logits of the rows, of what the settings' limits leave. Where there are no
    settings, the largest of each run can be noted.
    """
    num_rows, vocab_size = logits_SV.shape
    num_slices = triton.cdiv(vocab_size, _SLICE)
    values_SC = logits_SV.new_empty(num_rows, num_slices, dtype=torch.float32)
    places_SC = torch.empty_like(values_SC, dtype=torch.int32)
    scores_S = logits_SV.new_empty(num_rows, dtype=torch.float32)
    token_ids_S = torch.empty_like(scores_S, dtype=torch.int64)
    _find_largest[num_rows, num_slices](
        *(logits_SV, scores_S if largest_S is None else largest_S, scores_S if settings is None else settings),
        *(values_SC, places_SC, values_SC if runs_SR is None else runs_SR),
        *(logits_SV.stride(0), num_rows, vocab_size, first_token),
        TILE=_SLICE,
        RUN=0 if runs_SR is None else _RUN,
        IS_DRAWN=settings is not None,
        IS_LIMITED=largest_S is not None,
    )
    slices = triton.next_power_of_2(num_slices)
    _merge_largest[num_rows,](values_SC, places_SC, scores_S, token_ids_S, num_slices, SLICES=slices)
    return scores_S, token_ids_S


def _settings(noise: NoiseArray, device: torch.device, limits: Draws | None) -> Tensor:
    """[6, S] float64, in one piece: what `_setting` takes one of."""
    columns = np.zeros((6, len(noise)))
    columns[0], columns[4:] = noise["temperature"], noise["key"].T
    if limits is not None:
        with np.errstate(divide="ignore"):
            columns[1:4] = -np.log(limits.min_p), limits.top_k, limits.top_p
    return to_device(columns, device)


@triton.jit(do_not_specialize=["num_rows", "first_token"])
def _find_largest(
    logits,
    largest,
    settings,
    values,
    places,
    runs,
    stride,
    num_rows,
    vocab_size,
    first_token,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
    IS_DRAWN: tl.constexpr,
    IS_LIMITED: tl.constexpr,
):
    """The first largest of a slice of a row, of what a draw keeps and with what it adds; +inf for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
    if RUN > 0:
        run = (row * tl.num_programs(1) + tl.program_id(1)) * (TILE // RUN) + tl.arange(0, TILE // RUN)
        tl.store(runs + run, tl.max(tl.reshape(x, (TILE // RUN, RUN)), 1))
    if IS_DRAWN:
        temperature = _setting(settings, 0, num_rows).to(tl.float32)
        if temperature > 0:
            score = x + temperature * _noise(settings, first_token + column, num_rows)
            if IS_LIMITED:
                most = tl.load(largest + row)
                limit = tl.where(tl.abs(most) < float("inf"), _setting(settings, 1, num_rows).to(tl.float32), -1.0)
                score = tl.where(_distance(x, most, temperature) <= limit, score, float("-inf"))
            x = score
    value, place = tl.max(tl.where(x == x, x, float("inf")), 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + out, value)
    tl.store(places + out, tl.program_id(1) * TILE + place)


@triton.jit(do_not_specialize=["num_rows", "num_edits", "num_columns", "first_token"])
def _edit(
    logits,
    packed,
    last_tokens,
    stride,
    num_rows,
    num_edits,
    num_columns,
    first_token,
    TILE: tl.constexpr,
):
    """The edits of a row, each of another logit."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    by_row, tokens = packed + row, packed + 3 * (num_rows + 1)
    factor = tl.load(by_row + num_rows + 1).to(tl.float32, bitcast=True)
    last_offset = tl.load(by_row + 2 * (num_rows + 1)).to(tl.float32, bitcast=True)
    last = tl.load(last_tokens + row, mask=last_offset == last_offset, other=-1)
    is_among = tl.zeros((TILE,), tl.int32)
    end = tl.load(by_row + 1)
    for start in range(tl.load(by_row), end, TILE):
        place = start + tl.arange(0, TILE)
        token = tl.load(tokens + place, mask=place < end, other=-1)
        is_last = (token == last) & (place < end)
        offset = tl.load(tokens + num_edits * tl.where(is_last, 2, 1) + place, mask=place < end, other=0)
        is_among = tl.where(is_last, 1, is_among)
        _edit_some(logits, token - first_token, place < end, num_columns, factor, offset.to(tl.float32, bitcast=True))
    is_new = (last >= 0) & (tl.max(is_among, 0) == 0)
    _edit_some(logits, last - first_token, is_new, num_columns, factor, last_offset)


@triton.jit
def _edit_some(logits, columns, is_edited, num_columns, factor, offsets):
    is_here = is_edited & (columns >= 0) & (columns < num_columns)
    x = tl.load(logits + columns, mask=is_here, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + factor), x * factor)
    tl.store(logits + columns, x - offsets, mask=is_here)


@triton.jit(do_not_specialize=["num_slices"])
def _merge_largest(values, places, largest, token_ids, num_slices, SLICES: tl.constexpr):
    """The first largest of a row, and -1 in place of the token where it is not finite."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SLICES)
    x = tl.load(values + row * num_slices + part, mask=part < num_slices, other=float("-inf"))
    value, first = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(places + row * num_slices + first).to(tl.int64)
    tl.store(largest + row, value)
    tl.store(token_ids + row, tl.where(tl.abs(value) < float("inf"), token, -1))


@triton.jit
def _setting(settings, index: tl.constexpr, num_rows):
    """One of temperature, limit of the distance, top-k, top-p, and two halves of a key, of this program's row."""
    return tl.load(settings + index * num_rows + tl.program_id(0))


@triton.jit
def _noise(settings, token, num_rows):
    """Return the noise of these tokens of this program's row: `gumbel` of sampling.py."""
    first = _setting(settings, 4, num_rows).to(tl.int64).to(tl.uint32)
    second = _setting(settings, 5, num_rows).to(tl.int64).to(tl.uint32)
    bits = _mix(_mix(token.to(tl.uint32) * 0x9E3779B1 + first) ^ second)
    u = (bits >> 1).to(tl.float32) * 2.0**-31 + 2.0**-32
    u = tl.minimum(u, 1 - 2.0**-24)
    ratio = tl.minimum(u, 0.25) / (2 - tl.minimum(u, 0.25))
    square = ratio * ratio
    small = 2 * ratio * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9))))
    return -tl.log(tl.where(u < 0.25, small, -tl.log(1 - u)))  # small: of -log(1 - u), which is coarse there


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _distance(x, largest, temperature):
    """Return how far below the largest a logit is; never -0.0, whose bits are out of order."""
    return tl.abs(tl.div_rn(largest - x, tl.zeros_like(x) + temperature))


@triton.jit(do_not_specialize=["num_rows", "num_runs"])
def _cut(runs, largest, settings, state, num_rows, vocab_size, num_runs, TILE: tl.constexpr):
    """Up to which distance a row's tokens are gathered, the bits of that, -1 where nothing is to be searched; of how
    many tokens, and the weight of all, nothing yet.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = _setting(settings, 0, num_rows).to(tl.float32)
    top_k = _setting(settings, 2, num_rows)
    top_p = _setting(settings, 3, num_rows)
    most = tl.load(largest + row)
    key = tl.full((), -1, tl.int32)
    if (temperature > 0) & (tl.abs(most) < float("inf")):
        if _is_limit(top_k, vocab_size):
            key = tl.full((), _INFINITE, tl.int32)
            key = _search(runs + row * num_runs, most, temperature, num_runs, key, top_k, False, TILE)
        elif top_p < 1:
            cut = tl.log((vocab_size / (1 - top_p)).to(tl.float32)) + 1e-3  # and what weights are rounded by
            key = cut.to(tl.int32, bitcast=True)
    tl.store(state + row, key.to(tl.int64))
    tl.store(state + num_rows + row, tl.zeros((), tl.int64))
    tl.store(state + 2 * num_rows + row, tl.zeros((), tl.int64))


@triton.jit(do_not_specialize=["num_rows"])
def _gather(
    logits,
    stride,
    gathered,
    largest,
    settings,
    state,
    num_rows,
    vocab_size,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Put what is within the cut among what is gathered of the row, as far as there is room, in any order; add up how
    many they are and, where top-k does not limit the row, the weight of all tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(state + row)
    if cut >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + column, mask=column < vocab_size, other=float("-inf")).to(tl.float32)
        distance = _distance(x, tl.load(largest + row), _setting(settings, 0, num_rows).to(tl.float32))
        is_in = (column < vocab_size) & (distance.to(tl.int32, bitcast=True) <= cut)
        number = is_in.to(tl.int32)
        total = tl.sum(number, 0)
        if total > 0:
            start = tl.atomic_add(state + num_rows + row, total.to(tl.int64))
            place = start + tl.cumsum(number, 0) - 1
            tl.store(gathered + row * MOST + place, x, mask=is_in & (place < MOST))
        if not _is_limit(_setting(settings, 2, num_rows), vocab_size):
            weight = tl.sum((tl.exp(-distance) * _UNITS).to(tl.int64), 0)
            tl.atomic_add(state + 2 * num_rows + row, weight)


@triton.jit(do_not_specialize=["num_rows"])
def _limit(
    logits,
    stride,
    gathered,
    largest,
    settings,
    state,
    num_rows,
    vocab_size,
    TILE: tl.constexpr,
    MOST: tl.constexpr,
):
    """Lower the limit of a row that draws to the last distance that top-k and top-p keep."""
    row = tl.program_id(0).to(tl.int64)
    cut = tl.load(state + row)
    number = tl.load(state + num_rows + row)
    if cut >= 0:
        key = tl.full((), _INFINITE, tl.int32)
        if number <= MOST:
            size = number.to(tl.int32)
            key = _last_kept(gathered + row * MOST, size, largest, settings, state, num_rows, vocab_size, TILE)
        else:
            key = _last_kept(logits + row * stride, vocab_size, largest, settings, state, num_rows, vocab_size, TILE)
        kept = key.to(tl.float32, bitcast=True).to(tl.float64)
        tl.store(settings + num_rows + row, tl.minimum(_setting(settings, 1, num_rows), kept))


@triton.jit
def _last_kept(values, size, largest, settings, state, num_rows, vocab_size, TILE: tl.constexpr):
    """The last key that top-k and then top-p keep of this program's row; these values are all that they may keep."""
    row = tl.program_id(0)
    temperature = _setting(settings, 0, num_rows).to(tl.float32)
    top_k = _setting(settings, 2, num_rows)
    top_p = _setting(settings, 3, num_rows)
    most = tl.load(largest + row)
    total = tl.load(state + 2 * num_rows + row)
    key = tl.full((), _INFINITE, tl.int32)
    if _is_limit(top_k, vocab_size):
        key = _search(values, most, temperature, size, key, top_k, False, TILE)
        total, _, _ = _reach(values, most, temperature, size, key, True, TILE)
    if top_p < 1:
        target = tl.maximum(top_p * total.to(tl.float64), 1.0)
        key = _search(values, most, temperature, size, key, target, True, TILE)
    return key


@triton.jit
def _is_limit(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _search(values, most, temperature, size, high, target, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """The least key such that the tokens up to it reach the target; `high` if none before it does."""
    low = high * 0 - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached, before, after = _reach(values, most, temperature, size, middle, IS_WEIGHT, TILE)
        is_enough = reached.to(tl.float64) >= target
        high = tl.where(is_enough, before, high)  # to keys that there are: the last step comes soon
        low = tl.where(is_enough, low, after - 1)
    return high


@triton.jit
def _reach(values, most, temperature, size, key, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """(number or weight of the tokens up to this key, their last key, the first key after it)."""
    total = tl.zeros((TILE,), tl.int64)
    before = tl.full((TILE,), -1, tl.int32)
    after = tl.full((TILE,), _INFINITE, tl.int32)
    for start in range(0, size, TILE):
        place = start + tl.arange(0, TILE)
        x = tl.load(values + place, mask=place < size, other=float("-inf")).to(tl.float32)
        distance = _distance(x, most, temperature)
        keys = distance.to(tl.int32, bitcast=True)
        is_in = keys <= key
        if IS_WEIGHT:
            total += tl.where(is_in, tl.exp(-distance) * _UNITS, 0.0).to(tl.int64)
        else:
            total += tl.where(is_in, 1, 0)
        before = tl.maximum(before, tl.where(is_in, keys, -1))
        after = tl.minimum(after, tl.where(is_in, _INFINITE, keys))
    return tl.sum(total, 0), tl.max(before, 0), tl.min(after, 0)
