"""The scripts of bench/ by their command lines: each tells what it is, and what is wrong in one line."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from bench.errors import BenchConfigError
from bench.script import check_gpus, run_script

FOLDER = Path(__file__).resolve().parents[3] / "bench"
SCRIPTS = sorted(file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text())


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """Run a script as `python -m` does; its exit status."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    main = importlib.import_module(f"bench.{name}").main
    with pytest.raises(SystemExit) as ended:
        run_script((lambda: main(arguments)) if name == "without_tiles" else main)
    return ended.value.code


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_tells_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(name, ["--help"], monkeypatch) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m bench.{name} ")
    assert (importlib.import_module(f"bench.{name}").__doc__ or "")[:40] in told


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("all_reduce --ranks 1,2", "Error: --ranks is 1,2; allowed: at least 2"),
        ("host_tier weft-tiny --tokens x", "--tokens: 'x'; allowed: a whole number"),
        ("idle_time --tensor-parallel 1,x", "--tensor-parallel: 'x'; allowed: a whole number"),
        ("idle_time --async sometimes", "--async: 'sometimes'; allowed: auto, on, off"),
        ("linear_time --rows 4,0", "--rows: '0'; allowed: a whole number"),
        ("linear_time --dtype int4", "--dtype: invalid choice: 'int4'"),
        ("load_rate --rounds 0", "--rounds: '0'; allowed: a whole number"),
        ("overlap --step 5,inf", "--step: 'inf'; allowed: a number, at least 0"),
        ("overlap --launch=-1", "--launch: '-1'; allowed: a number, at least 0"),
        ("plan_time --sequences 0", "--sequences: '0'; allowed: a whole number"),
        ("process_tree --interval 0 -- true", "--interval is 0; allowed: seconds, more than 0"),
        ("roofline --input-tokens 0", "--input-tokens: '0'; allowed: a whole number"),
        ("roofline --set x", "Error: --set is 'x'; allowed: a setting of the model"),
        ("route_time --requests 0", "--requests: '0'; allowed: a whole number"),
        ("sampling_time --vocab 0", "--vocab: '0'; allowed: a whole number"),
        ("served_share --rounds W9:1", "--rounds: 'W9:1'; allowed: W1, W2, W3, W4, with rounds"),
        ("start_time --warm", "--warm: allowed with --new-ray"),
        ("step_time --policy fastest", "--policy: 'fastest'; allowed: fcfs"),
        ("without_tiles", "a command is wanted"),
    ],
)
def test_what_is_wrong_is_told(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    assert run(name, arguments, monkeypatch) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_each_rank_needs_a_gpu() -> None:
    check_gpus("--ranks", (2, 4), 4)
    with pytest.raises(BenchConfigError, match=r"--ranks is 2,4.*sees 3"):
        check_gpus("--ranks", (2, 4), 3)


@pytest.mark.parametrize("command", ["idle_time", "all_reduce --device cuda"])
def test_no_group_has_more_ranks_than_there_are_gpus(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("find_model", "_group"):  # of idle_time
        monkeypatch.setattr(f"bench.idle_time.{name}", lambda *_: None)
    name, *arguments = command.split()
    assert run(name, arguments, monkeypatch) == 2
    assert "and each rank needs a GPU of its own; this process sees 1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("command", ["idle_time nosuch", "linear_time --model nosuch", "host_tier nosuch"])
def test_a_model_that_is_not_there_is_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = command.split()
    assert run(name, arguments, monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Error: ")
    assert "nosuch" in line
