"""Carries out plans: on this process's rank alone, or on it and the group's other ranks by transport.py."""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from workers.errors import GroupFailedError
from workers.model_runner import ModelRunner, StepWork
from workers.overlap import Lookahead, StepExecution
from workers.plan import ModelOutput, StepPlan
from workers.transport import LeaderLink

logger = logging.getLogger(__name__)

_EVIDENCE_S = 1.0
"""How long to wait for the other ranks to say why a step failed here."""
_EVIDENCE_STEP_S = 0.02


class Executor(Protocol):
    """All ranks of a group, as the engine sees them. One thread."""

    num_blocks: int
    """Blocks of the KV cache, the same on every rank."""
    windows: tuple[int | None, ...]
    """Sliding window of each group of layers that has a block table, as in LayerGroups."""
    num_host_blocks: int
    """Slots of the host tier of the cache, the same on every rank."""
    max_in_flight: int
    """Plans to submit before the first is collected, so that no stage waits."""
    lookahead: Lookahead
    """Whether, and when, a plan may begin with tokens that the plan before still samples."""

    def submit(self, plan: StepPlan) -> None:
        """Start a step. GroupFailedError."""

    def collect(self) -> ModelOutput:
        """Wait for the oldest step not collected. GroupFailedError when a rank died, hung or diverged."""

    def check(self) -> None:
        """Raise GroupFailedError when a rank is gone; for moments when there is nothing to collect."""

    def close(self) -> None:
        """End all ranks of the group and free this one's."""


class LocalExecutor:
    """A group of one rank."""

    def __init__(self, runner: ModelRunner, *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.windows = runner.windows
        self.num_host_blocks = runner.num_host_blocks
        self.lookahead = runner.lookahead
        self.max_in_flight = 1 + (runner.lookahead is not Lookahead.NEVER)
        self._steps = RankSteps(runner)
        self._numbers: deque[int] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Start the step. GroupFailedError."""
        try:
            self._steps.start(plan)
        except Exception as error:
            raise _failed(plan.number, error) from error
        self._numbers.append(plan.number)

    def collect(self) -> ModelOutput:
        """Wait for the oldest output not collected. GroupFailedError."""
        number = self._numbers.popleft()
        try:
            output = self._steps.finish()
        except Exception as error:
            raise _failed(number, error) from error
        assert output is not None, "a single rank samples"
        return output

    def check(self) -> None:
        """Do nothing: there is no other rank that could be gone."""

    def close(self) -> None:
        """End the rank's thread."""
        self._steps.close()


class GroupExecutor:
    """The leader's rank in this process, and the others. Owns the link and closes it."""

    def __init__(
        self,
        runner: ModelRunner,
        link: LeaderLink,
        *,
        num_blocks: int,
        num_stages: int,
        last_rank: int,
        step_timeout_s: float,
        leave: Callable[[bool], None],
    ) -> None:
        """`last_rank` is the one that samples, 0 for this one; `leave` ends this process's part in the group, and is
        told whether that has failed.
        """
        self.num_blocks = num_blocks
        self.windows = runner.windows
        self.num_host_blocks = runner.num_host_blocks
        self.lookahead = runner.lookahead
        self.max_in_flight = num_stages + (runner.lookahead is not Lookahead.NEVER)
        self._steps = RankSteps(runner)
        self._link = link
        self._last_rank = last_rank
        self._step_timeout_s = step_timeout_s
        self._leave = leave
        self._failure: GroupFailedError | None = None
        self._is_closed = False

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank and start this rank's part of it. GroupFailedError."""
        try:
            self._link.send_plan(plan)
            self._steps.start(plan)
        except Exception as error:
            self._failure = explain(self._link, error)
            raise self._failure from error

    def collect(self) -> ModelOutput:
        """Wait for the oldest output not collected. GroupFailedError."""
        try:
            output = self._steps.finish()
        except Exception as error:
            self._failure = explain(self._link, error)
            raise self._failure from error
        try:
            return output or self._link.receive_output(self._last_rank, self._step_timeout_s)
        except GroupFailedError as failure:
            self._failure = failure
            raise

    def check(self) -> None:
        """Raise GroupFailedError when a rank is gone."""
        try:
            self._link.check()
        except GroupFailedError as failure:
            self._failure = failure
            raise

    def close(self) -> None:
        """End the other ranks, with the reason if the group failed, and leave."""
        if not self._is_closed:
            self._is_closed = True
            self._link.close(None if self._failure is None else str(self._failure))
            self._steps.close()
            self._leave(self._failure is not None)


class RankSteps:
    """This process's rank: steps are started in order, and finished in the same order.

    A QUEUED step is started at once, and a JOINED one as soon as the one before is done. A COMPUTED one is done when
    somebody waits for it, in the thread that waits; or in one of its own, where the next step is planned meanwhile.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._is_queued = runner.execution is StepExecution.QUEUED
        self._is_joined = runner.execution is StepExecution.JOINED
        needs_thread = runner.execution is StepExecution.COMPUTED and runner.lookahead is not Lookahead.NEVER
        self._thread = ThreadPoolExecutor(1, "steps") if needs_thread else None
        self._latest: Future[ModelOutput | None] | None = None  # in the thread
        self._prepared: deque[StepWork] = deque()
        self._started: deque[Callable[[], ModelOutput | None]] = deque()

    def start(self, plan: StepPlan) -> None:
        """Prepare a step, and start it after those before it, or have it ready for that."""
        work = self._runner.prepare(plan)
        if self._thread is not None:
            self._latest = self._thread.submit(self._run, work, self._latest)
            self._started.append(self._latest.result)
        elif self._is_queued:
            self._started.append(self._runner.start(work))
        else:
            self._prepared.append(work)
            self._start_one()

    def finish(self) -> ModelOutput | None:
        """Wait for the oldest step not finished; its output where this rank samples. Raises what the step raised."""
        while self._prepared and not self._is_joined:  # the next stage waits for those after the oldest too
            self._started.append(self._runner.start(self._prepared.popleft()))
        output = self._started.popleft()()
        self._start_one()
        return output

    def close(self) -> None:
        """Wait for the steps that are under way, and start no other."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        while self._is_joined and self._started:
            try:
                self._started.popleft()()
            except Exception as error:  # nobody waits for it, and who closes may have another reason to tell
                logger.debug("the last step failed: %r", error)

    def _run(self, work: StepWork, before: Future[ModelOutput | None] | None) -> ModelOutput | None:
        if before is not None:
            before.result()  # where it failed others may wait in it, and this one would wait for them
        return self._runner.start(work)()

    def _start_one(self) -> None:
        if self._is_joined and self._prepared and not self._started:
            self._started.append(self._runner.start(self._prepared.popleft()))


def _failed(number: int, error: Exception) -> GroupFailedError:
    """Fail the group: whatever goes wrong in a step, cache and slots can no longer be trusted."""
    return GroupFailedError(f"the model failed in step {number}: {error!r}")


def explain(link: LeaderLink, error: Exception) -> GroupFailedError:
    """Return why the group failed: what other ranks tell within a moment, else the error seen here."""
    deadline = time.monotonic() + _EVIDENCE_S
    while time.monotonic() < deadline:
        try:
            link.check()
        except GroupFailedError as reason:
            return reason
        time.sleep(_EVIDENCE_STEP_S)
    return error if isinstance(error, GroupFailedError) else GroupFailedError(f"rank 0 failed: {error!r}")
