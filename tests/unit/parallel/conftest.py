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


_LESSER_CPUS = {
    "amx_tile": "-mno-amx-tile",
    "avx512_bf16": "-mno-amx-tile -mno-avx512bf16",
    "avx512_vnni": "-mno-amx-tile -mno-avx512bf16 -mno-avx512vnni",
    "avx512f": "-mno-amx-tile -mno-avx512f",
    "avx2": "-mno-amx-tile -mno-avx512f -mno-avx2",
}
"""How to compile for a CPU that has not this feature, nor those before it."""


@pytest.fixture(scope="module", params=[None, *_LESSER_CPUS])
def library(request: pytest.FixtureRequest) -> Path:
    """The compiled ones: for this CPU, and for CPUs that have ever less; all stay in the user's cache."""
    _require_compiler()
    if request.param is None:
        return build.build_library()
    if request.param not in build.cpu_features().split():
        pytest.skip(f"as without {request.param}: this CPU has none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, *_LESSER_CPUS[request.param].split()))
        return build.build_library()


def _require_compiler() -> None:
    try:
        build.find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
