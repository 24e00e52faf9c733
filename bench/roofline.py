"""How near the engine comes to what the device can: decoding, prompts, and attention over long contexts. One rank.

python -m bench.roofline --model llama3-8b --set max_context=4096           decode 1 and 256, prompts of 2,048 tokens
python -m bench.roofline --model DIR --batches 1,8 --contexts 1024,4096 --json results.jsonl

A decode step is timed from the moment when all sequences decode to the end of the first. The least time for it is that
of reading weights and keys or of multiplying, whichever is longer, at the rates that are measured in this process. The
targets are those of an H200; on a CPU the same is measured, and no target is meant.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

from rich.console import Console
from rich.table import Table

from bench.attention_time import time_attention
from bench.errors import BenchConfigError
from bench.load.calls import Lengths
from bench.load.datasets import DatasetOptions, make_sessions, take_calls
from bench.load.engine_run import run_engine
from bench.load.geometries import find_model
from bench.load.hardware import Ceiling, measure_ceiling
from bench.load.model_cost import ModelCost, Work
from bench.load.offline import engine_config
from bench.load.records import CallRecord
from bench.result_line import add_json_flag, end_with_line
from bench.script import count, counts, make_parser, run_script
from cluster.operate import parse_settings
from parallel.device.select import NAMES, select_device
from parallel.dtypes import DTYPES
from parallel.families.registry import describe_model
from parallel.kernels.select import choose_dtype
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.request import SamplingParams

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_DECODE_TARGETS = {1: 0.85, 256: 0.75}
"""Least share of what the device can, by number of sequences."""
_PREFILL_TARGET = 0.6
_GROWTH_TARGET = 2.0
"""Limit of attention's time at the last context, over that at the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One kind of step."""

    name: str
    measured_s: float
    least_s: float
    """Least time, at the measured rates of memory and products."""
    bound: str
    """"memory" or "products"."""
    target: float | None
    """Least share that is wanted."""

    @property
    def share(self) -> float:
        """Share of what the device can."""
        return self.least_s / self.measured_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The time in which all of some sequences decode."""

    duration_s: float
    seen: tuple[int, ...]
    """How many tokens each token that came in it was computed from, itself included."""


def find_window(records: Sequence[CallRecord], num_in: int) -> Window:
    """Return the time from the last sequence's first token to the first sequence's last one.

    Raises BenchConfigError where there is no such time.
    """
    times_s = [[*accumulate([record.first_s or 0.0, *record.gaps_s])] for record in records]
    start_s, end_s = max(times[0] for times in times_s), min(times[-1] for times in times_s)
    seen = tuple(num_in + i for times in times_s for i, at_s in enumerate(times) if start_s < at_s <= end_s)
    if not seen:
        raise BenchConfigError("the first sequence ended before the last began; allowed: more --output-tokens")
    return Window(duration_s=end_s - start_s, seen=seen)


def measure_decode(
    engine: Engine, cost: ModelCost, ceiling: Ceiling, *, num_seqs: int, num_in: int, num_out: int
) -> Phase:
    """Decode so many sequences at once, after a round to warm up; the result is for one step."""
    for name in ("warm up", "timed"):
        records = _run(engine, num_seqs, num_in, num_out, name)
    window = find_window(records, num_in)
    num_steps = len(window.seen) / num_seqs
    memory_s = cost.decode_bytes(num_seqs, num_steps, window.seen) / ceiling.read_bytes_per_s
    products_s = cost.decode_flops(window.seen) / ceiling.flops_per_s
    return Phase(
        name=f"decode, {num_seqs} at once",
        measured_s=window.duration_s / num_steps,
        least_s=max(memory_s, products_s) / num_steps,
        bound="memory" if memory_s > products_s else "products",
        target=_DECODE_TARGETS.get(num_seqs),
    )


def measure_prefill(engine: Engine, cost: ModelCost, ceiling: Ceiling, *, num_prompts: int, num_in: int) -> Phase:
    """Compute some prompts, after a round to warm up; the result is for all of them."""
    for name in ("warm up", "timed"):
        records = _run(engine, num_prompts, num_in, 1, name)
    usages = tuple(record.usage for record in records if record.usage is not None)
    work = Work(step_tokens=(num_prompts * num_in,), requests=usages)
    memory_s, products_s = cost.bytes_read(work) / ceiling.read_bytes_per_s, cost.flops(work) / ceiling.flops_per_s
    return Phase(
        name=f"{num_prompts} prompts of {num_in} tokens",
        measured_s=max(record.end_s for record in records) - min(record.sent_s for record in records),
        least_s=max(memory_s, products_s),
        bound="memory" if memory_s > products_s else "products",
        target=_PREFILL_TARGET if products_s > memory_s else None,
    )


def _run(engine: Engine, num_seqs: int, num_in: int, num_out: int, salt: str) -> list[CallRecord]:
    """Run all at once; each run has a salt, so that none finds the prefixes of another."""
    inputs, outputs = Lengths(low=num_in, high=num_in), Lengths(low=num_out, high=num_out)
    made = make_sessions(DatasetOptions(inputs=inputs, outputs=outputs), vocab_size=engine.vocab_size, seed=0)
    return run_engine(engine, [*take_calls(made, num_seqs)], _GREEDY, cache_salt=f"{salt} {num_seqs} {num_out}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables and one line of JSON."""
    options = _parse(arguments)
    settings = {"device": options.device, "dtype": options.dtype, **parse_settings(options.set)}
    device = select_device(str(settings["device"]))  # before a model of its size is written
    folder = find_model(options.model)
    config = engine_config(folder, settings)
    dtype = choose_dtype(config.dtype, folder, device, config.kernels)
    description = describe_model(folder)
    int8_linears, int8_cache = config.quantization == "int8", config.cache.dtype == "int8"
    cost = ModelCost.of(
        *(description, dtype),
        int8_linears=int8_linears,
        int8_cache=int8_cache,
        int8_experts=device.torch_device.type == "cpu",
    )
    ceiling = measure_ceiling(device, dtype, int8_linears=int8_linears)
    attention_s = {
        num: time_attention(description, device, dtype, num, min(options.new_tokens, num)) for num in options.contexts
    }
    engine = build_engine(config)
    try:
        phases = [
            measure_decode(
                engine, cost, ceiling, num_seqs=num, num_in=options.input_tokens, num_out=options.output_tokens
            )
            for num in options.batches
        ]
        phases += [
            measure_prefill(engine, cost, ceiling, num_prompts=num, num_in=options.prompt_tokens)
            for num in options.prompts
        ]
    finally:
        engine.close()
    _print(ceiling, phases, attention_s)
    found = {
        "phases": [{**asdict(phase), "share": phase.share} for phase in phases],
        "attention_s": attention_s,
        "growth_target": _GROWTH_TARGET,
    }
    settings = {name: str(value) for name, value in vars(options).items()}
    fields = {"settings": settings, "ceiling": asdict(ceiling), **found}
    end_with_line("roofline", fields, has_torch=True, file=options.json)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("bench.roofline", __doc__)
    parser.add_argument("--model", default="llama3-8b", help="as `weft bench offline` takes it (%(default)s)")
    parser.add_argument("--device", choices=NAMES, default="auto", help="(%(default)s)")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="bfloat16", help="(%(default)s)")
    parser.add_argument("--set", action="append", default=[], help="dotted.path=value, as `weft bench offline` has it")
    parser.add_argument("--batches", type=counts, default=[1, 256], help="sequences that decode at once (1,256)")
    parser.add_argument("--input-tokens", type=count, default=128, help="tokens of their prompts (%(default)s)")
    parser.add_argument("--output-tokens", type=count, default=128, help="tokens that each generates (%(default)s)")
    parser.add_argument("--prompts", type=counts, default=[8], help="prompts at once (8)")
    parser.add_argument("--prompt-tokens", type=count, default=2048, help="tokens of each of them (%(default)s)")
    parser.add_argument(
        "--contexts", type=counts, default=[4096, 65536], help="context lengths of attention (4096,65536)"
    )
    parser.add_argument("--new-tokens", type=count, default=1, help="tokens that attend, one sequence's (%(default)s)")
    add_json_flag(parser)
    return parser.parse_args(arguments)


def _print(ceiling: Ceiling, phases: Sequence[Phase], attention_s: dict[int, float]) -> None:
    console = Console(width=100)
    table = Table("", "measured ms", "least ms", "bound by", "share", "target on an H200")
    for phase in phases:
        target = "-" if phase.target is None else f"{phase.target:.0%}"
        times = f"{phase.measured_s * 1e3:.3f}", f"{phase.least_s * 1e3:.3f}"
        table.add_row(phase.name, *times, phase.bound, f"{phase.share:.0%}", target)
    console.print(f"{ceiling.read_bytes_per_s / 1e9:.1f} GB/s, {ceiling.flops_per_s / 1e9:.0f} GFLOP/s", table)
    rows = Table("context of attention, 1 sequence", "all layers, ms", "times the first", "target on an H200")
    first_s = next(iter(attention_s.values()))
    for num, each_s in attention_s.items():
        rows.add_row(f"{num}", f"{each_s * 1e3:.3f}", f"{each_s / first_s:.2f}", f"< {_GROWTH_TARGET:g}")
    console.print(rows)


if __name__ == "__main__":
    run_script(main)
