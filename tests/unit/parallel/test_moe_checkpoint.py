"""Experts are read by the ranks that hold them, from tensors of their own or from one with all of them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.read_weights import read_weights
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file

from parallel.decoder import Decoder
from parallel.description import ClampedGate, DecoderDescription, MoeDescription, RouterScore
from parallel.errors import CheckpointError
from parallel.families import registry
from parallel.families.common import describe_common, with_experts
from parallel.families.family import LLAMA_MODULE_NAMES, Family
from parallel.families.fields import Fields
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.random_model import write_random_model
from parallel.weight_index import SAFETENSORS

EXPERT_NAMES = {
    "mixtral": "model.layers.1.block_sparse_moe.experts.5.w2.weight",
    "qwen2_moe": "model.layers.0.mlp.experts.3.up_proj.weight",
    "qwen3_moe": "model.layers.1.mlp.experts.0.gate_proj.weight",
}


def _load(folder: Path, *, rank: int = 0, tp: int = 1, expert_parallel: bool = False) -> tuple[Decoder, int]:
    """The other ranks do not exist: loading takes no collective."""
    decoder = Decoder(
        registry.describe_model(folder),
        mesh=Mesh(tp=Axis(size=tp, rank=rank), pp=Axis()),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=ReferenceKernels(),
        expert_parallel=expert_parallel,
    )
    return decoder, read_weights(decoder, folder)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("name", EXPERT_NAMES)
def test_each_of_two_ranks_reads_its_part(name: str, expert_parallel: bool) -> None:
    tensors = load_file(tiny_model(name) / SAFETENSORS.single)
    full = sum(tensor.nbytes for tensor in tensors.values())
    routers = ("gate.weight", "shared_expert_gate.weight")
    shared = sum(tensor.nbytes for key, tensor in tensors.items() if tensor.dim() == 1 or key.endswith(routers))

    read = [_load(tiny_model(name), rank=rank, tp=2, expert_parallel=expert_parallel)[1] for rank in range(2)]

    assert full <= sum(read) <= full + shared
    assert read[0] == read[1]


def test_rank_needs_no_tensor_of_the_experts_of_others(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("mixtral"), tmp_path / "model"))
    tensors = load_file(folder / SAFETENSORS.single)
    kept = {key: value for key, value in tensors.items() if not any(f"experts.{i}." in key for i in range(4))}
    save_file(kept, folder / SAFETENSORS.single, metadata={"format": "pt"})

    decoder, _ = _load(folder, rank=1, tp=2, expert_parallel=True)

    sources = [piece.source for parameter in decoder.sharded_parameters() for piece in parameter.pieces]
    ids = {int(source.split(".")[4]) for source in sources if ".experts." in source}
    assert ids == {4, 5, 6, 7}
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.block_sparse_moe\.experts\.0\.w1\.weight"):
        _load(folder, rank=0, tp=2, expert_parallel=True)


@pytest.mark.parametrize("name", EXPERT_NAMES)
@pytest.mark.parametrize("damage", ["missing", "transposed"])
def test_damaged_expert_is_named(tmp_path: Path, name: str, damage: str) -> None:
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    tensors, key = load_file(folder / SAFETENSORS.single), EXPERT_NAMES[name]
    weight = tensors.pop(key)
    if damage == "transposed":
        tensors[key] = weight.t().contiguous()
    save_file(tensors, folder / SAFETENSORS.single, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        _load(folder)
    assert f"tensor {key}" in str(caught.value)
    assert str(list(weight.shape)) in str(caught.value)


def _describe_stacked(fields: Fields) -> DecoderDescription:
    moe = MoeDescription(
        num_experts=6,
        num_chosen=2,
        intermediate_size=20,
        score=RouterScore.SOFTMAX_OF_CHOSEN,
        router_bias=True,
        expert_bias=True,
        clamped_gate=ClampedGate(alpha=1.702, limit=7.0),
    )
    return with_experts(describe_common(fields), moe)


STACKED = Family(
    model_type="stacked",
    describe=_describe_stacked,
    module_names={
        **LLAMA_MODULE_NAMES,
        "mlp.router": "mlp.router",
        **{
            f"mlp.experts.*.{part}.{leaf}": f"mlp.experts.{part}_proj{suffix}"
            for part in ("gate_up", "down")
            for leaf, suffix in (("weight", ""), ("bias", "_bias"))
        },
    },
    transposed=frozenset({"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
)
"""As gpt-oss is stored: [experts, in, out] for each matrix, gate and up row by row in turn."""
STACKED_CONFIG: dict[str, Any] = {
    "model_type": "stacked",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize("batch_bytes", [4, 100, 1 << 20])
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_experts_in_one_tensor_are_read_by_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expert_parallel: bool, batch_bytes: int
) -> None:
    monkeypatch.setattr(registry, "FAMILIES", {**registry.FAMILIES, "stacked": STACKED})
    monkeypatch.setattr("parallel.checkpoint._MAPPED_FRACTION", 0.0)
    monkeypatch.setattr("parallel.checkpoint._MIN_BATCH_BYTES", batch_bytes)
    write_random_model(tmp_path, STACKED_CONFIG, 0, torch.float32)
    tensors = load_file(tmp_path / SAFETENSORS.single)
    gate_up, bias = tensors["model.layers.1.mlp.experts.gate_up_proj"], "model.layers.1.mlp.experts.gate_up_proj_bias"
    assert gate_up.shape == (6, 8, 40)
    assert tensors[bias].shape == (6, 40)

    decoder, num_bytes = _load(tmp_path, rank=1, tp=2, expert_parallel=expert_parallel)

    targets = {
        piece.source: parameter.target(piece)
        for parameter in decoder.sharded_parameters()
        for piece in parameter.pieces
    }
    expert, rows = (4, slice(0, 40)) if expert_parallel else (1, slice(20, 40))
    columns = slice(0, 20) if expert_parallel else slice(10, 20)
    name = f"layers.1.mlp.experts.{expert}"
    assert torch.equal(targets[f"{name}.gate_up.weight"], gate_up[expert].mT[rows])
    assert torch.equal(targets[f"{name}.gate_up.bias"], tensors[bias][expert, rows])
    down = tensors["model.layers.1.mlp.experts.down_proj"]
    assert torch.equal(targets[f"{name}.down.weight"], down[expert].mT[:, columns])
    assert (f"{name}.down.bias" in targets) is expert_parallel  # else the first rank has it
    assert num_bytes < 0.6 * sum(tensor.nbytes for tensor in tensors.values())
