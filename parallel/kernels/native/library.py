"""The compiled kernels as Python functions, by ctypes; the structures that they take are in structures.py."""

import ctypes
from collections.abc import Callable, Mapping
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parallel.errors import DeviceError
from parallel.host_memory import TakePages
from parallel.kernels.native.build import NUMBERS, build_library

LANES = 16
"""Head sizes that the attention knows are multiples of this."""

_PRODUCT = (c_void_p, c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int64, c_int, c_int)
"""Result, rows, their stride and number, packed matrix, bias, outputs, inputs, threads."""
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "attention": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p),
    "multiply_rows": (c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64, c_int, c_int),
    "largest_of_rows": (c_void_p, c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64, c_int, c_int),
    "rms_norm": (c_void_p, c_void_p, *(c_int64,) * 4, c_void_p, c_void_p, c_int64, c_int, c_float, c_int),
    "layer_norm": (c_void_p, c_void_p, *(c_int64,) * 4, *(c_void_p,) * 3, c_int64, c_float, c_int),
    "sum_squares": (c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int),
    "norm_part": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float, c_float, c_int),
    "gate": (c_void_p, c_void_p, c_int64, c_int64, c_int, c_int),
    "activate": (c_void_p, *(c_int64,) * 3, c_int, c_int),
    "gate_rows": (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int),
    "rotary": (c_void_p, *(c_int64,) * 5, c_void_p, c_void_p, c_int64, c_int, c_int),
    "write_cache": (*(c_void_p,) * 4, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int),
    "write_cache_int8": (*(c_void_p,) * 4, c_int64, c_int64, c_void_p, *(c_int64,) * 4, c_int),
}


def build_for(dtype: torch.dtype) -> Path:
    """The library for models that compute in `dtype`; see `build_library`."""
    return build_library(numbers=str(dtype).removeprefix("torch."))


@dataclass(frozen=True, slots=True)
class AllReduces:
    """Sums over ranks in memory that they share; see all_reduce.h."""

    rank_bytes: int
    """What each rank needs of it."""
    sums: Mapping[torch.dtype, Callable[..., int]]
    """Those of each dtype; what they return is a `Meeting` of rank_sums.py."""


@dataclass(frozen=True, slots=True)
class Operations:
    """The kernels of a model. Arguments as in kernels.cpp: addresses, strides in elements, and the threads last."""

    dtype: torch.dtype
    """Of all numbers: bfloat16, float16 or float32, as the library was compiled."""
    attention: Callable[..., None]
    multiply_rows: Callable[..., None]
    largest_of_rows: Callable[..., None]
    """The largest outputs of the same product; see targets.h."""
    most_rows: int
    """Rows up to which `multiply_rows` is worth its call."""
    has_dot_products: Callable[[int, bool], bool]
    """Whether the CPU has them for rows of this size, of 8 bits or not: then all kernels here are the fastest there
    are, and the bits of a row depend on nothing else in the step."""
    rms_norm: Callable[..., None]
    layer_norm: Callable[..., None]
    gate: Callable[..., None]
    """The activation of the first half times the second; activations are said by their index in `ACTIVATIONS`."""
    activate: Callable[..., None]
    """The activation, in place."""
    gate_rows: Callable[..., None]
    """Rows times a sigmoid each, in place."""
    sum_squares: Callable[..., None]
    norm_part: Callable[..., None]
    rotary: Callable[..., None]
    write_cache: Callable[..., None]
    write_cache_int8: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Programs:
    """Products with packed matrices, and whole programs; where the CPU has vectors for them."""

    dtype: torch.dtype
    """As `Operations` has it."""
    pack_matrix: Callable[..., None]
    unpack_rows: Callable[..., None]
    multiply: Callable[..., None]
    largest: Callable[..., None]
    """The largest outputs of the same product; see targets.h."""
    multiply_float32: Callable[..., None]
    """The product with its result in float32, as it was summed."""
    multiply_heads: Callable[..., None]
    """A product for each head of tokens; see products.h."""
    search_table: Callable[..., None]
    """Tells where a matrix's outputs are largest; see table_search.h."""
    most_screened_rows: int
    """Up to so many rows a search reads a copy in 8 bits first; see screened.h. 0: no products in 8 bits."""
    make_screen: Callable[..., None] | None
    """Makes the copy in 8 bits; None where there is none."""
    sift_table: Callable[..., None] | None
    """Computes the outputs that may be among the largest; None where there is no copy in 8 bits."""
    most_sifted_rows: int
    """Up to so many rows `sift_table` is worth while."""
    run_experts: Callable[..., None]
    """What the experts of a layer give for some tokens; see experts.h."""
    choose_and_run_experts: Callable[..., None]
    """The same of experts that are chosen by their logits."""
    run: Callable[..., int]
    """What it returns, and `finish`, is a `Meeting` of rank_sums.py; 0 where nothing is added up over ranks."""
    can_start: Callable[[int], bool]
    """Whether `start`, with so many threads, has another one than the caller's."""
    start: Callable[..., int]
    """Has other threads begin what `run` does; what it points to stays until the caller has joined them in `finish`,
    which takes what this returned. The caller starts nothing else on several threads meanwhile."""
    finish: Callable[[int], int]
    has_dot_products: Callable[[int, bool], bool]
    """Whether the CPU has dot products for heads of this size, of 8 bits or not; see `Operations`."""


@dataclass(frozen=True, slots=True)
class Int8Operations:
    """Products in 8 bits, of and to numbers of `Operations.dtype`; see matrix_int8.h."""

    pack: Callable[..., None]
    multiply: Callable[..., None]
    largest: Callable[..., None]
    """The largest outputs of the same product, with noise or not; see targets.h."""


def load_operations(library: Path) -> Operations:
    """The kernels of a model. Raises DeviceError when the file cannot be loaded."""
    loaded = _load(library)
    functions: dict[str, Any] = {
        name: _function(loaded, f"weft_{name}", arguments) for name, arguments in _SIGNATURES.items()
    }
    return Operations(
        **functions,
        dtype=_number(loaded),
        has_dot_products=_has_dot_products(loaded),
        most_rows=loaded.weft_most_rows(),
    )


def load_programs(library: Path) -> Programs | None:
    """Return what runs programs; None where the CPU has not the instructions. Raises DeviceError as the others do."""
    loaded = _load(library)
    if not loaded.weft_has_programs():
        return None
    most_screened_rows = loaded.weft_most_screened_rows()
    return Programs(
        dtype=_number(loaded),
        pack_matrix=_function(loaded, "weft_pack_matrix", (c_void_p, c_void_p, c_int64, c_int, c_int)),
        unpack_rows=_function(
            loaded, "weft_unpack_rows", (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int, c_int)
        ),
        multiply=_function(loaded, "weft_multiply_number", _PRODUCT),
        largest=_function(loaded, "weft_largest_number", (c_void_p, *_PRODUCT)),
        multiply_float32=_function(loaded, "weft_multiply_float32", _PRODUCT),
        multiply_heads=_function(
            loaded,
            "weft_multiply_heads",
            (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int, c_int, c_void_p, c_int64, c_int, c_int),
        ),
        search_table=_function(loaded, "weft_search_table", (c_void_p, c_void_p, c_int64, c_int, c_int)),
        most_screened_rows=most_screened_rows,
        make_screen=(
            _function(loaded, "weft_make_screen", (c_void_p, c_void_p, c_int64, c_int, c_int))
            if most_screened_rows
            else None
        ),
        sift_table=(
            _function(loaded, "weft_sift_table", (*(c_void_p,) * 4, c_int64, c_int, c_int))
            if most_screened_rows
            else None
        ),
        most_sifted_rows=loaded.weft_most_sifted_rows(),
        run_experts=_function(
            loaded,
            "weft_run_experts",
            (c_void_p, c_void_p, c_int64, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int),
        ),
        choose_and_run_experts=_function(
            loaded,
            "weft_choose_and_run_experts",
            (c_void_p, c_void_p, c_int64, c_int, c_void_p, c_int64, c_void_p, c_int),
        ),
        run=_function(loaded, "weft_run", (c_void_p, c_int, c_void_p), c_int),
        can_start=_function(loaded, "weft_can_start", (c_int,), c_bool),
        start=_function(loaded, "weft_start", (c_void_p, c_int, c_void_p), c_void_p),
        finish=_function(loaded, "weft_finish", (c_void_p,), c_int),
        has_dot_products=_has_dot_products(loaded),
    )


def load_int8(library: Path) -> Int8Operations | None:
    """None where the CPU has not the instructions. Raises DeviceError when the file cannot be loaded."""
    loaded = _load(library)
    if not loaded.weft_has_int8():
        return None
    return Int8Operations(
        pack=_function(loaded, "weft_pack_int8", (c_void_p, c_int64, c_int, c_void_p, c_int64, c_int64, c_int)),
        multiply=_function(loaded, "weft_multiply_int8", _PRODUCT),
        largest=_function(loaded, "weft_largest_int8", (c_void_p, *_PRODUCT[:-1], c_void_p, c_int64, c_int)),
    )


def load_all_reduces(library: Path) -> AllReduces | None:
    """Return what adds up over ranks; None where the system has not the means. Raises DeviceError as the others do."""
    loaded = _load(library)
    rank_bytes = _function(loaded, "weft_rank_bytes", (), c_int64)()
    if not rank_bytes:
        return None
    arguments = (c_void_p, c_void_p, c_int64, c_int)
    names = _names(loaded)
    sums = {dtype: _function(loaded, f"weft_all_reduce_{name}", arguments, c_int) for dtype, name in names.items()}
    return AllReduces(rank_bytes=rank_bytes, sums=sums)


def load_largest(library: Path) -> dict[torch.dtype, Callable[..., None]]:
    """Where the largest logit of each row is; see sampling.h. Raises DeviceError when the file cannot be loaded."""
    loaded, arguments = _load(library), (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int)
    names = _names(loaded)
    return {dtype: _function(loaded, f"weft_choose_largest_{name}", arguments) for dtype, name in names.items()}


def load_draws(library: Path) -> Callable[..., None]:
    """The tokens of rows of which some draw; see draws.h. Raises DeviceError when the file cannot be loaded."""
    arguments = (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int)
    return _function(_load(library), "weft_choose_tokens", arguments)


def load_edits(library: Path) -> Callable[..., None]:
    """What is done to some logits of rows; see edits.h. Raises DeviceError when the file cannot be loaded."""
    arguments = (c_void_p, c_int64, c_int64, c_int64, *(c_void_p,) * 4, c_int64, c_int)
    return _function(_load(library), "weft_edit_logits", arguments)


def load_ranking(library: Path) -> Callable[..., None]:
    """The most probable tokens of rows; see ranking.h. Raises DeviceError when the file cannot be loaded."""
    arguments = (*(c_void_p,) * 4, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int)
    return _function(_load(library), "weft_rank_tokens", arguments)


def load_taking(library: Path) -> TakePages | None:
    """What takes pages, as idle.h says; None where there is no Linux. Raises DeviceError as the others do."""
    loaded, name = _load(library), "weft_take_when_idle"
    return _function(loaded, name, (c_void_p, c_size_t, c_size_t)) if hasattr(loaded, name) else None


def _load(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise DeviceError(f"cannot load {library}: {error}") from error


def _number(library: ctypes.CDLL) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, NUMBERS[library.weft_number()])
    return dtype


def _names(library: ctypes.CDLL) -> dict[torch.dtype, str]:
    return {torch.float32: "float32"} | {_number(library): "number"}


def _function(
    library: ctypes.CDLL, name: str, arguments: tuple[Any, ...], result: type[Any] | None = None
) -> Callable[..., Any]:
    function = library[name]
    function.argtypes = arguments
    function.restype = result
    return function


def _has_dot_products(library: ctypes.CDLL) -> Callable[[int, bool], bool]:
    return _function(library, "weft_has_dot_products", (c_int, c_int), c_bool)
