"""Chooses the experts of each token and their weights. Every rank holds the whole router and chooses the same.

Shape letters as in kernels/base.py; X is here the experts of the whole layer, G its groups of experts.
"""

from collections.abc import Iterator
from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from parallel.description import MoeDescription, RouterScore
from parallel.kernels.linears import PackedLinear
from parallel.layer import LayerContext
from parallel.shard import ShardedParameter, replicated


class Routing(NamedTuple):
    """What a router chose."""

    experts_TC: Tensor  # noqa: N815
    """[T, C] int64: the experts of each token, numbered over the whole layer, in no order."""
    weights_TC: Tensor  # noqa: N815
    """[T, C] float32: what the result of each expert is multiplied by."""


class Router:
    """A linear layer to one logit per expert, and the choice from those; nothing waits for the device."""

    def __init__(self, moe: MoeDescription, hidden_size: int, *, context: LayerContext) -> None:
        self._moe = moe
        self._kernels = context.kernels
        # sigmoids lie close together at the top: bfloat16 logits would swap experts
        self._dtype = torch.float32 if moe.score is RouterScore.SIGMOID else context.dtype
        shape = (moe.num_experts, hidden_size)
        self._weight_XE: Tensor | None = torch.empty(shape, dtype=self._dtype, device=context.device)
        self._bias_X = self._empty(self._dtype, context) if moe.router_bias else None
        self._choice_bias_X = self._empty(torch.float32, context) if moe.choice_bias else None
        self._linear: PackedLinear

    def __call__(self, x_TE: Tensor) -> Routing:
        """[T, E] -> the experts of each token, and their weights."""
        return choose_experts(self._moe, self.logits(x_TE), self._choice_bias_X)

    def logits(self, x_TE: Tensor) -> Tensor:
        """[T, E] -> [T, X], in the dtype that the experts are compared in."""
        return self._linear(x_TE.to(self._dtype))

    def sharded_parameters(self, prefix: str) -> Iterator[ShardedParameter]:
        """The whole weight and biases."""
        assert self._weight_XE is not None, "weights are gone after finish_loading"
        yield replicated(f"{prefix}.weight", self._weight_XE)
        if self._bias_X is not None:
            yield replicated(f"{prefix}.bias", self._bias_X)
        if self._choice_bias_X is not None:
            yield replicated(f"{prefix}.choice_bias", self._choice_bias_X)

    @property
    def weights(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """[X, E], the bias [X] and the choice's bias [X], until `finish_loading`."""
        assert self._weight_XE is not None, "weights are gone after finish_loading"
        return self._weight_XE, self._bias_X, self._choice_bias_X

    def finish_loading(self) -> None:
        """Hand weight and bias to the kernels."""
        assert self._weight_XE is not None, "finish_loading is called once"
        self._linear = self._kernels.pack_linear(self._weight_XE, self._bias_X)
        self._weight_XE = self._bias_X = None

    def _empty(self, dtype: torch.dtype, context: LayerContext) -> Tensor:
        return torch.empty(self._moe.num_experts, dtype=dtype, device=context.device)


def choose_experts(moe: MoeDescription, logits_TX: Tensor, choice_bias_X: Tensor | None) -> Routing:
    """The experts of each token and their weights, in float32 from the logits on."""
    logits_TX = logits_TX.float()
    match moe.score:
        case RouterScore.SOFTMAX:
            scores_TX = logits_TX.softmax(-1)
        case RouterScore.SOFTMAX_OF_CHOSEN:
            scores_TX = logits_TX
        case RouterScore.SIGMOID:
            scores_TX = logits_TX.sigmoid()
        case _:
            assert_never(moe.score)
    ranking_TX = scores_TX if choice_bias_X is None else scores_TX + choice_bias_X
    if moe.num_chosen_groups < moe.num_groups:
        ranking_TX = _keep_best_groups(moe, ranking_TX)
    experts_TC = ranking_TX.topk(moe.num_chosen, dim=-1, sorted=False).indices
    weights_TC = scores_TX.gather(1, experts_TC)
    if moe.score is RouterScore.SOFTMAX_OF_CHOSEN:
        weights_TC = weights_TC.softmax(-1)
    if moe.is_normalized:
        # sigmoids may all be 0
        weights_TC = weights_TC / (weights_TC.sum(-1, keepdim=True) + 1e-20)
    if moe.weight_multiplier != 1.0:
        weights_TC = weights_TC * moe.weight_multiplier
    return Routing(experts_TC, weights_TC)


def _keep_best_groups(moe: MoeDescription, ranking_TX: Tensor) -> Tensor:
    """Minus infinity for the experts of all other groups. arXiv:2412.19437, section 2.1.2, node-limited routing."""
    ranking_TGX = ranking_TX.unflatten(1, (moe.num_groups, -1))
    score_TG = ranking_TGX.topk(2, dim=-1, sorted=False).values.sum(-1)
    groups = score_TG.topk(moe.num_chosen_groups, dim=-1, sorted=False).indices
    is_left_out_TG = torch.ones_like(score_TG, dtype=torch.bool).scatter_(1, groups, False)
    kept_TGX: Tensor = ranking_TGX.masked_fill(is_left_out_TG.unsqueeze(-1), float("-inf"))
    return kept_TGX.flatten(1)
