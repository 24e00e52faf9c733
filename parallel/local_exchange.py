"""What the CPU ranks of one machine have in common: Unix sockets that the calling thread itself uses, and memory.

gloo hands every message to threads of its own. When there are more busy processes than cores, each of these hand-overs
waits for a core, and a decode step is made of nothing but small messages. Measured on 2 cores, an all-reduce of 16 KB
over 2 ranks with compute between: 260 us against gloo's 750 us on an idle machine, 480 us against 2,000 us with two
other busy processes; over 4 ranks, 250 us against 4,500 us.

Compiled kernels add up in the memory, which is faster still (parallel/kernels/native/all_reduce.h).

Whether this is used is agreed by all ranks of an axis when the mesh is made; collectives.py decides for which sizes.
"""

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BYTES = 128 << 10
"""Largest message; a socket's buffer holds it, so that all ranks can send before any receives."""

_PATH_BYTES = 108
_CONNECT_TIMEOUT_S = 30.0
_DEFAULT_TIMEOUT_S = 1800.0


class LocalExchange:
    """One rank's sockets to the other ranks of its axis, for small tensors, and memory that all of them map."""

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float | None = None) -> None:
        self._rank = rank
        self._peers = peers
        self._size = len(peers) + 1
        self.timeout_s = _DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
        """For how long a rank waits for another."""
        for peer in peers.values():
            _prepare(peer, self.timeout_s)

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, rank: int, size: int, timeout_s: float | None = None
    ) -> "LocalExchange | None":
        """Connect all ranks of a gloo group; all call it, and all get None when they are not on one machine.

        An operation that takes longer than `timeout_s` fails.
        """
        with tempfile.TemporaryDirectory(prefix="weft-") as folder, socket.socket(socket.AF_UNIX) as listener:
            path = _listen(listener, Path(folder), size)
            paths = _gather_paths(path, group, size)
            if not _all_agree(all(map(os.path.exists, paths)), group):
                return None
            peers = _connect_peers(listener, paths, rank)
            if not _all_agree(len(peers) == size - 1, group):
                return None
        return cls(rank, peers, timeout_s)

    @property
    def sockets(self) -> list[int]:
        """File descriptors of the sockets to each rank; -1 for this one."""
        return [self._peers[rank].fileno() if rank in self._peers else -1 for rank in range(self._size)]

    def share_memory(self, num_bytes: int, group: dist.ProcessGroup) -> mmap.mmap | None:
        """Map memory, zero at first, that all ranks have in common, and that goes with the last of them.

        All ranks of the group call it, with the same number or, where they want none, 0. All get None where one wants
        none, or cannot.
        """
        if not _all_agree(num_bytes > 0, group):
            return None
        memory = self._map_memory(num_bytes)
        return memory if _all_agree(memory is not None, group) else None

    def _map_memory(self, num_bytes: int) -> mmap.mmap | None:
        """Rank 0 makes it, and sends the others what it is known by; or nothing, when it cannot."""
        files: list[int] = []
        try:
            if self._rank == 0:
                with suppress(OSError, AttributeError):  # a system that has none, or is out of it
                    files.append(os.memfd_create("weft-ranks"))
                    os.truncate(files[0], num_bytes)
                for peer in self._peers.values():
                    socket.send_fds(peer, [b"m"], files)
            else:
                files = socket.recv_fds(self._peers[0], 1, 1)[1]
            return mmap.mmap(files[0], num_bytes) if files else None
        except (OSError, ValueError):  # ValueError: rank 0's file is empty, for there was no room for more
            return None
        finally:
            for file in files:
                os.close(file)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, the same bits on all; x is contiguous, at most MAX_BYTES, and overwritten.

        Raises OSError when a peer is gone or late.
        """
        peers = self._peers
        message = _bytes_of(x)
        for peer in peers.values():
            peer.sendall(message)
        terms = [x if rank == self._rank else _receive(peers[rank], torch.empty_like(x)) for rank in range(self._size)]
        total = terms[0]
        for term in terms[1:]:
            total.add_(term)
        return total

    def gather(self, x: Tensor, parts: Tensor | None) -> None:
        """Put every rank's x, contiguous, of any size, into parts[rank] on rank 0; the others have no parts.

        Raises OSError when a peer is gone or late.
        """
        if parts is None:
            self._peers[0].sendall(_bytes_of(x))
            return
        parts[0] = x
        for rank in range(1, self._size):
            _receive(self._peers[rank], parts[rank])


def _receive(peer: socket.socket, x: Tensor) -> Tensor:
    """Fill x, which is contiguous, with the peer's next message."""
    rest = _bytes_of(x)
    while rest:  # once, unless a signal comes in between
        num_bytes = peer.recv_into(rest, 0, socket.MSG_WAITALL)
        if num_bytes == 0:
            raise ConnectionError("the peer closed its connection")
        rest = rest[num_bytes:]
    return x


def _bytes_of(x: Tensor) -> memoryview:
    return x.view(-1).view(torch.uint8).numpy().data


def _listen(listener: socket.socket, folder: Path, size: int) -> str:
    """The path where peers connect; empty when this system cannot."""
    path = str(folder / "rank")
    try:
        listener.bind(path)
        listener.listen(size)
    except OSError:  # a temporary folder with too long a path, say
        return ""
    return path


def _gather_paths(path: str, group: dist.ProcessGroup, size: int) -> list[str]:
    mine = torch.tensor(list(os.fsencode(path).ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(everyone, mine, group=group)
    return [os.fsdecode(bytes(theirs.tolist()).rstrip(b"\0")) for theirs in everyone]


def _all_agree(mine: bool, group: dist.ProcessGroup) -> bool:
    vote = torch.tensor([int(mine)])
    dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=group)
    return bool(vote.item())


def _connect_peers(listener: socket.socket, paths: Sequence[str], rank: int) -> dict[int, socket.socket]:
    """Call every lower rank, answer every higher one; those that worked out."""
    peers: dict[int, socket.socket] = {}
    try:
        for lower in range(rank):
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(_CONNECT_TIMEOUT_S)
            peer.connect(paths[lower])
            peer.sendall(struct.pack("=I", rank))
            peers[lower] = peer
        listener.settimeout(_CONNECT_TIMEOUT_S)
        for _ in range(rank + 1, len(paths)):
            peer, _ = listener.accept()
            peer.settimeout(_CONNECT_TIMEOUT_S)
            (higher,) = struct.unpack("=I", peer.recv(4, socket.MSG_WAITALL))
            peers[higher] = peer
    except (OSError, struct.error):
        pass  # the count tells
    return peers


def _prepare(peer: socket.socket, timeout_s: float) -> None:
    """Timeouts by the kernel: those of Python cost a call of poll for every message."""
    peer.setblocking(True)
    timeout = struct.pack("@ll", *divmod(round(timeout_s * 1e6), 1_000_000))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        peer.setsockopt(socket.SOL_SOCKET, option, timeout)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_BYTES)
