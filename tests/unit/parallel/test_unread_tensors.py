"""What nobody reads of layers that are served is found; what is no sign of a wrong config is not."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from helpers.read_weights import read_weights
from helpers.tiny_models import tiny_model

from parallel.decoder import Decoder
from parallel.families.registry import describe_model
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.unread_tensors import find_unread

READ = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.experts.0.gate_proj.weight",
)


def _warnings(folder: Path, caplog: pytest.LogCaptureFixture, *, rank: int = 0, tp: int = 1, pp: int = 1) -> list[str]:
    """Those of one rank that loads; experts are whole."""
    description = describe_model(folder)
    decoder = Decoder(
        description,
        mesh=Mesh(tp=Axis(size=tp, rank=rank), pp=Axis(size=pp, rank=0)),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=ReferenceKernels(),
        expert_parallel=description.moe is not None,
    )
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        read_weights(decoder, folder)
    return [record.getMessage() for record in caplog.records]


def test_biases_that_the_config_has_lost_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = Path(shutil.copytree(tiny_model("llama-bias"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": False}))

    (warning,) = _warnings(folder, caplog)

    assert f"{folder}: 12 tensors of the layers are not read" in warning
    assert "model.layers.0.self_attn.k_proj.bias" in warning
    assert _warnings(folder, caplog, rank=1, tp=2) == []


@pytest.mark.parametrize(
    "name", ["llama-bias", "stablelm-12b", "falcon", "gpt2", "mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "gemma3"]
)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_whole_models_are_read(name: str, tp: int, pp: int, caplog: pytest.LogCaptureFixture) -> None:
    assert _warnings(tiny_model(name), caplog, tp=tp, pp=pp) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.1.mlp.gate_proj.weight",  # which only the layer before reads
    ],
)
def test_tensor_of_a_layer_that_is_served_is_found(name: str) -> None:
    assert find_unread(READ, [*READ, name]) == [name]


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.1.gate_proj.weight",  # of another rank
        "model.layers.2.self_attn.q_proj.bias",  # of another stage, or for further tokens
        "vision_tower.layers.0.self_attn.q_proj.bias",
        "model.norm.bias",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.attn.bias",
        "model.layers.0.attention.masked_bias",
    ],
)
def test_tensor_that_is_no_sign_of_a_wrong_config_is_not_found(name: str) -> None:
    assert find_unread(READ, [*READ, name]) == []
