"""What is fetched of a hub repository: the files that serve, and the weights in one format only."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects

from cluster.errors import ModelNotFoundError
from cluster.models import resolve_model
from cluster.revision_files import RevisionText, digest_files, find_files

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


class _SilenceError(Exception):
    """Of an HTTP library: nothing that Python knows as an error of the system."""


class FakeHub:
    """Holds one repository, and keeps what was asked for in a folder, as the real one does."""

    def __init__(self, cache: Path, files: list[str]) -> None:
        self.folder = self.fetched = cache / "0123abc"
        self.files = files
        self.revisions: list[str | None] = []
        self.silence: Exception | None = None
        """What asking fails with."""

    def model_info(self, repo_id: str, *, timeout: float) -> SimpleNamespace:
        assert repo_id == "org/model-1.0"
        assert timeout > 0
        if self.silence:
            raise self.silence
        return SimpleNamespace(sha=self.folder.name)

    def snapshot_download(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str],
        ignore_patterns: str | None = None,
        local_files_only: bool,
    ) -> str:
        assert repo_id == "org/model-1.0"
        if local_files_only:
            if not self.fetched.is_dir():
                raise LocalEntryNotFoundError("nothing is cached\nlong story")
            return str(self.fetched)
        assert self.silence is None, "asked without an end, where the hub is known to be silent"
        self.revisions.append(revision)
        self.fetched = self.folder
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


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    hub = FakeHub(tmp_path, [*SMALL, "model.safetensors"])

    def try_to_load_from_cache(repo_id: str, filename: str, *, revision: str | None) -> str | None:
        file = hub.fetched / filename
        return str(file) if revision in (None, hub.fetched.name) and file.exists() else None

    monkeypatch.setattr("huggingface_hub.model_info", hub.model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot_download)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", try_to_load_from_cache)
    return hub


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
    weights: list[str], fetched: list[str], tokenizer: str, hub: FakeHub
) -> None:
    hub.files = [*SMALL, *NEVER, *weights, tokenizer]

    folder = resolve_model("org/model-1.0")

    assert sorted(path.name for path in folder.iterdir()) == sorted([*SMALL, tokenizer, *fetched])
    assert hub.revisions[0] is None
    assert set(hub.revisions[1:]) == {"0123abc"}  # weights of the same commit as the config

    hub.revisions.clear()
    assert resolve_model("org/model-1.0") == folder
    assert len(hub.revisions) == (1 if "safetensors" in fetched[0] else 2), "weights that are here are not asked for"
    assert set(hub.revisions) == {"0123abc"}


def test_the_last_commit_is_fetched_and_noted_as_the_last(hub: FakeHub) -> None:
    resolve_model("org/model-1.0")
    hub.folder = hub.folder.with_name("4567def")
    hub.revisions.clear()
    assert resolve_model("org/model-1.0").name == "4567def"
    assert hub.revisions == [None, "4567def"], "with its commit named the package does not note it as the last"


def test_a_commit_that_was_fetched_before_is_fetched_again(hub: FakeHub) -> None:
    resolve_model("org/model-1.0", commit="0123abc")
    assert set(hub.revisions) == {"0123abc"}, "not what others have put there since"


@pytest.mark.parametrize("silence", [ConnectionError("no route"), _SilenceError(), OfflineModeIsEnabled("as wished")])
def test_cached_model_is_served_while_the_hub_is_silent(
    silence: Exception, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve_model("org/model-1.0")
    hub.silence = silence
    assert resolve_model("org/model-1.0") == folder
    is_told = "model 'org/model-1.0': the hub did not say its last commit" in caplog.text
    assert is_told != isinstance(silence, OfflineModeIsEnabled)


def test_hub_is_asked_for_a_revision_only_where_a_file_of_it_is_not_here(hub: FakeHub) -> None:
    folder = resolve_model("org/model-1.0")
    text = RevisionText(path=str(folder), max_context=8, files=digest_files(folder))
    hub.revisions.clear()

    assert find_files("org/model-1.0", text) == folder
    assert not hub.revisions

    (folder / "tokenizer.json").unlink()  # as where another program has fetched a part
    assert find_files("org/model-1.0", text) == folder
    assert (folder / "tokenizer.json").is_file()
    assert set(hub.revisions) == {"0123abc"}

    hub.revisions.clear()
    find_files("org/model-1.0", replace(text, files=""))  # nothing is known of them
    find_files("org/model-1.0", None)
    assert hub.revisions == ["0123abc", "0123abc"]


ERRORS = [LocalEntryNotFoundError("offline\nlong story"), ConnectionError("no route"), RuntimeError("no home")]


@pytest.mark.parametrize("error", ERRORS)
def test_hub_that_does_not_answer_is_a_typed_error(error: Exception, hub: FakeHub) -> None:
    hub.silence = error
    with pytest.raises(ModelNotFoundError, match=r"the hub did not give it: (offline|no route|no home)$"):
        resolve_model("org/model-1.0")


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("num_calls", [0, 1])
def test_hub_that_ends_meanwhile_is_a_typed_error(
    error: Exception, num_calls: int, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        if len(hub.revisions) == num_calls:
            raise error
        return hub.snapshot_download(*args, **kwargs)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=r"the hub did not give it: (offline|no route|no home)$"):
        resolve_model("org/model-1.0")


def test_repository_without_a_config_is_refused(hub: FakeHub) -> None:
    hub.files = ["model.safetensors", "tokenizer.json"]

    with pytest.raises(ModelNotFoundError, match=r"'org/model-1\.0': .* has no config\.json"):
        resolve_model("org/model-1.0")

    assert not (hub.folder / "model.safetensors").exists()
