import os
from pathlib import Path
from typing import Any

import pytest

from cluster import models
from cluster.errors import ModelNotFoundError
from cluster.models import absolute_source, read_text_files, resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_folder_is_taken_as_it_is(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder.resolve()


def test_relative_folder_becomes_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert resolve_model(folder.name) == folder.resolve()


def test_packaged_name_is_found_wherever_the_program_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.PACKAGED, "weft-tiny", folder)
    assert resolve_model("weft-tiny") == folder


def test_packaged_name_is_not_the_folder_that_happens_to_be_called_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "weft-tiny").mkdir()
    monkeypatch.chdir(folder)
    assert absolute_source("weft-tiny") == "weft-tiny"


def test_absolute_folder_keeps_its_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "current").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert absolute_source("current/.") == f"{folder}/current"
    assert absolute_source("org/model") == "org/model"


@pytest.mark.parametrize("source", ["/no/such/folder", "weft-huge", "./here", "a/b/c"])
def test_unknown_name_says_what_is_allowed(source: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is no folder here; allowed: a folder .* 'weft-tiny', or a hub id"):
        resolve_model(source)


def test_file_in_place_of_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model(str(folder / "config.json"))


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja", "qwen.tiktoken"])
def test_a_link_that_leads_nowhere_is_no_file_that_the_model_lacks(folder: Path, name: str) -> None:
    (folder / "README.md").symlink_to("../blobs/0")  # nobody reads it
    assert resolve_model(str(folder)) == folder.resolve()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../blobs/1")
    with pytest.raises(ModelNotFoundError, match=rf"{name} is a link to \.\./blobs/1, which is not there; allowed"):
        resolve_model(str(folder))


def test_a_folder_with_a_file_that_is_damaged_on_the_disk_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(ModelNotFoundError, match=f"{folder} cannot be read: Input/output error"):
        list(read_text_files(folder))


@pytest.mark.parametrize("source", ["~nosuchuser/x", "~a\0b", "a" * 300])
def test_name_that_the_system_does_not_take_is_refused_with_its_reason(source: str) -> None:
    for look in (resolve_model, absolute_source):
        with pytest.raises(ModelNotFoundError, match=r"cannot be read: (Could not|embedded null|File name too long)"):
            look(source)


def test_folder_that_may_not_be_entered_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_look = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if path.name == "config.json":
            raise PermissionError(13, "Permission denied", str(path))  # the user who runs tests may be root
        return may_look(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ModelNotFoundError, match="cannot be read: Permission denied; allowed"):
        resolve_model(str(folder))
