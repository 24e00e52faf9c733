"""What the policies are for, shown with the real scheduler in virtual time."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from bench.errors import BenchConfigError
from bench.simulate import Job, Outcome, Simulation, StepCost, draw_jobs, with_deadlines
from cluster.cli import app
from workers.config import SchedulerConfig, SchedulingPolicy

COST = StepCost()


def simulate(policy: SchedulingPolicy, jobs: list[Job], *, num_seqs: int = 16, num_blocks: int = 8000) -> Outcome:
    config = SchedulerConfig(policy=policy, max_num_seqs=num_seqs, max_waiting=len(jobs))
    return Simulation(jobs, config, COST, num_blocks=num_blocks).run()


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """About as many as the slots can serve: a queue forms, and empties."""
    return draw_jobs(600, rate=14.0, seed=3)


@pytest.fixture(scope="module")
def fcfs(jobs: list[Job]) -> Outcome:
    return simulate(SchedulingPolicy.FCFS, jobs)


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


def test_every_policy_is_simulated_unless_told_otherwise() -> None:
    result = CliRunner().invoke(app, ["simulate", "--requests", "5"], catch_exceptions=False)
    outcomes = json.loads(result.stdout.splitlines()[-1])["outcomes"]
    assert [outcome["policy"] for outcome in outcomes] == list(SchedulingPolicy)


def test_an_unknown_policy_is_refused_with_those_allowed() -> None:
    with pytest.raises(BenchConfigError, match="'fcfs,lifo'; allowed, with commas: fcfs, priority"):
        CliRunner().invoke(app, ["simulate", "--policy", "fcfs,lifo"], catch_exceptions=False)


def test_command_prints_a_table_and_one_line_of_json() -> None:
    arguments = ["simulate", "--requests", "20", "--policy", "fcfs,mlfq", "--deadlines", "--num-blocks", "400"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    *table, line = result.stdout.splitlines()
    assert any("mlfq" in row for row in table)
    assert [outcome["policy"] for outcome in json.loads(line)["outcomes"]] == ["fcfs", "mlfq"]
