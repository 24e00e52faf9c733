"""Chooses the kernels of a process, once, from its device and what the user asks for."""

import importlib
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch

from parallel.device.base import Device
from parallel.dtypes import resolve_dtype
from parallel.errors import DeviceError
from parallel.host_memory import TakePages
from parallel.kernels.base import Kernels
from parallel.kernels.choice import check_choice
from parallel.kernels.cpu_fast import CpuKernels
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.cpu_sampling import make_native_choice
from parallel.kernels.cuda import CudaKernels
from parallel.kernels.cuda_buckets import TOKEN_BUCKETS
from parallel.kernels.inductor import InductorKernels
from parallel.kernels.native.library import build_for, load_programs, load_taking
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.sampling import IN_TORCH, TokenChoice, rank_in_torch

logger = logging.getLogger(__name__)

T = TypeVar("T")


def select_kernels(
    device: torch.device,
    dtype: torch.dtype,
    name: str = "auto",
    *,
    attention_backend: str = "auto",
    compiles: bool = False,
    max_graph_size: int = TOKEN_BUCKETS[-1],
) -> Kernels:
    """The kernels called `name`; "auto" takes the fastest that this device and dtype have.

    Args:
        attention_backend: of the kernels for CUDA; see `CudaKernels`.
        compiles: the layers go through torch's compiler around them.
        max_graph_size: of the kernels for CUDA; see there.

    Raises DeviceError when the name is not known, its kernels do not run on the device, or do not go with the rest.
    """
    check_choice(str(device), name, attention_backend=attention_backend, compiles=compiles)
    if device.type == "cuda" and name != "reference":
        kernels: Kernels = CudaKernels(
            device, attention_backend, max_graph_size=max_graph_size, multiplies_rows=not compiles
        )
    else:
        kernels = _make(device, dtype, name)
    logger.info("%s for %s on %s", type(kernels).__name__, dtype, device)
    return InductorKernels(kernels, device) if compiles else kernels


def has_attention(device: torch.device, backend: str) -> bool:
    """Whether this GPU and what is installed here have an attention backend."""
    try:
        CudaKernels(device, backend)
    except DeviceError:
        return False
    return True


def choose_dtype(name: str, folder: Path, device: Device, kernels: str) -> torch.dtype:
    """The dtype called `name`, "auto" by checkpoint, device and the kernels called so. Raises as resolve_dtype."""
    return resolve_dtype(name, folder, device, multiplies=lambda dtype: multiplies(device.torch_device, dtype, kernels))


def multiplies(device: torch.device, dtype: torch.dtype, name: str = "auto") -> bool:
    """Whether the kernels called `name` have products of their own in this dtype on this CPU; compiles where needed."""
    return _from_library(load_programs, device, dtype, name) is not None


def select_sampling(device: torch.device, name: str = "auto", dtype: torch.dtype = torch.bfloat16) -> TokenChoice:
    """What takes tokens from logits on this device: Triton kernels on a GPU where torch came with them, compiled ones
    on a CPU where `name` and the machine have them (those of a model in `dtype`), else torch.
    """
    compiled = _from_library(make_native_choice, device, dtype, name)
    if compiled is not None or device.type != "cuda":
        return compiled or IN_TORCH
    try:
        triton_sampling: Any = importlib.import_module("parallel.kernels.triton_sampling")
    except ModuleNotFoundError as error:
        logger.warning("sampling in plain torch, which is slower: %s", error)
        return IN_TORCH
    return TokenChoice(
        triton_sampling.choose_in_triton, triton_sampling.find_in_triton, rank_in_torch, triton_sampling.edit_in_triton
    )


def select_taking(device: torch.device, name: str, dtype: torch.dtype) -> TakePages | None:
    """What takes pages of a CPU's memory on idle cores; None where `name` or the machine has no such kernels."""
    return _from_library(load_taking, device, dtype, name)


def _from_library(load: Callable[[Path], T], device: torch.device, dtype: torch.dtype, name: str) -> T | None:
    """Return what it loads of the kernels compiled for a CPU; None where `name` or the machine has none."""
    if device.type == "cpu" and name in ("auto", "cpu-native"):
        with suppress(DeviceError):  # the choice of kernels tells the reason
            return load(build_for(dtype))
    return None


def _make(device: torch.device, dtype: torch.dtype, name: str) -> Kernels:
    if name == "reference" or device.type != "cpu":
        return ReferenceKernels()
    if name == "cpu":
        return CpuKernels()
    try:
        return NativeCpuKernels.build(dtype)
    except DeviceError as error:
        if name == "cpu-native":
            raise
        logger.warning("plain torch computes, which is several times slower: %s", error)
        return CpuKernels(slowness=str(error))
