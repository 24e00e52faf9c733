"""Files of recorded decisions: what a pure module was told, call by call, and what it decided, to be decided again.

    weft decisions 3 scheduler        a line of text: version of the format, and which module
    length, header                    each frame is msgpack after its length, 4 bytes, little-endian
    length, call and decision
    ...

Such a file holds what clients sent (token ids, request ids), so that only its owner may read it. A process that dies
leaves a file that ends within a frame at worst; what comes before is whole.
"""

import errno
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import msgspec
from annotated_types import Ge

from weft.bounds import check_fields

logger = logging.getLogger(__name__)

VERSION = 3
"""Goes up where a file recorded before can no longer be read, or what it holds would be told as a difference."""
SUFFIX = ".decisions"

_MAGIC = "weft decisions"
_MAX_LINE_BYTES = 80
_LENGTH_BYTES = 4
_BUFFER_BYTES = 1 << 16
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_S = 1.0
"""Frames wait no longer than this for the next one to be written with it."""

T = TypeVar("T")


class RecordingError(ValueError):
    """A file of decisions cannot be written or read."""


class RecordingVersionError(RecordingError):
    """A file of decisions is of a version that this program does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingConfig:
    """Whether decisions are recorded, and where."""

    folder: str | None = None
    """An absolute path, on every node; each process makes a file of its own in it. None: nothing is recorded."""
    max_bytes: Annotated[int, Ge(1 << 16)] = 1 << 30
    """Size at which a file ends; what is decided after that is lost."""

    def __post_init__(self) -> None:
        if self.folder is not None and not Path(self.folder).is_absolute():
            raise RecordingError(f"folder is {self.folder!r}; allowed: an absolute path, the same on every node")
        check_fields(self, RecordingError)

    def open(self, name: str) -> "Recorder | None":
        """Return a recorder with a new file; None where nothing is recorded, or the disk is full.

        Raises RecordingError where it never could be.
        """
        if self.folder is None:
            return None
        try:
            return Recorder(_new_file(Path(self.folder), name), max_bytes=self.max_bytes)
        except RecordingError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL:
                logger.warning("%s; decisions are not recorded", error)
                return None
            raise


class FrameSink(Protocol):
    """Takes frames in their order: a Recorder, or who compares them with those recorded."""

    def begin(self, kind: str, header: msgspec.Struct) -> None:
        """Hear which module it is, and all that its decisions depend on besides the calls. Once, and first."""

    def write(self, frame: msgspec.Struct) -> None:
        """Take the next frame; what it refers to may change afterwards."""


class Recorder:
    """Writes one file. One thread. It never raises once the file is open: recording ends, and says so once."""

    def __init__(self, path: Path, *, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Make the file, which must not exist. Raises RecordingError."""
        self.path = path
        self._max_bytes = max_bytes
        self._clock = clock
        self._flushed_s = clock()
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._num_written = 0
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror or error}") from error
        self._file: FileIO | None = FileIO(number, "wb")

    def begin(self, kind: str, header: msgspec.Struct) -> None:
        """Write what comes before the calls."""
        self._buffer += f"{_MAGIC} {VERSION} {kind}\n".encode()
        self.write(header)
        self.flush()
        logger.info("decisions are recorded in %s", self.path)

    def write(self, frame: msgspec.Struct) -> None:
        """Add a frame; it reaches the file with others, a second later at most where more follow."""
        if self._file is None:
            return
        buffer = self._buffer
        start = len(buffer)
        buffer += bytes(_LENGTH_BYTES)
        self._encoder.encode_into(frame, buffer, -1)
        buffer[start : start + _LENGTH_BYTES] = (len(buffer) - start - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little")
        if self._num_written + len(buffer) > self._max_bytes:
            del buffer[start:]
            self._end(f"it has its {self._max_bytes} bytes")
        elif len(buffer) >= _BUFFER_BYTES or self._clock() >= self._flushed_s + _KEEP_S:
            self.flush()

    def flush(self) -> None:
        """Hand what was written to the operating system, which keeps it when this process dies."""
        if self._file is None:
            return
        self._flushed_s = self._clock()
        self._num_written += len(self._buffer)
        try:
            while self._buffer:
                del self._buffer[: self._file.write(self._buffer)]
        except OSError as error:
            self._buffer.clear()
            self._end(error.strerror or str(error))

    def close(self) -> None:
        """Write what is left. May be called again."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # some file systems tell again of what could not be written
                file.close()

    def _end(self, reason: str) -> None:
        self.close()
        logger.warning("%s ends: %s; decisions are no longer recorded", self.path, reason)


class Recording:
    """A file that was recorded. Raises RecordingError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_torn = False
        """It ends within a frame; known once all frames were read."""
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise RecordingError(f"{path}: {error.strerror or error}") from error
        line = self._file.readline(_MAX_LINE_BYTES).decode(errors="replace")
        magic, _, rest = line.rstrip("\n").partition(_MAGIC + " ")
        version, _, self.kind = rest.partition(" ")
        if magic or not line.endswith("\n") or not version.isdecimal() or not self.kind:
            raise RecordingError(f"{path}: not a recording of decisions")
        if int(version) != VERSION:
            raise RecordingVersionError(f"{path}: of version {version}; allowed: {VERSION}")

    def close(self) -> None:
        """Read no more."""
        self._file.close()

    def read_header(self, kind: type[T]) -> T:
        """Return what comes before the calls. Once, and first."""
        frame = self._read_frame()
        if frame is None:
            raise RecordingError(f"{self.path}: ends before its header does")
        return _decode(msgspec.msgpack.Decoder(kind), frame, f"{self.path}: the header")

    def read_frames(self, kind: type[T]) -> Iterator[T]:
        """Yield calls and decisions up to the end, or to a last frame that is not whole."""
        decoder = msgspec.msgpack.Decoder(kind)
        number = 0
        while (frame := self._read_frame()) is not None:
            number += 1
            yield _decode(decoder, frame, f"{self.path}: call {number}")

    def _read_frame(self) -> bytes | None:
        prefix = self._file.read(_LENGTH_BYTES)
        num_bytes = int.from_bytes(prefix, "little")
        frame = self._file.read(num_bytes) if len(prefix) == _LENGTH_BYTES else b""
        if len(prefix) == _LENGTH_BYTES and len(frame) == num_bytes:
            return frame
        self.is_torn = bool(prefix)
        return None


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes, what: str) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, ValueError) as error:
        raise RecordingError(f"{what} cannot be read: {error}") from error


def _new_file(folder: Path, name: str) -> Path:
    """The name of a file that no other process uses, nor another life of this one: in containers many have number 1."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RecordingError(f"{folder}: {error.strerror or error}") from error
    name = name.replace("/", "_")  # a model may be called owner/name
    return folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(3)}{SUFFIX}"
