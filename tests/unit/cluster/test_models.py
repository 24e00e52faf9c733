from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

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


def test_hub_id_is_fetched_with_the_files_that_serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_model("org/model-1.0") == folder
    assert asked[0][0] == "org/model-1.0"
    assert "*.safetensors" in asked[0][1]
    assert not any(pattern in ("*", "*.bin") for pattern in asked[0][1])


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline\nlong story"), ConnectionError("no route")])
def test_hub_that_does_not_answer_is_a_typed_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"the hub did not give it: (offline|no route)$"):
        resolve_model("org/model")
