"""Top-k, top-p and min-p as one lower bound on a row's logits.

What ties with the last token kept stays too, so that the kept set is a function of the probabilities and not of a
sort's order. On the host rows are handled one by one, with numpy's vectorized partition and sort; on a device together.
"""

import math

import numpy as np
import torch
from torch import Tensor

from parallel.kernels.host_arrays import Float32Array, Float64Array, Int64Array, to_device


def lower_bounds(
    scaled_RV: Tensor, rows: Int64Array, top_k: Float64Array, top_p: Float64Array, min_p: Float64Array
) -> Tensor:
    """Return the smallest logit that each row keeps, [R]; -inf for the rows not in `rows`.

    Args:
        scaled_RV: [R, V] float32, logits over temperature, less the row's largest: the largest is 0.
        rows: the rows to truncate; the next three say how, one entry for each of them.
        top_k: 0 or at least V: off.
        top_p: 1: off. Of the probability that top-k left.
        min_p: 0: off.
    """
    vocab_size, device = scaled_RV.shape[1], scaled_RV.device
    top_k = np.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size)
    bounds_R = scaled_RV.new_full((len(scaled_RV),), -torch.inf)
    bounds = np.log(min_p, out=np.full_like(min_p, -math.inf), where=min_p > 0).astype(np.float32)
    is_ranked = (top_k < vocab_size) | (top_p < 1)
    ranked = np.flatnonzero(is_ranked)
    bounds_R[to_device(rows, device)] = to_device(bounds, device)
    if len(ranked) == 0:
        return bounds_R
    index = to_device(rows[ranked], device)
    rank = host_bounds if device.type == "cpu" else device_bounds
    bounds_R[index] = torch.maximum(bounds_R[index], rank(scaled_RV[index], top_k[ranked], top_p[ranked]))
    return bounds_R


def host_bounds(scaled_RV: Tensor, top_k: Float64Array, top_p: Float64Array) -> Tensor:
    """Return the bounds by top-k, then top-p, for logits on the host."""
    pairs = zip(scaled_RV.numpy(), top_k.astype(np.int64).tolist(), top_p.tolist(), strict=True)
    return torch.tensor([_host_bound(scaled_V, k, p) for scaled_V, k, p in pairs], dtype=torch.float32)


def _host_bound(scaled_V: Float32Array, k: int, p: float) -> float:
    vocab_size = len(scaled_V)
    if k < vocab_size:
        kth = np.partition(scaled_V, vocab_size - k)[vocab_size - k]
        kept = scaled_V[scaled_V >= kth]
        if p >= 1:
            return float(kth)
    else:
        # Tokens below (1 - p) / V of the largest have together less than 1 - p: top-p never reaches them.
        kept = scaled_V[scaled_V >= np.float32(math.log((1 - p) / vocab_size) - 1e-3)]
    if not len(kept):  # a row of NaN, reported elsewhere
        return -math.inf
    descending = np.sort(kept)[::-1]
    weights = np.exp(descending, dtype=np.float64)
    total = weights.sum() if k < vocab_size else np.exp(scaled_V).sum(dtype=np.float64)
    num_kept = int(np.count_nonzero(np.cumsum(weights) - weights < p * total))
    return float(descending[max(num_kept, 1) - 1])


def device_bounds(scaled_RV: Tensor, top_k: Float64Array, top_p: Float64Array) -> Tensor:
    """Return the same, for all rows at once by a sort, for logits anywhere."""
    k_R1 = to_device(top_k.astype(np.int64), scaled_RV.device)[:, None]
    p_R1 = to_device(top_p, scaled_RV.device)[:, None]
    descending_RV = scaled_RV.sort(dim=-1, descending=True).values
    kth_R1 = descending_RV.gather(1, k_R1 - 1)
    weights_RV = descending_RV.double().exp_().masked_fill_(descending_RV < kth_R1, 0)
    ends_RV = weights_RV.cumsum(-1)
    is_kept_RV = ends_RV - weights_RV < p_R1 * ends_RV[:, -1:]
    last_R1 = (is_kept_RV.sum(-1, keepdim=True) - 1).clamp_(min=0)
    return torch.where(p_R1 < 1, descending_RV.gather(1, last_R1), kth_R1)[:, 0]
