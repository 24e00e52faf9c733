"""pytorch_model.bin, single and in parts: the same weights as from safetensors, and nothing in it is run."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.read_weights import read_weights
from helpers.tiny_models import tiny_model
from safetensors.torch import load_file
from torch import Tensor

from parallel.decoder import Decoder
from parallel.dtypes import checkpoint_dtype
from parallel.errors import CheckpointError
from parallel.families.registry import describe_model
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh
from parallel.weight_files import FileBytes, locate_tensors, open_tensors
from parallel.weight_index import PICKLED, SAFETENSORS


def _weights(folder: Path, tp_rank: int = 0, tp: int = 1) -> list[Tensor]:
    mesh = Mesh(tp=Axis(size=tp, rank=tp_rank), pp=Axis(size=1, rank=0))
    cpu = torch.device("cpu")
    decoder = Decoder(describe_model(folder), mesh=mesh, device=cpu, dtype=torch.float32, kernels=ReferenceKernels())
    read_weights(decoder, folder)
    return [parameter.tensor for parameter in decoder.sharded_parameters()]


def _pickled(name: str, folder: Path, num_parts: int = 1) -> Path:
    """A tiny model whose weights are in .bin files, the matrices with their columns one after the other."""
    shutil.copytree(tiny_model(name), folder)
    tensors = load_file(folder / SAFETENSORS.single)
    (folder / SAFETENSORS.single).unlink()
    tensors = {key: value.t().contiguous().t() if value.dim() == 2 else value for key, value in tensors.items()}
    if num_parts == 1:
        torch.save(tensors, folder / PICKLED.single)
        return folder
    weight_map = {key: f"pytorch_model-{index % num_parts:05}.bin" for index, key in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save({key: tensors[key] for key in tensors if weight_map[key] == file}, folder / file)
    (folder / PICKLED.index).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_weights_are_those_of_safetensors(name: str, num_parts: int, tmp_path: Path) -> None:
    folder = _pickled(name, tmp_path / "model", num_parts)

    for rank in range(2):
        for a, b in zip(_weights(tiny_model(name), rank, 2), _weights(folder, rank, 2), strict=True):
            assert torch.equal(a, b)
    assert checkpoint_dtype(folder) == torch.float32


def test_safetensors_come_before_pickles(tmp_path: Path) -> None:
    folder = _pickled("llama", tmp_path / "model")
    assert set(locate_tensors(folder).values()) == {folder / PICKLED.single}

    shutil.copy(tiny_model("llama") / SAFETENSORS.single, folder)

    assert set(locate_tensors(folder).values()) == {folder / SAFETENSORS.single}


def test_dtypes_have_the_names_of_safetensors(tmp_path: Path) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn)
    torch.save({str(i): torch.zeros(2).to(dtype) for i, dtype in enumerate(dtypes)} | {"step": 3}, tmp_path / "a.bin")

    with open_tensors(tmp_path / "a.bin") as tensors:
        names = [tensors.get_slice(name).get_dtype() for name in map(str, range(len(dtypes)))]

    assert names == ["BF16", "F16", "F64", "I64", "U8", "F8_E4M3"]


class _Runs:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    folder = _pickled("llama", tmp_path / "model")
    torch.save({"lm_head.weight": _Runs(tmp_path / "was-run")}, folder / PICKLED.single)

    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is not a complete file of tensors"):
        _weights(folder)

    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-100], lambda data: data[:50], lambda data: b"", lambda data: b"\xff" * len(data)],
    ids=["truncated", "cut", "empty", "garbage"],
)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_corrupt_file_is_named(num_parts: int, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder = _pickled("llama", tmp_path / "model", num_parts)
    file = sorted(folder.glob("*.bin"))[-1]
    file.write_bytes(damage(file.read_bytes()))

    with pytest.raises(CheckpointError, match=f"{file} is not a complete file of tensors"):
        _weights(folder)


def test_pickle_of_which_a_byte_is_damaged_is_named(tmp_path: Path) -> None:
    file = tmp_path / PICKLED.single
    torch.save({"model.norm.weight": torch.zeros(3)}, file)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"q\x07Q", b"K\x07Q"))  # the storage is called by a number
    assert file.read_bytes() != whole

    with pytest.raises(CheckpointError, match=f"{file} is not a complete file of tensors"), open_tensors(file):
        pass


@pytest.mark.parametrize("name", [PICKLED.single, SAFETENSORS.single])
def test_pointer_of_git_lfs_is_called_so(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n")

    with (
        pytest.raises(CheckpointError, match=rf"{name} is not a .*: it is a pointer of Git LFS; .* `git lfs pull`"),
        open_tensors(tmp_path / name),
    ):
        pass


def test_file_of_an_old_pytorch_is_refused_with_the_reason(tmp_path: Path) -> None:
    """It cannot be mapped: each rank would read all of it."""
    folder = _pickled("llama", tmp_path / "model")
    tensors = torch.load(folder / PICKLED.single, weights_only=True)
    torch.save(tensors, folder / PICKLED.single, _use_new_zipfile_serialization=False)

    with pytest.raises(CheckpointError, match=r"saved by PyTorch 1\.6 or later: mmap can only be used with"):
        _weights(folder)


def test_file_that_holds_no_mapping_is_refused(tmp_path: Path) -> None:
    folder = _pickled("llama", tmp_path / "model")
    torch.save([torch.zeros(3)], folder / PICKLED.single)

    with pytest.raises(CheckpointError, match="holds a list; allowed: tensors by name"):
        _weights(folder)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(3).to_sparse(), r"torch\.sparse_coo"),
        (lambda: torch.empty(3, device="meta"), "without values"),
        (lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), "nested"),
    ],
    ids=["sparse", "meta", "nested"],
)
def test_tensor_that_is_not_plain_is_named(tmp_path: Path, make: Callable[[], Tensor], kind: str) -> None:
    folder = _pickled("llama", tmp_path / "model")
    tensors = torch.load(folder / PICKLED.single, weights_only=True)
    torch.save({**tensors, "model.norm.weight": make()}, folder / PICKLED.single)

    told = rf": tensor model\.norm\.weight is {kind}; allowed: torch\.strided"
    if kind == "nested":
        told += "| is not a complete file of tensors"  # torch does not read them any more, from 2.15 on
    with pytest.raises(CheckpointError, match=rf"\.bin({told})"):
        _weights(folder)


def test_missing_part_is_named(tmp_path: Path) -> None:
    folder = _pickled("llama", tmp_path / "model", 3)
    (folder / "pytorch_model-00001.bin").unlink()

    with pytest.raises(CheckpointError, match=r"pytorch_model-00001\.bin does not exist, but pytorch_model\.bin"):
        _weights(folder)


def test_a_file_that_became_shorter_after_it_was_opened_is_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(100)))
    target = torch.empty(40, dtype=torch.uint8)
    FileBytes(file, 50).read(10, target)
    assert target.tolist() == list(range(60, 100))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has become shorter"):
        FileBytes(file, 50).read(11, target)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: No such file"):
        FileBytes(file, 50).read(0, target)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_the_bytes_of_a_tensor_are_found(name: str) -> None:
    file = tiny_model(name) / SAFETENSORS.single
    with open_tensors(file) as tensors:
        for key, expected in load_file(file).items():
            found = tensors.find(key)
            assert found is not None
            target = torch.empty_like(expected)
            found.read(0, target)
            assert torch.equal(target, expected)
