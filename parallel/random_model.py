"""Writes a model folder with random weights, of any geometry of the known families, for benchmarks and tests.

The weights are drawn and written piece by piece: memory stays small whatever the size of the model. Each tensor depends
on the seed and its own name only.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.decoder import Decoder
from parallel.description import DecoderDescription
from parallel.dtypes import DTYPES
from parallel.errors import ConfigError
from parallel.families.fields import read_json_object
from parallel.families.registry import describe_config, family_of
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Mesh
from parallel.weight_files import STORED_DTYPES
from parallel.weight_index import SAFETENSORS

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja"),
)
"""What is copied from a tokenizer folder, where it exists."""

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_CHUNK_ELEMENTS = 1 << 24


def write_random_model(
    folder: Path,
    config: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype,
    tokenizer: Path | None = None,
    *,
    max_shard_bytes: int = 2 << 30,
) -> None:
    """Write config.json, generation_config.json and safetensors files that `transformers` and Weft can load.

    Args:
        folder: new or empty.
        config: a Hugging Face config with at least model_type and the sizes; its dtype is replaced, its quantization
            left out.
        seed: of the weights.
        dtype: of the weights.
        tokenizer: a folder whose tokenizer files are copied; the ids of its special tokens fill those that
            `config` leaves open.
        max_shard_bytes: a larger model is written as several files with an index.

    Raises:
        ConfigError: the config describes no model, the dtype cannot be stored, or the folder has files in it.
        UnsupportedModelError: the family, or something that the config asks for, is not known.
    """
    description = describe_config(config, source="config")
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype is {dtype}; allowed: {', '.join(DTYPES)}")
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"{tokenizer} has no tokenizer.json; allowed: a folder with a tokenizer")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; allowed: a new or an empty folder")
    try:
        _fill(folder, description, config, seed, dtype, tokenizer, max_shard_bytes)
    except BaseException:
        for file in folder.iterdir():  # or the next try would find it not empty
            file.unlink()
        raise


def _fill(
    folder: Path,
    description: DecoderDescription,
    config: Mapping[str, Any],
    seed: int,
    dtype: torch.dtype,
    tokenizer: Path | None,
    max_shard_bytes: int,
) -> None:
    special_ids = _copy_tokenizer(tokenizer, folder) if tokenizer is not None else {}
    special_ids |= {name: config[name] for name in _SPECIAL_IDS if config.get(name) is not None}
    _write_weights(folder, _list_tensors(description), seed, dtype, max_shard_bytes)
    _write_json(folder / "generation_config.json", {**special_ids, "do_sample": False})
    # last: a folder without it is not a model, so one half written is not taken for one
    _write_json(folder / "config.json", _complete_config(config, special_ids, dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class _TensorPlan:
    """One tensor to write."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()


def _list_tensors(description: DecoderDescription) -> list[_TensorPlan]:
    """Every tensor of the model's checkpoint: what the whole decoder, on one rank, asks for."""
    family = family_of(description)
    decoder = Decoder(
        description, mesh=Mesh.single(), device=torch.device("meta"), dtype=torch.float32, kernels=ReferenceKernels()
    )
    plans: dict[str, _TensorPlan] = {}  # by name: a fused tensor holds several of the decoder's
    for parameter in decoder.sharded_parameters():
        for piece in parameter.pieces:
            location = family.locate(piece.source, description)
            shape = location.stored_shape(piece.full_shape)
            for name in location.names(piece.full_shape[0]):
                fan_in = shape[-2] if location.is_transposed else shape[-1]
                plans[name] = _plan_tensor(piece.source, name, shape, fan_in)
    return list(plans.values())


def _plan_tensor(source: str, name: str, shape: tuple[int, ...], fan_in: int) -> _TensorPlan:
    """Choose a distribution that keeps activations of moderate size and makes logits differ."""
    if len(shape) == 1 or source.endswith(("_norm.weight", "bias")):
        return _TensorPlan(name=name, shape=shape, mean=0.0 if source.endswith("bias") else 1.0, std=0.1)
    if source in ("embedding.weight", "positions.weight", "head.weight"):
        gain = 2.0  # the standard deviation of the logits
    elif source.endswith((".output.weight", ".down.weight")):
        gain = 6.0  # the layers outweigh the embedding; with a tied head the model else repeats its last token
    else:
        gain = 1.5
    return _TensorPlan(name=name, shape=shape, mean=0.0, std=gain / fan_in**0.5)


def _write_weights(
    folder: Path, tensors: Sequence[_TensorPlan], seed: int, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    shards = list(_split(tensors, max_shard_bytes // dtype.itemsize))
    if len(shards) == 1:
        _write_safetensors(folder / SAFETENSORS.single, shards[0], seed, dtype)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = folder / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_safetensors(file, shard, seed, dtype)
        weight_map |= {tensor.name: file.name for tensor in shard}
    total_size = sum(tensor.num_elements for tensor in tensors) * dtype.itemsize
    _write_json(folder / SAFETENSORS.index, {"metadata": {"total_size": total_size}, "weight_map": weight_map})


def _split(tensors: Sequence[_TensorPlan], max_elements: int) -> Iterator[list[_TensorPlan]]:
    """Cut the list, in order, into shards; a tensor larger than a shard has one of its own."""
    shard: list[_TensorPlan] = []
    num_elements = 0
    for tensor in tensors:
        if shard and num_elements + tensor.num_elements > max_elements:
            yield shard
            shard, num_elements = [], 0
        shard.append(tensor)
        num_elements += tensor.num_elements
    yield shard


def _write_safetensors(file: Path, tensors: Sequence[_TensorPlan], seed: int, dtype: torch.dtype) -> None:
    """Stream tensors into one file: header length (8 bytes, little endian), JSON header, then the data in order."""
    stored_name = next(name for name, stored in STORED_DTYPES.items() if stored is dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_elements * dtype.itemsize
        header[tensor.name] = {"dtype": stored_name, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned
    with file.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            for chunk in _draw(tensor, seed):
                out.write(chunk.to(dtype).view(torch.uint8).numpy().data)


def _draw(tensor: _TensorPlan, seed: int) -> Iterator[Tensor]:
    """The tensor's values in order, flat, float32, a chunk at a time."""
    digest = hashlib.blake2b(f"{seed} {tensor.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    for start in range(0, tensor.num_elements, _CHUNK_ELEMENTS):
        size = min(_CHUNK_ELEMENTS, tensor.num_elements - start)
        yield torch.empty(size).normal_(tensor.mean, tensor.std, generator=generator)


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copy the tokenizer's files; return the ids of special tokens that its folder knows."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    special_ids: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):  # the second counts more, as in transformers
        if (source / name).is_file():
            values = read_json_object(source / name)
            special_ids |= {key: values[key] for key in _SPECIAL_IDS if values.get(key) is not None}
    return special_ids


def _complete_config(config: Mapping[str, Any], special_ids: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    complete = {key: value for key, value in config.items() if key not in ("dtype", "quantization_config")}
    complete |= special_ids
    complete["torch_dtype"] = next(name for name, value in DTYPES.items() if value is dtype)
    words = config["model_type"].split("_")
    complete.setdefault("architectures", [f"{''.join(map(str.capitalize, words))}ForCausalLM"])
    return complete


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
