"""Packed matrices are unpacked slice by slice; what is wrong with their tensors is said by file and tensor."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.packed_models import plain_folder
from helpers.read_weights import read_weights
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.decoder import Decoder
from parallel.errors import CheckpointError
from parallel.families.registry import describe_model
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.weight_index import SAFETENSORS

NAMES = ("gpt_oss-mxfp4", "deepseek_v3-fp8")
SCALES = {
    "gpt_oss-mxfp4": "model.layers.1.mlp.experts.down_proj_scales",
    "deepseek_v3-fp8": "model.layers.1.self_attn.kv_b_proj.weight_scale_inv",
}


def _load(folder: Path, tp_rank: int = 0, tp: int = 1) -> tuple[list[Tensor], int]:
    mesh = Mesh(tp=Axis(size=tp, rank=tp_rank), pp=Axis(size=1, rank=0))
    decoder = Decoder(
        describe_model(folder),
        mesh=mesh,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=ReferenceKernels(),
    )
    parameters = [parameter.tensor for parameter in decoder.sharded_parameters()]
    return parameters, read_weights(decoder, folder)


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a packed model, to be damaged."""
    return Path(shutil.copytree(tiny_model(request.param), tmp_path / request.param))


def _damage(folder: Path, name: str, tensor: Tensor | None) -> None:
    tensors = load_file(folder / SAFETENSORS.single)
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / SAFETENSORS.single)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_unpacks_what_transformers_does(name: str, rank: int) -> None:
    packed, num_bytes = _load(tiny_model(name), rank, tp=2)
    plain, num_plain_bytes = _load(plain_folder(tiny_model(name)), rank, tp=2)
    assert _equal(packed, plain)
    assert num_bytes < 0.5 * num_plain_bytes
    assert num_bytes < 0.55 * _load(tiny_model(name))[1], "norms and routers are read by both"


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_unpacked_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = _load(tiny_model(name), 1, tp=2)
    monkeypatch.setattr("parallel.weight_reads._UNPACKED_ELEMENTS", 500)
    parts, _ = _load(tiny_model(name), 1, tp=2)
    assert _equal(whole, parts)


def test_scales_may_be_in_another_file(folder: Path) -> None:
    whole, num_bytes = _load(folder)
    tensors = load_file(folder / SAFETENSORS.single)
    (folder / SAFETENSORS.single).unlink()
    files = {name: f"{'scales' if '_scale' in name else 'rest'}.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    (folder / SAFETENSORS.index).write_text(json.dumps({"weight_map": files}))
    assert _equal(_load(folder)[0], whole)
    assert _load(folder)[1] == num_bytes


def test_missing_scales_are_named(folder: Path) -> None:
    _damage(folder, SCALES[folder.name], None)
    message = {
        "gpt_oss-mxfp4": r"has no tensor \S*1.mlp.experts.down_proj_scales; expected with shape \[8, 32, 3\]",
        # without them it is a matrix of a dtype that says nothing by itself
        "deepseek_v3-fp8": r"tensor \S*1.self_attn.kv_b_proj.weight has dtype F8_E4M3; allowed: F64, F32, F16, BF16",
    }
    with pytest.raises(CheckpointError, match=message[folder.name]):
        _load(folder)


def test_wrong_scales_are_named(folder: Path) -> None:
    name = SCALES[folder.name]
    scales = load_file(folder / SAFETENSORS.single)[name]
    _damage(folder, name, scales[:-1].clone() if len(scales) > 1 else torch.ones(2, 1))
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape .*; expected"):
        _load(folder)
    _damage(folder, name, scales.to(torch.float16))
    with pytest.raises(CheckpointError, match=f"tensor {name} has dtype F16; allowed: (U8|F32)$"):
        _load(folder)
