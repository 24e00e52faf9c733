"""What a linear layer that can tell its largest outputs is held to: its own product."""

import torch
from torch import Tensor

from parallel.kernels.linears import DrawnLinear, PackedLinear, Search, SearchedLinear, Sift, SiftedLinear
from parallel.kernels.sampling import TokenChoice, edit_in_torch, gumbel, largest_outputs


def check_largest(linear: PackedLinear, x_TI: Tensor) -> Tensor:
    """The places of the largest outputs, which are those of the product."""
    assert isinstance(linear, SearchedLinear)
    values_T, indices_T = linear.largest(x_TI)
    expected_values_T, expected_indices_T = largest_outputs(linear(x_TI))
    torch.testing.assert_close(values_T, expected_values_T, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices_T, expected_indices_T)
    return indices_T


def check_drawn(linear: PackedLinear, x_TI: Tensor, search: Search, choice: TokenChoice) -> None:
    """What is drawn is what is found in the product, whatever tokens its outputs are of."""
    assert isinstance(linear, DrawnLinear)
    for first_token in (0, 32_000):
        scores_T, indices_T = linear.drawn(x_TI, search, first_token)
        out_TO = linear(x_TI)
        if search.edits is not None:
            edit_in_torch(out_TO, search.edits, first_token)
        expected_scores_T, expected_indices_T = choice.find(out_TO, search.noise, first_token)
        torch.testing.assert_close(scores_T, expected_scores_T, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(indices_T, expected_indices_T)


def check_sifted(linear: PackedLinear, x_TI: Tensor, sift: Sift) -> Tensor:
    """What matters is as in the product, and so is what is no number; gives what is left out, [T, out]."""
    assert isinstance(linear, SiftedLinear)
    return check_what_matters(linear.sifted(x_TI, sift, 0), linear(x_TI), sift)


def check_what_matters(sifted_TO: Tensor, out_TO: Tensor, sift: Sift) -> Tensor:
    """The same, of outputs [T, out] of tokens from 0 on."""
    if sift.edits is not None:
        out_TO = out_TO.clone()
        edit_in_torch(out_TO, sift.edits, 0)
    keys_T2 = torch.from_numpy(sift.noise["key"].copy().view("int32"))
    temperature_T = torch.from_numpy(sift.noise["temperature"].copy())
    scores_TO = out_TO + temperature_T[:, None] * gumbel(keys_T2, out_TO.shape[1])
    last_T1 = scores_TO.sort(descending=True).values.gather(1, torch.from_numpy(sift.numbers).long()[:, None] - 1)
    is_left_out_TO = (sifted_TO != out_TO) & ~(sifted_TO.isnan() & out_TO.isnan())
    assert (sifted_TO[is_left_out_TO] == -torch.inf).all()
    assert not (is_left_out_TO & ~(scores_TO < last_T1)).any()
    return is_left_out_TO
