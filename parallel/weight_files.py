"""Opens weight files, whatever their format, of which only the slices that are asked for are read.

safetensors     a header and plain bytes; mapped, or read into memory of the caller's
*.bin           a zip file of plain bytes and a pickle, of which torch reads tensors only (`weights_only`); mapped
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel.errors import CheckpointError
from parallel.host_memory import forget_storage
from parallel.weight_index import FORMATS, find_weights, read_index

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that weights may be stored in, by their names in safetensors."""

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in STORED_DTYPES.items()} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header."""

_POINTER = b"version https://git-lfs"
"""How the text begins that `git clone` leaves in place of a large file where Git LFS is not installed."""


class StoredTensor(Protocol):
    """A tensor in a file."""

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""

    def get_dtype(self) -> str:
        """Return the name that its dtype has in safetensors."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """A view into the mapped file: nothing is read yet."""


class StoredTensors(Protocol):
    """The tensors of an open file."""

    def keys(self) -> Sequence[str]:
        """Return the names of the tensors."""

    def get_slice(self, name: str) -> StoredTensor:
        """Return the tensor of this name."""

    def find(self, name: str) -> "FileBytes | None":
        """Return where the bytes of a tensor lie, one after the other; None: that is not known."""


@dataclass(frozen=True, slots=True)
class FileBytes:
    """The bytes of a file from some byte on."""

    file: Path
    offset: int

    def read(self, first: int, target: Tensor) -> None:
        """Fill a contiguous tensor on the CPU with the bytes from `first` on.

        Raises CheckpointError when the file cannot be read, or ends before that.
        """
        memory = memoryview(target.view(-1).view(torch.uint8).numpy().data)
        try:
            with open(self.file, "rb", buffering=0) as opened:
                opened.seek(self.offset + first)
                while memory:
                    num_read = opened.readinto(memory)
                    if not num_read:
                        raise CheckpointError(f"{self.file} has become shorter since it was checked")
                    memory = memory[num_read:]
        except OSError as error:
            raise CheckpointError(f"{self.file} cannot be read: {error.strerror}") from error


def locate_tensors(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a checkpoint. Raises CheckpointError."""
    found = find_weights(folder)
    if found.name in (weights.single for weights in FORMATS):
        with open_tensors(found) as tensors:
            return dict.fromkeys(tensors.keys(), found)
    files = {name: folder / part for name, part in read_index(found).items()}
    for part in sorted(set(files.values())):
        if not part.is_file():
            raise CheckpointError(f"{part} does not exist, but {found.name} names it")
    return files


def is_only_mapped(file: Path) -> bool:
    """Whether no tensor of a weight file can be read into memory of the caller's."""
    return file.suffix == ".bin"


@contextmanager
def open_tensors(file: Path) -> Iterator[StoredTensors]:
    """A weight file, mapped until the end of the block. Raises CheckpointError when it is missing or corrupt."""
    if is_only_mapped(file):
        pickled = _load(file)
        try:
            yield _PickledTensors(pickled)
        finally:
            for tensor in pickled.values():  # the file stays mapped until torch's reader is collected as garbage
                forget_storage(tensor)
        return
    try:
        tensors = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {_reason(file, error)}") from error
    with tensors:
        yield _SafeTensors(file, tensors)


def _load(file: Path) -> dict[str, Tensor]:
    try:
        values: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # of a damaged pickle torch's reader raises whatever comes up
        raise CheckpointError(
            f"{file} is not a complete file of tensors, saved by PyTorch 1.6 or later: {_reason(file, error)}"
        ) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds a {type(values).__name__}; allowed: tensors by name")
    tensors = {str(name): value for name, value in values.items() if isinstance(value, Tensor)}
    for name, tensor in tensors.items():
        layout = "nested" if tensor.is_nested else "without values" if tensor.is_meta else tensor.layout
        if layout is not torch.strided:
            raise CheckpointError(f"{file}: tensor {name} is {layout}; allowed: {torch.strided}, with values")
    return tensors


def _reason(file: Path, error: Exception) -> str:
    """Return in a line why a file cannot be read."""
    with suppress(OSError), file.open("rb") as opened:
        if opened.read(len(_POINTER)) == _POINTER:
            return "it is a pointer of Git LFS; allowed: the file itself, as `git lfs pull` brings it"
    return next(iter(str(error).splitlines()), type(error).__name__)


class _SafeTensors:
    def __init__(self, file: Path, tensors: Any) -> None:
        self._file = file
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors.keys())

    def get_slice(self, name: str) -> StoredTensor:
        stored: StoredTensor = self._tensors.get_slice(name)
        return stored

    def find(self, name: str) -> FileBytes:
        first, _ = self._header[name]["data_offsets"]
        return FileBytes(self._file, self._header_end + first)

    @cached_property
    def _header(self) -> Mapping[str, Any]:
        """The library has checked it, and says nothing of places."""
        with open(self._file, "rb") as opened:
            opened.seek(_LENGTH_BYTES)
            header: Mapping[str, Any] = json.loads(opened.read(self._header_end - _LENGTH_BYTES))
        return header

    @cached_property
    def _header_end(self) -> int:
        with open(self._file, "rb") as opened:
            return _LENGTH_BYTES + int.from_bytes(opened.read(_LENGTH_BYTES), "little")


class _PickledTensors:
    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_slice(self, name: str) -> "_PickledTensor":
        return _PickledTensor(self._tensors[name].detach())

    def find(self, name: str) -> None:
        return None


class _PickledTensor:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return self._tensor[index]
