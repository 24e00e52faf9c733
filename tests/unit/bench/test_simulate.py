"""What the policies are for, shown with the real scheduler in virtual time."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from helpers.plans import make_plan
from typer.testing import CliRunner

from bench.errors import BenchConfigError, BenchError
from bench.load.statistics import Distribution
from bench.simulation.jobs import Job, draw_jobs, read_jobs, with_deadlines
from bench.simulation.scheduling_policies import Outcome, Simulation
from bench.simulation.step_cost import StepCost
from cluster.cli import app
from workers.config import SchedulerConfig, SchedulingPolicy
from workers.plan import ScheduledSequence

COST = StepCost()


def simulate(policy: SchedulingPolicy, jobs: list[Job], *, num_seqs: int = 16, num_blocks: int = 8000) -> Outcome:
    config = SchedulerConfig(policy=policy, max_num_seqs=num_seqs, max_waiting=len(jobs))
    return Simulation(jobs, config, COST, num_blocks=num_blocks).run()


def test_a_step_takes_time_for_itself_for_its_tokens_and_for_what_they_see() -> None:
    shares = [ScheduledSequence(0, 99, 1, [5], [], samples=True), ScheduledSequence(1, 16, 40, [], [], samples=False)]
    cost = StepCost(step_s=1000.0, token_s=1.0, context_token_s=1e-3)
    assert cost.duration_s(make_plan(1, [], [], shares)) == pytest.approx(1000 + 41 + (100 + 56) * 1e-3)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """About as many as the slots can serve: a queue forms, and empties."""
    return draw_jobs(600, rate=14.0, seed=3)


@pytest.fixture(scope="module")
def fcfs(jobs: list[Job]) -> Outcome:
    return simulate(SchedulingPolicy.FCFS, jobs)


def test_requests_that_are_made_up_have_heavy_tails(jobs: list[Job]) -> None:
    prompts, outputs = sorted(len(job.prompt) for job in jobs), sorted(job.num_out for job in jobs)
    assert (median(prompts), prompts[-1]) == (pytest.approx(300, rel=0.05), 4000)
    assert (outputs[0], median(outputs), outputs[-1]) == (20, pytest.approx(20 * 2 ** (1 / 1.2), rel=0.05), 2000)
    assert {job.priority for job in jobs} == {0, 1, 2}


def test_the_scheduler_knows_the_next_power_of_two_of_an_output() -> None:
    jobs = [Job(at_s=0.0, prompt=(1,), num_out=num_out) for num_out in (1, 2, 3, 8, 9)]
    assert [job.to_request("a").sampling.max_tokens for job in jobs] == [1, 2, 4, 8, 16]


def test_a_deadline_is_a_multiple_of_the_time_alone_and_two_seconds_away() -> None:
    cost = StepCost(step_s=0.5, token_s=0.25, context_token_s=0.0)
    (job,) = with_deadlines([Job(at_s=10.0, prompt=(1,) * 4, num_out=6)], cost, factors=(3.0,), seed=0)
    assert job.to_request("a").deadline_s == 10 + 2 + 3 * (6 * 0.5 + 4 * 0.25)


@pytest.mark.parametrize("policy", [SchedulingPolicy.MLFQ, SchedulingPolicy.SHORTEST_REMAINING])
def test_short_requests_no_longer_wait_for_long_ones(jobs: list[Job], fcfs: Outcome, policy: SchedulingPolicy) -> None:
    outcome = simulate(policy, jobs)

    assert outcome.completion_s.mean < 0.9 * fcfs.completion_s.mean
    assert outcome.ttft_s.p99 < 0.5 * fcfs.ttft_s.p99
    assert outcome.output_rate == pytest.approx(fcfs.output_rate, rel=0.05)
    assert outcome.num_preemptions > 50
    assert outcome.recomputed_share < 0.01


def test_urgent_requests_are_served_first_under_priority(jobs: list[Job], fcfs: Outcome) -> None:
    outcome = simulate(SchedulingPolicy.PRIORITY, jobs)

    assert outcome.urgent_s is not None
    assert fcfs.urgent_s is not None
    assert outcome.urgent_s < 0.9 * fcfs.urgent_s
    assert outcome.output_rate == pytest.approx(fcfs.output_rate, rel=0.05)


def test_more_requests_meet_their_deadlines_when_the_earliest_goes_first(jobs: list[Job]) -> None:
    pressed = with_deadlines(jobs, COST, factors=(1.2, 20.0), seed=3)
    pressed = [dataclasses.replace(job, at_s=job.at_s * 0.7) for job in pressed]
    pressed = with_deadlines(pressed, COST, factors=(1.5, 20.0), seed=3)

    num_expired = {
        policy: simulate(policy, pressed).num_expired for policy in (SchedulingPolicy.FCFS, SchedulingPolicy.DEADLINE)
    }

    assert num_expired[SchedulingPolicy.DEADLINE] < 0.8 * num_expired[SchedulingPolicy.FCFS]


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_small_pool_costs_little_and_serves_everybody(jobs: list[Job], policy: SchedulingPolicy) -> None:
    outcome = simulate(policy, jobs[:200], num_seqs=32, num_blocks=500)

    assert outcome.num_expired == 0
    assert outcome.recomputed_share < 0.1


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_same_seed_gives_the_same_outcome(policy: SchedulingPolicy) -> None:
    outcomes = [simulate(policy, draw_jobs(100, rate=14.0, seed=5), num_seqs=4, num_blocks=400) for _ in range(2)]

    assert outcomes[0] == outcomes[1]


def test_numbers_of_one_replica_by_hand() -> None:
    jobs = [
        Job(at_s=1.0, prompt=(1,) * 4, num_out=3),  # runs from 1 to 3, to 4.25 and to 5.5
        Job(at_s=1.5, prompt=(2,) * 4, num_out=1, priority=1),  # from 5.5 to 7.5
        Job(at_s=1.625, prompt=(3,) * 4, num_out=1),  # from 7.5 to 9.5
        Job(at_s=1.75, prompt=(4,) * 4, num_out=1, deadline_s=2.0),
    ]
    cost = StepCost(step_s=1.0, token_s=0.25, context_token_s=0.0)

    outcome = Simulation(jobs, SchedulerConfig(max_num_seqs=1), cost, num_blocks=8).run()

    assert outcome.completion_s == Distribution.of([4.5, 6.0, 7.875])
    assert outcome.slowdown == Distribution.of([4.5 / 4, 6.0 / 2, 7.875 / 2])
    assert outcome.ttft_s == Distribution.of([2.0, 6.0, 7.875])
    assert (outcome.urgent_s, outcome.wait_s, outcome.output_rate) == ((4.5 + 7.875) / 2, 5.875, 5 / 8.5)
    assert (outcome.num_expired, outcome.num_preemptions, outcome.recomputed_share, outcome.num_steps) == (1, 0, 0, 5)
    assert Simulation(jobs[1:2], SchedulerConfig(), cost, num_blocks=8).run().urgent_s is None


def test_numbers_of_two_stages_by_hand() -> None:
    """The first plan has both prompts; then each has a request, and enters a stage when the one before has left it."""
    jobs = [Job(at_s=0.0, prompt=(1,), num_out=2), Job(at_s=0.0, prompt=(2,), num_out=2)]
    cost = StepCost(step_s=1.0, token_s=0.5, context_token_s=0.0)

    outcome = Simulation(jobs, SchedulerConfig(), cost, num_blocks=8, num_stages=2).run()

    assert outcome.ttft_s == Distribution.of([2.0, 2.0])
    assert outcome.completion_s == Distribution.of([2 + 1.5, 2 + 0.75 + 1.5])
    assert (outcome.output_rate, outcome.num_steps) == (4 / 4.25, 3)


@pytest.mark.parametrize(
    ("cost", "least", "most"),
    [
        (StepCost(step_s=0.0, token_s=1.0, context_token_s=0.0), 1.9, 2.0),  # what is to be computed is divided
        (StepCost(step_s=1.0, token_s=0.0, context_token_s=0.0), 0.9, 1.0),  # each plan has half, and reads weights
    ],
)
def test_two_stages_give_up_to_twice_the_tokens_and_nobody_gets_them_sooner(
    cost: StepCost, least: float, most: float
) -> None:
    def run(num_requests: int, num_stages: int) -> Outcome:
        jobs = [Job(at_s=0.0, prompt=(1,), num_out=200)] * num_requests
        return Simulation(jobs, SchedulerConfig(), cost, num_blocks=1000, num_stages=num_stages).run()

    assert least < run(32, 2).output_rate / run(32, 1).output_rate <= most
    assert run(1, 2).completion_s == run(1, 1).completion_s


def test_a_request_that_the_context_ends_came_to_its_end() -> None:
    jobs = [Job(at_s=0.0, prompt=(1,) * 29, num_out=1000), Job(at_s=0.0, prompt=(2,) * 4, num_out=1)]
    cost = StepCost(step_s=1.0, token_s=0.25, context_token_s=0.0)

    outcome = Simulation(jobs, SchedulerConfig(max_num_seqs=1), cost, num_blocks=2).run()

    assert outcome.completion_s == Distribution.of([8.25 + 3 * 1.25, 12.0 + 2.0]), "of four tokens, and of one"
    assert outcome.slowdown == Distribution.of([12.0 / (4 + 29 / 4), 14.0 / 2])
    assert outcome.output_rate == 5 / 14.0


def write_trace(file: Path, *times_ms: int | None) -> Path:
    length = {"input_length": 20, "output_length": 2}
    lines = [length if time_ms is None else {**length, "timestamp": time_ms} for time_ms in times_ms]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


@pytest.mark.parametrize(("rate", "gap_s"), [(2.0, 0.5), (None, 0.125)])
def test_requests_of_a_trace_without_times_arrive_at_random(tmp_path: Path, rate: float | None, gap_s: float) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", *[None] * 1000)

    jobs = read_jobs(trace, 2000, rate=rate, seed=1)

    gaps_s = [later.at_s - earlier.at_s for earlier, later in pairwise(jobs)]
    assert len(jobs) == 1000
    assert min(gaps_s) > 0
    assert sum(gaps_s) / len(gaps_s) == pytest.approx(gap_s, rel=0.1)
    assert sum(each > gap_s for each in gaps_s) / len(gaps_s) == pytest.approx(0.3679, abs=0.05)  # 1 / e
    assert jobs == read_jobs(trace, 2000, rate=rate, seed=1)


@pytest.mark.parametrize(("rate", "times_s"), [(None, [0.0, 1.0, 4.0]), (1.5, [0.0, 0.5, 2.0])])
def test_times_of_a_trace_are_stretched_to_the_rate(tmp_path: Path, rate: float | None, times_s: list[float]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 3000, 4000, 7000)
    assert [job.at_s for job in read_jobs(trace, 2000, rate=rate, seed=1)] == pytest.approx(times_s)


@pytest.mark.parametrize("cluster", [[], ["--replicas", "2", "--copies", "2"]])
def test_requests_of_one_time_cannot_be_stretched_to_a_rate(tmp_path: Path, cluster: list[str]) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", 3000, 3000)
    arguments = ["simulate", "--trace", str(trace), *cluster]
    with pytest.raises(BenchConfigError, match="--rate is 5, and all 2 requests of the trace have the same time"):
        CliRunner().invoke(app, [*arguments, "--rate", "5"], catch_exceptions=False)
    for rest in ([], ["--rate", "inf"], ["--rate", "5", "--requests", "1"]):
        assert CliRunner().invoke(app, [*arguments, *rest], catch_exceptions=False).exit_code == 0


def test_requests_that_take_no_time_alone_are_refused() -> None:
    arguments = ["simulate", "--step-ms", "0", "--token-us", "0", "--context-ns", "40", "--requests", "10"]
    with pytest.raises(BenchConfigError, match="--step-ms is 0 and --token-us is 0; allowed: one of them more than 0"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batched-tokens", "31"], "--batched-tokens is 31; allowed: at least --num-seqs, 32"),
        (
            ["--num-blocks", "6"],
            "--num-blocks is 6, and the longest prompt has 100 tokens; allowed: at least 7",
        ),
    ],
)
def test_a_replica_that_is_too_small_is_told_by_its_flag(flags: list[str], message: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 2}\n')
    arguments = ["simulate", "--policy", "fcfs", "--trace", str(trace)]
    with pytest.raises(BenchConfigError, match=f"^{message}$"):
        CliRunner().invoke(app, [*arguments, *flags], catch_exceptions=False)
    enough = ["--batched-tokens", "32", "--num-blocks", "7"]
    assert CliRunner().invoke(app, [*arguments, *enough], catch_exceptions=False).exit_code == 0


def test_requests_of_which_none_meets_its_deadline_are_told() -> None:
    arguments = ["simulate", "--policy", "fcfs", "--requests", "3", "--deadlines", "--context-ns", "1e9"]
    with pytest.raises(BenchError, match="no request came to its end before its deadline; allowed"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_one_request_may_take_less_time_than_the_clock_can_tell() -> None:
    outcome = Simulation(
        [Job(at_s=1e6, prompt=(1,), num_out=1)],
        SchedulerConfig(),
        StepCost(step_s=1e-15, token_s=0.0, context_token_s=0.0),
        num_blocks=8,
    ).run()
    assert outcome.completion_s.max == 0


def test_every_policy_is_simulated_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    CliRunner().invoke(app, ["simulate", "--requests", "5", "--json", str(file)], catch_exceptions=False)
    outcomes = json.loads(file.read_text())["outcomes"]
    assert [outcome["policy"] for outcome in outcomes] == list(SchedulingPolicy)


def test_requests_are_those_that_the_flags_ask_for(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    trace = write_trace(tmp_path / "trace.jsonl", 0, 1000, 2000)

    def simulated(*flags: str) -> dict[str, Any]:
        arguments = ["simulate", "--policy", "fcfs", "--requests", "100", *flags, "--json", str(file)]
        CliRunner().invoke(app, arguments, catch_exceptions=False)
        (outcome,) = json.loads(file.read_text().splitlines()[-1])["outcomes"]
        assert isinstance(outcome, dict)
        return outcome

    assert simulated("--trace", str(trace))["completion_s"]["count"] == 3
    assert simulated("--rate", "0.1")["output_rate"] < 0.1 * simulated()["output_rate"]
    assert simulated("--num-seqs", "1")["num_expired"] == 0 < simulated("--num-seqs", "1", "--deadlines")["num_expired"]


@pytest.mark.parametrize("cluster", [[], ["--replicas", "2", "--network-ms", "5"]])
def test_what_a_replica_is_is_given_in_units_of_people(cluster: list[str], tmp_path: Path) -> None:
    file = tmp_path / "lines"
    arguments = ["simulate", "--requests", "5", "--step-ms", "2", "--token-us", "3", "--context-ns", "4", *cluster]
    arguments += ["--pipeline-parallel", "3"]
    CliRunner().invoke(app, [*arguments, "--json", str(file)], catch_exceptions=False)
    asked = json.loads(file.read_text())["arguments"]
    replica = asked["replica"] if cluster else asked
    assert replica["cost"] == pytest.approx({"step_s": 2e-3, "token_s": 3e-6, "context_token_s": 4e-9}, rel=1e-9)
    assert replica["num_stages"] == 3
    assert replica.get("network_s") == (pytest.approx(5e-3) if cluster else None)


@pytest.mark.parametrize(
    ("flags", "tells"),
    [([], "scheduling_policies.print_outcomes"), (["--replicas", "2"], "routing_policies.print_outcomes")],
)
def test_line_is_kept_where_nobody_reads_the_table(
    flags: list[str], tells: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(f"bench.simulation.{tells}", closed)
    file = tmp_path / "lines"
    with pytest.raises(BrokenPipeError):
        CliRunner().invoke(app, ["simulate", "--requests", "5", *flags, "--json", str(file)], catch_exceptions=False)
    assert len(file.read_text().splitlines()) == 1


def test_an_unknown_policy_is_refused_with_those_allowed() -> None:
    with pytest.raises(BenchConfigError, match="'fcfs,lifo'; allowed, with commas: fcfs, priority"):
        CliRunner().invoke(app, ["simulate", "--policy", "fcfs,lifo"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("flags", "simulation"),
    [([], "scheduling_policies.Simulation"), (["--replicas", "2"], "routing_policies.SimulatedCluster")],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_simulated(
    flags: list[str], simulation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"bench.simulation.{simulation}", None)
    arguments = ["simulate", *flags, "--json", str(tmp_path / "none" / "lines")]
    with pytest.raises(BenchError, match="cannot be written: No such file"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_command_prints_a_table_of_80_columns_and_adds_a_line_of_json(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    arguments = ["simulate", "--requests", "20", "--deadlines", "--num-blocks", "400", "--json", str(file)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "80"})
    assert result.exit_code == 0
    heads, _, *rows = (line.split() for line in result.stdout.splitlines() if line.strip())
    assert heads == ["policy", *SchedulingPolicy]
    assert rows[-1][0] == "CPU/step"
    outcome = json.loads(file.read_text())["outcomes"][0]
    assert ["tokens/s", f"{outcome['output_rate']:.0f}"] in [row[:2] for row in rows]
