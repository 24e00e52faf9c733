"""How long a step takes in a simulation: by a formula, and behind others in the stages of a pipeline."""

from dataclasses import dataclass

from workers.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """How long a step takes: reading the weights, computing its tokens, reading the keys and values that they see.

    The defaults are about those of 8 B parameters in bf16 on one H100.
    """

    step_s: float = 8e-3
    token_s: float = 5e-5
    context_token_s: float = 4e-8

    def duration_s(self, plan: StepPlan) -> float:
        """Return the time that this step takes."""
        num_tokens = sum(plan.scheduled.nums_tokens)
        num_seen = num_tokens + sum(plan.scheduled.starts)
        return self.step_s + num_tokens * self.token_s + num_seen * self.context_token_s


class Pipeline:
    """The stages of a replica. A step takes an equal part of its time in each, one step behind the other.

    What stages send to each other takes no time.
    """

    def __init__(self, num_stages: int) -> None:
        self._free_s = [0.0] * num_stages

    def enter(self, now_s: float, duration_s: float) -> tuple[float, ...]:
        """Begin a step, and return when it leaves each stage."""
        part_s = duration_s / len(self._free_s)
        for stage, free_s in enumerate(self._free_s):
            now_s = self._free_s[stage] = max(now_s, free_s) + part_s
        return tuple(self._free_s)
