"""The time of the choice of tokens is measured for everything that requests ask for."""

import json

import pytest

from bench import sampling_time


def test_command_measures_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    sampling_time.main(["--device", "cpu", "--rows", "1,3", "--vocab", "600"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    kinds = ["greedy", "temperature", "min-p 0.1", "top-k 20, top-p 0.8", "top-p 0.9", "penalties"]
    assert [(row["rows"], row["kind"]) for row in line["rows"]] == [(num, kind) for num in (1, 3) for kind in kinds]
    assert all(time_s > 0 for row in line["rows"] for time_s in (*row["s"], row["least_s"]))
