"""Tiny checkpoints of families that `transformers` does not have, made from those of one that it has.

Their tensors are renamed and fused as the published checkpoints have them; the original's logits are the model's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]

_ORIGINALS = {
    "gemma3": "gemma3_text",
    "internlm2": "llama-grouped",
    "internlm2-bias": "llama-grouped-bias",
    "baichuan": "llama-multi-head",
    "baichuan-2": "llama-multi-head",
    "baichuan-13b": "llama-multi-head",
}

NAMES = tuple(_ORIGINALS)


def original_of(name: str) -> str:
    """The tiny model that this one is made from."""
    return _ORIGINALS[name]


def write(name: str, original: Path, folder: Path) -> None:
    """Write the checkpoint, from the folder of its original."""
    config = json.loads((original / "config.json").read_text())
    tensors = load_file(original / "model.safetensors")
    folder.mkdir()
    convert = _CONVERSIONS[name.split("-")[0]]
    config, tensors = convert(name, config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")


def load_original(name: str, model: Any) -> Any:
    """What gives the logits of this model: its original, changed where the families differ in more than names."""
    if name == "baichuan-2":
        with torch.no_grad():
            model.lm_head.weight.copy_(torch.nn.functional.normalize(model.lm_head.weight))
    return _AlibiLlama(model) if name == "baichuan-13b" else model


class _AlibiLlama:
    """Llama without rotation, and with ALiBi in its attention mask."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config
        head_dim = model.config.head_dim

        def no_rotation(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            ones = torch.ones(1, position_ids.shape[1], head_dim)
            return ones, torch.zeros_like(ones)

        model.model.rotary_emb.forward = no_rotation

    def __call__(self, token_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        from transformers.models.bloom.modeling_bloom import build_alibi_tensor

        length = token_ids.shape[1]
        alibi = build_alibi_tensor(torch.ones(1, length), self.config.num_attention_heads, torch.float32)
        hidden = torch.ones(length, length).triu(1).bool()
        mask = alibi[None].expand(1, -1, length, length).masked_fill(hidden, torch.finfo(torch.float32).min)
        answer: SimpleNamespace = self._model(token_ids, attention_mask=mask, use_cache=use_cache)
        return answer


def _to_gemma3(name: str, config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    renamed = {key.replace("model.", "language_model.model."): value for key, value in tensors.items()}
    return {"model_type": "gemma3", "text_config": config, "vision_config": {"hidden_size": 8}}, renamed


def _to_internlm2(name: str, config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    num_groups, head_dim = config["num_key_value_heads"], config["head_dim"]
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    renamed: Tensors = {}
    for key, value in tensors.items():
        if ".q_proj." in key:
            parts = [tensors[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            heads = [part.view(num_groups, -1, head_dim, *part.shape[1:]) for part in parts]
            fused = torch.cat(heads, dim=1).flatten(0, 2)
            renamed[key.replace("self_attn.q_proj", "attention.wqkv")] = fused
        elif ".k_proj." not in key and ".v_proj." not in key:
            for old, new in names.items():
                key = key.replace(old, new)
            renamed[key] = value
    sizes = {key: config[key] for key in (*_SIZE_FIELDS, "num_key_value_heads")}
    # past the original context only, which the tests do not reach
    scaling = {"type": "dynamic", "factor": 2.0} if name == "internlm2-bias" else None
    more = {"bias": config["attention_bias"], "rope_theta": 10000, "rope_scaling": scaling}
    return {"model_type": "internlm2", **sizes, **more}, renamed


def _to_baichuan(name: str, config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    renamed: Tensors = {}
    for key, value in tensors.items():
        if ".q_proj." in key:
            parts = [tensors[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            renamed[key.replace("q_proj", "W_pack")] = torch.cat(parts)
        elif ".k_proj." not in key and ".v_proj." not in key:
            renamed[key] = value
    sizes = {key: config[key] for key in _SIZE_FIELDS}
    if name == "baichuan-13b":
        sizes["model_max_length"] = sizes.pop("max_position_embeddings")
    if name == "baichuan-2":
        sizes["z_loss_weight"] = 0
    return {"model_type": "baichuan", **sizes}, renamed


_SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
)

_Convert = Callable[[str, dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]
_CONVERSIONS: dict[str, _Convert] = {
    "gemma3": _to_gemma3,
    "internlm2": _to_internlm2,
    "baichuan": _to_baichuan,
}
