"""Which slices of which stored tensors fill a parameter, and how each of them is copied.

Names and layouts are the family's (families/), slices the layers' (shard.py). Matrices that are stored packed
(quantization/) are unpacked on the way.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from parallel.description import DecoderDescription
from parallel.errors import CheckpointError
from parallel.families.layout import Location
from parallel.families.registry import family_of
from parallel.host_memory import leave, read_now
from parallel.quantization.fp8 import Fp8TilePacking
from parallel.quantization.mxfp4 import Mxfp4Packing
from parallel.quantization.packing import Packing, Stored
from parallel.shard import Piece, ShardedParameter
from parallel.weight_files import STORED_DTYPES, FileBytes, StoredTensors

_PACKINGS: Sequence[Packing] = (Mxfp4Packing(), Fp8TilePacking())
"""Ways to store a matrix in fewer bits, known by the tensors that they have beside or in place of its own."""

OpenFiles = Mapping[Path, StoredTensors]

_CONVERTED_ELEMENTS = 1 << 16
"""Elements converted at once: they stay in the cache of a core."""
_ROW_ELEMENTS = 1 << 18
"""Elements of whole rows read at once for their columns: small reads cost more than what stays near a core gains."""
_SENT_ELEMENTS = 1 << 22
"""Elements sent to a GPU at once, from pinned memory, which torch keeps for the next."""
_UNPACKED_ELEMENTS = 1 << 22
"""Elements unpacked at once: meanwhile a weight takes several times the memory that it is kept in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightRead:
    """One slice to copy: `start : stop` along `dim` of the tensor called `name`, the other dims whole."""

    name: str
    shape: tuple[int, ...]
    """Shape that the stored tensor must have."""
    dim: int
    start: int
    stop: int
    target: Tensor
    """The part of a parameter that the slice fills; on disk it may be transposed."""
    is_transposed: bool = False
    expert: int | None = None
    """Expert that is read, where the stored tensor holds all along a first dim; `dim` counts the dims after it."""
    rows: range | None = None
    """Rows that are read of a slice of columns (dim 1); None: all."""

    @property
    def num_elements(self) -> int:
        """Elements of the slice."""
        return self.target.numel()

    @property
    def num_touched(self) -> int:
        """Elements in the pages that are read: those of whole rows, also of a slice of columns."""
        sizes = self.shape[-self.target.dim() :]
        return len(self._rows) * math.prod(sizes[1:])

    @property
    def _rows(self) -> range:
        """Rows (dim 0) that are read."""
        if self.dim == 0:
            return range(self.start, self.stop)
        return range(self.shape[-self.target.dim()]) if self.rows is None else self.rows

    def cut(self, max_touched: int) -> Iterator["WeightRead"]:
        """Yield the slice in parts, by rows, that touch at most `max_touched` elements each, but for a single row."""
        rows = self._rows
        num_parts = -(-self.num_touched // max_touched) or 1
        step = -(-len(rows) // num_parts) or 1
        target_dim = self.target.dim() - 1 if self.is_transposed else 0
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            target = self.target.narrow(target_dim, start, len(part))
            if self.dim == 0:
                yield replace(self, start=part.start, stop=part.stop, target=target)
            else:
                yield replace(self, rows=part, target=target)

    def stored(self, file: Path) -> Iterator[tuple[Path, Stored]]:
        """Yield each tensor that is read, and its file; `file` holds the one called `name`."""
        yield file, Stored(self.name, self.shape, tuple(STORED_DTYPES))

    def copy(self, file: Path, opened: OpenFiles) -> int:
        """Fill the target; return the bytes that were read."""
        if (found := opened[file].find(self.name)) is not None:
            return self._read(found, STORED_DTYPES[opened[file].get_slice(self.name).get_dtype()])
        with _StoredSlice(opened[file], self.name, self.expert) as stored:
            columns = () if self.dim == 0 else (slice(self.start, self.stop),)
            weights = stored[slice(self._rows.start, self._rows.stop), *columns]
            self.target.copy_(weights.t() if self.is_transposed else weights)
        return stored.num_bytes

    def _read(self, found: FileBytes, dtype: torch.dtype) -> int:
        """Read what has the same bytes in one piece straight to the target; else whole rows, some at a time."""
        if self._holds_as_stored(dtype):
            found.read(self._num_skipped * dtype.itemsize, self.target)
            return self.num_elements * dtype.itemsize
        is_sent = self.target.device.type != "cpu"
        for part in self.cut(_SENT_ELEMENTS if is_sent else _CONVERTED_ELEMENTS if self.dim == 0 else _ROW_ELEMENTS):
            sizes = (len(part._rows), *self.shape[-self.target.dim() :][1:])
            rows = torch.empty(sizes, dtype=dtype, pin_memory=is_sent)
            found.read(part._num_skipped * dtype.itemsize, rows)
            weights = rows if self.dim == 0 else rows[:, self.start : self.stop]
            part.target.copy_(weights.t() if self.is_transposed else weights)
        return self.num_elements * dtype.itemsize

    @property
    def _num_skipped(self) -> int:
        """Elements of the stored tensor before the first of these rows."""
        sizes = self.shape[-self.target.dim() :]
        return (self.expert or 0) * math.prod(sizes) + self._rows.start * math.prod(sizes[1:])

    def _holds_as_stored(self, dtype: torch.dtype) -> bool:
        is_same = self.target.dtype == dtype and self.target.is_contiguous() and not self.is_transposed
        return self.dim == 0 and is_same and self.target.device.type == "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedRead(WeightRead):
    """One slice of a matrix that is stored packed: shape and dim are those of the matrix in the decoder."""

    packing: Packing
    values: Stored
    scales: Stored
    scales_file: Path | None
    """File of the scales; None: that of the values."""

    def stored(self, file: Path) -> Iterator[tuple[Path, Stored]]:
        """Yield values and scales."""
        yield file, self.values
        yield self.scales_file or file, self.scales

    def copy(self, file: Path, opened: OpenFiles) -> int:
        """Fill the target, unpacked; return the bytes that were read."""
        with (
            _StoredSlice(opened[file], self.values.name, self.expert) as values,
            _StoredSlice(opened[self.scales_file or file], self.scales.name, self.expert) as scales,
        ):
            columns = range(self.shape[1]) if self.dim == 0 else range(self.start, self.stop)
            for part in self.cut(_UNPACKED_ELEMENTS):
                part.target.copy_(self.packing.read(values, scales, part._rows, columns))
        return values.num_bytes + scales.num_bytes


class _StoredSlice:
    """A stored tensor, or the part of one expert of it, of which what is asked for is read, and left in the end."""

    def __init__(self, tensors: StoredTensors, name: str, expert: int | None) -> None:
        self._slice = tensors.get_slice(name)
        self._experts = () if expert is None else (slice(expert, expert + 1),)
        self._parts: list[Tensor] = []

    def __enter__(self) -> "_StoredSlice":
        return self

    def __exit__(self, *_error: object) -> None:
        for part in self._parts:
            leave(part)

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """A view into the mapped file, whose pages are read now."""
        part = self._slice[*self._experts, *index]
        read_now(part)
        self._parts.append(part)
        return part.squeeze(0) if self._experts else part

    @property
    def num_bytes(self) -> int:
        """Read so far."""
        return sum(part.nbytes for part in self._parts)


def plan_reads(
    parameter: ShardedParameter, files: Mapping[str, Path], description: DecoderDescription, folder: Path
) -> Iterator[tuple[Path, WeightRead]]:
    """What fills a parameter, and the file that each of it is read from.

    Args:
        parameter: of a decoder of this description.
        files: where each tensor of the checkpoint is.
        description: also says the family.
        folder: for messages.

    Raises:
        CheckpointError: there is no such tensor.
    """
    family = family_of(description)
    for piece in parameter.pieces:
        location = family.locate(piece.source, description)
        for read in _reads(piece, location, parameter.target(piece)):
            names = [read.name, *family.other_names(read.name)]
            if description.tie_embeddings and piece.source == "embedding.weight":
                names.append(family.tensor_name("head.weight"))  # some writers keep this one of two names
            yield _find(read, names, files, folder)


def _find(read: WeightRead, names: Sequence[str], files: Mapping[str, Path], folder: Path) -> tuple[Path, WeightRead]:
    """Return the file and the read of a tensor that the checkpoint has under one of these names."""
    for name in names:
        packed = _find_packed(read, name, files, folder)
        if packed is not None:
            return packed
        if name in files:
            return files[name], replace(read, name=name)
    raise _missing(read.name, read.shape, folder)


def _find_packed(
    read: WeightRead, name: str, files: Mapping[str, Path], folder: Path
) -> tuple[Path, WeightRead] | None:
    """Return the file and the read of a matrix that is packed under this name; None: it is not, or is no matrix."""
    num_leading = 0 if read.expert is None else 1
    if len(read.shape) != num_leading + 2:
        return None
    num_rows, num_columns = read.shape[:-3:-1] if read.is_transposed else read.shape[-2:]
    for packing in _PACKINGS:
        tensors = packing.stored(name, (num_rows, num_columns))
        if not any(stored.name in files for stored in tensors if stored.name != name):
            continue
        values, scales = (stored._replace(shape=(*read.shape[:num_leading], *stored.shape)) for stored in tensors)
        for stored in (values, scales):
            if stored.name not in files:
                raise _missing(stored.name, stored.shape, folder)
        file, scales_file = files[values.name], files[scales.name]
        return file, _PackedRead(
            name=values.name,
            shape=(num_rows, num_columns),
            dim=1 - read.dim if read.is_transposed else read.dim,
            start=read.start,
            stop=read.stop,
            target=read.target,
            expert=read.expert,
            packing=packing,
            values=values,
            scales=scales,
            scales_file=None if scales_file == file else scales_file,
        )
    return None


def _missing(name: str, shape: tuple[int, ...], folder: Path) -> CheckpointError:
    return CheckpointError(f"{folder} has no tensor {name}; expected with shape {list(shape)}")


def _reads(piece: Piece, location: Location, target: Tensor) -> Iterator[WeightRead]:
    """The slices of stored tensors that fill `target`, the place of `piece`."""
    shape = location.stored_shape(piece.full_shape)
    if "{row}" in location.name:
        assert piece.dim == 0, "tensors that are stored by row are cut by row"
        for row in range(piece.start, piece.stop):
            name = location.name.format(row=row)
            yield WeightRead(name=name, shape=shape, dim=0, start=0, stop=shape[0], target=target[row - piece.start])
        return
    runs = [range(piece.start, piece.stop)]
    if location.fusion is not None:
        assert piece.dim == 0, "matrices are fused, and cut, by rows"
        runs = list(location.fusion.runs(location.part, piece.start, piece.stop))
    done = 0
    sizes = shape[-len(piece.full_shape) :]
    for run in runs:
        dim = len(sizes) - 1 - piece.dim if location.is_transposed else piece.dim
        dim, part = (0, range(sizes[0])) if len(run) == sizes[dim] else (dim, run)  # the whole lies in one piece
        yield WeightRead(
            name=location.name,
            shape=shape,
            dim=dim,
            start=part.start,
            stop=part.stop,
            target=target.narrow(piece.dim, done, len(run)),
            is_transposed=location.is_transposed,
            expert=location.expert,
        )
        done += len(run)
