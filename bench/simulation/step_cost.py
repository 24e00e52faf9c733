"""How long a step takes in a simulation, by a formula."""

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
