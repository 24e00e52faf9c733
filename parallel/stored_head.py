"""Whether a checkpoint has a head of its own although its config ties the head to the embedding.

`transformers` ties the two where only one is stored, or both are with the same values; else each is what is stored.
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from parallel.description import DecoderDescription
from parallel.families.registry import family_of
from parallel.host_memory import leave, read_now
from parallel.mesh import Mesh
from parallel.weight_files import STORED_DTYPES, locate_tensors, open_tensors

_COMPARED_ELEMENTS = 1 << 22
"""Elements that are compared at once."""

logger = logging.getLogger(__name__)


def untie_stored_head(
    description: DecoderDescription, folder: Path, *, mesh: Mesh, dtype: torch.dtype
) -> DecoderDescription:
    """The description, no longer tied where the head is to be read as it is stored.

    Every rank finds the same by itself, for what a head gives may have another dtype where it is shared. So each
    compares all rows. Where no rank has both, nothing would be shared: a head that is stored is read, none compared.

    Args:
        description: of the model in this folder.
        folder: of the weights; most have only one of the two, and are not read here.
        mesh: of all ranks.
        dtype: that the weights will have; `transformers` compares them in it.

    Raises:
        CheckpointError: there are no weights, or they are corrupt.
    """
    if not description.tie_embeddings:
        return description
    files = locate_tensors(folder)
    names = [_stored_name(source, description, files) for source in ("embedding.weight", "head.weight")]
    found = {name: files[name] for name in names if name is not None}
    if len(found) < len(names):
        return description
    if mesh.pp.size == 1:
        if _are_equal(found, [description.vocab_size, description.hidden_size], dtype):
            return description
        logger.info("%s has a head that is not its embedding, whatever config.json says: both are loaded", folder)
    return replace(description, tie_embeddings=False)


def _stored_name(source: str, description: DecoderDescription, files: Mapping[str, Path]) -> str | None:
    family = family_of(description)
    name = family.tensor_name(source)
    return next((name for name in (name, *family.other_names(name)) if name in files), None)


def _are_equal(files: Mapping[str, Path], shape: list[int], dtype: torch.dtype) -> bool:
    """Whether these two tensors are; not where one of them is no weight of this shape, of which loading will tell."""
    with ExitStack() as stack:
        opened = {file: stack.enter_context(open_tensors(file)) for file in set(files.values())}
        first, second = (opened[file].get_slice(name) for name, file in files.items())
        if any(stored.get_shape() != shape or stored.get_dtype() not in STORED_DTYPES for stored in (first, second)):
            return False
        num_rows = max(1, _COMPARED_ELEMENTS // shape[1])
        parts = (slice(start, start + num_rows) for start in range(0, shape[0], num_rows))
        return all(_are_rows_equal(first[rows,], second[rows,], dtype) for rows in parts)


def _are_rows_equal(first: Tensor, second: Tensor, dtype: torch.dtype) -> bool:
    """Compare rows of mapped files, whose pages are left afterwards."""
    if first.is_set_to(second):
        return True  # `.bin` files hold what is tied once
    for rows in (first, second):
        read_now(rows)
    is_equal = torch.equal(first.to(dtype), second.to(dtype))
    for rows in (first, second):
        leave(rows)
    return is_equal
