"""Writes a checkpoint with linear layers in 8 bits, in the format that vLLM reads ("compressed-tensors", W8A8 dynamic).

Weights are int8 with a scale for each output, activations are quantized per token while the model runs; embedding and
head stay as they are, as in the checkpoints that are published in this format. Runs in vLLM's environment.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of the families that are compared."""

_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_EIGHT_BITS, "strategy": "channel", "dynamic": False, "observer": "minmax"},
            "input_activations": {**_EIGHT_BITS, "strategy": "token", "dynamic": True, "observer": None},
            "output_activations": None,
        }
    },
}


def write_w8a8_checkpoint(model: Path, target: Path) -> None:
    """Quantize the model in a folder with one weight file; everything else is copied."""
    shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZATION}, indent=2))
    tensors: dict[str, Tensor] = {}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(name)
            if name.endswith(tuple(f"{kind}.weight" for kind in _KINDS)):
                tensors[name], tensors[f"{name}_scale"] = quantize_outputs(tensor)
            else:
                tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def quantize_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 [out, in] and float32 scales [out, 1] of a matrix."""
    scales = weight.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (weight.float() / scales).round().to(torch.int8), scales
