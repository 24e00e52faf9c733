"""Linear layers on a GPU mean what the reference means."""

import pytest
import torch
from helpers.elementwise_cases import TOLERANCES
from helpers.linear_cases import LinearCase, linear_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", linear_cases(), ids=lambda case: case.name)
def test_linear_equals_reference(case: LinearCase, dtype: torch.dtype) -> None:
    case.check(dtype, torch.device("cuda"))
