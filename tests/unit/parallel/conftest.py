"""The fast CPU kernels, for tests that hold them to the reference."""

from pathlib import Path

import pytest
import torch

from parallel.errors import DeviceError
from parallel.kernels.base import Kernels
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native import build
from parallel.kernels.native.library import Operations, load_operations


@pytest.fixture(params=[None, torch.bfloat16, torch.float16], ids=["torch", "native", "native-float16"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those in plain torch, and the compiled ones of each type of 16 bits where there is a compiler."""
    if request.param is None:
        return CpuKernels()
    _require_compiler()
    return NativeCpuKernels.build(request.param)


_LESSER_CPUS = {
    "amx_tile": "-mno-amx-tile",
    "avx512_bf16": "-mno-amx-tile -mno-avx512bf16",
    "avx512_vnni": "-mno-amx-tile -mno-avx512bf16 -mno-avx512vnni",
    "avx512f": "-mno-amx-tile -mno-avx512f",
    "avx2": "-mno-amx-tile -mno-avx512f -mno-avx2",
}
"""How to compile for a CPU that has not this feature, nor those before it."""


@pytest.fixture(scope="module", params=[None, "float16", *_LESSER_CPUS])
def library(request: pytest.FixtureRequest) -> Path:
    """The compiled ones: for this CPU, in bfloat16 or float16, and for CPUs that have ever less; all stay in the user's
    cache.
    """
    _require_compiler()
    if request.param in (None, "float16"):
        return build.build_library(is_float16=request.param is not None)
    if request.param not in build.cpu_features().split():
        pytest.skip(f"as without {request.param}: this CPU has none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, *_LESSER_CPUS[request.param].split()))
        return build.build_library()


@pytest.fixture(scope="module")
def operations(library: Path) -> dict[torch.dtype, Operations]:
    """The kernels of each dtype that the library has."""
    return load_operations(library)


@pytest.fixture(scope="module")
def half(operations: dict[torch.dtype, Operations]) -> torch.dtype:
    """Its type of 16 bits."""
    (half,) = operations.keys() - {torch.float32}
    return half


@pytest.fixture(params=["float32", "half"])
def dtype(request: pytest.FixtureRequest, half: torch.dtype) -> torch.dtype:
    """Each dtype that the library has."""
    return torch.float32 if request.param == "float32" else half


def _require_compiler() -> None:
    try:
        build.find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
