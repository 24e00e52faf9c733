"""What a step costs beside the model: CPU time of deciding it, of taking its output and of building its inputs.

python -m bench.step_time [--sequences 256,1024,4096] [--policy fcfs,mlfq] [--steps 100] [--recorded]
python -m bench.step_time --longest 120000 [--device cuda]
python -m bench.step_time --groups 7

All sequences decode, and half as many requests wait, which displace some under policies with levels while there is
memory for it. The target is 1 ms for 256 sequences, linear beyond. With --recorded the scheduler writes down what it
decides, as `weft serve --record-decisions` has it. With --longest one sequence has a prompt of so many tokens, the
others 32 to 47. With --groups layers have so many block tables, all but one for a sliding window, as where layers
differ in what they see (parallel/layer_groups.py). Inputs are those for a CPU or, where there is one, for a GPU.
"""

import argparse
import gc
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from weft.recording import Recorder

from bench.load.statistics import percentile
from bench.result_line import end_with_line
from bench.script import count, counts, make_parser, run_script
from parallel.device.select import select_device
from parallel.errors import DeviceError
from workers.config import SchedulerConfig, SchedulingPolicy
from workers.inputs import InputBuilder
from workers.kv_cache_manager import KVCacheManager
from workers.plan import ModelOutput
from workers.recording import RecordingScheduler
from workers.request import Request, RequestId, SamplingParams
from workers.scheduler import Scheduler

_MIN_CONTEXT = 4096
"""Longest context that the scheduler allows, if no longer one is asked for."""
_BLOCK_SIZE = 16
_NUM_PROMPT_TOKENS = 32
_WINDOW = 1024
"""Tokens that layers of all groups but the first see."""
_NUM_WARM_UP_STEPS = 5
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """CPU time of one policy with so many running sequences, in milliseconds."""

    policy: SchedulingPolicy
    num_seqs: int
    schedule_ms: float
    """Medians."""
    update_ms: float
    inputs_ms: float
    total_ms: float
    p99_ms: float
    """99th percentile of the total."""


class Steps:
    """A scheduler and a rank's input builder, with a model that always says the same."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        num_seqs: int,
        num_steps: int,
        recorder: Recorder | None,
        *,
        longest: int,
        num_groups: int,
        device: torch.device,
    ) -> None:
        length = _NUM_PROMPT_TOKENS + _BLOCK_SIZE + num_steps + 4 * _NUM_WARM_UP_STEPS
        num_entries = num_seqs * (length // _BLOCK_SIZE + 2) + longest // _BLOCK_SIZE
        max_context = max(_MIN_CONTEXT, longest + 2 * length)
        make_scheduler = Scheduler if recorder is None else partial(RecordingScheduler, sink=recorder)
        self._scheduler = make_scheduler(
            SchedulerConfig(
                policy=policy,
                max_num_batched_tokens=max(num_seqs, 8192),
                max_num_seqs=num_seqs,
                max_waiting=2 * num_seqs,
                promote_after_s=None,
            ),
            KVCacheManager.with_pool(
                num_entries * num_groups,
                block_size=_BLOCK_SIZE,
                hash_key=b"step time",
                windows=(None, *[_WINDOW] * (num_groups - 1)),
            ),
            max_context=max_context,
            eos_token_ids=frozenset(),
            max_in_flight=1,
        )
        self._inputs = InputBuilder(
            num_slots=num_seqs,
            max_context=max_context,
            block_size=_BLOCK_SIZE,
            device=device,
            num_groups=num_groups,
        )
        for i in range(num_seqs):  # in each step as many of them begin a block, and fill one
            num_prompt_tokens = max(longest if i == 0 else 0, _NUM_PROMPT_TOKENS + i % _BLOCK_SIZE)
            self._add(i, num_prompt_tokens, max_tokens=length)
        while self._scheduler.num_waiting:
            self.run()
        room = num_entries * _BLOCK_SIZE - _NUM_PROMPT_TOKENS
        for i in range(num_seqs // 2):
            self._add(num_seqs + i, _NUM_PROMPT_TOKENS, max_tokens=min(_MIN_CONTEXT // 2, room))

    def run(self) -> tuple[float, float, float]:
        """Make one step; return the CPU seconds of `schedule`, `update` and `build`."""
        start_s = time.process_time()
        plan = self._scheduler.schedule(0.0)
        scheduled_s = time.process_time()
        assert plan is not None
        self._inputs.build(plan)
        built_s = time.process_time()
        slots = plan.scheduled.sampling_slots
        output = ModelOutput(plan.number, slots, [5] * len(slots))
        ready_s = time.process_time()
        self._scheduler.update(plan, output, 0.0)
        return scheduled_s - start_s, time.process_time() - ready_s, built_s - scheduled_s

    def _add(self, number: int, num_prompt_tokens: int, *, max_tokens: int) -> None:
        prompt = (number % 997, number // 997, *([7] * (num_prompt_tokens - 2)))
        sampling = SamplingParams(max_tokens=max_tokens)
        self._scheduler.add(Request(request_id=RequestId(str(number)), prompt_token_ids=prompt, sampling=sampling), 0.0)


def measure(
    policy: SchedulingPolicy,
    num_seqs: int,
    num_steps: int,
    *,
    recorded: bool = False,
    longest: int = 0,
    num_groups: int = 1,
    device: torch.device = _CPU,
) -> StepTime:
    """Measure so many steps.

    Args:
        policy, num_seqs, num_steps: what is measured.
        recorded: whether decisions are written down.
        longest: tokens of one of the prompts, if that is more than it would have.
        num_groups: groups of layers.
        device: what inputs are for.
    """
    with TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "decisions", max_bytes=1 << 30) if recorded else None
        steps = Steps(policy, num_seqs, num_steps, recorder, longest=longest, num_groups=num_groups, device=device)
        found = _measure(steps, policy, num_seqs, num_steps)
        if recorder is not None:
            recorder.close()
    return found


def _measure(steps: Steps, policy: SchedulingPolicy, num_seqs: int, num_steps: int) -> StepTime:
    for _ in range(_NUM_WARM_UP_STEPS):
        steps.run()
    gc.collect()
    times = [steps.run() for _ in range(num_steps)]
    schedule_ms, update_ms, inputs_ms = (sorted(part * 1e3 for part in parts) for parts in zip(*times, strict=True))
    total_ms = sorted(sum(parts) * 1e3 for parts in times)
    return StepTime(
        policy=policy,
        num_seqs=num_seqs,
        schedule_ms=percentile(schedule_ms, 0.5),
        update_ms=percentile(update_ms, 0.5),
        inputs_ms=percentile(inputs_ms, 0.5),
        total_ms=percentile(total_ms, 0.5),
        p99_ms=percentile(total_ms, 0.99),
    )


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = make_parser("bench.step_time", __doc__)
    parser.add_argument("--sequences", type=counts, default=[256, 1024, 4096], metavar="N,N")
    parser.add_argument("--policy", type=_policies, default=list(SchedulingPolicy), metavar="NAME,NAME")
    parser.add_argument("--steps", type=count, default=100)
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--longest", type=count, default=1, help="tokens of one prompt (as the others)")
    parser.add_argument("--groups", type=count, default=1, help="of layers (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what inputs are for (%(default)s)")
    options = parser.parse_args(argv)
    try:
        device = select_device(options.device).torch_device
    except DeviceError as error:
        parser.error(f"--device: {error}")
    gc.freeze()  # what was imported, as a rank does (cluster/imports.py)
    found = [
        measure(
            policy,
            num,
            options.steps,
            recorded=options.recorded,
            longest=options.longest,
            num_groups=options.groups,
            device=device,
        )
        for num in options.sequences
        for policy in options.policy
    ]
    _print(found)
    times = list(map(asdict, found))
    asked = {name: getattr(options, name) for name in ("steps", "recorded", "longest", "groups", "device")}
    end_with_line("step_time", {**asked, "times": times})


def _policies(text: str) -> list[SchedulingPolicy]:
    if unknown := set(text.split(",")) - {*SchedulingPolicy}:
        raise argparse.ArgumentTypeError(f"{min(unknown)!r}; allowed: {', '.join(SchedulingPolicy)}")
    return [SchedulingPolicy(part) for part in text.split(",")]


def _print(found: Sequence[StepTime]) -> None:
    table = Table("sequences", "policy", "schedule", "update", "inputs", "total", "p99", title="CPU time of a step, ms")
    for time_of in found:
        parts = [time_of.schedule_ms, time_of.update_ms, time_of.inputs_ms, time_of.total_ms, time_of.p99_ms]
        table.add_row(str(time_of.num_seqs), time_of.policy, *(f"{part:.2f}" for part in parts))
    Console(width=100).print(table)


if __name__ == "__main__":
    run_script(main)
