"""What an all-reduce of a small tensor costs, as the layers of a tensor-parallel group call it.

python -m bench.all_reduce [--ranks 2,4] [--sizes 4,16,64,256,1024] [--device auto] [--dtype bfloat16] [--rounds 10]

The ranks are processes of this machine and meet as those of a group do. All call the same all-reduces one after the
other, with nothing in between; rank 0 measures. Every way has its turn in each round, after one that is not counted.

    CPU     shared memory       what the layers do (parallel/kernels/native/all_reduce.h), where a compiler is found
            Unix sockets        what is done elsewhere (parallel/local_exchange.py) up to 128 KB
            gloo                the same beyond, and here for all sizes
    CUDA    NCCL, eager         each call is queued by the host, as in a step that is not recorded
            NCCL, recorded      many in a CUDA graph; a value is the mean over a replay, and p99 is that of replays
            one-shot            the same two by memory that the ranks share (parallel/one_shot.py), for what it takes

A rank sends and receives at least 2 (n - 1) / n of a tensor's bytes when n ranks add it up, and "bus GB/s" counts
those: it compares with what a link can do, whatever n. On a GPU this was never run.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from bench.errors import BenchConfigError
from bench.load.hardware import recorded
from bench.load.statistics import percentile
from bench.result_line import add_json_flag, end_with_line
from bench.script import check_gpus, make_parser, run_script
from parallel.collectives import all_reduce, share_memory
from parallel.device.base import Device
from parallel.device.select import NAMES, select_device
from parallel.dtypes import DTYPES
from parallel.kernels.select import select_kernels
from parallel.local_exchange import MAX_BYTES
from parallel.mesh import Axis
from workers.config import DeviceName, EngineConfig, ParallelConfig
from workers.rank import JOIN_TIMEOUT_S, Rendezvous, join_mesh

_NUM_CALLS = 100
"""Calls of each way in one round, and in one graph."""
_END_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure."""

    ranks: tuple[int, ...]
    """Sizes of groups."""
    sizes_kb: tuple[int, ...]
    """Sizes of the tensors, in units of 1,024 bytes."""
    device: DeviceName
    dtype: str
    rounds: int

    def __post_init__(self) -> None:
        if min(self.ranks, default=0) < 2:
            raise BenchConfigError(f"--ranks is {_joined(self.ranks)}; allowed: at least 2 each")
        if min(self.sizes_kb, default=0) < 1:
            raise BenchConfigError(f"--sizes is {_joined(self.sizes_kb)}; allowed: at least 1 (KB) each")
        if self.rounds < 1:
            raise BenchConfigError(f"--rounds is {self.rounds}; allowed: at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What all-reduces of one size took, in one way."""

    ranks: int
    num_bytes: int
    """Size of the tensor that each rank has."""
    way: str
    median_us: float
    p99_us: float

    @classmethod
    def of(cls, times_s: Sequence[float], *, ranks: int, num_bytes: int, way: str) -> "Timing":
        """Summarize the time of each call, of which there is at least one."""
        times_us = sorted(1e6 * time_s for time_s in times_s)
        median_us, p99_us = percentile(times_us, 0.5), percentile(times_us, 0.99)
        return cls(ranks=ranks, num_bytes=num_bytes, way=way, median_us=median_us, p99_us=p99_us)

    @property
    def algorithm_gb_per_s(self) -> float:
        """The tensor's bytes over the median time."""
        return self.num_bytes / self.median_us / 1e3

    @property
    def bus_gb_per_s(self) -> float:
        """What each rank at least sends, and receives, over the median time."""
        return self.algorithm_gb_per_s * 2 * (self.ranks - 1) / self.ranks


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and one line of JSON."""
    args = _parse(arguments)
    options = _options(args)
    device = select_device(options.device)
    if device.works_by_itself:
        check_gpus("--ranks", options.ranks, torch.cuda.device_count())
    timings = [timing for num_ranks in options.ranks for timing in measure_group(options, num_ranks)]
    _print(timings)
    rows = [
        {**asdict(each), "algorithm_gb_per_s": each.algorithm_gb_per_s, "bus_gb_per_s": each.bus_gb_per_s}
        for each in timings
    ]
    settings = {**asdict(options), "device": device.torch_device.type}
    end_with_line("all_reduce", {"settings": settings, "rows": rows}, has_torch=True, file=args.json)


def measure_group(options: Options, num_ranks: int) -> list[Timing]:
    """Start the other ranks as processes, and be rank 0 of the group.

    Raises CollectiveError when another rank is gone.
    """
    rendezvous = Rendezvous.open()
    context = multiprocessing.get_context("spawn")
    processes = []
    for rank in range(1, num_ranks):
        arguments = (options, num_ranks, rank, rendezvous.host, rendezvous.port)
        processes.append(context.Process(target=_follow, args=arguments, daemon=True))
        processes[-1].start()
    try:
        timings = _take_part(options, num_ranks, 0, rendezvous.host, rendezvous.store)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    for process in processes:
        process.join(_END_TIMEOUT_S)
    return timings


def _follow(options: Options, num_ranks: int, rank: int, host: str, port: int) -> None:
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))
    _take_part(options, num_ranks, rank, host, store)


def _take_part(options: Options, num_ranks: int, rank: int, host: str, store: TCPStore) -> list[Timing]:
    parallel = ParallelConfig(tensor_parallel=num_ranks)
    config = EngineConfig(model="", device=options.device, parallel=parallel)  # no model is loaded
    axis = join_mesh(config, rank, host, store).tp
    device = select_device(options.device, rank)
    share_memory(axis, select_kernels(device.torch_device, DTYPES[options.dtype]))
    timings = [_measure_size(axis, device, size_kb << 10, options) for size_kb in options.sizes_kb]
    dist.destroy_process_group()
    return [timing for ways in timings for timing in ways]


@torch.inference_mode()
def _measure_size(axis: Axis, device: Device, num_bytes: int, options: Options) -> list[Timing]:
    """Measure all ways on tensors of one size, in turns."""
    dtype = DTYPES[options.dtype]
    x = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=device.torch_device)  # as is every sum
    ways = _ways(x, axis, device)
    times_s: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(options.rounds + 1):
        for way, measure in ways.items():
            round_s = measure()
            if number:
                times_s[way] += round_s
    return [Timing.of(each_s, ranks=axis.size, num_bytes=num_bytes, way=way) for way, each_s in times_s.items()]


def _ways(x: Tensor, axis: Axis, device: Device) -> dict[str, Callable[[], list[float]]]:
    """Return what measures a round, by the way's name: it gives seconds of an all-reduce, many times."""
    if device.works_by_itself:
        ways = _gpu_ways("NCCL", x, replace(axis, one_shot=None), device)
        if axis.one_shot is not None and axis.one_shot.takes(x):
            ways |= _gpu_ways("one-shot", x, axis, device)
        return ways
    axes = {}
    if axis.one_shot is not None:
        axes["shared memory"] = axis
    if axis.local is not None and x.nbytes <= MAX_BYTES:
        axes["Unix sockets"] = replace(axis, one_shot=None)
    axes["gloo"] = replace(axis, one_shot=None, local=None)
    return {way: partial(_time_each, device, partial(all_reduce, x, of_way)) for way, of_way in axes.items()}


def _gpu_ways(name: str, x: Tensor, axis: Axis, device: Device) -> dict[str, Callable[[], list[float]]]:
    return {
        f"{name}, eager": partial(_time_each, device, partial(all_reduce, x, axis)),
        f"{name}, recorded": partial(_time_each, device, _record(x, axis), _NUM_CALLS),
    }


def _record(x: Tensor, axis: Axis) -> Callable[[], object]:
    """Return a call that replays many all-reduces."""

    def reduce_often() -> Tensor:
        for _ in range(_NUM_CALLS):
            all_reduce(x, axis)
        return x

    return recorded(reduce_often)


def _time_each(device: Device, call: Callable[[], object], num_in_call: int = 1) -> list[float]:
    """Return the seconds of an all-reduce in each of many calls that follow each other."""
    marks = [device.mark()]
    for _ in range(_NUM_CALLS):
        call()
        marks.append(device.mark())
    device.synchronize()
    times_s = (later.seconds_since(earlier) for earlier, later in pairwise(marks))
    return [time_s / num_in_call for time_s in times_s if time_s is not None]  # all: the device has come to each mark


def _print(timings: Sequence[Timing]) -> None:
    table = Table("ranks", "KB", "way", "median us", "p99 us", "algorithm GB/s", "bus GB/s")
    for each in timings:
        times = f"{each.median_us:.1f}", f"{each.p99_us:.1f}"
        rates = f"{each.algorithm_gb_per_s:.3f}", f"{each.bus_gb_per_s:.3f}"
        table.add_row(str(each.ranks), str(each.num_bytes >> 10), each.way, *times, *rates)
    Console(width=100).print(table)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.all_reduce", __doc__)
    parser.add_argument("--ranks", default="2,4", help="sizes of groups (%(default)s)")
    parser.add_argument("--sizes", default="4,16,64,256,1024", help="sizes of the tensor, in KB (%(default)s)")
    parser.add_argument("--device", choices=NAMES, default="auto", help="(%(default)s)")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bfloat16", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help=f"rounds of {_NUM_CALLS} calls each way (%(default)s)")
    add_json_flag(parser)
    return parser.parse_args(arguments)


def _options(args: argparse.Namespace) -> Options:
    ranks, sizes_kb = _numbers("--ranks", args.ranks), _numbers("--sizes", args.sizes)
    return Options(ranks=ranks, sizes_kb=sizes_kb, device=args.device, dtype=args.dtype, rounds=args.rounds)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BenchConfigError(f"{flag} is {text!r}; allowed: whole numbers with commas between") from None


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    run_script(main)
