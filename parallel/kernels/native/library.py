"""The compiled kernels as Python functions: ctypes signatures, and the structures that attention.h reads."""

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel.errors import DeviceError

LANES = 16
"""Head sizes that the attention knows are multiples of this."""

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "attention": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    "multiply_rows": (c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64, c_int, c_int),
    "rms_norm": (c_void_p, c_void_p, *(c_int64,) * 4, c_void_p, c_void_p, c_int64, c_int, c_float, c_int),
    "silu_mul": (c_void_p, c_void_p, c_int64, c_int64, c_int),
    "rotary": (c_void_p, *(c_int64,) * 4, c_void_p, c_void_p, c_int64, c_int, c_int),
    "write_cache": (*(c_void_p,) * 4, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int),
}


class LayerParams(ctypes.Structure):
    """What is constant for the attention of a layer; `LayerParams` of attention.h."""

    _fields_ = (
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("key_bias", c_void_p),
        ("key_bias_stride", c_int64),
        ("sinks", c_void_p),
    )


class StepLayout(ctypes.Structure):
    """What is constant for the attention of a step; `StepLayout` of attention.h."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("num_sequences", c_int32),
        ("block_size", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_threads", c_int32),
    )


@dataclass(frozen=True, slots=True)
class Operations:
    """The kernels of one dtype. Arguments as in kernels.cpp: addresses, strides in elements, and the threads last."""

    attention: Callable[..., None]
    multiply_rows: Callable[..., None]
    most_rows: int
    """Rows up to which `multiply_rows` is worth its call."""
    rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    rotary: Callable[..., None]
    write_cache: Callable[..., None]


def load_operations(library: Path) -> dict[torch.dtype, Operations]:
    """The kernels of every dtype that has them. Raises DeviceError when the file cannot be loaded."""
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise DeviceError(f"cannot load {library}: {error}") from error
    return {dtype: _operations(loaded, name) for dtype, name in _NAMES.items()}


def _operations(library: ctypes.CDLL, dtype: str) -> Operations:
    functions: dict[str, Any] = {}
    for name, arguments in _SIGNATURES.items():
        function = library[f"weft_{name}_{dtype}"]
        function.argtypes = arguments
        function.restype = None
        functions[name] = function
    return Operations(**functions, most_rows=library.weft_most_rows())
