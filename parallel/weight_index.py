"""Where the weights of a folder are: which of its files, and in which of them each tensor. Reads no weights, no torch.

safetensors files come before pickled ones, a single file before several with an index.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """What the files of a checkpoint in one format are called."""

    single: str
    index: str
    """Names the files of a checkpoint that has several."""


SAFETENSORS = WeightFormat(single="model.safetensors", index="model.safetensors.index.json")
PICKLED = WeightFormat(single="pytorch_model.bin", index="pytorch_model.bin.index.json")

FORMATS: Sequence[WeightFormat] = (SAFETENSORS, PICKLED)
"""Formats of weight files, in the order in which they are looked for."""

_MAX_NAME_BYTES = 255
"""Bytes of a file's name: no file system has longer ones."""


def find_weights(folder: Path) -> Path:
    """Return the file that holds all weights of a folder, or the index that says which files do.

    Raises:
        CheckpointError: there is neither, in no format.
    """
    names = [name for weights in FORMATS for name in (weights.single, weights.index)]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    for name in names:
        if (folder / name).is_symlink():
            raise CheckpointError(f"{folder / name} is a link to {(folder / name).readlink()}, which is no file")
    raise CheckpointError(f"{folder} has no weights; looked for {', '.join(names)}")


def read_index(file: Path) -> Mapping[str, str]:
    """Return the name of the file that holds each tensor. Raises CheckpointError; files need not be there."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        parts = {str(name): str(part) for name, part in weight_map.items() if isinstance(part, str)}
        is_complete = len(parts) == len(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is not an index of weight files: {error!r}") from error
    if not is_complete:
        raise CheckpointError(f"{file} is not an index of weight files: a tensor is in no file")
    for part in set(parts.values()):
        if Path(part).name != part or len(part.encode(errors="replace")) > _MAX_NAME_BYTES:
            raise CheckpointError(f"{file} names {part}; allowed: files beside it")
    return parts
