"""Plans to the ranks on the leader's own machine, over Unix sockets that the calling threads themselves use.

zmq hands each message to a thread of its own on either side, so that three threads wake up one after the other until a
rank has its plan; here it is one, and under load none: a rank that has done a step looks for the next plan for a moment
before it sleeps. Only plans go this way, and only small ones: everything else, and who is gone, is known from the
connection of zmq that each rank has as well (transport.py).
"""

import fcntl
import os
import secrets
import socket
import struct
import termios
import time

MAX_BYTES = 64 << 10
"""Largest plan that goes this way, while no more than so many bytes wait to be received: the first stage of a pipeline
sends plans to all the others before it computes what these then wait for."""
_BUFFER_BYTES = 4 * MAX_BYTES
"""Room for that, and for more of what stands for the plans after these than are ever in flight."""
_SMALL_BYTES = 4 << 10
"""A plan of up to so many, which most are, is sent whatever waits: to ask takes 2 us. There is room for 30 besides."""
WAIT_S = 1
"""How long a rank waits for a message before it looks whether its leader lives; the socket tells of an end at once."""
LOOK_S = 1e-3
"""How long a rank looks for its next plan, giving way to whoever wants its core, before it sleeps until one comes.

To wake a sleeping core takes longer than all the rest of a plan's way. A leader under load has the next plan sooner.
"""
_ELSEWHERE = b"\0"
"""Stands for a plan that is larger, and comes over zmq."""


class PlanSender:
    """The leader's end. Ranks that are not on this machine, or cannot, never come to it."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._lines: dict[int, socket.socket] = {}
        self.name = f"weft-{secrets.token_hex(16)}"
        """Where ranks on this machine connect; empty when this system cannot."""
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._listener.bind(_address(self.name))
            self._listener.listen(1024)
            self._listener.setblocking(False)
        except OSError:  # no such sockets or names
            self._close_door()
            self.name = ""

    def admit(self) -> None:
        """Take in the ranks that have connected so far; none can any more."""
        while self._listener is not None:
            try:
                line, _ = self._listener.accept()
            except BlockingIOError:
                self._close_door()
                return
            line.setblocking(False)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            if not _is_ours(line):
                line.close()
                continue
            (rank,) = struct.unpack("=I", line.recv(4))
            self._lines[rank] = line

    def send(self, rank: int, message: bytes) -> bool:
        """Send a message; False where it must take the other way. BlockingIOError when the rank reads no more."""
        line = self._lines.get(rank)
        if line is None:
            return False
        num_bytes = len(message)
        is_small = num_bytes <= _SMALL_BYTES or (num_bytes <= MAX_BYTES and _num_waiting(line) < MAX_BYTES)
        try:
            line.send(message if is_small else _ELSEWHERE)
        except BlockingIOError:
            raise
        except OSError:  # it is gone: the other way knows how to say so
            self._lines.pop(rank).close()
            return False
        return is_small

    def close(self) -> None:
        """End it, for every rank."""
        self._close_door()
        for line in self._lines.values():
            line.close()
        self._lines.clear()

    def _close_door(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class PlanReceiver:
    """A rank's end. Its thread looks for a message, then sleeps in the one call that also brings it."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._is_busy = False  # the message before came a moment ago: the next one may be close
        self._has_ended = False
        self.has_next = True
        """Whether the next message comes this way. If not, none is received before `resume`, or ever if it ended."""

    @classmethod
    def connect(cls, name: str, rank: int) -> "PlanReceiver | None":
        """Connect to the leader, before this rank's first report; None when it is on another machine."""
        line = None
        try:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            line.connect(_address(name))
            if not _is_ours(line):
                raise PermissionError(f"{name} is somebody else's")
            line.send(struct.pack("=I", rank))
        except OSError:
            if line is not None:
                line.close()
            return None
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", WAIT_S, 0))
        return cls(line)

    def receive(self) -> bytes | None:
        """Wait for the next message; None after WAIT_S without one, and when it comes the other way."""
        try:
            message = (self._look() if self._is_busy else None) or self._line.recv(MAX_BYTES)
        except BlockingIOError:
            self._is_busy = False
            return None
        except OSError:
            message = b""
        self._has_ended = message == b""
        self.has_next = message not in (_ELSEWHERE, b"")
        self._is_busy = self.has_next
        return message if self.has_next else None

    def _look(self) -> bytes | None:
        """Ask for a message again and again for LOOK_S."""
        end_s = time.perf_counter() + LOOK_S
        while time.perf_counter() < end_s:
            try:
                return self._line.recv(MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        return None

    def has_message(self) -> bool:
        """Whether there is a message, or the end of them that `receive` has not seen yet. Never waits."""
        if self._has_ended:
            return False
        try:
            self._line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # the next `receive` sees it too
        return True

    def resume(self) -> None:
        """Go on receiving here: the message that came the other way has arrived."""
        self.has_next = not self._has_ended

    def close(self) -> None:
        """End it."""
        self._line.close()


def _address(name: str) -> str:
    """A name without a file, which is free as soon as its process has ended (unix(7): abstract)."""
    return f"\0{name}"


def _is_ours(line: socket.socket) -> bool:
    """Whether the process at the other end belongs to the user of this one: every user may take and use such names."""
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user_id, _ = struct.unpack("3i", credentials)
    return bool(user_id == os.geteuid())


def _num_waiting(line: socket.socket) -> int:
    """Bytes of memory of what was sent, and not received yet."""
    (num_bytes,) = struct.unpack("i", fcntl.ioctl(line, termios.TIOCOUTQ, bytes(4)))
    return int(num_bytes)
