"""What one replica's engine, and each of its ranks, has done, in plain numbers; cluster/metrics.py exports them.

The engine's thread writes, one other thread may read: counters are single numbers, observations are taken one by one.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from workers.request import FinishReason

if TYPE_CHECKING:
    from parallel.mesh import Axis  # torch

MAX_OBSERVATIONS = 1 << 16
"""Most values of a kind that are kept until they are taken; older ones are dropped."""


class Observations:
    """Values of one kind since they were last taken."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=MAX_OBSERVATIONS)

    def add(self, value: float) -> None:
        """Note one more value."""
        self._values.append(value)

    def take(self) -> Iterator[float]:
        """Remove and return what there is; may run in another thread than `add`."""
        while self._values:
            yield self._values.popleft()


class EngineStats:
    """Totals since the start, and latencies.

    Once nothing runs, `num_prompt_tokens` and `num_cached_tokens` are the sums of what the usage of all requests says,
    and `num_generation_tokens` of their completion tokens less those submitted with them. A request that fails counts
    too, though its client sees no usage.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        """Prompt tokens of accepted requests."""
        self.num_cached_tokens = 0
        """Prompt tokens found in the prefix cache, when their request was first scheduled or later."""
        self.num_host_tokens = 0
        """Cached tokens that were brought back from the host."""
        self.num_saved_blocks = 0
        """Blocks copied to the host when they were evicted."""
        self.num_loaded_blocks = 0
        """Blocks copied back from the host."""
        self.num_generation_tokens = 0
        """Tokens sampled here and accepted."""
        self.num_computed_tokens = 0
        """Tokens that went through the model, prompt and output, recomputed ones included."""
        self.num_recomputed_tokens = 0
        """Tokens computed again after a preemption."""
        self.num_preemptions = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self.num_failed = 0
        self.num_refused = 0
        """Requests that were never accepted: invalid, or the queue was full."""
        self.num_steps = 0
        self.busy_s = 0.0
        """Time with a step in flight."""
        self.ttft_s = Observations()
        """Time from a request's arrival here to its first token."""
        self.itl_s = Observations()
        """Time between two tokens of a request."""
        self.queue_s = Observations()
        """Time from a request's arrival to its first step; noted when it ends."""
        self.e2e_s = Observations()
        """Time from a request's arrival to its end."""
        self.step_s = Observations()
        """Time from the submission of a step to its output."""
        self.step_sequences = Observations()
        """Sequences in each step."""
        self.step_tokens = Observations()
        """Tokens computed in each step, over all sequences."""


class RankStats:
    """Totals of one rank since its start; the rank's own thread writes, any other may read."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.busy_s = 0.0
        """Time in steps, waiting for other ranks included."""
        self.model_busy_s = 0.0
        """Time in which the model computes: its layers and the head, waiting for other ranks included."""
        self.model_idle_s = 0.0
        """Time between two computations of the model in which the scheduler had work all along."""
        self.model_read_bytes = 0.0
        """The least that the model had to read in its busy time: weights, keys and values; experts by expectation."""
        self.model_flops = 0.0
        """The operations that the model had to do in its busy time; experts by expectation."""
        self.peak_memory_bytes: Callable[[], int] | None = None
        """The most that the rank has held so far: resident on a CPU, allocated on a GPU; None: nobody knows yet."""
        self.energy_j: Callable[[], float | None] | None = None
        """Energy that the rank's GPU has used since the driver was loaded, for anybody; None where nothing tells."""
        self.info: Mapping[str, str] = {}
        """What the rank computes with, by label (model_runner.py has the labels); empty until it has weights."""
        self.slowness = ""
        """Why plain torch computes where compiled kernels were wanted; empty: it does not."""
        self.num_recorded_steps = 0
        """Sizes of steps that were recorded as graphs of the device before the first request."""
        self.recording_s = 0.0
        """How long the recording of steps took; 0 where none are recorded."""
        self.axes: Mapping[str, Axis] = {}
        """The rank's axes that have other ranks on them, by name; each counts its collectives."""

    def add_step(self, duration_s: float) -> None:
        """Note a step that the rank has done its part of."""
        self.num_steps += 1
        self.busy_s += duration_s
