"""Norms over all heads of queries and keys, for the dtype that they are stored in."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers.weights import fill, full_tensor

from parallel.description import NormKind, QKNorm, QKNormScope
from parallel.errors import UnsupportedModelError
from parallel.families.registry import describe_config
from parallel.kernels.reference import ReferenceKernels
from parallel.layer import LayerContext
from parallel.mesh import Axis
from parallel.qk_norm import make_qk_norm

SIZES = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
OLMO2 = describe_config(
    {"model_type": "olmo2", **SIZES, "num_attention_heads": 8, "num_key_value_heads": 2}, source="test"
)
CONTEXT = LayerContext(axis=Axis(), kernels=ReferenceKernels(), device=torch.device("cpu"), dtype=torch.bfloat16)


def test_a_norm_over_all_heads_is_rounded_once() -> None:
    norm = make_qk_norm(OLMO2, range(8), range(2), context=CONTEXT)
    assert norm is not None
    fill(norm.sharded_parameters("attention"))
    norm.finish_loading()
    generator = torch.Generator().manual_seed(0)
    heads = [torch.randn(20, num_heads, 8, generator=generator).bfloat16() for num_heads in (8, 2)]
    for x, normed, name in zip(heads, norm(*heads), ("q_norm", "k_norm"), strict=True):
        flat = x.float().flatten(1)
        weight = full_tensor(f"attention.{name}.weight", flat.shape[1]).bfloat16().float()
        assert normed.dtype is torch.bfloat16
        expected = F.rms_norm(flat, (flat.shape[1],), weight, OLMO2.norm_eps)
        torch.testing.assert_close(normed.float().flatten(1), expected, rtol=2**-8, atol=0)


def test_another_norm_over_all_heads_is_refused() -> None:
    description = replace(OLMO2, qk_norm=QKNorm(kind=NormKind.LAYER, scope=QKNormScope.ALL_HEADS))
    with pytest.raises(UnsupportedModelError, match="norm over all heads together is layer; supported: rms"):
        make_qk_norm(description, range(8), range(2), context=CONTEXT)
