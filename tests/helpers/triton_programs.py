"""Programs around Triton's kernels, each a process of its own: the interpreter is chosen when Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]

_SPEED_UP = """
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from triton import language
from triton.runtime import interpreter


def patch_once(function, patch=interpreter._patch_lang, patched=set()):
    if id(function.__globals__) not in patched:
        patched.add(id(function.__globals__))
        patch(function)
        language.tensor.__index__ = lambda scalar: scalar.handle.data.item()
    return SimpleNamespace(restore=lambda: None)


interpreter._patch_lang = patch_once
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=False)


def make_block(block, element, shape, make=language.block_type.__init__, made={}):
    key = element, *[getattr(size, "value", size) for size in shape]
    if key not in made:
        make(block, element, shape)
        made[key] = vars(block).copy()
    vars(block).update(made[key])


def make_tensor(tensor, handle, type, make=language.tensor.__init__, made={}):
    key = tuple(type.shape) if type.is_block() else ()
    if key not in made:
        make(tensor, handle, type)
        made[key] = vars(tensor).copy()
    vars(tensor).update(made[key], handle=handle, type=type, dtype=type.scalar)


language.pointer_type.__hash__ = language.block_type.__hash__ = language.dtype.__hash__
language.block_type.__init__ = make_block
language.tensor.__init__ = make_tensor
interpreter._get_np_dtype = cache(interpreter._get_np_dtype)
"""
"""Else it patches Triton's language anew whenever a kernel calls a function, which takes half of the time or more,
computes each sum of integers twice, to see whether it overflows: a third of what is left, and works out for each result
its type and sizes, though few differ: a third again.

Up to Triton 3.6 it asks numpy for the int of an array of one number, which numpy 2.5 refuses.
"""


def interpret(program: str) -> None:
    """Run it with Triton's interpreter. Raises CalledProcessError where it fails."""
    run_with_triton(_SPEED_UP + program, TRITON_INTERPRET="1")


def run_with_triton(program: str, **environment: str) -> None:
    """Run it; the test is skipped where there is no Triton. Raises CalledProcessError where it fails."""
    pytest.importorskip("triton", reason="needs triton, which comes with torch for CUDA")
    path = os.pathsep.join([str(_REPOSITORY), str(_REPOSITORY / "tests"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=600)
