"""A command without matrix tiles: what a process asks Linux for, and what it is told."""

import os
import platform
import subprocess
import sys

import pytest

_ASK = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
answer = libc.syscall(158, 0x1023, 18)  # may this process use tile data?
print(ctypes.get_errno() if answer else 0)
address = ctypes.c_ulong()
assert libc.syscall(158, 0x1003, ctypes.byref(address)) == 0  # another question of the same call
"""
_EPERM = 1

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="tiles are asked for on x86-64 Linux only"
)


def _answer(*before: str) -> int:
    command = [*before, sys.executable, "-c", _ASK]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ)).stdout)


def test_tiles_are_refused_and_nothing_else_is() -> None:
    assert _answer() != _EPERM
    assert _answer(sys.executable, "-m", "bench.without_tiles") == _EPERM


def test_child_processes_get_no_tiles_either() -> None:
    assert _answer(sys.executable, "-m", "bench.without_tiles", "env") == _EPERM


def test_a_command_is_needed() -> None:
    done = subprocess.run([sys.executable, "-m", "bench.without_tiles"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage" in done.stderr
