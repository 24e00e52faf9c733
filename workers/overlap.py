"""How far steps of one rank overlap: with the thread that starts them, and with the planning of the next."""

from enum import StrEnum


class StepExecution(StrEnum):
    """Who computes a step that was started."""

    QUEUED = "queued"
    """The device by itself (CUDA): to start a step is to queue it there."""
    COMPUTED = "computed"
    """The thread that starts it (a CPU): it is started when somebody waits for it."""
    JOINED = "joined"
    """Other threads of this process begin it where they can, as soon as the step before is done; who waits for it joins
    them and does the rest. Of a CPU rank without others, one step at a time."""


class Lookahead(StrEnum):
    """Whether a step is planned before the tokens that the one before it samples are known.

    Every rank then keeps what was sampled last in each slot.
    """

    NEVER = "never"
    WHILE_REQUESTS_WAIT = "while_requests_wait"
    """Only then is nobody the worse for it: a request that comes while none waits would wait a step longer."""
    ALWAYS = "always"


def choose_execution(*, works_by_itself: bool, world_size: int) -> StepExecution:
    """Return who computes the steps of a rank, by its device and the number of ranks in its group."""
    if works_by_itself:
        return StepExecution.QUEUED
    return StepExecution.JOINED if world_size == 1 else StepExecution.COMPUTED


def choose_lookahead(
    execution: StepExecution, *, async_scheduling: bool | None, num_stages: int, starts_steps: bool
) -> Lookahead:
    """Return when to look ahead, if the settings leave it open where it makes steps faster; never over several stages.

    `starts_steps`: other threads can begin a step, if it is to be joined.
    """
    if num_stages > 1:
        return Lookahead.NEVER
    if async_scheduling is not None:
        return Lookahead.ALWAYS if async_scheduling else Lookahead.NEVER
    if execution is StepExecution.JOINED and starts_steps:
        return Lookahead.WHILE_REQUESTS_WAIT
    return Lookahead.ALWAYS if execution is StepExecution.QUEUED else Lookahead.NEVER
