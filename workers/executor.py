"""Carries out plans: on this process's rank alone, or on it and the group's other ranks by transport.py."""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from workers.errors import GroupFailedError
from workers.model_runner import ModelRunner
from workers.plan import ModelOutput, StepPlan
from workers.transport import LeaderLink

_EVIDENCE_S = 1.0
"""How long to wait for the other ranks to say why a step failed here."""
_EVIDENCE_STEP_S = 0.02


class Executor(Protocol):
    """All ranks of a group, as the engine sees them. One thread."""

    num_blocks: int
    """Of the KV cache, the same on every rank."""
    windows: tuple[int | None, ...]
    """Of the groups of layers that have a block table, as in LayerGroups."""
    max_in_flight: int
    """Plans to submit before the first is collected, so that no stage waits."""

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

    max_in_flight = 1

    def __init__(self, runner: ModelRunner, *, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.windows = runner.windows
        self._runner = runner
        self._outputs: deque[ModelOutput] = deque()

    def submit(self, plan: StepPlan) -> None:
        """Run the step. GroupFailedError."""
        try:
            output = self._runner.run(plan)
        except Exception as error:  # whatever it was, the cache and the slots can no longer be trusted
            raise GroupFailedError(f"the model failed in step {plan.number}: {error!r}") from error
        assert output is not None, "a single rank samples"
        self._outputs.append(output)

    def collect(self) -> ModelOutput:
        """Return the oldest output not collected."""
        return self._outputs.popleft()

    def check(self) -> None:
        """Nobody else is there to be gone."""

    def close(self) -> None:
        """Nothing is held beyond this object."""


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
        leave: Callable[[], None],
    ) -> None:
        """`last_rank` is the one that samples, 0 for this one; `leave` ends this process's part in the group."""
        self.num_blocks = num_blocks
        self.windows = runner.windows
        self.max_in_flight = num_stages
        self._runner = runner
        self._link = link
        self._last_rank = last_rank
        self._step_timeout_s = step_timeout_s
        self._leave = leave
        self._outputs: deque[ModelOutput] = deque()
        self._numbers: deque[int] = deque()
        self._failure: GroupFailedError | None = None
        self._is_closed = False

    def submit(self, plan: StepPlan) -> None:
        """Send the plan to every rank and do this rank's part of it. GroupFailedError."""
        try:
            self._link.send_plan(plan)
            output = self._runner.run(plan)
        except Exception as error:
            self._failure = explain(self._link, error)
            raise self._failure from error
        self._numbers.append(plan.number)
        if output is not None:
            self._outputs.append(output)

    def collect(self) -> ModelOutput:
        """Wait for the oldest output not collected. GroupFailedError."""
        number = self._numbers.popleft()
        try:
            if self._last_rank == 0:
                return self._outputs.popleft()
            output = self._link.receive_output(self._last_rank, self._step_timeout_s)
            if output.number != number:
                raise GroupFailedError(
                    f"rank {self._last_rank} answered to step {output.number}; expected: step {number}"
                )
            return output
        except GroupFailedError as failure:
            self._failure = failure
            raise

    def check(self) -> None:
        """Raise GroupFailedError when a rank is gone."""
        self._link.check()

    def close(self) -> None:
        """End the other ranks, with the reason if the group failed, and leave."""
        if not self._is_closed:
            self._is_closed = True
            self._link.close(None if self._failure is None else str(self._failure))
            self._leave()


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
