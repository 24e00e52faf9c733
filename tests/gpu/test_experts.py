"""Experts on a GPU mean what the reference means, and the host never waits for them."""

import pytest
import torch

from parallel.description import Activation
from parallel.kernels.base import ExpertWeights
from parallel.kernels.reference import ReferenceExperts, ReferenceKernels
from parallel.kernels.select import select_kernels

pytestmark = pytest.mark.gpu

NUM_EXPERTS, NUM_CHOSEN = 8, 3
# float32 may be summed in tensor cores of fewer bits; the others are rounded twice
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("hidden", "inner"), [(128, 64), (128, 60)])  # rows of whole 16 bytes, and others
@pytest.mark.parametrize("num_tokens", [1, 7, 300])
def test_experts_equal_reference_and_never_wait(dtype: torch.dtype, hidden: int, inner: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda")
    weights = ExpertWeights(
        into_XJE=(torch.randn(NUM_EXPERTS, 2 * inner, hidden) * hidden**-0.5).to(device, dtype),
        down_XEI=(torch.randn(NUM_EXPERTS, hidden, inner) * inner**-0.5).to(device, dtype),
        into_bias_XJ=torch.randn(NUM_EXPERTS, 2 * inner).to(device, dtype),
        down_bias_XE=torch.randn(NUM_EXPERTS, hidden).to(device, dtype),
        activate=ReferenceKernels().gated(Activation.SILU),
    )
    x = torch.randn(num_tokens, hidden).to(device, dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS + 2).topk(NUM_CHOSEN).indices.to(device) - 1  # some are of other ranks
    scale = torch.rand(num_tokens, NUM_CHOSEN, device=device)
    experts = select_kernels(device, dtype).pack_experts(weights)
    experts(x, ids, scale)  # compiles

    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = experts(x, ids, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(actual, ReferenceExperts(weights)(x, ids, scale), rtol=tolerance, atol=tolerance)
