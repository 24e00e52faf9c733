"""Routing policies compared over a whole simulated cluster: `weft simulate --replicas N`.

weft simulate --replicas 16                                        conversations with shared prefixes, made by seed
weft simulate --replicas 16 --trace mooncake_conversation.jsonl.gz --rate 10
weft simulate --replicas 4 --autoscale 2:32 --fail 60:1 --router-policy prefix_affinity

What runs is in cluster.py; this file makes the sessions and tells what became of them.
"""

import dataclasses
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.errors import BenchConfigError
from bench.load.calls import Lengths, Session
from bench.load.dataset_files import TraceLimits, read_trace
from bench.load.datasets import DatasetKind, DatasetOptions, make_sessions, take_calls
from bench.load.flag_groups import ClusterFlags
from bench.load.report import warn
from bench.load.statistics import Distribution
from bench.result_line import append_line, check_line_file
from bench.simulation.cluster import ClusterOutcome, ClusterSettings, SimulatedCluster
from bench.simulation.controller import Autoscaling, FleetSettings
from bench.simulation.jobs import draw_times, stretch
from bench.simulation.quiet_loggers import only_errors
from bench.simulation.replica import ReplicaSettings
from bench.simulation.report import outcomes_line, print_outcomes
from bench.simulation.scheduling_policies import Options
from cluster.autoscaler import AutoscalerConfig
from cluster.cli_flags import given
from router.config import AdmissionConfig, PolicyName, RouterConfig
from workers.config import SchedulerConfig

_VOCAB_SIZE = 32_000
_MAX_TOKENS = 2**31  # of a replica, as its messages to routers hold them
_DEFAULT_RATE = 2.0
"""Requests a second for each replica, without a trace's times."""
_CONVERSATIONS = DatasetOptions(
    kind=DatasetKind.SESSIONS,
    inputs=Lengths(low=32, high=512),
    outputs=Lengths(low=32, high=256),
    prefix_tokens=1024,
    num_prefixes=16,
    turns=Lengths(low=2, high=6),
    think_s=5.0,
)
"""The requests where there is no trace."""
_MEAN_TURNS = 4
_LARGEST_SHIFT = 0.01
"""Largest shift between copies of a trace, as a part of its duration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Which requests on which cluster; bench/load/cli.py has the flags."""

    trace: Path | None
    limits: TraceLimits
    num_copies: int
    """Copies of the trace, side by side, with other prompts in each: clients that share nothing with each other."""
    num_requests: int
    """Requests of each copy."""
    rate: float | None
    """Requests a second, of all copies together; None: those of the trace, or 2 a replica where it has no times."""
    policies: tuple[PolicyName, ...]
    num_routers: int
    max_in_flight: int
    """Most requests in flight on each router."""
    fleet: FleetSettings
    replica: ReplicaSettings
    seed: int


def simulate_cluster(options: ClusterOptions, *, json_file: Path | None) -> None:
    """Run every policy on the same sessions; print a table, and add a line of JSON to the file.

    Raises BenchConfigError, and BenchError when the file cannot be written.
    """
    if json_file is not None:
        check_line_file(json_file)
    with only_errors("workers.roster", "router.route"):  # the first warns of each preemption
        outcomes = [
            SimulatedCluster(make_arrivals(options), _settings(options, policy)).run() for policy in options.policies
        ]
    if json_file is not None:  # first: whoever reads the table may have closed the pipe
        append_line(outcomes_line(options, outcomes), json_file)
    console = Console()
    print_outcomes(console, [_cells(each) for each in outcomes])
    for warning in _idle_failures(options, outcomes):
        warn(console, warning)


def parse_cluster(options: Options, flags: ClusterFlags) -> ClusterOptions:
    """Return what the flags of `weft simulate` mean for a cluster. Raises BenchConfigError."""
    if options.has_deadlines or len(options.policies) > 1:
        raise BenchConfigError("--deadlines, or more than one --policy; allowed: without --replicas")
    if options.trace is None and (flags.copies != 1 or flags.length_scale != 1):
        raise BenchConfigError("--copies, --length-scale: allowed with --trace")
    if options.num_blocks * flags.block_size >= _MAX_TOKENS:
        raise BenchConfigError(
            f"--num-blocks {options.num_blocks} of --block-size {flags.block_size}; allowed: fewer than 2**31 tokens"
        )
    assert flags.replicas is not None
    autoscaling = _parse_autoscaling(flags)
    most_replicas = flags.replicas if autoscaling is None else autoscaling.max_replicas
    scheduler = SchedulerConfig(
        policy=options.policies[0],
        max_num_seqs=options.num_seqs,
        max_num_batched_tokens=options.batched_tokens,
        promote_after_s=options.promote_after_s,
    )
    return ClusterOptions(
        trace=options.trace,
        limits=TraceLimits(scale=flags.length_scale),
        num_copies=flags.copies,
        num_requests=options.num_requests,
        rate=options.rate,
        policies=_parse_policies(flags.router_policy),
        num_routers=flags.routers,
        max_in_flight=flags.max_in_flight,
        fleet=FleetSettings(
            replicas=flags.replicas,
            autoscaling=autoscaling,
            start_s=flags.start_time,
            failures=tuple(_parse_failure(each, most_replicas) for each in flags.fail or ()),
        ),
        replica=ReplicaSettings(
            scheduler=scheduler,
            cost=options.cost,
            num_blocks=options.num_blocks,
            num_stages=options.num_stages,
            block_size=flags.block_size,
            network_s=flags.network_ms / 1e3,
        ),
        seed=options.seed,
    )


def _parse_policies(names: str) -> tuple[PolicyName, ...]:
    try:
        return tuple(PolicyName(name) for name in names.split(","))
    except ValueError:
        raise BenchConfigError(f"--router-policy is {names!r}; allowed, with commas: {', '.join(PolicyName)}") from None


def _parse_autoscaling(flags: ClusterFlags) -> Autoscaling | None:
    text = flags.autoscale
    if text is None:
        if given(flags).keys() & {"target_requests", "upscale_delay", "downscale_delay"}:
            raise BenchConfigError("--target-requests, --upscale-delay, --downscale-delay: allowed with --autoscale")
        return None
    least, _, most = text.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise BenchConfigError(f"--autoscale is {text!r}; allowed: least:most replicas, such as 2:32, at least 1")
    assert flags.replicas is not None
    if not int(least) <= flags.replicas <= int(most):
        raise BenchConfigError(f"--replicas is {flags.replicas}; allowed with this --autoscale: {least} to {most}")
    rules = AutoscalerConfig(
        target_requests=flags.target_requests,
        upscale_delay_s=flags.upscale_delay,
        downscale_delay_s=flags.downscale_delay,
    )
    return Autoscaling(rules=rules, min_replicas=int(least), max_replicas=int(most))


def _parse_failure(text: str, most_replicas: int) -> tuple[float, int]:
    seconds, _, replica = text.partition(":")
    try:
        time_s, number = float(seconds), int(replica)
    except ValueError:
        time_s, number = -1.0, -1
    if not (0 <= time_s < 1e9 and 0 <= number < most_replicas):
        allowed = f"seconds:replica, such as 60:0; replicas are 0 to {most_replicas - 1}"
        raise BenchConfigError(f"--fail is {text!r}; allowed: {allowed}")
    return time_s, number


def _settings(options: ClusterOptions, policy: PolicyName) -> ClusterSettings:
    admission = AdmissionConfig(max_in_flight=options.max_in_flight)
    return ClusterSettings(
        fleet=options.fleet,
        replica=options.replica,
        router=RouterConfig(control="simulated", policy=policy, admission=admission),
        num_routers=options.num_routers,
        seed=options.seed,
    )


# The requests


def make_arrivals(options: ClusterOptions) -> Iterator[Session]:
    """Return sessions in the order of their times, made as they are wanted."""
    if options.trace is None:
        return _conversations(options.num_requests, _rate(options), options.seed)
    return _copies(options, options.trace)


def _rate(options: ClusterOptions) -> float:
    """Return how many requests come a second, where no trace says when."""
    return options.rate or _DEFAULT_RATE * options.fleet.replicas


def _conversations(num_requests: int, rate: float, seed: int) -> Iterator[Session]:
    sessions = make_sessions(_CONVERSATIONS, vocab_size=_VOCAB_SIZE, seed=seed)
    return _at_times(draw_times(rate / _MEAN_TURNS, random.Random(seed)), take_calls(sessions, num_requests))


def _copies(options: ClusterOptions, trace: Path) -> Iterator[Session]:
    def read(number: int, limits: TraceLimits) -> Iterator[Session]:
        sessions = read_trace(trace, limits=limits, vocab_size=_VOCAB_SIZE, seed=options.seed + number)
        return itertools.islice(sessions, options.num_requests)

    recorded_s = [session.at_s for session in read(0, TraceLimits(max_input_tokens=1)) if session.at_s is not None]
    times_s = _recorded_times(options, recorded_s) if recorded_s else _drawn_times(options)
    copies = [_at_times(each, read(number, options.limits)) for number, each in enumerate(times_s)]
    return heapq.merge(*copies, key=lambda session: session.at_s or 0.0)


def _recorded_times(options: ClusterOptions, recorded_s: Sequence[float]) -> list[list[float]]:
    """Return the times of the trace for each copy, from 0 on, a little later in all copies but the first."""
    largest_shift_s = _LARGEST_SHIFT * (recorded_s[-1] - recorded_s[0])
    rng = random.Random(options.seed)
    shifts_s = [0.0, *(rng.uniform(0, largest_shift_s) for _ in range(options.num_copies - 1))]
    return [stretch(recorded_s, options.rate, num_copies=options.num_copies, shift_s=shift_s) for shift_s in shifts_s]


def _drawn_times(options: ClusterOptions) -> list[Iterator[float]]:
    """Return random times for each copy."""
    rate = _rate(options) / options.num_copies
    return [draw_times(rate, random.Random(options.seed + number)) for number in range(options.num_copies)]


def _at_times(times_s: Iterable[float], sessions: Iterable[Session]) -> Iterator[Session]:
    return (dataclasses.replace(session, at_s=at_s) for at_s, session in zip(times_s, sessions, strict=False))


# What is told


def _cells(outcome: ClusterOutcome) -> dict[str, str]:
    completion = outcome.completion_s
    (ttft_p50, ttft_p99), (tpot_p50, tpot_p99) = _shown(outcome.ttft_s, "s", 1.0), _shown(outcome.tpot_s, "ms", 1e3)
    last = str(outcome.last_replicas)
    return {
        "policy": outcome.policy,
        "tokens/s": f"{outcome.output_rate:.0f}",
        "TTFT p50": ttft_p50,
        "TTFT p99": ttft_p99,
        "TPOT p50": tpot_p50,
        "TPOT p99": tpot_p99,
        "completion mean": "-" if completion is None else f"{completion.mean:.2f} s",
        "on time": f"{outcome.on_time_share:.1%}",
        "prefix hits": f"{outcome.hit_share:.1%}",
        "busy": f"{outcome.busy_share:.0%}",
        "busiest": f"x {outcome.busy_imbalance:.2f}",
        "most requests": f"x {outcome.load_imbalance:.2f}",
        "replica-seconds": f"{outcome.replica_s:.0f}",
        "replicas": f"{outcome.most_replicas}, {last} at the end" if outcome.scalings else last,
        "moved": str(outcome.num_moves),
        "ended otherwise": ", ".join(f"{number} {end}" for end, number in outcome.ends.items() if end != "stop") or "0",
    }


def _shown(times: Distribution | None, unit: str, factor: float) -> tuple[str, str]:
    """Return p50 and p99."""
    if times is None:
        return "-", "-"
    return f"{times.p50 * factor:.2f} {unit}", f"{times.p99 * factor:.2f} {unit}"


def _idle_failures(options: ClusterOptions, outcomes: Sequence[ClusterOutcome]) -> Iterator[str]:
    """Yield a warning of each failure that changed nothing."""
    for time_s, number in dict.fromkeys(options.fleet.failures):
        policies = [each.policy for each in outcomes if (time_s, number) in each.idle_failures]
        if policies:
            why = "the load had ended, or no such replica was READY"
            yield f"--fail {time_s:g}:{number} did nothing under {', '.join(policies)}: {why}"
