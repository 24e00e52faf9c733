"""Loads the weights of one rank from a Hugging Face folder of safetensors files, reading only the slices it holds.

Which slices those are is said by the layers (shard.py), what their tensors are called by the family (families/).
Matrices that are stored packed (quantization/) are unpacked on the way.
A file is mapped, never read whole, and mapped anew after a few slices: the pages that were touched would else count as
memory of this process until the last of them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.errors import CheckpointError, ConfigError
from parallel.families.layout import Location
from parallel.families.registry import describe_model, family_of
from parallel.kernels.base import Kernels
from parallel.mesh import Mesh
from parallel.quantization.fp8 import Fp8TilePacking
from parallel.quantization.mxfp4 import Mxfp4Packing
from parallel.quantization.packing import Packing, Stored
from parallel.shard import Piece

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

STORED_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that weights may be stored in, by their names in safetensors."""

PACKINGS: Sequence[Packing] = (Mxfp4Packing(), Fp8TilePacking())
"""Ways to store a matrix in fewer bits, known by the tensors that they have beside or in place of its own."""

_BATCH_ELEMENTS = 1 << 25
_UNPACKED_ELEMENTS = 1 << 22
"""At once: while it is unpacked a weight takes several times the memory that it is kept in."""

logger = logging.getLogger(__name__)

Progress = Callable[[float], None]


def load_decoder(
    folder: Path,
    *,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    expert_parallel: bool = False,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Build this rank's part of the model in a folder, with its weights.

    Args:
        folder: config.json and safetensors files in Hugging Face layout.
        mesh: which part is this rank's.
        device, dtype: where and as what the weights are held, whatever they are stored as.
        kernels: the operations that the decoder will call.
        expert_parallel: divide experts over the tensor-parallel ranks, each whole; else a part of every one to each.
        max_context: serve contexts no longer than this; None: what the config says.
        progress: called with the fraction of this rank's weights read so far, from the calling thread; ends with 1.0.

    Raises:
        ModelError: one of its kinds; the message names the file and the field or tensor.
    """
    description = describe_model(folder)
    if max_context is not None:
        description = _limit_context(description, max_context)
    decoder = Decoder(
        description, mesh=mesh, device=device, dtype=dtype, kernels=kernels, expert_parallel=expert_parallel
    )
    bytes_read = load_weights(decoder, folder, progress=progress)
    decoder.finish_loading()
    logger.info("rank %d read %d bytes of weights from %s", mesh.rank, bytes_read, folder)
    return decoder


def load_weights(decoder: Decoder, folder: Path, *, progress: Progress | None = None) -> int:
    """Fill the parameters of a decoder from a checkpoint; return the bytes read, a part of those in the files.

    All tensors are checked before the first is copied.

    Raises:
        CheckpointError: a file is missing or corrupt, or a tensor is missing or has the wrong shape or dtype.
    """
    reads_by_file = _plan_reads(decoder, folder)
    _check(reads_by_file)
    total = sum(read.num_elements for reads in reads_by_file.values() for read in reads)
    done = num_bytes = 0
    for file, batch in _batches(reads_by_file):
        with open_tensors(file) as tensors:
            for read in batch:
                num_bytes += read.copy(tensors)
                done += read.num_elements
                if progress is not None:
                    progress(done / total)
    return num_bytes


def locate_tensors(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor of a checkpoint. Raises CheckpointError."""
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if single.is_file():
        with open_tensors(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if index.is_file():
        return _read_index(index)
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; allowed: weights in safetensors files")


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """A safetensors file, mapped until the end of the block. Raises CheckpointError when it is missing or corrupt."""
    try:
        tensors = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a complete safetensors file: {error}") from error
    with tensors:
        yield tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """One slice to copy: `start : stop` along `dim` of the tensor called `name`, the other dims whole."""

    name: str
    shape: tuple[int, ...]
    """That the tensor must have."""
    dim: int
    start: int
    stop: int
    target: Tensor
    """The part of a parameter that the slice fills; on disk it may be transposed."""
    is_transposed: bool = False
    expert: int | None = None
    """Where the tensor holds all experts along a first dim: the one that is read; `dim` counts those after it."""

    @property
    def num_elements(self) -> int:
        """Of the slice."""
        return self.target.numel()

    def cut(self, max_elements: int) -> Iterator["_Read"]:
        """The same slice as several of at most so many elements each."""
        num_parts = -(-self.num_elements // max_elements) or 1
        step = -(-(self.stop - self.start) // num_parts) or 1
        target_dim = self.target.dim() - 1 - self.dim if self.is_transposed else self.dim
        for start in range(self.start, self.stop, step):
            stop = min(start + step, self.stop)
            target = self.target.narrow(target_dim, start - self.start, stop - start)
            yield replace(self, start=start, stop=stop, target=target)

    def stored(self, file: Path) -> Iterator[tuple[Path, Stored]]:
        """What is read, and where; `file` holds the tensor of this name."""
        yield file, Stored(self.name, self.shape, tuple(STORED_DTYPES))

    def copy(self, tensors: Any) -> int:
        """Fill the target from an open file; return the bytes that were read."""
        stored = _StoredSlice(tensors, self.name, self.expert)
        weights = stored[*[slice(None)] * self.dim, slice(self.start, self.stop)]
        self.target.copy_(weights.t() if self.is_transposed else weights)
        return stored.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedRead(_Read):
    """The same of a matrix that is stored packed: shape and dim are those of the matrix in the decoder."""

    packing: Packing
    values: Stored
    scales: Stored
    scales_file: Path | None
    """None: beside the values."""

    def stored(self, file: Path) -> Iterator[tuple[Path, Stored]]:
        """Values and scales."""
        yield file, self.values
        yield self.scales_file or file, self.scales

    def copy(self, tensors: Any) -> int:
        """Fill the target, unpacked; return the bytes that were read."""
        with nullcontext(tensors) if self.scales_file is None else open_tensors(self.scales_file) as others:
            values = _StoredSlice(tensors, self.values.name, self.expert)
            scales = _StoredSlice(others, self.scales.name, self.expert)
            for part in self.cut(_UNPACKED_ELEMENTS):
                rows, columns = map(range, self.shape)
                if part.dim == 0:
                    rows = range(part.start, part.stop)
                else:
                    columns = range(part.start, part.stop)
                part.target.copy_(self.packing.read(values, scales, rows, columns))
        return values.num_bytes + scales.num_bytes


class _StoredSlice:
    """A stored tensor, or the part of one expert of it, of which what is asked for is read."""

    def __init__(self, tensors: Any, name: str, expert: int | None) -> None:
        self._slice = tensors.get_slice(name)
        self._experts = () if expert is None else (slice(expert, expert + 1),)
        self.num_bytes = 0
        """Read so far."""

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        """A view into the mapped file."""
        part: Tensor = self._slice[*self._experts, *index]
        self.num_bytes += part.nbytes
        return part.squeeze(0) if self._experts else part


def _limit_context(description: DecoderDescription, max_context: int) -> DecoderDescription:
    if not 1 <= max_context <= description.max_context:
        raise ConfigError(f"max_context is {max_context}; allowed by the model: 1 to {description.max_context}")
    return replace(description, max_context=max_context)


def _plan_reads(decoder: Decoder, folder: Path) -> dict[Path, list[_Read]]:
    description = decoder.description
    family = family_of(description)
    files = locate_tensors(folder)
    reads_by_file: dict[Path, list[_Read]] = {}
    for parameter in decoder.sharded_parameters():
        for piece in parameter.pieces:
            location = family.locate(piece.source, description)
            for read in _reads(piece, location, parameter.target(piece)):
                names = [read.name, *family.other_names(read.name)]
                if description.tie_embeddings and piece.source == "embedding.weight":
                    names.append(family.tensor_name("head.weight"))  # some writers keep this one of two names
                file, found = _find(read, names, files, folder)
                reads_by_file.setdefault(file, []).append(found)
    return reads_by_file


def _find(read: _Read, names: Sequence[str], files: Mapping[str, Path], folder: Path) -> tuple[Path, _Read]:
    """The same read, as the checkpoint has its tensor under one of these names."""
    for name in names:
        packed = _find_packed(read, name, files, folder)
        if packed is not None:
            return packed
        if name in files:
            return files[name], replace(read, name=name)
    raise _missing(read.name, read.shape, folder)


def _find_packed(read: _Read, name: str, files: Mapping[str, Path], folder: Path) -> tuple[Path, _Read] | None:
    """The same read of a matrix that is packed under this name; None: it is not, or not a matrix."""
    num_leading = 0 if read.expert is None else 1
    if len(read.shape) != num_leading + 2:
        return None
    num_rows, num_columns = read.shape[:-3:-1] if read.is_transposed else read.shape[-2:]
    for packing in PACKINGS:
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


def _reads(piece: Piece, location: Location, target: Tensor) -> Iterator[_Read]:
    """The slices of stored tensors that fill `target`, the place of `piece`."""
    shape = location.stored_shape(piece.full_shape)
    if "{row}" in location.name:
        assert piece.dim == 0, "tensors that are stored by row are cut by row"
        for row in range(piece.start, piece.stop):
            name = location.name.format(row=row)
            yield _Read(name=name, shape=shape, dim=0, start=0, stop=shape[0], target=target[row - piece.start])
        return
    runs = [range(piece.start, piece.stop)]
    if location.fusion is not None:
        assert piece.dim == 0, "matrices are fused, and cut, by rows"
        runs = list(location.fusion.runs(location.part, piece.start, piece.stop))
    done = 0
    for run in runs:
        yield _Read(
            name=location.name,
            shape=shape,
            dim=len(piece.full_shape) - 1 - piece.dim if location.is_transposed else piece.dim,
            start=run.start,
            stop=run.stop,
            target=target.narrow(piece.dim, done, len(run)),
            is_transposed=location.is_transposed,
            expert=location.expert,
        )
        done += len(run)


def _batches(reads_by_file: Mapping[Path, Sequence[_Read]]) -> Iterator[tuple[Path, list[_Read]]]:
    """Reads of one file that together are small, in order; a large slice is cut up."""
    for file, reads in reads_by_file.items():
        batch: list[_Read] = []
        num_elements = 0
        for read in reads:
            for part in read.cut(_BATCH_ELEMENTS):
                if batch and num_elements + part.num_elements > _BATCH_ELEMENTS:
                    yield file, batch
                    batch, num_elements = [], 0
                batch.append(part)
                num_elements += part.num_elements
        yield file, batch


def _check(reads_by_file: Mapping[Path, Sequence[_Read]]) -> None:
    """Compare the headers of all files with what is expected of them."""
    expected: dict[Path, list[Stored]] = {}
    for file, reads in reads_by_file.items():
        for read in reads:
            for place, stored in read.stored(file):
                expected.setdefault(place, []).append(stored)
    for file, tensors in expected.items():
        _check_file(file, tensors)


def _check_file(file: Path, expected: Sequence[Stored]) -> None:
    with open_tensors(file) as tensors:
        present = set(tensors.keys())
        for name, shape, dtypes in expected:
            if name not in present:
                raise CheckpointError(f"{file} has no tensor {name}; expected there with shape {list(shape)}")
            stored = tensors.get_slice(name)
            if stored.get_shape() != list(shape):
                raise CheckpointError(
                    f"{file}: tensor {name} has shape {stored.get_shape()}; expected {list(shape)}, from config.json"
                )
            if stored.get_dtype() not in dtypes:
                raise CheckpointError(
                    f"{file}: tensor {name} has dtype {stored.get_dtype()}; allowed: {', '.join(dtypes)}"
                )


def _read_index(file: Path) -> dict[str, Path]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): file.parent / part for name, part in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not an index of safetensors files: {error!r}") from error
    for part in set(files.values()):
        if part.parent != file.parent:
            raise CheckpointError(f"{file} names {part}; allowed: files beside it")
        if not part.is_file():
            raise CheckpointError(f"{part} does not exist, but {file.name} names it")
    return files
