"""The checkpoint in 8 bits that vLLM is measured with holds the same model."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.peers.w8a8_checkpoint import write_w8a8_checkpoint
from parallel.random_model import write_random_model

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def test_linear_layers_are_in_8_bits_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    model, target = tmp_path / "model", tmp_path / "w8a8"
    write_random_model(model, CONFIG, 0, torch.bfloat16)
    write_w8a8_checkpoint(model, target)
    old, new = load_file(model / "model.safetensors"), load_file(target / "model.safetensors")
    quantized = {name for name in old if name.endswith("_proj.weight")}
    assert len(quantized) == 7
    assert set(new) == set(old) | {f"{name}_scale" for name in quantized}
    for name, weight in old.items():
        if name in quantized:
            assert new[name].dtype is torch.int8
            scales = new[f"{name}_scale"]
            assert scales.shape == (len(weight), 1)
            assert ((new[name].float() * scales - weight.float()).abs() <= scales * 0.501).all()
        else:
            assert torch.equal(new[name], weight)
    config = json.loads((target / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == json.loads((model / "config.json").read_text())
