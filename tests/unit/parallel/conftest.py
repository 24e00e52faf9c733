"""The fast CPU kernels, for tests that hold them to the reference."""

import pytest

from parallel.errors import DeviceError
from parallel.kernels.base import Kernels
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native.build import find_compiler


@pytest.fixture(params=["torch", "native"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those in plain torch, and the compiled ones where there is a compiler."""
    if request.param == "torch":
        return CpuKernels()
    try:
        find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    return NativeCpuKernels.build()
