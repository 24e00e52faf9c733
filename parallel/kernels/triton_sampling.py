"""The choice of tokens in Triton: the largest by two launches; a draw by two more, and one where top-k or top-p limit.

Checked by Triton's interpreter on a CPU; not yet run on a GPU, and not tuned for one. Means what sampling.py means.

The largest logit of a row has distance 0, and any other one (largest - logit) / temperature. Bits of distances are in
the order of the distances, so that a search for the last one kept, by bisection over those bits, is exact; nothing is
sorted. What adds up are integers, weights of exp(-distance) in units of 2**-42: no order of summation, and so no size
of a tile or a batch, can change a token. Against sampling.py, whose sums are floating point, a draw may be another
token where its noise is within 1e-6 of the border of two; weights of less than a unit are never drawn.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.kernels.host_arrays import to_device
from parallel.kernels.sampling import Draws

_SLICE = 2048
"""Logits of a row that one program reads."""
_SEARCH_TILE = 8192
"""Logits that the one program which searches a row has in flight."""
_UNITS = tl.constexpr(2.0**42)
"""Of the largest weight; the sum over 2**21 tokens still fits in an int64."""
_INFINITE = tl.constexpr(0x7F800000)
"""The bits of an infinite distance."""


def choose_in_triton(logits_SV: Tensor, draws: Draws | None) -> Tensor:
    """Implements `ChooseTokens`."""
    logits_SV = logits_SV.float()
    num_rows, vocab_size = logits_SV.shape
    num_slices = triton.cdiv(vocab_size, _SLICE)
    values_SC = logits_SV.new_empty(num_rows, num_slices)
    places_SC = torch.empty_like(values_SC, dtype=torch.int32)
    largest_S = logits_SV.new_empty(num_rows)
    token_ids_S = torch.empty_like(largest_S, dtype=torch.int64)
    stride, slices = logits_SV.stride(0), triton.next_power_of_2(num_slices)
    _find_largest[num_rows, num_slices](logits_SV, values_SC, places_SC, stride, vocab_size, TILE=_SLICE)
    _merge_largest[num_rows,](values_SC, places_SC, largest_S, token_ids_S, num_slices, SLICES=slices)
    if draws is None:
        return token_ids_S
    with np.errstate(divide="ignore"):
        columns = (draws.rows, draws.temperature, -np.log(draws.min_p), draws.top_k, draws.top_p, draws.noise)
    settings = to_device(np.stack(columns).astype(np.float64), logits_SV.device)  # in one piece
    num_draws = len(draws.rows)
    inputs = logits_SV, largest_S, settings
    if bool(((draws.top_k > 0) | (draws.top_p < 1)).any()):
        _limit[num_draws,](*inputs, stride, num_draws, vocab_size, TILE=_SEARCH_TILE, num_warps=16)
    sums_RC = token_ids_S.new_empty(num_draws, num_slices)
    _weigh[num_draws, num_slices](*inputs, sums_RC, stride, num_draws, vocab_size, TILE=_SLICE)
    _draw[num_draws,](
        *inputs, sums_RC, token_ids_S, stride, num_draws, vocab_size, num_slices, TILE=_SLICE, SLICES=slices
    )
    return token_ids_S


@triton.jit
def _find_largest(logits, values, places, stride, vocab_size, TILE: tl.constexpr):
    """The first largest of a slice of a row, +inf for a NaN."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits + row * stride + column, mask=column < vocab_size, other=float("-inf"))
    value, place = tl.max(tl.where(x == x, x, float("inf")), 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(values + out, value)
    tl.store(places + out, tl.program_id(1) * TILE + place)


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
def _setting(settings, index: tl.constexpr, num_draws):
    """One of row, temperature, limit of the distance, top-k, top-p, noise of this program's draw."""
    return tl.load(settings + index * num_draws + tl.program_id(0))


@triton.jit
def _distances(logits, largest, temperature, column, vocab_size):
    """Of these tokens of a row; infinite past the vocabulary."""
    x = tl.load(logits + column, mask=column < vocab_size, other=float("-inf"))
    return tl.abs(tl.div_rn(largest - x, tl.zeros_like(x) + temperature))  # not -0.0, whose bits are out of order


@triton.jit
def _weights(distance, limit):
    """In units, of those up to the limit."""
    return tl.where(distance <= limit, tl.exp(-distance) * _UNITS, 0.0).to(tl.int64)


@triton.jit(do_not_specialize=["num_draws"])
def _limit(logits, largest, settings, stride, num_draws, vocab_size, TILE: tl.constexpr):
    """Lower the limit of a draw to the last distance that top-k and top-p keep."""
    row = _setting(settings, 0, num_draws).to(tl.int64)
    temperature = _setting(settings, 1, num_draws).to(tl.float32)
    limit = _setting(settings, 2, num_draws)
    top_k = _setting(settings, 3, num_draws)
    top_p = _setting(settings, 4, num_draws)
    most = tl.load(largest + row)
    logits += row * stride
    key = tl.full((), _INFINITE, tl.int32)
    if tl.abs(most) < float("inf"):
        if (top_k > 0) & (top_k < vocab_size):
            key = _search(logits, most, temperature, vocab_size, key, top_k, False, TILE)
        if top_p < 1:
            total, _, _ = _reach(logits, most, temperature, vocab_size, key, True, TILE)
            target = tl.maximum(top_p * total.to(tl.float64), 1.0)
            key = _search(logits, most, temperature, vocab_size, key, target, True, TILE)
    kept = key.to(tl.float32, bitcast=True).to(tl.float64)
    tl.store(settings + 2 * num_draws + tl.program_id(0), tl.minimum(limit, kept))


@triton.jit
def _search(logits, most, temperature, vocab_size, high, target, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """The least key such that the tokens up to it reach the target; `high` if none before it does."""
    low = high * 0 - 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached, before, after = _reach(logits, most, temperature, vocab_size, middle, IS_WEIGHT, TILE)
        is_enough = reached.to(tl.float64) >= target
        high = tl.where(is_enough, before, high)  # to keys that there are: the last step comes soon
        low = tl.where(is_enough, low, after - 1)
    return high


@triton.jit
def _reach(logits, most, temperature, vocab_size, key, IS_WEIGHT: tl.constexpr, TILE: tl.constexpr):
    """(number or weight of the tokens up to this key, their last key, the first key after it)."""
    total = tl.zeros((TILE,), tl.int64)
    before = tl.full((TILE,), -1, tl.int32)
    after = tl.full((TILE,), _INFINITE, tl.int32)
    for start in range(0, vocab_size, TILE):
        column = start + tl.arange(0, TILE)
        distance = _distances(logits, most, temperature, column, vocab_size)
        keys = distance.to(tl.int32, bitcast=True)
        is_in = keys <= key
        if IS_WEIGHT:
            total += tl.where(is_in, _weights(distance, float("inf")), 0)
        else:
            total += tl.where(is_in, 1, 0)
        before = tl.maximum(before, tl.where(is_in, keys, -1))
        after = tl.minimum(after, tl.where(is_in, _INFINITE, keys))
    return tl.sum(total, 0), tl.max(before, 0), tl.min(after, 0)


@triton.jit(do_not_specialize=["num_draws"])
def _weigh(logits, largest, settings, sums, stride, num_draws, vocab_size, TILE: tl.constexpr):
    """What a slice of a row weighs."""
    row = _setting(settings, 0, num_draws).to(tl.int64)
    temperature = _setting(settings, 1, num_draws).to(tl.float32)
    limit = _setting(settings, 2, num_draws).to(tl.float32)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    distance = _distances(logits + row * stride, tl.load(largest + row), temperature, column, vocab_size)
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + place, tl.sum(_weights(distance, limit), 0))


@triton.jit(do_not_specialize=["num_draws", "num_slices"])
def _draw(
    logits,
    largest,
    settings,
    sums,
    token_ids,
    stride,
    num_draws,
    vocab_size,
    num_slices,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
):
    """The first token up to which more than noise * total weigh: the slice by its sum, then the token in it."""
    row = _setting(settings, 0, num_draws).to(tl.int64)
    temperature = _setting(settings, 1, num_draws).to(tl.float32)
    limit = _setting(settings, 2, num_draws).to(tl.float32)
    noise = _setting(settings, 5, num_draws)
    most = tl.load(largest + row)
    index = tl.arange(0, SLICES)
    sums += tl.program_id(0).to(tl.int64) * num_slices
    slice_sums = tl.load(sums + index, mask=index < num_slices, other=0)
    total = tl.sum(slice_sums, 0)
    target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((tl.cumsum(slice_sums, 0) <= target).to(tl.int32), 0)
    rest = target - tl.sum(tl.where(index < part, slice_sums, 0), 0)
    column = part * TILE + tl.arange(0, TILE)
    weights = _weights(_distances(logits + row * stride, most, temperature, column, vocab_size), limit)
    token = part * TILE + tl.sum((tl.cumsum(weights, 0) <= rest).to(tl.int32), 0)
    tl.store(token_ids + row, tl.where(tl.abs(most) < float("inf"), token.to(tl.int64), -1))
