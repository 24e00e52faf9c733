"""Runs a command as on a CPU without matrix tiles (AMX), on one that has them.

python -m bench.without_tiles python -m bench.peers --geometry llama-110m --dtype int8

A process must ask Linux for the tiles before it can use them (arch_prctl, ARCH_REQ_XCOMP_PERM). A seccomp filter, which
all processes of the command inherit, refuses that. Only x86-64 Linux; elsewhere there is nothing to refuse.
"""

import argparse
import ctypes
import os
import platform
import struct
import sys

from bench.script import make_parser

_SET_SECCOMP, _SECCOMP_FILTER, _SET_NO_NEW_PRIVS = 22, 2, 38
_ARCH_PRCTL, _REQUEST_PERMISSION, _EPERM = 158, 0x1023, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16
"""Offsets in what a filter sees of a system call."""
_REFUSE, _ALLOW = 0x00050000 | _EPERM, 0x7FFF0000
_FILTER = [
    (_LOAD, 0, 0, _NUMBER),
    (_JUMP_IF_EQUAL, 0, 3, _ARCH_PRCTL),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_JUMP_IF_EQUAL, 0, 1, _REQUEST_PERMISSION),
    (_RETURN, 0, 0, _REFUSE),
    (_RETURN, 0, 0, _ALLOW),
]


class _Program(ctypes.Structure):
    _fields_ = [("num_instructions", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def refuse_tiles() -> None:
    """Let this process and those that it starts have no tiles from now on. OSError where that cannot be."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise OSError(f"tiles can be refused on x86_64 Linux; this is {platform.machine()} {sys.platform}")
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _FILTER))
    program = _Program(len(_FILTER), ctypes.addressof(packed))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0)):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"the filter was not taken: {os.strerror(number)}")


def main(arguments: list[str]) -> None:
    """Become the command."""
    parser = make_parser("bench.without_tiles", __doc__)
    parser.usage = f"{parser.prog} COMMAND [ARGUMENT ...]"
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what is run")
    command = parser.parse_args(arguments).command
    if not command:
        parser.error("a command is wanted")
    refuse_tiles()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        parser.error(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
