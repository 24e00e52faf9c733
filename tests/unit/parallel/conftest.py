"""The fast CPU kernels, for tests that hold them to the reference."""

from pathlib import Path

import pytest

from parallel.errors import DeviceError
from parallel.kernels.base import Kernels
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native import build


@pytest.fixture(params=["torch", "native"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those in plain torch, and the compiled ones where there is a compiler."""
    if request.param == "torch":
        return CpuKernels()
    _require_compiler()
    return NativeCpuKernels.build()


@pytest.fixture(scope="module", params=["", "-mno-amx-tile", "-mno-amx-tile -mno-avx512bf16"])
def library(request: pytest.FixtureRequest) -> Path:
    """The compiled ones, for this CPU, without its matrix tiles, and without its products of bfloat16 pairs too; all
    stay in the user's cache."""
    _require_compiler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, *request.param.split()))
        return build.build_library()


def _require_compiler() -> None:
    try:
        build.find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
