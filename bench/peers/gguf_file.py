"""Writes a Llama, Qwen2, Qwen3 or Qwen3 MoE checkpoint in Hugging Face layout as a GGUF file, without a tokenizer."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

_FILE_TYPES = {
    "float32": gguf.LlamaFileType.ALL_F32,
    "float16": gguf.LlamaFileType.MOSTLY_F16,
    "bfloat16": gguf.LlamaFileType.MOSTLY_BF16,
}
_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROUTER = ".mlp.gate.weight"


def write_gguf(model: Path, path: Path, *, dtype: str) -> None:
    """Write matrices in `dtype` ("float32", "float16" or "bfloat16"), vectors and routers in float32.

    Raises ValueError for another model type or dtype, and for a mixture that llama.cpp would compute differently.
    """
    config = json.loads((model / "config.json").read_text())
    kind = config["model_type"]
    if kind not in _ARCHITECTURES:
        raise ValueError(f"model_type is {kind!r}; allowed: {', '.join(_ARCHITECTURES)}")
    if dtype not in _FILE_TYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(_FILE_TYPES)}, int8")
    if "num_experts" in config and not config.get("norm_topk_prob"):
        raise ValueError("norm_topk_prob is false; allowed: true, what llama.cpp does")
    architecture = _ARCHITECTURES[kind]
    writer: Any = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _add_config(writer, config, dtype)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in _with_experts_together(_tensors(model, config)):
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, f"{name} has a place in {kind}"
        is_exact = tensor.dim() == 1 or name.endswith(_ROUTER)
        _add_tensor(writer, gguf_name, tensor, "float32" if is_exact else dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: Any, config: dict[str, Any], dtype: str) -> None:
    num_heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_tokenizer_model("none")


def _tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            yield name, _pair_rotary_rows(name, tensor, config)


def _with_experts_together(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of a layer's experts as one, [experts, out, in], after all else."""
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = _EXPERT.search(name)
        if match is None:
            yield name, tensor
        else:
            experts.setdefault(_EXPERT.sub(".experts.", name), {})[int(match[1])] = tensor
    for name, by_index in experts.items():
        yield name, torch.stack([by_index[index] for index in range(len(by_index))])


def _pair_rotary_rows(name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """llama.cpp rotates rows 2i and 2i+1 of a Llama head together; in a checkpoint those are i and i + H/2."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = next((heads[each] for each in heads if f".{each}." in name), None)
    if config["model_type"] != "llama" or key is None:
        return tensor
    halves = tensor.view(config[key], 2, _head_dim(config) // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, name: str, tensor: Tensor, dtype: str) -> None:
    if dtype == "bfloat16":
        data: NDArray[Any] = tensor.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        data = tensor.to(torch.float32).numpy().astype(dtype)
        writer.add_tensor(name, data)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
