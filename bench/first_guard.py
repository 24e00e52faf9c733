"""Is the foundation slow? Weft's engine in process against `transformers` generate, in turns, on one random model.

    python -m bench.first_guard [--rounds 5] [--json-only]

One stream: 128 tokens in, 64 out. Mixed: 32 requests at once, 32-256 in, 16-128 out; `transformers` gets them as one
left-padded batch that runs until the longest is done, and only tokens that were asked for count. Greedy, fixed lengths,
fresh prompts each round. The physical limit of one stream is memory: every token reads all weights once.
"""

import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from bench.load.geometries import find_model
from bench.machine import Span, Stopwatch, describe_machine, describe_torch
from bench.script import count, make_parser, run_script
from workers.config import EngineConfig
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.request import Request, RequestId, SamplingParams

_VOCAB_SIZE = 32_000  # that of llama-110m

TARGETS = {"one stream": 1.0, "mixed": 3.0}
"""Least ratio of Weft's output tokens per second to those of `transformers`."""

_BUSY_OTHERS = 0.1
"""Cores: a round in which other processes used more is marked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request."""

    prompt: list[int]
    num_out: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One workload run once by each side, the one right after the other."""

    weft: Span
    transformers: Span
    num_out: int

    @property
    def ratio(self) -> float:
        """Speed of Weft over that of `transformers`."""
        return self.transformers.wall_s / self.weft.wall_s

    @property
    def is_contended(self) -> bool:
        """Whether other processes took part of the machine."""
        return any((span.others_cores or 0.0) > _BUSY_OTHERS for span in (self.weft, self.transformers))


def main() -> None:
    """Run both workloads and print a table and a line of JSON; fail when a target is missed."""
    parser = make_parser("bench.first_guard", __doc__)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--threads", type=count, default=None, help="CPU threads of both (default: torch's choice)")
    parser.add_argument("--json-only", action="store_true", help="no table")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    rounds = run_rounds(find_model("llama-110m"), args.rounds)
    passed = all(median_ratio(rounds[name]) >= target for name, target in TARGETS.items())
    if not args.json_only:
        Console().print(_table(rounds))
    print(json.dumps(_summary(rounds) | {"passed": passed}))
    sys.exit(0 if passed else 1)


def run_rounds(model: Path, num_rounds: int) -> dict[str, list[Round]]:
    """Run both workloads `num_rounds` times after one round of warm-up; who goes first alternates."""
    engine = build_engine(EngineConfig(model=str(model), dtype="bfloat16", device="cpu"))
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    peer.eval()
    rng = random.Random(0)
    rounds: dict[str, list[Round]] = {name: [] for name in TARGETS}
    with Progress() as progress:
        task = progress.add_task("rounds", total=(num_rounds + 1) * len(TARGETS))
        for index in range(num_rounds + 1):
            for name, jobs in (("one stream", one_stream(rng)), ("mixed", mixed(rng))):
                measured = _round(jobs, engine, peer, weft_first=index % 2 == 0)
                if index > 0:
                    rounds[name].append(measured)
                progress.advance(task)
    return rounds


def one_stream(rng: random.Random) -> list[Job]:
    """Return a single request."""
    return [Job(prompt=_prompt(rng, 128), num_out=64)]


def mixed(rng: random.Random) -> list[Job]:
    """Return 32 requests at once; the lengths are the same in every round, spread evenly and shuffled once."""
    lengths = random.Random(1)
    ins = [32 + round(index * (256 - 32) / 31) for index in range(32)]
    outs = [16 + round(index * (128 - 16) / 31) for index in range(32)]
    lengths.shuffle(ins)
    lengths.shuffle(outs)
    return [Job(prompt=_prompt(rng, num_in), num_out=num_out) for num_in, num_out in zip(ins, outs, strict=True)]


def run_weft(engine: Engine, jobs: Sequence[Job]) -> None:
    """Run all jobs through the engine, to the end."""
    missing = {}
    for index, job in enumerate(jobs):
        sampling = SamplingParams(temperature=0.0, max_tokens=job.num_out, ignore_eos=True)
        request_id = RequestId(str(index))
        engine.add_request(Request(request_id=request_id, prompt_token_ids=tuple(job.prompt), sampling=sampling))
        missing[request_id] = job.num_out
    unfinished = len(jobs)
    while unfinished:
        for output in engine.step().outputs:
            if output.error is not None:
                raise output.error
            missing[output.request_id] -= len(output.token_ids)
            unfinished -= output.finish is not None
    assert not any(missing.values()), "every request gets the tokens it asked for"


def run_transformers(peer: Any, jobs: Sequence[Job]) -> None:
    """Run all jobs as one left-padded batch."""
    longest = max(len(job.prompt) for job in jobs)
    ids = torch.zeros(len(jobs), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, job in enumerate(jobs):
        ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
        mask[row, longest - len(job.prompt) :] = 1
    num_out = max(job.num_out for job in jobs)
    with torch.inference_mode():
        output: Tensor = peer.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=num_out, max_new_tokens=num_out, pad_token_id=0
        )
    assert output.shape[1] == longest + num_out


def median_ratio(rounds: Sequence[Round]) -> float:
    """Return the median over the rounds that had the machine to themselves, or over all where fewer than three did."""
    quiet = [each for each in rounds if not each.is_contended]
    return statistics.median(each.ratio for each in (quiet if len(quiet) >= 3 else rounds))


def _round(jobs: Sequence[Job], engine: Engine, peer: Any, *, weft_first: bool) -> Round:
    spans: dict[str, Span] = {}
    sides: list[tuple[str, Callable[[], None]]] = [
        ("weft", lambda: run_weft(engine, jobs)),
        ("transformers", lambda: run_transformers(peer, jobs)),
    ]
    for name, run in sides if weft_first else reversed(sides):
        watch = Stopwatch()
        run()
        spans[name] = watch.stop()
    num_out = sum(job.num_out for job in jobs)
    return Round(weft=spans["weft"], transformers=spans["transformers"], num_out=num_out)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(_VOCAB_SIZE) for _ in range(length)]


def _table(rounds: dict[str, list[Round]]) -> Table:
    table = Table(
        "workload", "round", "Weft tok/s", "transformers tok/s", "ratio", "others' cores", title="first guard"
    )
    for name, each_rounds in rounds.items():
        for index, each in enumerate(each_rounds):
            speeds = (f"{each.num_out / span.wall_s:.1f}" for span in (each.weft, each.transformers))
            others = " / ".join(_cores(span) for span in (each.weft, each.transformers))
            flag = " contended" if each.is_contended else ""
            table.add_row(name, str(index + 1), *speeds, f"{each.ratio:.2f}", others + flag)
        ratio = median_ratio(each_rounds)
        verdict = "met" if ratio >= TARGETS[name] else "MISSED"
        table.add_row(name, "median", "", "", f"{ratio:.2f}", f"target {TARGETS[name]:.1f}: {verdict}", style="bold")
    return table


def _cores(span: Span) -> str:
    return "?" if span.others_cores is None else f"{span.others_cores:.2f}"


def _summary(rounds: dict[str, list[Round]]) -> dict[str, Any]:
    workloads = {
        name: {
            "ratio": round(median_ratio(each_rounds), 3),
            "target": TARGETS[name],
            "weft_tokens_per_s": [round(each.num_out / each.weft.wall_s, 1) for each in each_rounds],
            "transformers_tokens_per_s": [round(each.num_out / each.transformers.wall_s, 1) for each in each_rounds],
            "contended_rounds": [index + 1 for index, each in enumerate(each_rounds) if each.is_contended],
        }
        for name, each_rounds in rounds.items()
    }
    versions = {"transformers": transformers.__version__}
    machine = describe_machine() | describe_torch()
    return {"benchmark": "first_guard", "dtype": "bfloat16", "workloads": workloads} | versions | machine


if __name__ == "__main__":
    run_script(main)
