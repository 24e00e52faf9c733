"""The operations between matrix products on a GPU mean what the reference means."""

import pytest
import torch
from helpers.elementwise_cases import TOLERANCES, Check, elementwise_checks

from parallel.kernels.select import select_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("check", elementwise_checks(), ids=lambda check: check.__name__)
def test_operation_equals_reference(check: Check, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    check(select_kernels(device, dtype), dtype, device)
