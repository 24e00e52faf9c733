"""Reads what the processes of a cluster have logged, wherever they run or ran.

Ray sends the stderr of each process to a file on its node, and the file stays when the process ends: a rank that died
is who has most to tell. A file on another node is read by a Ray task there, in pieces of bounded size.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_MAX_DEAD = 256
"""How many processes that have ended are remembered, so that their logs can still be read."""
_MAX_PIECE_BYTES = 256 << 10  # of one log
_MAX_ANSWER_BYTES = 2 << 20
"""Limit of all pieces together: gRPC takes messages of up to 4 MB."""
_REMOTE_TIMEOUT_S = 10.0  # for another node, which may have gone, to read a piece


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSource:
    """The log of one process."""

    name: str
    """Name of this life alone: "controller/4711" and "router-0/4712" by the pid, "m-0.1/0" by replica and rank."""
    belongs_to: frozenset[str]
    """Other names for it: "controller"; "router" and "router-0"; its replica, its group, its model."""
    node_id: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece:
    """A piece of one log."""

    data: bytes
    next_offset: int
    has_more: bool


ReadRemote = Callable[[LogSource, int | None, int, int], Awaitable[LogPiece | None]]


class LogReader:
    """Knows the logs of all processes, those that have ended of late included."""

    def __init__(self, node_id: str, read_remote: ReadRemote | None = None) -> None:
        """Begin with no logs; `node_id` is the node whose files are read directly."""
        self._node_id = node_id
        self._read_remote = read_remote or _read_on_node
        self._sources: dict[str, LogSource] = {}

    def note(self, sources: Iterable[LogSource]) -> None:
        """Remember all processes that live, which are these; of those that have ended the oldest ones make room."""
        living = {source.name: source for source in sources if source.path}
        dead = [(name, source) for name, source in self._sources.items() if name not in living]
        self._sources = dict(dead[-_MAX_DEAD:]) | living  # what lives comes last: so do those that die next

    @property
    def latest(self) -> tuple[LogSource, ...]:
        """What a successor is told: of a large cluster only those of the processes that were noted last."""
        return tuple(self._sources.values())[-_MAX_DEAD:]

    @property
    def names(self) -> list[str]:
        """Every name that logs can be asked for by."""
        return sorted({name for source in self._sources.values() for name in (source.name, *source.belongs_to)})

    async def read(self, target: str, offsets: Mapping[str, int], tail_bytes: int) -> dict[str, LogPiece | None]:
        """Return what the logs of `target` hold after these offsets, by name; None for one that cannot be read now.

        Args:
            target: one of `names`; empty: every log.
            offsets: how far each was read.
            tail_bytes: of a log without an offset, begin so many bytes before the end.
        """
        sources = [
            source
            for source in self._sources.values()
            if not target or target == source.name or target in source.belongs_to
        ]
        max_bytes = max(1, min(_MAX_PIECE_BYTES, _MAX_ANSWER_BYTES // max(1, len(sources))))
        pieces = await asyncio.gather(
            *(self._read(source, offsets.get(source.name), tail_bytes, max_bytes) for source in sources)
        )
        return {source.name: piece for source, piece in zip(sources, pieces, strict=True)}

    async def _read(self, source: LogSource, offset: int | None, tail_bytes: int, max_bytes: int) -> LogPiece | None:
        if source.node_id == self._node_id:
            return await asyncio.to_thread(read_piece, source.path, offset, tail_bytes, max_bytes)
        return await self._read_remote(source, offset, tail_bytes, max_bytes)


def read_piece(path: str, offset: int | None, tail_bytes: int, max_bytes: int) -> LogPiece | None:
    """Return at most so many bytes of a file of this machine, from `offset` on; None when it is gone."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, 2)
            begin = max(0, size - tail_bytes) if offset is None else min(offset, size)
            file.seek(begin)
            data = file.read(max_bytes)
    except OSError:
        return None
    return LogPiece(data=data, next_offset=begin + len(data), has_more=begin + len(data) < size)


_READ_PIECE = ray.remote(read_piece)
"""Made once: Ray's head keeps each for good."""


async def _read_on_node(source: LogSource, offset: int | None, tail_bytes: int, max_bytes: int) -> LogPiece | None:
    affinity = NodeAffinitySchedulingStrategy(node_id=source.node_id, soft=False)
    task = _READ_PIECE.options(num_cpus=0, scheduling_strategy=affinity)
    try:
        async with asyncio.timeout(_REMOTE_TIMEOUT_S):
            piece: LogPiece | None = await task.remote(source.path, offset, tail_bytes, max_bytes)
    except (RayError, TimeoutError):
        return None  # the node has gone, or is too busy to start a process
    return piece
