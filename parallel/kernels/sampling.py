"""The border between the sampler and the machine: which token a row of logits gives. What it means, in plain torch.

    largest   the first of the largest logits
    draw      logits over temperature; top-k, then top-p, then min-p (truncation.py); the inverse of the cumulative
              distribution of what is left, in vocabulary order, at the row's noise

A row never depends on the others of its step. Shape letters: S rows, V vocabulary, R rows that draw, C chunks.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from parallel.kernels.host_arrays import to_device
from parallel.kernels.truncation import lower_bounds

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_CHUNK = 256
"""Entries of the vocabulary that the draw sums at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """Which rows of a step draw their token, and how; on the host. All arrays are as long as `rows`."""

    rows: Int64Array
    """In ascending order."""
    temperature: Float64Array
    """More than 0."""
    top_k: Float64Array
    """0 or at least V: off."""
    top_p: Float64Array
    """1: off. Of the probability that top-k left."""
    min_p: Float64Array
    """0: off."""
    noise: Float64Array
    """In [0, 1)."""


class ChooseTokens(Protocol):
    """Takes a token from each row of logits; `kernels/select.py` chooses one implementation per process."""

    def __call__(self, logits_SV: Tensor, draws: Draws | None) -> Tensor:
        """[S] int64, on the device: what the rows of `draws` draw, and of the others the first largest.

        -1 where a row has a NaN or +inf, or nothing but -inf. The host does not wait for the device.

        Args:
            logits_SV: [S, V], left as it is; float32 where a row draws.
            draws: None: no row draws.
        """


def choose_in_torch(logits_SV: Tensor, draws: Draws | None) -> Tensor:
    """Implements `ChooseTokens`, on any device."""
    if draws is None:
        return _largest(logits_SV)
    if len(draws.rows) == len(logits_SV):
        return _draw(logits_SV, draws)
    token_ids = _largest(logits_SV)
    index = to_device(draws.rows, logits_SV.device)
    token_ids[index] = _draw(logits_SV[index], draws)
    return token_ids


def largest_outputs(out_TO: Tensor) -> tuple[Tensor, Tensor]:
    """What `SearchedLinear.largest` gives, of outputs that are there."""
    values_T, indices_T = out_TO.max(-1)
    return values_T.float(), indices_T.where(values_T.isfinite(), -1)


def _largest(logits_SV: Tensor) -> Tensor:
    """The first largest of each row; -1 where it is not finite. NaN counts as larger than any number."""
    if logits_SV.device.type != "cpu":
        return largest_outputs(logits_SV)[1]
    logits = logits_SV.float().numpy()  # whose argmax is vectorized, unlike torch's
    token_ids = logits.argmax(-1)
    is_finite = np.isfinite(logits[np.arange(len(logits)), token_ids])
    return torch.from_numpy(np.where(is_finite, token_ids, -1))


def _draw(logits_RV: Tensor, draws: Draws) -> Tensor:
    device = logits_RV.device
    largest_R1 = logits_RV.amax(-1, keepdim=True)
    temperature_R1 = to_device(draws.temperature.astype(np.float32), device)[:, None]
    scaled_RV = (logits_RV - largest_R1).div_(temperature_R1)
    truncated = np.flatnonzero((draws.top_k > 0) | (draws.top_p < 1) | (draws.min_p > 0))
    if len(truncated):
        limits = (values[truncated] for values in (draws.top_k, draws.top_p, draws.min_p))
        bounds = lower_bounds(scaled_RV, truncated, *limits)
        scaled_RV.masked_fill_(scaled_RV < bounds[:, None], -torch.inf)
    token_ids = _invert_cumulative(scaled_RV.exp_(), to_device(draws.noise, device))
    return token_ids.where(largest_R1[:, 0].isfinite(), -1)


def _invert_cumulative(weights_RV: Tensor, noise_R: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds noise * total: by chunks, then within one. Never weight 0.

    -1 where the total is not finite, of which no token is a part.
    """
    num_rows, vocab_size = weights_RV.shape
    chunks_RCV = pad(weights_RV, (0, -vocab_size % _CHUNK)).view(num_rows, -1, _CHUNK)
    chunk_ends_RC = chunks_RCV.sum(-1).double().cumsum_(-1)
    target_R1 = _below(noise_R[:, None] * chunk_ends_RC[:, -1:], chunk_ends_RC)
    chunk_R1 = torch.searchsorted(chunk_ends_RC, target_R1, right=True).clamp_(max=chunk_ends_RC.shape[1] - 1)
    chunk_starts_RC = pad(chunk_ends_RC, (1, 0))
    rows_R = torch.arange(num_rows, device=weights_RV.device)
    ends_RV = chunks_RCV[rows_R, chunk_R1[:, 0]].double().cumsum_(-1)
    rest_R1 = _below(target_R1 - chunk_starts_RC.gather(1, chunk_R1), ends_RV)
    offset_R1 = torch.searchsorted(ends_RV, rest_R1, right=True).clamp_(max=_CHUNK - 1)
    return (chunk_R1 * _CHUNK + offset_R1)[:, 0].where(chunk_ends_RC[:, -1].isfinite(), -1)


def _below(target_R1: Tensor, ends_RN: Tensor) -> Tensor:
    """The target where rounding may have brought it out of [0, last end)."""
    last_R1 = ends_RN[:, -1:]
    return torch.minimum(target_R1, torch.nextafter(last_R1, torch.zeros_like(last_R1))).clamp_(min=0)
