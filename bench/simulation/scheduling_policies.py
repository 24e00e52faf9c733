"""Scheduling policies compared in virtual time: the real scheduler, and steps that take as long as a formula says.

weft simulate                                       requests with heavy tails, made by seed
weft simulate --trace azure_2023_conv.jsonl.gz --rate 2.6 --requests 2000
weft simulate --policy fcfs,mlfq --num-seqs 16 --num-blocks 800
weft simulate --pipeline-parallel 4 --rate 20
"""

import dataclasses
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.errors import BenchConfigError, BenchError
from bench.load.statistics import Distribution
from bench.result_line import append_line, check_line_file
from bench.simulation.jobs import DEFAULT_RATE, Job, draw_jobs, read_jobs, with_deadlines
from bench.simulation.quiet_loggers import only_errors
from bench.simulation.report import outcomes_line, print_outcomes
from bench.simulation.step_cost import Pipeline, StepCost
from workers.config import SchedulerConfig, SchedulingPolicy
from workers.kv_cache_manager import KVCacheManager
from workers.plan import ModelOutput, StepPlan
from workers.request import FinishReason, RequestId
from workers.scheduler import Scheduler

ALL_POLICIES = ",".join(SchedulingPolicy)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of all requests under one policy."""

    policy: SchedulingPolicy
    completion_s: Distribution
    """From arrival to the end, of those that were not given up."""
    slowdown: Distribution
    """The same over the time that the request takes alone."""
    urgent_s: float | None
    """Mean completion of priority 0; None: none of it was completed."""
    ttft_s: Distribution
    wait_s: float
    """The longest time, all stays together, that any request waited: in the queue, or in a slot for a step."""
    output_rate: float
    """Tokens per second from the first arrival to the last end."""
    num_expired: int
    num_preemptions: int
    recomputed_share: float
    """Of all computed tokens: the preemption tax."""
    num_steps: int
    cpu_s: float = dataclasses.field(compare=False)
    """CPU time of `schedule` and `update`."""


class Simulation:
    """One replica's step loop without ranks. Two runs of equal jobs and settings give equal outcomes.

    As in the engine, requests come in between two steps, and as many plans are in flight as there are stages.
    """

    def __init__(
        self, jobs: Sequence[Job], config: SchedulerConfig, cost: StepCost, *, num_blocks: int, num_stages: int = 1
    ) -> None:
        self._config = config
        self._cost = cost
        max_context = num_blocks * _BLOCK_SIZE + 1
        self._jobs = {RequestId(str(i)): _within(max_context, job) for i, job in enumerate(jobs)}
        self._coming = deque(self._jobs.items())
        self.scheduler = Scheduler(
            config,
            KVCacheManager.with_pool(num_blocks, block_size=_BLOCK_SIZE, hash_key=b"simulation"),
            max_context=max_context,
            eos_token_ids=frozenset(),
            max_in_flight=num_stages,
        )
        self._pipeline = Pipeline(num_stages)
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # and when it is done
        self.now_s = 0.0
        self._cpu_s = 0.0
        self._num_steps = self._num_computed = self._num_expired = 0
        self._waited_s = 0.0
        self._ends_s: dict[RequestId, float] = {}
        self._first_tokens_s: dict[RequestId, float] = {}

    def run(self) -> Outcome:
        """Serve all requests to their end. Raises BenchError when all of them expired."""
        while self._coming or self.scheduler.has_unfinished:
            self.step()
        return self._summarize()

    def step(self) -> None:
        """Let requests arrive, then do the oldest step, or wait for the next arrival where there is nothing to do."""
        scheduler = self.scheduler
        while self._coming and self._coming[0][1].at_s <= self.now_s:
            name, job = self._coming.popleft()
            scheduler.add(job.to_request(name), job.at_s)
        self._num_expired += len(scheduler.expire(self.now_s))
        start_s = time.process_time()
        while (plan := scheduler.schedule(self.now_s)) is not None:
            *_, end_s = self._pipeline.enter(self.now_s, self._cost.duration_s(plan))
            self._in_flight.append((plan, end_s))
        self._cpu_s += time.process_time() - start_s
        if self._in_flight:
            self._land()
        elif self._coming:
            self.now_s = self._coming[0][1].at_s
        else:
            assert not scheduler.has_unfinished, "requests wait for nothing"

    def _land(self) -> None:
        plan, self.now_s = self._in_flight.popleft()
        self._num_steps += 1
        self._num_computed += sum(plan.scheduled.nums_tokens)
        slots = plan.scheduled.sampling_slots
        output = ModelOutput(plan.number, slots, [1] * len(slots))
        start_s = time.process_time()
        outputs = self.scheduler.update(plan, output, self.now_s)
        self._cpu_s += time.process_time() - start_s
        for token in outputs:
            sequence = token.sequence
            name = sequence.request_id
            self._first_tokens_s.setdefault(name, self.now_s)
            if sequence.num_output_tokens < self._jobs[name].num_out:
                continue
            if sequence.finish is None:
                self.scheduler.finish(sequence, FinishReason.STOP, self.now_s)
            self._ends_s[name] = self.now_s
            self._waited_s = max(self._waited_s, sequence.waited_s)

    def _summarize(self) -> Outcome:
        jobs, counters = self._jobs, self.scheduler.counters
        completions_s = {name: end_s - jobs[name].at_s for name, end_s in self._ends_s.items()}
        urgent = [completion_s for name, completion_s in completions_s.items() if jobs[name].priority == 0]
        num_out = sum(jobs[name].num_out for name in self._ends_s)
        return Outcome(
            policy=self._config.policy,
            completion_s=_distribution(completions_s.values()),
            slowdown=_distribution(
                completion_s / jobs[name].alone_s(self._cost) for name, completion_s in completions_s.items()
            ),
            urgent_s=math.fsum(urgent) / len(urgent) if urgent else None,
            ttft_s=_distribution(at_s - jobs[name].at_s for name, at_s in self._first_tokens_s.items()),
            wait_s=self._waited_s,
            output_rate=num_out / max(1e-9, self.now_s - min(job.at_s for job in jobs.values())),
            num_expired=self._num_expired,
            num_preemptions=counters.num_preemptions,
            recomputed_share=counters.num_recomputed_tokens / self._num_computed,
            num_steps=self._num_steps,
            cpu_s=self._cpu_s,
        )


def _within(max_context: int, job: Job) -> Job:
    """The request with the output that it gets where the context ends before it does; a prompt too long is refused."""
    return dataclasses.replace(job, num_out=max(1, min(job.num_out, max_context - len(job.prompt))))


def _distribution(values: Iterable[float]) -> Distribution:
    found = Distribution.of(values)
    if found is None:
        raise BenchError("no request came to its end before its deadline; allowed: costs with which one does")
    return found


# The command


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Which requests on which replica; bench/load/cli.py has the flags."""

    trace: Path | None
    num_requests: int
    rate: float | None
    """Requests per second; None: those of the trace, or 8 where it has no times."""
    policies: tuple[SchedulingPolicy, ...]
    num_seqs: int
    num_blocks: int
    num_stages: int
    batched_tokens: int
    promote_after_s: float
    has_deadlines: bool
    cost: StepCost
    seed: int


def simulate(options: Options, *, json_file: Path | None) -> None:
    """Run every policy on the same requests; print a table, and add a line of JSON to the file.

    Raises BenchConfigError, and BenchError when no request meets its deadline or the file cannot be written.
    """
    _check_cost(options.cost)
    if options.batched_tokens < options.num_seqs:
        allowed = f"at least --num-seqs, {options.num_seqs}"
        raise BenchConfigError(f"--batched-tokens is {options.batched_tokens}; allowed: {allowed}")
    if json_file is not None:
        check_line_file(json_file)
    jobs = _jobs(options)
    _check_room(jobs, options.num_blocks)
    with only_errors("workers.roster"):  # it warns of each preemption
        outcomes = [_run(jobs, policy, options) for policy in options.policies]
    if json_file is not None:  # first: whoever reads the table may have closed the pipe
        append_line(outcomes_line(options, outcomes), json_file)
    print_outcomes(Console(), [_cells(each) for each in outcomes])


def parse_policies(names: str) -> tuple[SchedulingPolicy, ...]:
    """Raises BenchConfigError."""
    try:
        return tuple(SchedulingPolicy(name) for name in names.split(","))
    except ValueError:
        raise BenchConfigError(f"--policy is {names!r}; allowed, with commas: {', '.join(SchedulingPolicy)}") from None


def _run(jobs: Sequence[Job], policy: SchedulingPolicy, options: Options) -> Outcome:
    config = SchedulerConfig(
        policy=policy,
        max_num_seqs=options.num_seqs,
        max_num_batched_tokens=options.batched_tokens,
        max_waiting=len(jobs),
        promote_after_s=options.promote_after_s,
    )
    return Simulation(jobs, config, options.cost, num_blocks=options.num_blocks, num_stages=options.num_stages).run()


def _check_cost(cost: StepCost) -> None:
    """Raises BenchConfigError where a request takes no time alone: it would have no slowdown."""
    if not cost.step_s + cost.token_s > 0:
        seen = f"--step-ms is {cost.step_s * 1e3:g} and --token-us is {cost.token_s * 1e6:g}"
        raise BenchConfigError(f"{seen}; allowed: one of them more than 0")


def _check_room(jobs: Sequence[Job], num_blocks: int) -> None:
    """Raises BenchConfigError where a prompt is longer than all blocks."""
    longest = max(len(job.prompt) for job in jobs)
    if longest > num_blocks * _BLOCK_SIZE:
        seen = f"--num-blocks is {num_blocks}, and the longest prompt has {longest} tokens"
        raise BenchConfigError(f"{seen}; allowed: at least {-(-longest // _BLOCK_SIZE)}")


def _jobs(options: Options) -> list[Job]:
    if options.trace is None:
        jobs = draw_jobs(options.num_requests, rate=options.rate or DEFAULT_RATE, seed=options.seed)
    else:
        jobs = read_jobs(options.trace, options.num_requests, rate=options.rate, seed=options.seed)
    if options.has_deadlines:
        jobs = with_deadlines(jobs, options.cost, factors=(2.0, 5.0, 20.0), seed=options.seed)
    return jobs


def _cells(outcome: Outcome) -> dict[str, str]:
    completion, ttft = outcome.completion_s, outcome.ttft_s
    return {
        "policy": outcome.policy,
        "completion mean": f"{completion.mean:.2f} s",
        "completion p50": f"{completion.p50:.2f} s",
        "completion p99": f"{completion.p99:.2f} s",
        "slowdown mean": f"{outcome.slowdown.mean:.1f}",
        "urgent mean": "-" if outcome.urgent_s is None else f"{outcome.urgent_s:.2f} s",
        "TTFT mean": f"{ttft.mean:.2f} s",
        "TTFT p99": f"{ttft.p99:.2f} s",
        "longest wait": f"{outcome.wait_s:.2f} s",
        "tokens/s": f"{outcome.output_rate:.0f}",
        "expired": str(outcome.num_expired),
        "preempted": str(outcome.num_preemptions),
        "recomputed": f"{outcome.recomputed_share:.1%}",
        "CPU/step": f"{outcome.cpu_s / outcome.num_steps * 1e3:.2f} ms",
    }
