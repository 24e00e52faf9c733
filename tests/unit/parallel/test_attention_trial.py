"""A library that is installed attends only where a trial has shown that it does."""

from typing import Any

import pytest
import torch
from helpers.fake_flashinfer import FakeFlashInfer
from torch import Tensor

from parallel.errors import DeviceError
from parallel.kernels import cuda
from parallel.kernels.attention_trial import attends
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.flash_attention import FlashAttention
from parallel.kernels.flashinfer_attention import FlashInfer

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class NoCompiler(FakeFlashInfer):
    """The library where the first plan finds nothing to compile its kernels with."""

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **options: Any) -> Any:  # noqa: N802
        raise RuntimeError("Could not find nvcc")


class Wrong(FlashInfer):
    """Gives numbers that are not the mean."""

    def __call__(self, *args: Any) -> Tensor:
        return super().__call__(*args) * 1.1


def test_what_attends_as_the_reference_does_is_taken() -> None:
    library = FakeFlashInfer()
    assert attends(FlashInfer(library, CPU), CPU)
    assert [len(library.decodes), len(library.prefills)] == [1, 1]


def test_a_library_that_cannot_compile_its_kernels_is_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not attends(FlashInfer(NoCompiler(), CPU), CPU)
    assert "flashinfer is installed, but does not attend here: Could not find nvcc" in caplog.text


def test_a_library_whose_numbers_are_others_is_left_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert not attends(Wrong(FakeFlashInfer(), CPU), CPU)
    assert "its attention is not right here" in caplog.text


@pytest.mark.parametrize("is_right", [True, False])
def test_kernels_for_a_gpu_have_the_library_that_passes_its_trial(
    monkeypatch: pytest.MonkeyPatch, is_right: bool
) -> None:
    monkeypatch.setattr(FlashAttention, "find", classmethod(lambda cls, device: None))
    monkeypatch.setattr(FlashInfer, "find", classmethod(lambda cls, device: cls(FakeFlashInfer(), CPU)))
    monkeypatch.setattr(cuda, "attends", lambda library, device: is_right)
    assert (CudaKernels(GPU).attention_backend == "flashinfer") is is_right
    if not is_right:
        with pytest.raises(DeviceError, match="and what it compiles with"):
            CudaKernels(GPU, "flashinfer")
