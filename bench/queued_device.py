"""A stand-in for a GPU, which is none: a device that is given work and does it by itself, without the CPU.

Steps run one after the other on a timeline of its own, each for the same time, and nobody learns what a step gave
before that is over. The model has no layers: its head sees what its embedding gives, so that every token is a function
of the one before it, and wrong if that was not fed on the device. This little is computed when a step is started, as a
launch costs the host something too; a part of it can be asked for.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch.nn.functional as F
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.device.cpu import CpuDevice
from parallel.dtypes import resolve_dtype
from parallel.families.registry import describe_model
from parallel.kernels.base import AttentionMeta, LayerCache, RunLayers
from parallel.kernels.linears import PackedLinear
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from workers.config import EngineConfig
from workers.engine import Engine
from workers.engine_builder import read_eos_token_ids
from workers.executor import LocalExecutor
from workers.model_runner import ModelRunner
from workers.stats import RankStats
from workers.tokenizer import load_token_table

_HEAD_INPUTS = 16


class QueuedMark(NamedTuple):
    """A point in the work of the device: when it comes there."""

    at_s: float

    def seconds_since(self, earlier: Self) -> float | None:
        """The device's time between the two, once it has come to this one."""
        return self.at_s - earlier.at_s if time.perf_counter() >= self.at_s else None


class QueuedDevice(CpuDevice):
    """Implements `Device`. What the host queues is done `step_s` after what was queued before it, or after now."""

    works_by_itself = True

    def __init__(self, step_s: float, launch_s: float) -> None:
        self._step_s = step_s
        self._launch_s = launch_s
        self._free_s = 0.0

    def queue_step(self) -> None:
        """Give it a step, which keeps the host busy for `launch_s`."""
        self._free_s = self.mark().at_s + self._step_s
        end_s = time.perf_counter() + self._launch_s
        while time.perf_counter() < end_s:
            pass

    def mark(self) -> QueuedMark:  # type: ignore[override]  # where a CPU has a moment
        """After what is queued."""
        return QueuedMark(max(time.perf_counter(), self._free_s))

    def start_copy(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """The result waits for what is queued so far, without using the CPU."""
        done = self.mark()

        def wait() -> list[Tensor]:
            time.sleep(max(0.0, done.at_s - time.perf_counter()))
            return list(tensors)

        return wait


class _QueuedKernels(ReferenceKernels):
    """Takes the device's time where other kernels run the layers."""

    def __init__(self, device: QueuedDevice) -> None:
        self._device = device

    def pack_head(self, weight_VE: Tensor, bias_V: Tensor | None, *, is_shared: bool) -> PackedLinear:
        """A few inputs are enough to tell tokens apart."""
        few_VE = weight_VE[:, :_HEAD_INPUTS].contiguous()
        return lambda x_SE: F.linear(x_SE[:, :_HEAD_INPUTS], few_VE)

    def compile_layers(self, run: RunLayers, axis: Axis) -> RunLayers:
        """See `Kernels.compile_layers`; here it does not do the same."""

        def queue(
            x_TE: Tensor,
            angles: Sequence[tuple[Tensor, ...]],
            caches: Sequence[LayerCache],
            metas: Sequence[AttentionMeta],
        ) -> tuple[Tensor, Tensor]:
            self._device.queue_step()
            return x_TE, x_TE

        return queue


def build_queued_engine(config: EngineConfig, device: QueuedDevice, stats: RankStats) -> Engine:
    """Build an engine of one rank over the stand-in, as `build_engine` does."""
    folder = Path(config.model)
    dtype = resolve_dtype(config.dtype, folder, device, multiplies=lambda _: False)
    kernels = _QueuedKernels(device)
    decoder = load_decoder(folder, mesh=Mesh.single(), device=device.torch_device, dtype=dtype, kernels=kernels)
    runner = ModelRunner(decoder, mesh=Mesh.single(), device=device, config=config, stats=stats)
    num_blocks = runner.choose_num_blocks()
    runner.allocate(num_blocks)
    description = describe_model(folder)
    tokens = load_token_table(folder)
    return Engine(
        config,
        LocalExecutor(runner, num_blocks=num_blocks),
        tokens=tokens,
        eos_token_ids=read_eos_token_ids(folder, tokens),
        max_context=description.max_context,
        vocab_size=description.vocab_size,
    )
