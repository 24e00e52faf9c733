"""The host does not wait for the device while it starts a step: nothing of it is asked for a number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.plans import make_plan
from helpers.recording import RecordingKernels, make_runner
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workers.model_runner import ModelRunner
from workers.overlap import Lookahead
from workers.plan import NewSequence, ScheduledSequence
from workers.request import SamplingParams

ASKING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,  # as inference mode has it
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
}
INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}

SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, seed=3),
    SamplingParams(temperature=0.0, logprobs=3, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=5),
]


class NobodyAsks(TorchDispatchMode):
    """Operations for whose result, or its size, the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in ASKING, f"{func} waits for the device"
        if func in INDEXING:
            dtypes = {index.dtype for index in args[1] if index is not None}
            assert torch.bool not in dtypes, f"{func} by a mask waits for its sum"
        return func(*args, **(kwargs or {}))


class NobodyAssignsNumbers(TorchFunctionMode):
    """By a tensor of indices: the number becomes a tensor of the host, whose copy the host waits for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__setitem__:
            _, index, value = args
            indices = index if isinstance(index, tuple) else (index,)
            has_tensor = any(isinstance(one, torch.Tensor) for one in indices)
            assert isinstance(value, torch.Tensor) or not has_tensor, f"{value} by a tensor waits for its copy"
        return func(*args, **(kwargs or {}))


def unseen(operation: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for a kernel of the GPU may do as it likes."""

    def call(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return operation(*args, **options)

    return call


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    for name in ("_attend", "write_cache"):
        monkeypatch.setattr(RecordingKernels, name, unseen(getattr(RecordingKernels, name)))
    made, _, _ = make_runner(max_num_seqs=3)
    made.allocate(200)
    return made


def test_a_step_is_started_without_a_wait_whatever_its_requests_want(runner: ModelRunner) -> None:
    assert runner.lookahead is Lookahead.ALWAYS
    prompts = [NewSequence(slot, [1, 2, 3, 4], 4, sampling, [2]) for slot, sampling in enumerate(SAMPLING)]
    plans = [
        make_plan(0, [], prompts, [ScheduledSequence(slot, 0, 4, [], [slot], True) for slot in range(3)]),
        # with tokens that only the device knows
        make_plan(1, [], [], [ScheduledSequence(slot, 4, 1, [], [], True) for slot in range(3)]),
    ]
    for plan in plans:
        with torch.inference_mode(), NobodyAsks(), NobodyAssignsNumbers():
            finish = runner.start(runner.prepare(plan))
        output = finish()
        assert output is not None
        assert (output.slots, output.errors) == ([0, 1, 2], {})
