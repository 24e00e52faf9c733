"""How long the choice of tokens takes, from logits that are there: by what requests ask for, rows and vocabulary.

python -m bench.sampling_time [--device auto] [--rows 1,32,256] [--vocab 32000,151936]

Logits fall off as words do in a language, by Zipf's law, in an order of each row's own; penalties are on 500 tokens of
each. `flat`: all are nearly the same, which is the worst for top-p. The least time is that of reading the logits once
at the rate measured in this process. On a CPU the engine mostly asks the head for tokens, and no logits are made.
"""

from collections.abc import Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.load.hardware import best_s, measure_ceiling
from bench.result_line import end_with_line
from bench.script import counts, make_parser, run_script
from parallel.device.base import Device
from parallel.device.select import NAMES, select_device
from parallel.kernels.sampling import NOISE, Draws, Edits, TokenChoice
from parallel.kernels.select import select_sampling

_KINDS: dict[str, tuple[float, int, float, float] | None] = {
    "greedy": None,
    "temperature": (1.0, 0, 1.0, 0.0),
    "min-p 0.1": (1.0, 0, 1.0, 0.1),
    "top-k 20, top-p 0.8": (0.7, 20, 0.8, 0.0),
    "top-p 0.9": (0.6, 0, 0.9, 0.0),
}
"""Temperature, top-k, top-p and min-p of each kind; None: the largest is taken."""
_NUM_EDITS = 500


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table and one line of JSON."""
    parser = make_parser("bench.sampling_time", __doc__)
    parser.add_argument("--device", choices=NAMES, default="auto", help="(%(default)s)")
    parser.add_argument("--rows", type=counts, default=[1, 32, 256], help="(1,32,256)")
    parser.add_argument("--vocab", type=counts, default=[32000, 151936], help="(32000,151936)")
    args = parser.parse_args(arguments)
    device = select_device(args.device)
    choice = select_sampling(device.torch_device)
    rate = measure_ceiling(device, torch.bfloat16).read_bytes_per_s
    table, results = Table("vocabulary", "rows", "", "ms", "ms, flat", "least ms"), []
    for vocab_size in args.vocab:
        for num_rows in args.rows:
            least_s = 4 * num_rows * vocab_size / rate
            zipf, flat = (_logits(num_rows, vocab_size, exponent, device) for exponent in (1.1, 0.0))
            for kind in (*_KINDS, "penalties"):
                times_s = [_measure(device, choice, logits, kind) for logits in (zipf, flat)]
                results.append({"vocab": vocab_size, "rows": num_rows, "kind": kind, "s": times_s, "least_s": least_s})
                times = (f"{each * 1e3:.3f}" for each in (*times_s, least_s))
                table.add_row(str(vocab_size), str(num_rows), kind, *times)
    Console().print(table)
    end_with_line("sampling_time", {"rows": results}, has_torch=True)


def _logits(num_rows: int, vocab_size: int, exponent: float, device: Device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)])
    noise = 0.1 * torch.randn(num_rows, vocab_size, generator=generator)
    return (noise - exponent * (ranks + 1).log()).to(device.torch_device)


def _measure(device: Device, choice: TokenChoice, logits: Tensor, kind: str) -> float:
    num_rows, vocab_size = logits.shape
    if kind == "penalties":
        edits, edited = _edits(num_rows, vocab_size), logits.clone()
        return best_s(device, lambda: choice.edit(edited, edits, 0))
    draws = None
    if (limits := _KINDS[kind]) is not None:
        temperature, *others = limits
        noise = np.zeros(num_rows, NOISE)
        noise["temperature"], noise["key"] = temperature, np.arange(2 * num_rows).reshape(-1, 2)
        top_k, top_p, min_p = (np.full(num_rows, each, np.float64) for each in others)
        draws = Draws(noise=noise, top_k=top_k, top_p=top_p, min_p=min_p)
    return best_s(device, lambda: choice.choose(logits, draws))


def _edits(num_rows: int, vocab_size: int) -> Edits:
    generator = np.random.default_rng(0)
    token_ids = [generator.choice(vocab_size, _NUM_EDITS, replace=False) for _ in range(num_rows)]
    return Edits(
        starts=np.arange(num_rows + 1) * _NUM_EDITS,
        token_ids=np.concatenate(token_ids),
        factors=np.full(num_rows, 1.1, np.float32),
        offsets=np.zeros(num_rows * _NUM_EDITS, np.float32),
    )


if __name__ == "__main__":
    run_script(main)
