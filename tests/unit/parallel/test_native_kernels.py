"""The compiled kernels: built once, with a clear error where they cannot be, and with results that no split changes."""

from pathlib import Path

import pytest
import torch
from helpers.paged_layout import make_layout, meta_of_one

from parallel.errors import DeviceError
from parallel.kernels.base import AttentionParams
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native import build
from parallel.kernels.native.library import Operations, load_operations
from parallel.kernels.select import select_kernels

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def operations() -> dict[torch.dtype, Operations]:
    try:
        return load_operations(build.build_library())
    except DeviceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_is_the_same_bit_for_bit_alone_together_and_on_more_threads(
    operations: dict[torch.dtype, Operations], dtype: torch.dtype, window: int | None
) -> None:
    spans = [(1, 1500), (1, 33), (1, 256), (1, 257), *[(1, 40 + row) for row in range(20)], (9, 600)]
    layout = make_layout(spans, num_kv_heads=4, head_dim=32, block_size=16, dtype=dtype)
    cache, meta = layout.cache, layout.meta
    q = torch.randn(meta.query_starts_host[-1], 8, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    params = AttentionParams(scale=0.2, sliding_window=window)
    together = NativeCpuKernels(operations, 1).attention(q, cache, meta, params)
    for num_threads in (2, 5):
        assert torch.equal(NativeCpuKernels(operations, num_threads).attention(q, cache, meta, params), together)
    for row in range(4):
        single = NativeCpuKernels(operations, 2).attention(q[row : row + 1], cache, meta_of_one(meta, row), params)
        assert torch.equal(single, together[row : row + 1])


def test_library_is_compiled_once_and_again_when_the_compiler_changes(
    tmp_path: Path, operations: dict[torch.dtype, Operations], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / build.build_library().name  # the name is the key
    built.touch()
    assert build.build_library(tmp_path) == built
    assert built.stat().st_size == 0
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOTHER"))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "kernels.cpp").write_text("#error not this one\n")
    with pytest.raises(DeviceError, match="not this one"):
        build.build_library(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_auto_takes_them_on_a_cpu(operations: dict[torch.dtype, Operations]) -> None:
    assert isinstance(select_kernels(CPU, torch.bfloat16), NativeCpuKernels)


def test_without_a_compiler_auto_falls_back_and_native_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "COMPILERS", ())
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    assert isinstance(select_kernels(CPU, torch.bfloat16), CpuKernels)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(DeviceError, match=r"no C\+\+ compiler"):
        select_kernels(CPU, torch.bfloat16, "cpu-native")
