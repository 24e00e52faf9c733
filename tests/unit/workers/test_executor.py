"""When a rank's step is started: at once where its device works by itself, else when somebody waits for it."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import pytest
from helpers.plans import make_plan

from workers.errors import GroupFailedError
from workers.executor import GroupExecutor, LocalExecutor, RankSteps
from workers.overlap import Lookahead, StepExecution
from workers.plan import ModelOutput, StepPlan
from workers.transport import LeaderLink


class FakeRunner:
    """Notes what is asked of it, by the number of the plan."""

    def __init__(self, execution: StepExecution, lookahead: Lookahead = Lookahead.NEVER) -> None:
        self.execution, self.lookahead = execution, lookahead
        self.events: list[str] = []

    def prepare(self, plan: StepPlan) -> int:
        self.events.append(f"prepare {plan.number}")
        return plan.number

    def start(self, number: int) -> Callable[[], ModelOutput]:
        self.events.append(f"start {number}")

        def finish() -> ModelOutput:
            self.events.append(f"finish {number}")
            return ModelOutput(number, [], [])

        return finish


def steps_of(runner: FakeRunner) -> RankSteps:
    unchecked: Any = runner
    return RankSteps(unchecked)


def plan(number: int) -> StepPlan:
    return make_plan(number, [], [], [])


@pytest.mark.parametrize("lookahead", Lookahead)
def test_device_that_works_by_itself_has_the_next_step_before_the_first_is_waited_for(lookahead: Lookahead) -> None:
    runner = FakeRunner(StepExecution.QUEUED, lookahead)
    steps = steps_of(runner)
    steps.start(plan(0))
    steps.start(plan(1))
    assert runner.events == ["prepare 0", "start 0", "prepare 1", "start 1"]
    assert [steps.finish(), steps.finish()] == [ModelOutput(0, [], []), ModelOutput(1, [], [])]


def test_a_step_that_keeps_the_thread_busy_is_only_prepared_until_it_is_waited_for() -> None:
    runner = FakeRunner(StepExecution.COMPUTED)
    steps = steps_of(runner)
    steps.start(plan(0))
    assert runner.events == ["prepare 0"]
    assert steps.finish() == ModelOutput(0, [], [])
    assert runner.events == ["prepare 0", "start 0", "finish 0"]


def test_later_stages_get_every_step_before_the_oldest_is_waited_for() -> None:
    runner = FakeRunner(StepExecution.COMPUTED)
    steps = steps_of(runner)
    steps.start(plan(0))
    steps.start(plan(1))
    steps.finish()
    assert runner.events[2:] == ["start 0", "start 1", "finish 0"]
    steps.start(plan(2))
    steps.finish()
    assert runner.events[5:] == ["prepare 2", "start 2", "finish 1"]


def test_planned_ahead_a_busy_step_runs_in_a_thread_and_in_order() -> None:
    runner = FakeRunner(StepExecution.COMPUTED, Lookahead.ALWAYS)
    steps = steps_of(runner)
    steps.start(plan(0))
    steps.start(plan(1))
    assert [steps.finish(), steps.finish()] == [ModelOutput(0, [], []), ModelOutput(1, [], [])]
    done = [event for event in runner.events if "prepare" not in event]
    assert done == ["start 0", "finish 0", "start 1", "finish 1"]
    steps.close()


def test_planned_ahead_no_step_begins_after_one_that_failed() -> None:
    """It would wait for ranks that are still in that one, as long as a step may take."""
    runner = FakeRunner(StepExecution.COMPUTED, Lookahead.ALWAYS)
    is_planned = threading.Event()
    begin = runner.start

    def start(number: int) -> Callable[[], ModelOutput]:
        finish = begin(number)
        is_planned.wait(60)
        return finish if number != 1 else lambda: pytest.fail("rank 1 hangs")

    runner.start = start  # type: ignore[method-assign]
    steps = steps_of(runner)
    for number in range(4):
        steps.start(plan(number))
    is_planned.set()
    assert steps.finish() == ModelOutput(0, [], [])
    with pytest.raises(pytest.fail.Exception, match="rank 1 hangs"):
        steps.finish()
    steps.close()
    assert [event for event in runner.events if "start" in event] == ["start 0", "start 1"]


@pytest.mark.parametrize("lookahead", Lookahead)
def test_a_rank_without_others_begins_a_step_when_the_one_before_is_done(lookahead: Lookahead) -> None:
    runner = FakeRunner(StepExecution.JOINED, lookahead)
    steps = steps_of(runner)
    steps.start(plan(0))
    steps.start(plan(1))
    assert runner.events == ["prepare 0", "start 0", "prepare 1"]
    assert steps.finish() == ModelOutput(0, [], [])
    assert runner.events[3:] == ["finish 0", "start 1"]
    steps.close()
    assert runner.events[5:] == ["finish 1"]  # nothing is under way when its memory goes


def test_a_step_that_fails_while_its_rank_is_closed_does_not_hide_why() -> None:
    runner = FakeRunner(StepExecution.JOINED)
    runner.start = lambda number: lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    steps = steps_of(runner)
    steps.start(plan(0))
    steps.close()


class Group:
    """A leader whose rank is a fake, and the link to its other ranks: the last one answers each plan."""

    def __init__(self, *, num_stages: int = 1, lookahead: Lookahead = Lookahead.NEVER) -> None:
        self.sent: list[int] = []
        self.answers: deque[ModelOutput] = deque()
        self.is_dead = False
        self.reasons: list[str | None] = []
        self.left: list[bool] = []
        runner: Any = FakeRunner(StepExecution.QUEUED, lookahead)
        runner.windows, runner.num_host_blocks = (None,), 0
        self.runner, last_rank, link = runner, 2 * (num_stages - 1), cast(LeaderLink, self)
        self.executor = GroupExecutor(
            *(runner, link),
            num_blocks=2,
            num_stages=num_stages,
            last_rank=last_rank,
            step_timeout_s=1.0,
            leave=self.left.append,
        )

    def send_plan(self, plan: StepPlan) -> None:
        self.check()
        self.sent.append(plan.number)

    def receive_output(self, rank: int, timeout_s: float) -> ModelOutput:
        assert (rank, timeout_s) == (2, 1.0)
        self.check()
        return self.answers.popleft()

    def check(self) -> None:
        if self.is_dead:
            raise GroupFailedError("rank 1 died")

    def close(self, reason: str | None) -> None:
        self.reasons.append(reason)


def test_every_rank_has_the_plan_before_the_leader_begins_its_part() -> None:
    group = Group()
    begin = group.runner.start
    group.runner.start = lambda number: pytest.fail("too early") if number not in group.sent else begin(number)
    group.executor.submit(plan(0))
    assert group.executor.collect() == ModelOutput(0, [], []), "the leader itself samples"
    group.executor.close()
    group.executor.close()
    assert (group.reasons, group.left) == ([None], [False]), "it has ended well, and once"


def test_the_output_of_a_pipeline_is_that_of_its_last_stage() -> None:
    group = Group(num_stages=2)
    group.runner.start = lambda number: lambda: None
    group.answers.append(ModelOutput(7, [], []))
    group.executor.submit(plan(7))
    assert group.executor.collect() == ModelOutput(7, [], [])


@pytest.mark.parametrize("fails_in", ["check", "submit", "collect", "own step"])
def test_a_group_that_failed_is_left_as_a_failed_one(fails_in: str) -> None:
    """Also while there is nothing to do; and the leader, which fails for others that are gone, tells of those."""
    group = Group(num_stages=2)
    group.runner.start = lambda number: lambda: 1 // 0 if fails_in == "own step" else None
    group.is_dead = fails_in in ("check", "submit")

    def fail() -> None:
        if fails_in == "check":
            group.executor.check()
        group.executor.submit(plan(0))
        group.is_dead = True
        group.executor.collect()

    with pytest.raises(GroupFailedError, match="rank 1 died"):
        fail()
    group.executor.close()
    assert group.reasons == ["rank 1 died"]
    assert group.left == [True]


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("lookahead", Lookahead)
def test_a_plan_for_each_stage_is_under_way_and_one_more_where_they_are_made_ahead(
    lookahead: Lookahead, num_stages: int
) -> None:
    ahead = lookahead is not Lookahead.NEVER
    executor = Group(num_stages=num_stages, lookahead=lookahead).executor
    assert (executor.max_in_flight, executor.lookahead) == (num_stages + ahead, lookahead)
    runner: Any = FakeRunner(StepExecution.QUEUED, lookahead)
    runner.windows, runner.num_host_blocks = (None,), 0
    assert LocalExecutor(runner, num_blocks=2).max_in_flight == 1 + ahead
