"""What a revision's folder held, told apart from what it holds now."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ModelFilesChangedError
from cluster.models import PACKAGED
from cluster.revision_files import RevisionText, check_files, digest_files, is_alike


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PACKAGED["weft-tiny"], tmp_path / "model"))


def wanted(folder: Path) -> RevisionText:
    return RevisionText(path=str(folder), max_context=64, files=digest_files(folder))


def split(folder: Path) -> None:
    """Into a file for each half of the tensors, and an index."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    halves = {"a.safetensors": tensors[::2], "b.safetensors": tensors[1::2]}
    for name, half in halves.items():
        save_file(dict(half), folder / name)
    weight_map = {tensor: name for name, half in halves.items() for tensor, _ in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def train(file: Path) -> None:
    """Change the values of one layer in six; sizes and times stay as they are."""
    times = os.stat(file)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "layers.0." in name:
            tensor.add_(torch.ones_like(tensor))
    save_file(tensors, file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def reword(file: Path) -> None:
    file.write_text(file.read_text() + " ")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: train(folder / "model.safetensors"),
        lambda folder: reword(folder / "config.json"),
        lambda folder: reword(folder / "tokenizer.json"),
        lambda folder: (folder / "added_tokens.json").write_text("{}"),
        split,
    ],
    ids=["weights", "config", "tokenizer", "another file", "other files"],
)
def test_another_model_in_the_same_folder_is_refused(folder: Path, change: Callable[[Path], object]) -> None:
    text = wanted(folder)
    check_files(folder, text, node="10.0.0.7")
    change(folder)
    with pytest.raises(ModelFilesChangedError, match=r"model on 10\.0\.0\.7 has another config, tokenizer or weights"):
        check_files(folder, text, node="10.0.0.7")


def test_change_in_any_of_several_weight_files_is_refused(folder: Path) -> None:
    split(folder)
    text = wanted(folder)
    check_files(folder, text, node="here")
    train(folder / "b.safetensors")
    with pytest.raises(ModelFilesChangedError):
        check_files(folder, text, node="here")


def test_the_same_files_on_another_node_and_what_only_routers_read_are_no_difference(
    folder: Path, tmp_path: Path
) -> None:
    text = wanted(folder)
    there = Path(shutil.copytree(folder, tmp_path / "there", copy_function=shutil.copyfile))
    (there / "generation_config.json").write_text('{"transformers_version": "99"}')
    check_files(there, text, node="there")


def test_what_cannot_be_compared_is_not_refused(folder: Path) -> None:
    text = wanted(folder)
    reword(folder / "config.json")
    check_files(folder, replace(text, files=f"0{text.files}"), node="here")
    check_files(folder, replace(text, files=""), node="here")
    (folder / "model.safetensors").unlink()
    assert digest_files(folder) == ""
    check_files(folder, text, node="here")  # the loader says that there are none


def test_texts_are_alike_where_no_difference_is_known() -> None:
    text = RevisionText(path="/m", max_context=8, digest="1-a", files="1-b")
    assert is_alike(text, replace(text, path="/n", files=""))
    assert not is_alike(text, replace(text, files="1-c"))
    assert not is_alike(text, replace(text, digest="1-c"))
