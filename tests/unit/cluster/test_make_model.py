"""`weft make-model` writes what its flags say, and refuses what the family does not have."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ClusterConfigError
from cluster.make_model import make_model
from parallel.families.registry import describe_model


def _make(folder: Path, preset: str = "tiny", **sizes: Any) -> None:
    make_model(folder, preset=preset, sizes={"vocab_size": 2048, **sizes}, dtype="float32", seed=0, tokenizer=None)


def test_flags_change_the_preset(tmp_path: Path) -> None:
    _make(tmp_path, hidden_size=32, model_type="qwen2")
    description = describe_model(tmp_path)
    assert (description.family, description.hidden_size, description.num_layers) == ("qwen2", 32, 4)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_of_every_family_are_small(tmp_path: Path, family: str) -> None:
    _make(tmp_path, "tiny-moe", model_type=family, num_experts=6, num_experts_per_tok=3)
    moe = describe_model(tmp_path).moe
    assert moe is not None
    assert (moe.num_experts, moe.num_chosen, moe.intermediate_size) == (6, 3, 96)
    assert moe.shared_intermediate_size in (None, 192)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == family


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab_size": 2047}, r"vocab_size is 2047; allowed: at least 2048, the tokens of .*weights"),
        ({"num_experts": 4}, "num_experts is 4, which this family does not have"),
        ({"model_type": "falcon", "num_key_value_heads": 2}, "num_key_value_heads is 2; allowed of falcon: 1"),
        ({"model_type": "mixtral", "moe_intermediate_size": 64}, "moe_intermediate_size is 64, which this family"),
    ],
)
def test_sizes_that_the_family_or_the_tokenizer_does_not_have_are_refused(
    tmp_path: Path, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClusterConfigError, match=message):
        _make(tmp_path / "new", **sizes)
    assert not (tmp_path / "new").exists()


def test_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ClusterConfigError, match=r"file/model cannot be written: Not a directory"):
        _make(tmp_path / "file/model")


def test_unknown_preset_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    names = r"tiny, 110m, 1b, 8b, qwen2\.5-0\.5b, qwen3-moe-0\.5b, tiny-moe"
    with pytest.raises(ClusterConfigError, match=rf"--preset is 'huge'; allowed: {names}"):
        _make(tmp_path, "huge")
