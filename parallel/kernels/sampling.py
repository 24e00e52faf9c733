"""The border between the sampler and the machine: which token a row of logits gives. What it means, in plain torch.

    largest   the first of the largest logits
    draw      of the tokens that top-k, then top-p, then min-p leave (truncation.py), the first for which
              logit + temperature * noise is largest

Noise is -log(-log(u)), with a u in (0, 1) of the row's key and the token: each token is then the largest with the
probability that the softmax of logits / temperature gives it (Gumbel's trick; Maddison et al., arXiv:1411.0030, section
2). Nothing is added up over the vocabulary, so that parts of it can be looked through apart, in any order.

A row never depends on the others of its step. Shape letters: S rows, V vocabulary, R rows that draw.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from parallel.kernels.host_arrays import Float32Array, Float64Array, Int64Array, to_device
from parallel.kernels.truncation import lower_bounds

NOISE = np.dtype([("temperature", np.float32), ("key", np.uint32, 2)])
"""What a row's noise is made of. Temperature: 0 where the row takes the largest logit, else 1e-5 to 1e36."""
NoiseArray = npt.NDArray[np.void]
"""[S] of NOISE."""

_GAMMA, _FIRST, _SECOND = (number - 2**32 for number in (0x9E3779B1, 0x21F0AAAD + 2**32, 0xD35A2D97))
"""Factors of `gumbel`, as int32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """How the rows of a step draw their tokens; on the host. What limits a row means something only where it draws."""

    noise: NoiseArray
    top_k: Float64Array
    """[S]: how many of the largest logits each row keeps; 0 or at least V: all."""
    top_p: Float64Array
    """[S]: how much of the probability that top-k left each row keeps; 1: all."""
    min_p: Float64Array
    """[S]: the least probability that a row keeps, as a part of its largest; 0: any."""


class LastTokens(NamedTuple):
    """The last token of some rows, which has been chosen, but only the device knows which one it is."""

    token_ids: Tensor
    """[S] int64, on the device; anything where a row has none."""
    offsets: Float32Array
    """[S]: its offset, where it is none of the tokens that the row edits already; NaN: the row has no such token."""
    offsets_again: Float32Array
    """[N]: the offset of each edited token if it is the last one; as it is where the row has no such token."""


class Edits(NamedTuple):
    """What is done to some logits of the rows of a step before tokens are chosen; on the host.

    A logit x becomes x / factor where it is above 0, else x * factor, each less its offset.
    """

    starts: Int64Array
    """[S + 1]: where each row's tokens begin in the arrays below; and where those of the last row end."""
    token_ids: Int64Array
    """[N]: the tokens whose logits are edited, each once in a row; those past the vocabulary mean nothing."""
    factors: Float32Array
    """[S]: the factor of each row, above 0."""
    offsets: Float32Array
    """[N]: what each logit loses; infinite: the token is forbidden."""
    last: LastTokens | None = None
    """The last token of some rows, which is edited too."""


class ChooseTokens(Protocol):
    """Takes a token from each row of logits."""

    def __call__(self, logits_SV: Tensor, draws: Draws | None) -> Tensor:
        """[S] int64, on the device: what the rows draw, and of those that do not the first largest.

        -1 where a row has a NaN or +inf, or nothing but -inf. The host does not wait for the device.

        Args:
            logits_SV: [S, V], left as it is; float32 where a row draws.
            draws: None: no row draws.
        """


class FindTokens(Protocol):
    """Takes a token from each row of a part of the vocabulary, without top-k, top-p and min-p."""

    def __call__(self, logits_SV: Tensor, noise: NoiseArray | None, first_token: int) -> tuple[Tensor, Tensor]:
        """Return the largest sum of logit and noise of each row, [S] float32, NaN where there is one; and its first
        column, [S] int64, -1 where it is not finite. The host does not wait for the device.

        Args:
            logits_SV: [S, columns], left as it is.
            noise: None: nothing is added.
            first_token: which the first column is of.
        """


class RankTokens(Protocol):
    """Tells which tokens are most probable."""

    def __call__(self, logits_SV: Tensor, rows: Int64Array, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return for these rows the logarithm of the sum of all e^logit, [R] float32; the largest logits from the
        largest down, [R, number] float32; and their tokens, [R, number] int64. The host does not wait for the device.

        Where `ChooseTokens` gives -1 these are anything.

        Args:
            logits_SV: [S, V] float32, left as it is.
            rows: [R], those asked for.
            number: 0 to V.
        """


class EditLogits(Protocol):
    """Changes logits before tokens are chosen."""

    def __call__(self, logits_SV: Tensor, edits: Edits, first_token: int) -> None:
        """Do so in place. The host does not wait for the device.

        Args:
            logits_SV: [S, columns] float32.
            first_token: which the first column is of.
        """


class TokenChoice(NamedTuple):
    """What `kernels/select.py` chooses once per process."""

    choose: ChooseTokens
    find: FindTokens
    rank: RankTokens
    edit: EditLogits


def choose_in_torch(logits_SV: Tensor, draws: Draws | None) -> Tensor:
    """Implements `ChooseTokens`, on any device."""
    if draws is None:
        return _largest(logits_SV)
    rows = np.flatnonzero(draws.noise["temperature"])
    if len(rows) == len(logits_SV):
        return _draw(logits_SV, draws, rows)
    token_ids = _largest(logits_SV)
    index = to_device(rows, logits_SV.device)
    token_ids[index] = _draw(logits_SV[index], draws, rows)
    return token_ids


def find_in_torch(logits_SV: Tensor, noise: NoiseArray | None, first_token: int) -> tuple[Tensor, Tensor]:
    """Implements `FindTokens`, on any device."""
    return largest_outputs(logits_SV if noise is None else _scores(logits_SV, noise, first_token))


def rank_in_torch(logits_SV: Tensor, rows: Int64Array, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Implements `RankTokens`, on any device."""
    logits_RV = logits_SV[to_device(rows, logits_SV.device)]
    # in the order in which CUDA adds up, which the number of rows decides, a float32 would be another
    sums_RV = logits_RV.double() if logits_RV.is_cuda else logits_RV
    return sums_RV.logsumexp(-1).to(logits_RV.dtype), *logits_RV.topk(number, dim=-1)


def edit_in_torch(logits_SV: Tensor, edits: Edits, first_token: int) -> None:
    """Implements `EditLogits`, on any device."""
    rows, columns = np.repeat(np.arange(len(logits_SV)), np.diff(edits.starts)), edits.token_ids - first_token
    is_here = (columns >= 0) & (columns < logits_SV.shape[1])
    rows_N, columns_N, factors_N, offsets_N = (
        to_device(each[is_here], logits_SV.device) for each in (rows, columns, edits.factors[rows], edits.offsets)
    )
    x_N = logits_SV[rows_N, columns_N]
    if edits.last is not None:
        again_N = to_device(edits.last.offsets_again[is_here], logits_SV.device)
        last_N = edits.last.token_ids[rows_N] - first_token
        offsets_N = torch.where(columns_N == last_N, again_N, offsets_N)
        _edit_last(logits_SV, edits, edits.last, first_token)  # written first: the row's own may include it
    logits_SV[rows_N, columns_N] = _edited(x_N, factors_N, offsets_N)


def _edit_last(logits_SV: Tensor, edits: Edits, last: LastTokens, first_token: int) -> None:
    rows = np.flatnonzero(~np.isnan(last.offsets))
    rows_R, factors_R, offsets_R = (
        to_device(each, logits_SV.device) for each in (rows, edits.factors[rows], last.offsets[rows])
    )
    columns_R = last.token_ids[rows_R] - first_token
    there_R = columns_R.clamp(0, logits_SV.shape[1] - 1)
    x_R = logits_SV[rows_R, there_R]
    logits_SV[rows_R, there_R] = torch.where(columns_R == there_R, _edited(x_R, factors_R, offsets_R), x_R)


def _edited(x_N: Tensor, factors_N: Tensor, offsets_N: Tensor) -> Tensor:
    return torch.where(x_N > 0, x_N / factors_N, x_N * factors_N) - offsets_N


IN_TORCH = TokenChoice(choose_in_torch, find_in_torch, rank_in_torch, edit_in_torch)


def largest_outputs(out_TO: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `SearchedLinear.largest` gives, for outputs that are there."""
    values_T, indices_T = out_TO.max(-1)
    return values_T.float(), indices_T.where(values_T.isfinite(), -1)


def gumbel(keys_R2: Tensor, num_tokens: int, *, first_token: int = 0) -> Tensor:
    """The noise [R, tokens] float32 of rows with these keys (int32, the bits of `NOISE`'s), from -2.9 to 22.2.

    A counter-based generator in the sense of Salmon et al. (SC 2011); its block function is twice a mixer of 32 bits
    that was found by search (Wellons, "Prospecting for Hash Functions", 2018).
    """
    tokens_V = torch.arange(first_token, first_token + num_tokens, dtype=torch.int32, device=keys_R2.device)
    bits_RV = _mix(_mix(tokens_V * _GAMMA + keys_R2[:, :1]) ^ keys_R2[:, 1:])
    u_RV = _shift(bits_RV, 1).float().mul_(2.0**-31).add_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return torch.log(torch.log1p(-u_RV).neg_()).neg_()


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * _FIRST
    x = (x ^ _shift(x, 15)) * _SECOND
    return x ^ _shift(x, 15)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift to the right, as if int32 had no sign."""
    return torch.bitwise_and(x >> bits, 2 ** (32 - bits) - 1)


def _largest(logits_SV: Tensor) -> Tensor:
    """The first largest of each row; -1 where it is not finite. NaN counts as larger than any number."""
    if logits_SV.device.type != "cpu":
        return largest_outputs(logits_SV)[1]
    logits = logits_SV.float().numpy()  # whose argmax is vectorized, unlike torch's
    token_ids = logits.argmax(-1)
    is_finite = np.isfinite(logits[np.arange(len(logits)), token_ids])
    return torch.from_numpy(np.where(is_finite, token_ids, -1))


def _draw(logits_RV: Tensor, draws: Draws, rows: Int64Array) -> Tensor:
    scores_RV = _scores(logits_RV, draws.noise[rows], 0)
    limits = [values[rows] for values in (draws.top_k, draws.top_p, draws.min_p)]
    truncated = np.flatnonzero((limits[0] > 0) | (limits[1] < 1) | (limits[2] > 0))
    if len(truncated):
        temperature_R1 = _temperature(draws.noise[rows], logits_RV.device)
        scaled_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).div_(temperature_R1)
        bounds = lower_bounds(scaled_RV, truncated, *(values[truncated] for values in limits))
        scores_RV.masked_fill_(scaled_RV < bounds[:, None], -torch.inf)
    return _largest(scores_RV)


def _scores(logits_RV: Tensor, noise: NoiseArray, first_token: int) -> Tensor:
    keys_R2 = to_device(np.ascontiguousarray(noise["key"]).view(np.int32), logits_RV.device)
    noise_RV = gumbel(keys_R2, logits_RV.shape[1], first_token=first_token)
    return noise_RV.mul_(_temperature(noise, logits_RV.device)).add_(logits_RV)


def _temperature(noise: NoiseArray, device: torch.device) -> Tensor:
    return to_device(np.ascontiguousarray(noise["temperature"]), device)[:, None]
