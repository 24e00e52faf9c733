"""How fast a model's weights are loaded, beside what the disk and the memory of this machine give.

python -m bench.load_rate [FOLDER] [--rounds 5] [--dtype bfloat16]

Each round: the files read in order by four threads with an empty page cache, which is the disk's rate; the model loaded
with an empty page cache, and again with a full one; as many bytes copied from memory to new memory, which is the least
that loading has to do. Each is a process of its own, as a rank is; imports do not count. They come between a page
cache's emptying and its filling for all alike: a virtual machine's host takes back the memory meanwhile, and gives it
anew at a rate of its own. Linux only.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.result_line import end_with_line
from bench.script import count, make_parser, run_script
from cluster.spares import engine_variables
from parallel.dtypes import DTYPES
from parallel.weight_index import FORMATS

_NUM_READERS = 4
_BLOCK_BYTES = 1 << 20

_IMPORTS = """
import sys, time
from pathlib import Path
from cluster.imports import import_for_good
import_for_good("parallel.checkpoint", "parallel.kernels.select")
import torch
from bench.load_rate import read_files
from parallel.checkpoint import load_decoder
from parallel.kernels.select import select_kernels
from parallel.mesh import Mesh
"""

_READ = f"""{_IMPORTS}
start_s = time.perf_counter()
read_files([Path(name) for name in sys.argv[1:]])
print(time.perf_counter() - start_s)
"""

_LOAD = f"""{_IMPORTS}
folder, dtype, device = Path(sys.argv[1]), getattr(torch, sys.argv[2]), torch.device("cpu")
kernels = select_kernels(device, dtype)
start_s = time.perf_counter()
decoder = load_decoder(folder, mesh=Mesh.single(), device=device, dtype=dtype, kernels=kernels)
print(time.perf_counter() - start_s)
"""

_COPY = """
import sys, time
import torch

source = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
start_s = time.perf_counter()
source.clone()
print(time.perf_counter() - start_s)
"""


def main() -> None:
    """Measure in rounds, and tell medians."""
    parser = make_parser("bench.load_rate", __doc__)
    default = Path.home() / ".cache/weft/models/llama-110m"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="folder of a model")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16")
    args = parser.parse_args()
    files = sorted({file for weights in FORMATS for file in args.folder.glob(f"*{Path(weights.single).suffix}")})
    num_bytes = sum(file.stat().st_size for file in files)
    if not files:
        sys.exit(f"{args.folder} has no weights")
    steps: dict[str, Callable[[], float]] = {
        "disk": lambda: _cold(files, lambda: _run(_READ, *files)),
        "load, empty page cache": lambda: _cold(files, lambda: _run(_LOAD, args.folder, args.dtype)),
        "load, full page cache": lambda: _run(_LOAD, args.folder, args.dtype),
        "copy to new memory": lambda: _run(_COPY, num_bytes),
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            rates[name].append(num_bytes / step() / 1e9)
    table = Table("GB/s", "median", "all", "of the disk's", title=f"{args.folder.name}, {num_bytes / 1e6:.0f} MB")
    for name, values in rates.items():
        of_disk = f"{median(values) / median(rates['disk']):.0%}"
        table.add_row(name, f"{median(values):.2f}", " ".join(f"{value:.2f}" for value in values), of_disk)
    Console().print(table)
    end_with_line("load_rate", {"bytes": num_bytes, "gb_per_s": rates})


def _cold(files: Sequence[Path], step: Callable[[], float]) -> float:
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # pages that are not written yet would stay
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return step()


def read_files(files: Sequence[Path]) -> None:
    """Read files whole, one after the other."""
    for file in files:
        descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size

        def read(first: int, descriptor: int = descriptor, size: int = size) -> None:
            buffer = bytearray(_BLOCK_BYTES)
            for offset in range(first, size, _NUM_READERS * _BLOCK_BYTES):
                os.preadv(descriptor, [buffer], offset)

        with ThreadPoolExecutor(_NUM_READERS) as readers:
            list(readers.map(read, range(0, _NUM_READERS * _BLOCK_BYTES, _BLOCK_BYTES)))
        os.close(descriptor)


def _run(script: str, *arguments: object) -> float:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    variables = os.environ | engine_variables(os.cpu_count() or 1)
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=variables).stdout)


if __name__ == "__main__":
    run_script(main)
