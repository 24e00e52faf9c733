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


@pytest.fixture(
    scope="module", params=[None, torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: dtype or "torch"
)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Those in plain torch, and the compiled ones for each type of numbers where there is a compiler."""
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
_LIBRARIES = [*((numbers, "") for numbers in build.NUMBERS), *(("bfloat16", feature) for feature in _LESSER_CPUS)]
_LIBRARIES.append(("float32", "avx2"))  # what such a CPU computes in by default


@pytest.fixture(scope="module", params=_LIBRARIES, ids=lambda numbers_feature: "-".join(filter(None, numbers_feature)))
def library(request: pytest.FixtureRequest) -> Path:
    """The compiled ones for each type of numbers, and for CPUs that have ever less; they stay in the user's cache."""
    _require_compiler()
    numbers, feature = request.param
    if feature and feature not in build.cpu_features().split():
        pytest.skip(f"as without {feature}: this CPU has none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_FLAGS", (*build._FLAGS, *_LESSER_CPUS.get(feature, "").split()))
        return build.build_library(numbers=numbers)


@pytest.fixture(scope="module")
def operations(library: Path) -> Operations:
    """The kernels that the library has."""
    return load_operations(library)


@pytest.fixture(scope="module")
def dtype(operations: Operations) -> torch.dtype:
    """What it is compiled for."""
    return operations.dtype


def _require_compiler() -> None:
    try:
        build.find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
