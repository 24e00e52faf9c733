"""Loads the weights of one rank from a Hugging Face folder of safetensors files, reading only the slices it holds.

Which slices those are is said by the layers (shard.py), what their tensors are called by the family (families/).
A file is mapped, never read whole, and mapped anew after a few slices: the pages that were touched would else count as
memory of this process until the last of them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

_BATCH_ELEMENTS = 1 << 25

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
        progress: called with the fraction of this rank's bytes read so far, from the calling thread; ends with 1.0.

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
    total = sum(_check_file(file, reads) for file, reads in reads_by_file.items())
    done = 0
    for file, batch in _batches(reads_by_file):
        with open_tensors(file) as tensors:
            for read in batch:
                done += read.copy(tensors)
                if progress is not None:
                    progress(done / total)
    return done


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

    def copy(self, tensors: Any) -> int:
        """Fill the target from an open file; return the bytes that were read."""
        index = (*[slice(None)] * self.dim, slice(self.start, self.stop))
        if self.expert is not None:
            index = (slice(self.expert, self.expert + 1), *index)
        weights: Tensor = tensors.get_slice(self.name)[index]  # a view into the mapped file: nothing is read yet
        if self.expert is not None:
            weights = weights.squeeze(0)
        self.target.copy_(weights.t() if self.is_transposed else weights)
        return weights.numel() * weights.element_size()


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
                name = next((name for name in names if name in files), None)
                if name is None:
                    raise CheckpointError(f"{folder} has no tensor {read.name}; expected with shape {list(read.shape)}")
                reads_by_file.setdefault(files[name], []).append(replace(read, name=name))
    return reads_by_file


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


def _check_file(file: Path, reads: Sequence[_Read]) -> int:
    """Compare the file's header with what is expected of it; return how many bytes will be read."""
    num_bytes = 0
    with open_tensors(file) as tensors:
        present = set(tensors.keys())
        for read in reads:
            expected = list(read.shape)
            if read.name not in present:
                raise CheckpointError(f"{file} has no tensor {read.name}; expected there with shape {expected}")
            stored = tensors.get_slice(read.name)
            if stored.get_shape() != expected:
                raise CheckpointError(
                    f"{file}: tensor {read.name} has shape {stored.get_shape()}; expected {expected}, from config.json"
                )
            dtype = STORED_DTYPES.get(stored.get_dtype())
            if dtype is None:
                raise CheckpointError(
                    f"{file}: tensor {read.name} has dtype {stored.get_dtype()}; allowed: {', '.join(STORED_DTYPES)}"
                )
            num_bytes += read.num_elements * dtype.itemsize
    return num_bytes


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
