"""How our Triton kernels follow each other on a GPU: each may start while the one before it still runs.

Programmatic dependent launch (CUDA C++ Programming Guide), recorded in graphs too: a kernel is made ready, and asks for
what nobody writes (weights), as soon as all programs of the kernel before it are under way. It waits for that one's
results with `wait_for_input`, which every program calls before it touches what others write or read, and one that has
nothing to do too: a launch none of whose programs waits is over before the one before it, and the next waits for
neither.
"""

import ctypes
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_CAPABILITIES = (9, 10)
"""Hopper, and Blackwell of data centers: with others some met graphs that could not be recorded."""
_FIRST_DRIVER = 12030
"""CUDA 12.3: the first that records such launches in graphs."""


def launch_options(device: torch.device) -> dict[str, Any]:
    """What a kernel that takes IS_EARLY is launched with."""
    return {"IS_EARLY": True, "launch_pdl": True} if _can_start_early(device) else {"IS_EARLY": False}


@cache
def _can_start_early(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in _CAPABILITIES:
        return False
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value >= _FIRST_DRIVER


@triton.jit
def wait_for_input(IS_EARLY: tl.constexpr):
    """Returns when the kernel before this one has written all that it writes, and lets the next one start."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
