"""`weft logs`: what processes of a service have logged, their lines side by side, each with the name of its process."""

import time
from collections.abc import Callable, Iterator

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


class _Tails:
    """What of each log is told, and how far it was. Of logs that are there at first only the ends are, also where these
    can be read only later; of those that begin later everything.
    """

    def __init__(self, tail_bytes: int) -> None:
        self.offsets: dict[str, int] = {}
        """Where to read on, by name."""
        self.has_more = False
        """Whether there is more to read already."""
        self._tail_bytes = tail_bytes + 1  # the first tells whether a line begins
        self._splitters: dict[str, LineSplitter] = {}
        self._late: set[str] | None = None
        """Those of which it is not known yet where their ends begin; None: of all."""

    @property
    def most_bytes(self) -> int:
        """How much to read of a log that has no offset."""
        return self._tail_bytes if self._late is None else _ALL_BYTES

    def take(self, answer: control_pb2.ReadLogsResponse) -> Iterator[str]:
        """Yield the lines that have become complete."""
        if self._late is None:
            self._late = set(answer.unread)
            self.offsets |= dict.fromkeys(self._late, _ALL_BYTES)  # past the end, which is told when they can be read
        self.has_more = any(chunk.has_more or chunk.name in self._late for chunk in answer.chunks)
        for chunk in answer.chunks:
            if chunk.name in self._late:
                self._late.remove(chunk.name)
                self.offsets[chunk.name] = begin = max(0, chunk.next_offset - self._tail_bytes)
                self._splitters[chunk.name] = LineSplitter(is_cut=begin > 0)
                continue
            if chunk.name not in self.offsets:
                self._splitters[chunk.name] = LineSplitter(is_cut=chunk.next_offset > len(chunk.data))
            self.offsets[chunk.name] = chunk.next_offset
            for line in self._splitters[chunk.name].add(chunk.data):
                if not line.startswith(_MARKS):
                    yield f"{chunk.name} | {line}"

    def end(self) -> Iterator[str]:
        """Yield last lines, where nothing ended them."""
        for name, splitter in self._splitters.items():
            for line in splitter.end():
                yield f"{name} | {line}"


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

    Of those that are there at first the last `tail_bytes` are told. On stderr it is said which cannot be read, once for
    each time that they cannot.

    Raises ControllerError; with `follows`, what Patience does.
    """
    tails = _Tails(tail_bytes)
    unread: set[str] = set()
    patience = Patience(sleep=sleep)

    def read() -> control_pb2.ReadLogsResponse:
        return client.read_logs(target, tails.offsets, tail_bytes=tails.most_bytes)

    while True:
        answer = patience.ask(read) if follows else read()
        patience.note_stopping(is_stopping=answer.stopping)
        for line in tails.take(answer):
            tell(line)
        if missing := [name for name in answer.unread if name not in unread]:
            tell_aside(
                f"not read: {', '.join(missing)}; their nodes have gone or do not answer, or the files have gone"
            )
        unread = set(answer.unread)
        if tails.has_more:
            continue
        if not follows:
            break
        sleep(_POLL_S)
    for line in tails.end():
        tell(line)
