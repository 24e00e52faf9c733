"""Kernels that gate with SiLU while they multiply do so where a model gates with SiLU, and nowhere else."""

from dataclasses import replace

import pytest
import torch
from helpers.weights import fill
from torch import Tensor

from parallel.description import Activation
from parallel.families.registry import describe_config
from parallel.kernels.linears import PackedLinear
from parallel.kernels.reference import ReferenceKernels, ReferenceLinear
from parallel.layer import LayerContext
from parallel.mesh import Axis
from parallel.mlp import MLP

SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
LLAMA = describe_config({"model_type": "llama", **SIZES, "num_attention_heads": 8}, source="test")


class GatingLinear(ReferenceLinear):
    num_gated = 0

    def gated(self, x_TI: Tensor) -> Tensor:
        GatingLinear.num_gated += 1
        return ReferenceKernels().silu_mul(self(x_TI))


class GatingKernels(ReferenceKernels):
    def pack_linear(self, weight_OI: Tensor, bias_O: Tensor | None) -> PackedLinear:
        return GatingLinear(weight_OI, bias_O)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("is_gated", [True, False])
def test_only_what_gates_with_silu_is_gated_by_the_product(
    activation: Activation, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GatingLinear, "num_gated", 0)
    description = replace(LLAMA, activation=activation, is_mlp_gated=is_gated)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for kernels in (ReferenceKernels(), GatingKernels()):
        context = LayerContext(axis=Axis(), kernels=kernels, device=torch.device("cpu"), dtype=torch.float32)
        mlp = MLP(description, context=context)
        fill(mlp.sharded_parameters("mlp"))
        mlp.finish_loading()
        results.append(mlp(x))
    assert torch.equal(*results)
    assert GatingLinear.num_gated == (is_gated and activation is Activation.SILU)
