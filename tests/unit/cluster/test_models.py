from pathlib import Path

import pytest

from cluster import models
from cluster.errors import ModelNotFoundError
from cluster.models import resolve_model


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


@pytest.mark.parametrize("source", ["/no/such/folder", "weft-huge", "./here", "a/b/c"])
def test_unknown_name_says_what_is_allowed(source: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is no folder here; allowed: a folder .* 'weft-tiny', or a hub id"):
        resolve_model(source)


def test_file_is_no_model(folder: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is a file"):
        resolve_model(str(folder / "config.json"))


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
