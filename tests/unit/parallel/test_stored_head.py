"""A head that is stored beside an embedding it should be tied to: another one is read, the same one is held once."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.read_weights import read_weights
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.errors import CheckpointError
from parallel.families.registry import describe_model
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.stored_head import untie_stored_head
from parallel.weight_index import PICKLED, SAFETENSORS

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CPU = torch.device("cpu")
ONE_RANK = Mesh.single()


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Of a tied model: one of them for both."""
    return load_file(tiny_model("llama-tied") / SAFETENSORS.single)


def _write(folder: Path, tensors: dict[str, Tensor], form: str = "safetensors") -> Path:
    """A folder with these, that says the head is tied; "files": each of the two is in another one."""
    folder.mkdir(exist_ok=True)
    shutil.copy(tiny_model("llama-tied") / "config.json", folder)
    if form == "bin":
        torch.save(tensors, folder / PICKLED.single)
    elif form == "safetensors":
        save_file(tensors, folder / SAFETENSORS.single)
    else:
        weight_map = {name: f"{name == HEAD}.safetensors" for name in tensors}
        for file in set(weight_map.values()):
            save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
        (folder / SAFETENSORS.index).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _load(folder: Path, mesh: Mesh, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a rank holds."""
    description = untie_stored_head(describe_model(folder), folder, mesh=mesh, dtype=dtype)
    decoder = Decoder(description, mesh=mesh, device=CPU, dtype=dtype, kernels=ReferenceKernels())
    read_weights(decoder, folder)
    return {parameter.pieces[0].source: parameter.tensor for parameter in decoder.sharded_parameters()}


def _changed(embedding: Tensor, change: float) -> Tensor:
    """In its last number."""
    head = embedding.clone()
    head[-1, -1] += change
    return head


@pytest.mark.parametrize("form", ["safetensors", "files", "bin"])
def test_head_that_differs_is_read(tmp_path: Path, tensors: dict[str, Tensor], form: str) -> None:
    head = _changed(tensors[EMBEDDING], 1.0)

    held = _load(_write(tmp_path, tensors | {HEAD: head}, form), ONE_RANK)

    assert torch.equal(held["embedding.weight"], tensors[EMBEDDING])
    assert torch.equal(held["head.weight"], head)


def test_head_of_a_gemma3_with_vision_is_read_under_the_name_that_transformers_writes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model("gemma3"), tmp_path / "model"))
    file = folder / SAFETENSORS.single
    stored = load_file(file)
    embedding = next(tensor for name, tensor in stored.items() if name.endswith("embed_tokens.weight"))
    head = _changed(embedding, 1.0)
    save_file(stored | {"language_model.lm_head.weight": head}, file)

    assert torch.equal(_load(folder, ONE_RANK)["head.weight"], head)


@pytest.mark.parametrize("form", ["safetensors", "files", "bin"])
@pytest.mark.parametrize(("change", "dtype"), [(0.0, torch.float32), (1e-6, torch.bfloat16)])
def test_head_with_the_values_of_the_embedding_is_held_once(
    tmp_path: Path,
    tensors: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    change: float,
    dtype: torch.dtype,
) -> None:
    """The values that both have once they are loaded."""
    monkeypatch.setattr("parallel.stored_head._COMPARED_ELEMENTS", 1000)
    head = _changed(tensors[EMBEDDING], change)
    assert torch.equal(head, tensors[EMBEDDING]) == (change == 0.0)

    held = _load(_write(tmp_path, tensors | {HEAD: head}, form), ONE_RANK, dtype)

    assert torch.equal(held["embedding.weight"], tensors[EMBEDDING].to(dtype))
    assert "head.weight" not in held


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_hold_equal_rows_read_the_head_too(tmp_path: Path, tensors: dict[str, Tensor], rank: int) -> None:
    head = _changed(tensors[EMBEDDING], 1.0)
    mesh = Mesh(tp=Axis(size=2, rank=rank), pp=Axis(size=1, rank=0))

    held = _load(_write(tmp_path, tensors | {HEAD: head}), mesh)

    rows = slice(0, 160) if rank == 0 else slice(160, 319)
    num_rows = rows.stop - rows.start  # the rest is padding
    assert torch.equal(held["embedding.weight"][:num_rows], tensors[EMBEDDING][rows])
    assert torch.equal(held["head.weight"][:num_rows], head[rows])


@pytest.mark.parametrize("change", [0.0, 1.0])
def test_head_of_another_stage_is_read_and_nothing_compared(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, change: float
) -> None:
    monkeypatch.delattr("parallel.stored_head._are_rows_equal")
    head = _changed(tensors[EMBEDDING], change)
    folder = _write(tmp_path, tensors | {HEAD: head})

    first, last = (_load(folder, Mesh(tp=Axis(size=1, rank=0), pp=Axis(size=2, rank=stage))) for stage in range(2))

    assert torch.equal(first["embedding.weight"], tensors[EMBEDDING])
    assert torch.equal(last["head.weight"], head)


@pytest.mark.parametrize("row", [0, 15, 100, 304])
def test_a_row_that_differs_is_found_wherever_it_lies(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    monkeypatch.setattr("parallel.stored_head._COMPARED_ELEMENTS", 1000)  # 15 rows
    head = tensors[EMBEDDING].clone()
    head[row, 0] += 1.0
    assert torch.equal(_load(_write(tmp_path, tensors | {HEAD: head}), ONE_RANK)["head.weight"], head)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_nothing_is_compared_where_none_is_tied_or_one_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("parallel.stored_head._are_rows_equal")
    folder = tiny_model(name)
    description = describe_model(folder)
    assert untie_stored_head(description, folder, mesh=ONE_RANK, dtype=torch.float32) == description


def test_tensors_that_a_pickled_file_has_once_are_not_read_to_compare_them(
    tmp_path: Path, tensors: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("parallel.stored_head.read_now")
    held = _load(_write(tmp_path, tensors | {HEAD: tensors[EMBEDDING]}, "bin"), ONE_RANK)
    assert "head.weight" not in held


@pytest.mark.parametrize("name", [EMBEDDING, HEAD])
def test_wrong_shape_of_one_is_named(tmp_path: Path, tensors: dict[str, Tensor], name: str) -> None:
    both = tensors | {HEAD: _changed(tensors[EMBEDDING], 0.0)}
    folder = _write(tmp_path, both | {name: torch.zeros(7, 64)})
    with pytest.raises(CheckpointError, match=rf"tensor {name} has shape \[7, 64\]; expected \[319, 64\]"):
        load_decoder(folder, mesh=ONE_RANK, device=CPU, dtype=torch.float32, kernels=ReferenceKernels())


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (torch.zeros(320, 64), r"has shape \[320, 64\]; expected \[319, 64\]"),
        (torch.zeros(()), r"has shape \[\]; expected \[319, 64\]"),
        (torch.zeros(319, 64, dtype=torch.int32), "has dtype I32; allowed: F64, F32, F16, BF16"),
    ],
)
def test_head_that_is_no_weight_is_named_where_its_values_are_those_of_the_embedding(
    tmp_path: Path, tensors: dict[str, Tensor], head: Tensor, message: str
) -> None:
    folder = _write(tmp_path, tensors | {EMBEDDING: torch.zeros(319, 64), HEAD: head})
    with pytest.raises(CheckpointError, match=f"tensor {HEAD} {message}"):
        load_decoder(folder, mesh=ONE_RANK, device=CPU, dtype=torch.float32, kernels=ReferenceKernels())
