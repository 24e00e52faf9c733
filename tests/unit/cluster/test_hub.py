"""What is fetched of a hub repository: the files that serve, and the weights in one format only."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from cluster.errors import ModelNotFoundError
from cluster.models import resolve_model

SMALL = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
NEVER = [
    *(
        "README.md",
        "modeling_own.py",
        "model.gguf",
        "consolidated.00.pth",
        "consolidated.safetensors",
        "flax_model.msgpack",
    ),
    *("original/tokenizer.model", "original/params.json", "onnx/config.json", "onnx/model.safetensors"),
]


class FakeHub:
    """Holds one repository, and keeps what was asked for in a folder, as the real one does."""

    def __init__(self, cache: Path, files: list[str]) -> None:
        self.folder = cache / "0123abc"
        self.files = files
        self.revisions: list[str | None] = []

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str],
        ignore_patterns: str | None = None,
    ) -> str:
        assert repo_id == "org/model-1.0"
        self.revisions.append(revision)
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in filter_repo_objects(self.files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (self.folder / name).parent.mkdir(exist_ok=True)
            (self.folder / name).write_text(self._content(name))
        return str(self.folder)

    def _content(self, name: str) -> str:
        if not name.endswith(".index.json"):
            return "{}"
        stem, suffix = ("model", "safetensors") if "safetensors" in name else ("pytorch_model", "bin")
        parts = [file for file in self.files if file.startswith(f"{stem}-") and file.endswith(suffix)]
        return json.dumps({"weight_map": {f"tensor{i}": part for i, part in enumerate(parts)}})


@pytest.mark.parametrize(
    ("weights", "fetched"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors", "model-old.bin"],
            ["model.safetensors.index.json", "model-1.safetensors", "model-2.safetensors"],
        ),
        (
            ["model.safetensors", "pytorch_model.bin.index.json", "pytorch_model-1.bin", "pytorch_model-2.bin"],
            ["model.safetensors", "pytorch_model.bin.index.json"],
        ),
        (
            ["pytorch_model.bin.index.json", "pytorch_model-1.bin", "pytorch_model-2.bin"],
            ["pytorch_model.bin.index.json", "pytorch_model-1.bin", "pytorch_model-2.bin"],
        ),
    ],
)
@pytest.mark.parametrize("tokenizer", ["tokenizer.model", "qwen.tiktoken", "merges.txt"])
def test_files_that_serve_are_fetched_once(
    weights: list[str], fetched: list[str], tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path, [*SMALL, *NEVER, *weights, tokenizer])
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)

    folder = resolve_model("org/model-1.0")

    assert sorted(path.name for path in folder.iterdir()) == sorted([*SMALL, tokenizer, *fetched])
    assert hub.revisions[0] is None
    assert set(hub.revisions[1:]) == {"0123abc"}  # weights of the same commit as the config


def test_a_commit_that_was_fetched_before_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path, [*SMALL, "model.safetensors"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    resolve_model("org/model-1.0", commit="0123abc")
    assert set(hub.revisions) == {"0123abc"}, "not what others have put there since"


def test_cached_model_is_served_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, the package gives the cached folder whatever is asked for."""
    for name in (*SMALL, "model.safetensors"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(tmp_path))

    assert resolve_model("org/model-1.0") == tmp_path


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("offline\nlong story"), ConnectionError("no route"), RuntimeError("no home")]
)
@pytest.mark.parametrize("num_calls", [0, 1])
def test_hub_that_does_not_answer_is_a_typed_error(
    error: Exception, num_calls: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(tmp_path, [*SMALL, "model.safetensors"])

    def download(*args: Any, **kwargs: Any) -> str:
        if len(hub.revisions) == num_calls:
            raise error
        return hub.snapshot_download(*args, **kwargs)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"the hub did not give it: (offline|no route|no home)$"):
        resolve_model("org/model-1.0")


def test_repository_without_a_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = FakeHub(tmp_path, ["model.safetensors", "tokenizer.json"])
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)

    with pytest.raises(ModelNotFoundError, match=r"'org/model-1\.0': .* has no config\.json"):
        resolve_model("org/model-1.0")

    assert not (hub.folder / "model.safetensors").exists()
