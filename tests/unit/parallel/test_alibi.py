"""ALiBi at far positions: what it adds is as exact there as near the beginning."""

import pytest
import torch
from helpers.paged_layout import make_layout

from parallel.alibi import key_bias
from parallel.families.registry import describe_config
from parallel.kernels.base import AttentionParams
from parallel.kernels.select import select_kernels
from parallel.position_description import Alibi

CPU = torch.device("cpu")
SLOPES = tuple(2.0 ** (-0.7 * (head + 1)) for head in range(6))
NUM_POSITIONS = 33_000
HEAD_DIM = 64


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("spans", [[(1, 5)], [(3, 2050)], [(1, 32_900), (1, 2048)], [(9, 33_000)]], ids=str)
def test_attention_equals_that_in_float64(kernels: str, spans: list[tuple[int, int]]) -> None:
    layout = make_layout(spans, num_kv_heads=3, head_dim=HEAD_DIM, block_size=16)
    starts = layout.meta.query_starts_host
    q = torch.randn(starts[-1], 6, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    alibi = Alibi(slopes=SLOPES)
    params = AttentionParams(
        scale=HEAD_DIM**-0.5,
        key_bias_NP=key_bias(alibi, range(6), NUM_POSITIONS, device=CPU),
        is_bias_by_distance=alibi.is_by_distance,
    )

    result = select_kernels(CPU, torch.float32, kernels).attention(q, layout.cache, layout.meta, params)

    slopes = torch.tensor(SLOPES, dtype=torch.float64)
    for start, stop, keys, values in zip(starts, starts[1:], layout.keys, layout.values, strict=False):
        k, v = (half.double().repeat_interleave(2, dim=1) for half in (keys, values))
        distance = torch.arange(len(k)) - torch.arange(len(k) - (stop - start), len(k))[:, None]
        scores = torch.einsum("qnh,cnh->nqc", q[start:stop].double(), k) * HEAD_DIM**-0.5
        scores += slopes[:, None, None] * distance
        weights = scores.masked_fill(distance > 0, float("-inf")).softmax(-1)
        expected = torch.einsum("nqc,cnh->qnh", weights, v)
        torch.testing.assert_close(result[start:stop].double(), expected, atol=1e-5, rtol=0)


def test_far_biases_of_falcon_are_as_coarse_as_those_of_transformers() -> None:
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    sizes = {"vocab_size": 32, "hidden_size": 6 * HEAD_DIM, "num_hidden_layers": 1, "num_attention_heads": 6}
    alibi = describe_config({"model_type": "falcon", "alibi": True, **sizes}, source="test").alibi
    assert alibi is not None
    assert not alibi.is_by_distance
    mask = torch.ones(1, NUM_POSITIONS, dtype=torch.int64)
    original = build_alibi_tensor(mask, 6, torch.float32)[:, 0] * HEAD_DIM**-0.5
    torch.testing.assert_close(key_bias(alibi, range(6), NUM_POSITIONS, device=CPU), original, rtol=1e-6, atol=0)
