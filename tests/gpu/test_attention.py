"""Attention on a GPU means what the reference means, and the host never waits for it."""

import pytest
import torch
from helpers.attention_cases import TOLERANCES, AttentionCase, attention_cases
from torch import Tensor

from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.select import select_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", attention_cases(), ids=lambda case: case.name)
def test_attention_equals_reference_and_never_waits(case: AttentionCase, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    kernels = select_kernels(device, dtype)

    def attention(q: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
        kernels.attention(q, cache, meta, params)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            return kernels.attention(q, cache, meta, params)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    case.check(attention, dtype, device)
