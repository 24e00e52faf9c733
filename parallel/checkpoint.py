"""Loads the weights of one rank from a Hugging Face folder, reading only the slices it holds, several at once.

What those are is planned by weight_reads.py; their files are opened by weight_files.py. Rows are read straight to
where they stay, columns by way of a few whole rows. What cannot be read so (`.bin` files, packed matrices) is copied
from a mapped file, of which pages that were touched count as memory of this process: those of a slice are left when it
is copied, and a file is mapped anew for each part of the decoder, since more pages come than are asked for. While a
part is laid out for the kernels, which may copy it, the next are read.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.errors import CheckpointError, ConfigError
from parallel.families.registry import describe_model
from parallel.host_memory import release_free_memory
from parallel.kernels.base import Kernels
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.quantization.packing import Stored
from parallel.stored_head import untie_stored_head
from parallel.unread_tensors import find_unread
from parallel.weight_files import is_only_mapped, locate_tensors, open_tensors
from parallel.weight_reads import OpenFiles, WeightRead, plan_reads

_NUM_READERS = 3
_MAX_BEGUN, _MAX_BEGUN_INT8 = 0.3, 0.1
"""Share of the rank's own weights that is read ahead; what will be in 8 bits takes twice as much till then."""
_MAPPED_FRACTION = 0.01
"""Share of the rank's own weights whose pages of files are mapped at once."""
_MIN_BATCH_BYTES = 1 << 18
_STORED_BYTES = 4  # of an element, but for rare float64

logger = logging.getLogger(__name__)

Progress = Callable[[float], None]
"""Called with the fraction of the weights read so far."""

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
    layer_partition: Sequence[int] = (),
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
        layer_partition: layers of each stage (shard.py); empty: equally many.
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
    description = untie_stored_head(description, folder, mesh=mesh, dtype=dtype)
    build = partial(
        Decoder,
        dtype=dtype,
        layer_partition=layer_partition,
        expert_parallel=expert_parallel,
        int8_linears=int8_linears,
        int8_cache=int8_cache,
    )
    try:
        decoder = build(description, mesh=mesh, device=device, kernels=kernels)
    except (RuntimeError, OSError, ConfigError):  # no memory for it: the config may be another model's
        _check_sizes(build, description, mesh=mesh, folder=folder)
        raise
    max_begun = _MAX_BEGUN_INT8 if int8_linears else _MAX_BEGUN
    bytes_read = load_weights(decoder, folder, progress=progress, max_begun=max_begun)
    logger.info("rank %d read %d bytes of weights from %s", mesh.rank, bytes_read, folder)
    return decoder


def load_weights(
    decoder: Decoder, folder: Path, *, progress: Progress | None = None, max_begun: float = _MAX_BEGUN
) -> int:
    """Fill the parameters of a decoder from a checkpoint; return the bytes read, a part of those in the files.

    All tensors are checked before the first is copied. One part is laid out after the other, so that a copy that the
    kernels make is only ever one of a part. Meanwhile the next are read: no part is begun when those that are not laid
    out are more of the weights than `max_begun`. Of files that are only mapped one part at a time: more pages come than
    are asked for, and stay until it is done.

    Raises:
        CheckpointError: a file is missing or corrupt, or a tensor is missing or has the wrong shape or dtype.
    """
    files = locate_tensors(folder)
    plans, finishes = _plan(decoder, files, folder)
    expected = _expected(plans)
    _check_files(expected)
    if decoder.mesh.rank == 0:
        _warn_of_unread(expected, files, folder)
    if any(is_only_mapped(file) for plan in plans for file in plan):
        max_begun = 0.0
    total = sum(read.num_elements for plan in plans for reads in plan.values() for read in reads)
    own_bytes = total * decoder.dtype.itemsize
    max_touched = max(int(own_bytes * _MAPPED_FRACTION), _NUM_READERS * _MIN_BATCH_BYTES) // _STORED_BYTES
    done = num_bytes = 0
    begun: deque[_BegunPart] = deque()
    with ExitStack() as parts, _readers() as readers:
        while plans or begun:
            while plans and sum(part.num_elements for part in begun) <= max_begun * total:
                begun.append(parts.enter_context(_begin(plans.pop(0), max_touched // _NUM_READERS, readers)))
            for batch_elements, batch_bytes in begun[0].finish():
                done += batch_elements
                num_bytes += batch_bytes
                if progress is not None:
                    progress(done / total)
            # Nothing here may keep the weights of a part that is laid out: the kernels may have their own.
            begun.popleft()
            _lay_out(finishes.pop(0))
    return num_bytes


@contextmanager
def _readers() -> Iterator[ThreadPoolExecutor]:
    readers = ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="weights")
    try:
        yield readers
    finally:
        readers.shutdown(cancel_futures=True)


def _lay_out(finish: _Finish) -> None:
    finish()
    release_free_memory()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Reads of one file that a reader does at once."""

    file: Path
    reads: Sequence[WeightRead]

    def copy(self, opened: OpenFiles) -> tuple[int, int]:
        """Fill the targets; return how many elements they have, and the bytes that were read."""
        num_bytes = sum(read.copy(self.file, opened) for read in self.reads)
        return sum(read.num_elements for read in self.reads), num_bytes


def _check_sizes(build: Callable[..., Decoder], description: DecoderDescription, *, mesh: Mesh, folder: Path) -> None:
    """Raise CheckpointError where the weights in a folder are not those of the description; takes no memory for them.

    Tables of positions, which are in no file, are left out, and so are other ranks, which may not do this.
    """
    bare = replace(description, max_context=1, rotaries=(None,) * description.num_layers)
    alone = Mesh(tp=Axis(size=mesh.tp.size, rank=mesh.tp.rank), pp=Axis(size=mesh.pp.size, rank=mesh.pp.rank))
    decoder = build(bare, mesh=alone, device=torch.device("meta"), kernels=ReferenceKernels())
    plans, _ = _plan(decoder, locate_tensors(folder), folder)
    _check_files(_expected(plans))


def _limit_context(description: DecoderDescription, max_context: int) -> DecoderDescription:
    if not 1 <= max_context <= description.max_context:
        raise ConfigError(f"max_context is {max_context}; allowed by the model: 1 to {description.max_context}")
    return replace(description, max_context=max_context)


def _plan(decoder: Decoder, files: Mapping[str, Path], folder: Path) -> tuple[list[_Plan], list[_Finish]]:
    """The reads of each part of the decoder, and what is to be called after them."""
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
    for file, reads in plan.items():
        batch: list[WeightRead] = []
        num_touched = 0
        for read in reads:
            for part in read.cut(max_touched):
                if batch and num_touched + part.num_touched > max_touched:
                    yield _Batch(file=file, reads=batch)
                    batch, num_touched = [], 0
                batch.append(part)
                num_touched += part.num_touched
        yield _Batch(file=file, reads=batch)


class _BegunPart:
    """A part of the decoder whose parameters are being filled."""

    def __init__(self, num_elements: int, running: Iterable[Future[tuple[int, int]]], files: ExitStack) -> None:
        self.num_elements = num_elements
        self._running = deque(running)
        self._files = files

    def __enter__(self) -> "_BegunPart":
        return self

    def __exit__(self, *_error: object) -> None:
        self._files.close()

    def finish(self) -> Iterator[tuple[int, int]]:
        """Wait for it; yield what each batch gives."""
        while self._running:
            yield self._running.popleft().result()
        self._files.close()


def _begin(plan: _Plan, max_touched: int, readers: ThreadPoolExecutor) -> _BegunPart:
    files = {place for file, reads in plan.items() for read in reads for place, _ in read.stored(file)}
    num_elements = sum(read.num_elements for reads in plan.values() for read in reads)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_tensors(file)) for file in files}
        running = [readers.submit(batch.copy, opened) for batch in _batches(plan, max_touched)]
        return _BegunPart(num_elements, running, stack.pop_all())


def _expected(plans: Iterable[_Plan]) -> Mapping[Path, Sequence[Stored]]:
    """The tensors of each file that are read."""
    expected: dict[Path, list[Stored]] = {}
    for plan in plans:
        for file, reads in plan.items():
            for place, stored in (stored for read in reads for stored in read.stored(file)):
                expected.setdefault(place, []).append(stored)
    return expected


def _check_files(expected: Mapping[Path, Sequence[Stored]]) -> None:
    for file, tensors in expected.items():
        _check_file(file, tensors)


def _check_file(file: Path, expected: Sequence[Stored]) -> None:
    """Compare the header of a file with what is expected of it."""
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


def _warn_of_unread(expected: Mapping[Path, Sequence[Stored]], files: Iterable[str], folder: Path) -> None:
    unread = find_unread((stored.name for tensors in expected.values() for stored in tensors), files)
    if unread:
        logger.warning(
            "%s: %d tensors of the layers are not read, for config.json does not ask for them; one is %s",
            *(folder, len(unread), unread[0]),
        )
