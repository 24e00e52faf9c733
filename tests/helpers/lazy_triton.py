"""Triton's kernels on the GPU of lazy_cuda.py: each is interpreted when its stream comes to it.

For a process in which Triton interprets (triton_programs.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from helpers.lazy_cuda import DeviceTensor, LazyCuda
from parallel.kernels import triton_launch


@contextmanager
def interpreted_on(cuda: LazyCuda) -> Iterator[set[str]]:
    """Until it is closed, a launch is work of the device's; what it gives are the names of the kernels launched."""
    interpret = InterpretedFunction.run
    names: set[str] = set()

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        names.add(kernel.fn.__name__)
        inner = [_memory_of(arg) for arg in args]
        cuda.launch(lambda: interpret(kernel, *inner, **options))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(InterpretedFunction, "run", launch)
        monkeypatch.setattr(triton_launch, "_can_start_early", lambda _: False)  # that is not interpreted
        yield names


def _memory_of(arg: Any) -> Any:
    if isinstance(arg, DeviceTensor):
        return arg.elem
    if isinstance(arg, Tensor):
        raise RuntimeError(f"a kernel is given a pointer of the host's, of {list(arg.shape)}")
    return arg
