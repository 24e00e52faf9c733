"""The time of products is measured for every matrix of a model."""

import json
from pathlib import Path

import pytest

from bench import linear_time
from cluster.make_model import make_model


def test_command_measures_every_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_time, "_MOST_COPIES", 4)
    model, lines = tmp_path / "model", tmp_path / "lines"
    make_model(model, preset="tiny", sizes={}, dtype="float32", seed=0, tokenizer=None)
    linear_time.main(["--model", str(model), "--device", "cpu", "--rows", "1,3", "--json", str(lines)])
    line = json.loads(lines.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == line
    matrices = "q, k, v", "output", "gate, up", "down", "head"
    assert [(row["matrix"], row["rows"]) for row in line["results"]] == [(of, num) for of in matrices for num in (1, 3)]
    times = [time_s for row in line["results"] for name, time_s in row.items() if name not in ("matrix", "rows")]
    assert len(times) == 60
    assert min(times) > 0
