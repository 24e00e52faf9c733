"""Linear layers on a GPU mean what the reference means."""

import pytest
import torch
from helpers.elementwise_cases import TOLERANCES
from helpers.linear_cases import LinearCase, check_gate_of_one_row, linear_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", linear_cases(), ids=lambda case: case.name)
def test_linear_equals_reference(case: LinearCase, dtype: torch.dtype) -> None:
    case.check(dtype, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gate_of_one_row_is_rounded(dtype: torch.dtype) -> None:
    check_gate_of_one_row(dtype, torch.device("cuda"))
