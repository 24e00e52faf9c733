"""Tiny checkpoints whose matrices are stored in few bits, as they are published; what the numbers stand for is beside
them, as `transformers` reads it, in the folder `plain`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]

_ORIGINALS = {"gpt_oss-mxfp4": "gpt_oss-blocks", "deepseek_v3-fp8": "deepseek_v3-tiles"}

NAMES = tuple(_ORIGINALS)


def original_of(name: str) -> str:
    """The tiny model whose weights are rounded and packed."""
    return _ORIGINALS[name]


def plain_folder(folder: Path) -> Path:
    """Where the model with the same, rounded weights is."""
    return folder / "plain"


def write(name: str, original: Path, folder: Path) -> None:
    """Write both checkpoints, from the folder of the original."""
    config = json.loads((original / "config.json").read_text())
    packed: Tensors = {}
    plain: Tensors = {}
    pack, is_packed, settings = _PACKINGS[name]
    for key, tensor in load_file(original / "model.safetensors").items():
        if is_packed(key):
            tensors, plain[key] = pack(key, tensor)
            packed |= tensors
        else:
            packed[key] = plain[key] = tensor
    if name == "deepseek_v3-fp8":  # a layer that predicts one token more
        last = f"model.layers.{config['num_hidden_layers']}"
        packed |= {f"{last}.eh_proj.weight": torch.ones(4, 8), f"{last}.input_layernorm.weight": torch.ones(4)}
    _save(plain_folder(folder), config, plain)
    _save(folder, {**config, "quantization_config": settings}, packed)


def pack_mxfp4(name: str, tensor: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks and scales of all experts' matrices, stored [experts, inputs, outputs]; and these, rounded."""
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    groups = tensor.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).log2().floor() - 2
    numbers = torch.tensor(FP4_VALUES)
    nearest = (torch.ldexp(groups, -exponents.unsqueeze(-1)).unsqueeze(-1) - numbers).abs().argmin(-1)
    blocks = (nearest[..., 0::2] + 16 * nearest[..., 1::2]).to(torch.uint8)
    scales = (exponents + 127).to(torch.uint8)
    rounded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, rounded


def pack_fp8(name: str, tensor: Tensor) -> tuple[Tensors, Tensor]:
    """The matrix in eight bits and its tiles' scales; and the matrix, rounded."""
    num_rows, num_columns = tensor.shape
    values = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-num_rows // 128), -(-num_columns // 128))
    rounded = torch.empty_like(tensor)
    for i, j in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        tile = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
        scales[i, j] = tensor[tile].abs().max() / 448  # the largest number there is
        values[tile] = (tensor[tile] / scales[i, j]).to(values.dtype)
        rounded[tile] = values[tile].float() * scales[i, j]
    return {name: values, f"{name}_scale_inv": scales}, rounded


_Pack = Callable[[str, Tensor], tuple[Tensors, Tensor]]

_PACKINGS: dict[str, tuple[_Pack, Callable[[str], bool], dict[str, Any]]] = {
    "gpt_oss-mxfp4": (
        pack_mxfp4,
        lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")),
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    ),
    "deepseek_v3-fp8": (
        pack_fp8,
        lambda name: name.endswith(("_proj.weight", "_mqa.weight")),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
}


def _save(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
