"""How long the products of a step take by themselves, and the least that they can take.

python -m bench.linear_time [--model llama3-8b] [--device auto] [--rows 1,4,16,64] [--json FILE]

For each matrix of a layer, gate and up with SiLU-mul: the kernels' products, those of plain torch, and the same in 8
bits. So many copies of a matrix are multiplied one after the other that no cache holds them, on a CPU as many as a
fifth of a second is enough for. On a GPU they are recorded as a CUDA graph, as the engine does: the host has no part in
the time. "least": reading the weights, or computing, whichever takes longer at the rates that this machine has here
(bench/load/hardware.py).
"""

import argparse
import math
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.load.geometries import find_model
from bench.load.hardware import Ceiling, best_s, measure_ceiling, recorded
from bench.result_line import add_json_flag, end_with_line
from bench.script import counts, make_parser, run_script
from parallel.description import DecoderDescription
from parallel.device.base import Device
from parallel.device.select import NAMES, select_device
from parallel.dtypes import DTYPES
from parallel.families.registry import describe_model
from parallel.kernels.base import Kernels
from parallel.kernels.linears import GatedLinear, PackedLinear
from parallel.kernels.reference import ReferenceKernels
from parallel.kernels.select import choose_dtype, select_kernels

_CPU_BYTES, _GPU_BYTES = 512 << 20, 4 << 30
"""More weights than caches hold; on a GPU enough that launch and wait of a round, 10 us, are little of it."""
_MOST_COPIES = 320
"""Limit of the copies of a matrix: where it is reached they are so small that they stay in a cache anyway."""
_CPU_ROUND_S = 0.2
_LEAST_PRODUCTS = 3
"""In a round, however long they take."""
Multiply = Callable[[Tensor], Tensor]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and one line of JSON."""
    options = _parse(arguments)
    folder, device = find_model(options.model), select_device(options.device)
    dtype = choose_dtype(options.dtype, folder, device, "auto")
    kernels = select_kernels(device.torch_device, dtype)
    ceilings = {is_int8: measure_ceiling(device, dtype, int8_linears=is_int8) for is_int8 in (False, True)}
    columns = "torch", "ours", "least", "torch, 8 bits", "ours, 8 bits", "least, 8 bits"
    table, results = Table("matrix", "rows", *(f"{column}, us" for column in columns)), []
    for name, shape in _shapes(describe_model(folder)).items():
        times = [
            _measure_matrix(device, kernels, shape, dtype, ceiling, options.rows, is_int8, is_gated=name == "gate, up")
            for is_int8, ceiling in ceilings.items()
        ]
        for num_rows, numbers_s, int8_s in zip(options.rows, *times, strict=True):
            row_s = *numbers_s, *int8_s
            results.append({"matrix": name, "rows": num_rows, **dict(zip(columns, row_s, strict=True))})
            table.add_row(name, str(num_rows), *(f"{each * 1e6:.1f}" for each in row_s))
    Console(width=110).print(table)
    fields = {
        "model": options.model,
        "dtype": str(dtype),
        "read_bytes_per_s": ceilings[False].read_bytes_per_s,
        "flops_per_s": ceilings[False].flops_per_s,
        "int8_flops_per_s": ceilings[True].flops_per_s,
        "results": results,
    }
    end_with_line("linear_time", fields, has_torch=True, file=options.json)


def _measure_matrix(
    device: Device,
    kernels: Kernels,
    shape: tuple[int, int],
    dtype: torch.dtype,
    ceiling: Ceiling,
    rows: Sequence[int],
    is_int8: bool,
    *,
    is_gated: bool,
) -> list[tuple[float, float, float]]:
    """Return what torch, what the kernels and what the least takes, in seconds, for each number of rows."""
    inputs = [torch.randn(num_rows, shape[1], device=device.torch_device).to(dtype) for num_rows in rows]
    times = []
    for of in (ReferenceKernels(), kernels):
        products = _make_products(device, of, shape, dtype, is_int8=is_int8, is_gated=is_gated)
        times.append([_measure(device, products, x_TI) for x_TI in inputs])
    read_s = math.prod(shape) * (1 if is_int8 else dtype.itemsize) / ceiling.read_bytes_per_s
    least = [max(read_s, 2 * num_rows * math.prod(shape) / ceiling.flops_per_s) for num_rows in rows]
    return list(zip(*times, least, strict=True))


def _shapes(description: DecoderDescription) -> dict[str, tuple[int, int]]:
    """Return [out, in] of a layer's matrices."""
    hidden, inner = description.hidden_size, description.intermediate_size
    num_heads, num_kv_heads = description.num_heads, description.num_kv_heads
    return {
        "q, k, v": ((num_heads + 2 * num_kv_heads) * description.head_dim, hidden),
        "output": (hidden, num_heads * description.head_dim),
        "gate, up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (description.vocab_size, hidden),
    }


@torch.inference_mode()
def _make_products(
    device: Device, kernels: Kernels, shape: tuple[int, int], dtype: torch.dtype, *, is_int8: bool, is_gated: bool
) -> list[Multiply]:
    """Return products with so many copies of a matrix that no cache holds them."""
    num_out, num_in = shape
    pack = kernels.quantize_linear if is_int8 else kernels.pack_linear
    values_OI = torch.randn(num_out, num_in, device=device.torch_device).to(dtype)
    num_bytes = num_out * num_in * (1 if is_int8 else dtype.itemsize)
    all_bytes = _GPU_BYTES if device.works_by_itself else _CPU_BYTES
    num_copies = min(_MOST_COPIES, -(-all_bytes // num_bytes))
    products = []
    for _ in range(num_copies):
        weight_OI = kernels.empty_linear(num_out, num_in, dtype).to(device.torch_device).copy_(values_OI)
        linear = pack(weight_OI, None)
        products.append(_gated(linear, kernels) if is_gated else linear)
    return products


@torch.inference_mode()
def _measure(device: Device, products: Sequence[Multiply], x_TI: Tensor) -> float:
    """Return the seconds of one product, the best of some rounds."""
    if not device.works_by_itself:
        one_s = best_s(device, lambda: products[-1](x_TI))  # from a cache
        products = products[: max(_LEAST_PRODUCTS, int(_CPU_ROUND_S / one_s))]

    def multiply() -> Tensor:
        for product in products:
            out_TO = product(x_TI)
        return out_TO

    return best_s(device, recorded(multiply) if device.works_by_itself else multiply) / len(products)


def _gated(linear: PackedLinear, kernels: Kernels) -> Multiply:
    return linear.gated if isinstance(linear, GatedLinear) else lambda x_TI: kernels.silu_mul(linear(x_TI))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.linear_time", __doc__)
    parser.add_argument("--model", default="llama3-8b", help="as `weft bench offline` takes it (%(default)s)")
    parser.add_argument("--device", choices=NAMES, default="auto", help="(%(default)s)")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="bfloat16", help="(%(default)s)")
    parser.add_argument("--rows", type=counts, default=[1, 4, 16, 64], help="(1,4,16,64)")
    add_json_flag(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script(main)
