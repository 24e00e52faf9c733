"""Loads the weights of one rank from a Hugging Face folder, reading only the slices it holds, several at once.

What those are is planned by weight_reads.py; their files are opened by weight_files.py. A file is mapped, never read
whole. Pages that were touched count as memory of this process: those of a slice are left when it is copied, and a file
is mapped anew for each part of the decoder, since more pages come than are asked for. A part is laid out for the
kernels, which may copy it, before the next is read.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.errors import CheckpointError, ConfigError
from parallel.families.registry import describe_model
from parallel.host_memory import release_free_memory
from parallel.kernels.base import Kernels
from parallel.mesh import Mesh
from parallel.quantization.packing import Stored
from parallel.weight_files import locate_tensors, open_tensors
from parallel.weight_reads import OpenFiles, WeightRead, plan_reads

_NUM_READERS = 3
"""With more, more of them get the same large page anew, and all but one throw it away (docs/experiments)."""
_MAPPED_FRACTION = 0.02
"""Pages of files that are mapped at once, as a part of the rank's own weights."""
_MIN_BATCH_BYTES = 1 << 18
_STORED_BYTES = 4  # of an element, but for rare float64

logger = logging.getLogger(__name__)

Progress = Callable[[float], None]

_Finish = Callable[[], None]
_Plan = Mapping[Path, Sequence[WeightRead]]
"""The reads of each file."""


def load_decoder(
    folder: Path,
    *,
    mesh: Mesh,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Kernels,
    expert_parallel: bool = False,
    int8_linears: bool = False,
    int8_cache: bool = False,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> Decoder:
    """Build this rank's part of the model in a folder, with its weights.

    Args:
        folder: config.json and weight files in Hugging Face layout.
        mesh: which part is this rank's.
        device, dtype: where and as what the weights are held, whatever they are stored as.
        kernels: the operations that the decoder will call.
        expert_parallel: divide experts over the tensor-parallel ranks, each whole; else a part of every one to each.
        int8_linears: linear layers and the head in 8 bits (kernels/int8_linear.py).
        int8_cache: keys and values in 8 bits (kernels/int8_cache.py), where they are not one and the same.
        max_context: serve contexts no longer than this; None: what the config says.
        progress: called with the fraction of this rank's weights read so far, from the calling thread; ends with 1.0.

    Raises:
        ModelError: one of its kinds; the message names the file and the field or tensor.
    """
    description = describe_model(folder)
    if max_context is not None:
        description = _limit_context(description, max_context)
    decoder = Decoder(
        description,
        mesh=mesh,
        device=device,
        dtype=dtype,
        kernels=kernels,
        expert_parallel=expert_parallel,
        int8_linears=int8_linears,
        int8_cache=int8_cache,
    )
    bytes_read = _load(decoder, folder, progress, lay_out=_lay_out)
    logger.info("rank %d read %d bytes of weights from %s", mesh.rank, bytes_read, folder)
    return decoder


def load_weights(decoder: Decoder, folder: Path, *, progress: Progress | None = None) -> int:
    """Fill the parameters of a decoder from a checkpoint; return the bytes read, a part of those in the files.

    All tensors are checked before the first is copied.

    Raises:
        CheckpointError: a file is missing or corrupt, or a tensor is missing or has the wrong shape or dtype.
    """
    return _load(decoder, folder, progress, lay_out=lambda finish: None)


def _load(decoder: Decoder, folder: Path, progress: Progress | None, lay_out: Callable[[_Finish], None]) -> int:
    """Fill part by part, and lay out each before the next: a copy that the kernels make is only ever one of a part."""
    plans, finishes = _plan(decoder, folder)
    _check(plans)
    total = sum(read.num_elements for plan in plans for reads in plan.values() for read in reads)
    own_bytes = total * decoder.dtype.itemsize
    max_touched = max(int(own_bytes * _MAPPED_FRACTION), _NUM_READERS * _MIN_BATCH_BYTES) // _STORED_BYTES
    done = num_bytes = 0
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weights") as readers:
        while plans:
            # Nothing here may keep the weights of a part that is laid out: the kernels may have their own.
            for batch_elements, batch_bytes in _read(plans.pop(0), max_touched, readers):
                done += batch_elements
                num_bytes += batch_bytes
                if progress is not None:
                    progress(done / total)
            lay_out(finishes.pop(0))
    return num_bytes


def _lay_out(finish: _Finish) -> None:
    finish()
    release_free_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Reads of one file that a reader does at once."""

    file: Path
    reads: Sequence[WeightRead]
    num_touched: int
    """Elements in the pages that are read."""

    def copy(self, opened: OpenFiles) -> tuple[int, int]:
        """Fill the targets; return how many elements they have, and the bytes that were read."""
        num_bytes = sum(read.copy(self.file, opened) for read in self.reads)
        return sum(read.num_elements for read in self.reads), num_bytes


def _limit_context(description: DecoderDescription, max_context: int) -> DecoderDescription:
    if not 1 <= max_context <= description.max_context:
        raise ConfigError(f"max_context is {max_context}; allowed by the model: 1 to {description.max_context}")
    return replace(description, max_context=max_context)


def _plan(decoder: Decoder, folder: Path) -> tuple[list[_Plan], list[_Finish]]:
    """The reads of each part of the decoder, and what is to be called after them."""
    files = locate_tensors(folder)
    plans: list[_Plan] = []
    finishes: list[_Finish] = []
    for part in decoder.parts():
        plan: dict[Path, list[WeightRead]] = {}
        for parameter in part.parameters:
            for file, read in plan_reads(parameter, files, decoder.description, folder):
                plan.setdefault(file, []).append(read)
        plans.append(plan)
        finishes.append(part.finish_loading)
    return plans, finishes


def _batches(plan: _Plan, max_touched: int) -> Iterator[_Batch]:
    """Reads of one file, in order, as many as one reader may map; a slice is cut up for that."""
    limit = max_touched // _NUM_READERS or 1
    for file, reads in plan.items():
        batch: list[WeightRead] = []
        num_touched = 0
        for read in reads:
            for part in read.cut(limit):
                if batch and num_touched + part.num_touched > limit:
                    yield _Batch(file=file, reads=batch, num_touched=num_touched)
                    batch, num_touched = [], 0
                batch.append(part)
                num_touched += part.num_touched
        yield _Batch(file=file, reads=batch, num_touched=num_touched)


def _read(plan: _Plan, max_touched: int, readers: ThreadPoolExecutor) -> Iterator[tuple[int, int]]:
    """Fill the parameters of a part; yield what each batch gives."""
    files = {place for file, reads in plan.items() for read in reads for place, _ in read.stored(file)}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_tensors(file)) for file in files}
        yield from _copy(_batches(plan, max_touched), max_touched, opened, readers)


def _copy(
    batches: Iterable[_Batch], max_touched: int, opened: OpenFiles, readers: ThreadPoolExecutor
) -> Iterator[tuple[int, int]]:
    """Copy several at a time, as long as they touch no more than that together; yield what each gives.

    A batch that alone touches more than that, since a single row does, is copied alone.
    """
    running: dict[Future[tuple[int, int]], int] = {}

    def finished() -> Iterator[tuple[int, int]]:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            del running[future]
            yield future.result()

    for batch in batches:
        while running and (len(running) == _NUM_READERS or sum(running.values()) + batch.num_touched > max_touched):
            yield from finished()
        running[readers.submit(batch.copy, opened)] = batch.num_touched
    while running:
        yield from finished()


def _check(plans: Iterable[_Plan]) -> None:
    """Compare the headers of all files with what is expected of them."""
    expected: dict[Path, list[Stored]] = {}
    for plan in plans:
        for file, reads in plan.items():
            for place, stored in (stored for read in reads for stored in read.stored(file)):
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
