"""`weft logs`: what processes of a service have logged, their lines side by side, each with the name of its process."""

import time
from collections.abc import Callable

from weft.v1 import control_pb2

from cluster.control_client import ControlClient
from cluster.patience import Patience, tell_aside

_POLL_S = 0.5
_MARKS = (":job_id:", ":actor_name:", ":task_name:")
"""Lines that Ray writes for its own reader of logs."""
_MOST_BYTES_A_LINE = 64 << 10
"""A longer line is told in parts."""
_ALL_BYTES = 1 << 40
"""More than a log has."""


class LineSplitter:
    """Cuts the bytes of one log into lines, whatever pieces they come in."""

    def __init__(self, *, is_cut: bool = False) -> None:
        """`is_cut`: the bytes begin within a line, of which nothing is told, or with the end of one."""
        self._rest = b""
        self._is_cut = is_cut

    def add(self, data: bytes) -> list[str]:
        """Return the lines that have become complete."""
        if self._is_cut:
            _, end, data = data.partition(b"\n")
            self._is_cut = not end
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_BYTES_A_LINE:
            lines, self._rest = [*lines, self._rest], b""
        return [line.decode(errors="replace") for line in lines]

    def end(self) -> list[str]:
        """Return the last line, where nothing ended it."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


def print_at_once(line: str) -> None:
    """Print a line that whoever reads a pipe sees now."""
    print(line, flush=True)


def show_logs(
    client: ControlClient,
    target: str,
    *,
    follows: bool,
    tail_bytes: int,
    tell: Callable[[str], None] = print_at_once,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Print what the logs of a process, a replica, a model or everything hold; with `follows`, for ever.

    Of those that are there at first the last `tail_bytes` are told, also where they can be read only later; of those
    that begin later everything. On stderr it is said which cannot be read, once for each time that they cannot.

    Raises ControllerError; with `follows`, what Patience does.
    """
    offsets: dict[str, int] = {}
    splitters: dict[str, LineSplitter] = {}
    unread: set[str] = set()
    late: set[str] | None = None  # those of which it is not known yet where their tails begin; None: of all
    patience = Patience(sleep=sleep)
    tail_bytes += 1  # the first tells whether a line begins

    def read() -> control_pb2.ReadLogsResponse:
        return client.read_logs(target, offsets, tail_bytes=tail_bytes if late is None else _ALL_BYTES)

    while True:
        answer = patience.ask(read) if follows else read()
        if late is None:
            late = set(answer.unread)
            offsets |= dict.fromkeys(late, _ALL_BYTES)  # past the end, which is told when they can be read
        patience.note_stopping(is_stopping=answer.stopping)
        for chunk in answer.chunks:
            if chunk.name in late:
                offsets[chunk.name] = begin = max(0, chunk.next_offset - tail_bytes)
                splitters[chunk.name] = LineSplitter(is_cut=begin > 0)
                continue
            if chunk.name not in offsets:
                splitters[chunk.name] = LineSplitter(is_cut=chunk.next_offset > len(chunk.data))
            offsets[chunk.name] = chunk.next_offset
            for line in splitters[chunk.name].add(chunk.data):
                if not line.startswith(_MARKS):
                    tell(f"{chunk.name} | {line}")
        if missing := [name for name in answer.unread if name not in unread]:
            tell_aside(
                f"not read: {', '.join(missing)}; their nodes have gone or do not answer, or the files have gone"
            )
        unread = set(answer.unread)
        if any(chunk.has_more or chunk.name in late for chunk in answer.chunks):
            late -= {chunk.name for chunk in answer.chunks}
            continue
        if not follows:
            break
        sleep(_POLL_S)
    for name, splitter in splitters.items():
        for line in splitter.end():
            tell(f"{name} | {line}")
