"""Which dtype a model computes in: what the user names, or what the checkpoint and the device suggest."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from parallel.device.base import Device
from parallel.errors import CheckpointError, ConfigError
from parallel.families.fields import Fields, read_json_object
from parallel.weight_files import STORED_DTYPES, locate_tensors, open_tensors

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Dtypes that a model can compute in, by the names that users give them."""


def resolve_dtype(name: str, folder: Path, device: Device, *, multiplies: Callable[[torch.dtype], bool]) -> torch.dtype:
    """The dtype called `name`; "auto" lets the device decide, knowing that of the checkpoint.

    Args:
        multiplies: whether the kernels have products of their own in a dtype (`select.multiplies`), however slow torch
            is in it on this device.

    Raises:
        ConfigError: the name, or what config.json says, is not known.
        CheckpointError: "auto", config.json says nothing, and the weights cannot be read.
    """
    if name != "auto":
        return _find(name, "dtype", ("auto", *DTYPES))
    stored = checkpoint_dtype(folder)
    return stored if multiplies(stored) else device.default_dtype(stored)


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """What config.json names (`dtype`, formerly `torch_dtype`); where it names none, that of the first weight."""
    file = folder / "config.json"
    fields = Fields(read_json_object(file))
    for field in ("dtype", "torch_dtype"):
        if field in fields:
            return _find(fields.text(field).removeprefix("torch."), f"{file}: {field}", tuple(DTYPES))
    return _first_weight_dtype(folder)


def _find(name: str, what: str, allowed: tuple[str, ...]) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"{what} is {name!r}; allowed: {', '.join(allowed)}")
    return DTYPES[name]


def _first_weight_dtype(folder: Path) -> torch.dtype:
    for name, file in sorted(locate_tensors(folder).items()):
        with open_tensors(file) as tensors:
            dtype = STORED_DTYPES.get(tensors.get_slice(name).get_dtype())
        if dtype is not None and dtype in DTYPES.values():
            return dtype
    raise CheckpointError(f"{folder} holds no weights of dtype {', '.join(DTYPES)}")
