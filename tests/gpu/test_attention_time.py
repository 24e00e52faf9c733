"""Attention is timed on a GPU as a recorded step."""

import pytest
import torch

from bench.attention_time import time_attention
from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.device.cuda import CudaDevice
from parallel.families.registry import describe_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_context_takes_longer(dtype: torch.dtype) -> None:
    description = describe_model(PACKAGED[DEFAULT_MODEL])
    short_s, long_s = (time_attention(description, CudaDevice(), dtype, length) for length in (16, 1 << 18))
    assert 0 < short_s < long_s
