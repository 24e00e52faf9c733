"""What the clients of one simulated replica send: requests that are made up, or those of a trace.

Every request asks for its output rounded up to a power of two (`max_tokens`, what shortest_remaining knows) and ends
earlier, as at an end-of-sequence token. Priorities 0 to 2 are drawn; only the policy of that name looks at them.
"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchConfigError
from bench.load.calls import draw_ids
from bench.load.dataset_files import TraceLimits, read_trace
from bench.simulation.step_cost import StepCost
from workers.request import Request, RequestId, SamplingParams

DEFAULT_RATE = 8.0
"""Requests a second, without a trace's times."""
_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request of the simulated clients."""

    at_s: float
    prompt: tuple[int, ...]
    num_out: int
    """Tokens after which it ends."""
    priority: int = 0
    deadline_s: float | None = None

    def to_request(self, name: str) -> Request:
        """Return it as the scheduler sees it."""
        max_tokens = 1 << (self.num_out - 1).bit_length()
        return Request(
            request_id=RequestId(name),
            prompt_token_ids=self.prompt,
            sampling=SamplingParams(max_tokens=max_tokens),
            priority=self.priority,
            deadline_s=self.deadline_s,
        )

    def alone_s(self, cost: StepCost) -> float:
        """Return about how long it takes with nothing else to do."""
        return self.num_out * cost.step_s + len(self.prompt) * cost.token_s


def draw_times(rate: float, rng: random.Random) -> Iterator[float]:
    """When requests arrive at random, so many per second on average (Poisson), without end."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


def draw_jobs(num_jobs: int, *, rate: float, seed: int) -> list[Job]:
    """Make requests with heavy tails that arrive at random: prompts log-normal (median 300 tokens), outputs Pareto of
    exponent 1.2 from 20 tokens, cut at 4,000 and 2,000.
    """
    rng = random.Random(seed)
    jobs = []
    for at_s in itertools.islice(draw_times(rate, rng), num_jobs):
        num_in = max(1, min(4000, round(rng.lognormvariate(math.log(300), 1.0))))
        num_out = min(2000, round(20 * rng.paretovariate(1.2)))
        prompt = draw_ids(rng, num_in, _VOCAB_SIZE)
        jobs.append(Job(at_s=at_s, prompt=prompt, num_out=num_out, priority=rng.randrange(3)))
    return jobs


def read_jobs(path: Path, num_jobs: int, *, rate: float | None, seed: int) -> list[Job]:
    """Return the first requests of a trace, its times stretched to this many requests per second.

    Requests of a trace without times arrive at random.
    """
    rng = random.Random(seed)
    trace = read_trace(path, limits=TraceLimits(), vocab_size=_VOCAB_SIZE, seed=seed)
    sessions = list(itertools.islice(trace, num_jobs))
    recorded_s = [session.at_s for session in sessions if session.at_s is not None]
    times_s = stretch(recorded_s, rate) if recorded_s else draw_times(rate or DEFAULT_RATE, rng)
    return [
        Job(at_s=at_s, prompt=tuple(call.prompt), num_out=call.num_out, priority=rng.randrange(3))
        for at_s, (call,) in zip(times_s, (session.calls for session in sessions), strict=False)
        if isinstance(call.prompt, tuple)
    ]


def stretch(times_s: Sequence[float], rate: float | None, *, num_copies: int = 1, shift_s: float = 0.0) -> list[float]:
    """The times of one of so many copies of a trace: from the first on, a shift later, and stretched until all copies
    together have the rate; None: as fast as they were.

    Raises BenchConfigError where all times are the same, and so at no rate.
    """
    first_s, span_s = times_s[0], times_s[-1] - times_s[0]
    if rate is not None and rate < math.inf and len(times_s) > 1 and not span_s:
        seen = f"--rate is {rate:g}, and all {len(times_s)} requests of the trace have the same time"
        raise BenchConfigError(f"{seen}; allowed: no --rate, which sends them at once, or a trace without times")
    factor = 1.0 if rate is None else len(times_s) * num_copies / rate / max(1e-9, span_s)
    return [(at_s + (shift_s - first_s)) * factor for at_s in times_s]


def with_deadlines(jobs: Sequence[Job], cost: StepCost, *, factors: Sequence[float], seed: int) -> list[Job]:
    """Give each request a deadline: its time alone, times one of the factors, and two seconds."""
    rng = random.Random(seed)
    return [
        dataclasses.replace(job, deadline_s=job.at_s + 2.0 + job.alone_s(cost) * rng.choice(factors)) for job in jobs
    ]
