"""All targets by one command: what each benchmark's line says of them, and benchmarks that fail."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import targets
from bench.targets import ON_CPU, ON_CUDA, Benchmark, Target
from parallel.errors import DeviceError

BY_NAME = {each.name: each for each in ON_CPU}
Measure = Callable[..., tuple[int, str, list[dict[str, object]]]]
MODULE = """
import sys

print("a table")
if sys.argv[1] != "silent":
    print('{"benchmark": "module", "value": ' + sys.argv[1] + "}")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("benchmark", [*ON_CPU, *ON_CUDA], ids=lambda each: each.name)
def test_each_command_is_one_that_its_benchmark_takes(
    benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = benchmark.command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--help"])  # what comes before it is read first
    module = importlib.import_module("bench.peers.__main__" if name == "bench.peers" else name)
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {name} ")


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        (
            "peers-110m",
            {
                "rows": [{"workload": name, "engine": engine} for name in ("W1", "W2") for engine in ("weft", "vllm")],
                "best_peer": {"W1": {"engine": "vllm", "ratio": 1.09}},
            },
            [
                ("W1, times the rate of vllm", 1.1, 1.09, False),
                ("W2, times the rate of the best peer", 1.3, None, None),
            ],
        ),
        (
            "peers-110m-int8",
            {"rows": [{"workload": "W1"}], "best_peer": {"W1": {"engine": "openvino", "ratio": 1.5}}},
            [("W1, times the rate of openvino", None, 1.5, None)],
        ),
        (
            "served",
            {"rows": [{"workload": "W2", "ratios": [0.84, 0.86, 0.87]}]},
            [("W2, of the rate offline", 0.85, 0.86, True)],
        ),
        (
            "start-warm",
            {"rounds": [{"READY": ready_s} for ready_s in (1.5, 2.1, 2.2)]},
            [("READY, s", 2, 2.1, False)],
        ),
        (
            "load-0.5b",
            {"gb_per_s": {"disk": [1.0, 2.0, 4.0], "load, empty page cache": [1.0, 1.8, 1.9]}},
            [("of the disk's rate", 0.8, 0.9, True)],
        ),
        ("idle", {"rows": [{"ranks": 2, "idle_share": 0.021}]}, [("idle, ranks: 2, %", 2, 2.1, False)]),
        (
            "overlap",
            {"rows": [{"engine_share": 0.001, "served_share": 0.03}]},
            [("idle, engine, %", 2, 0.1, True), ("idle, served, %", 2, 3.0, False)],
        ),
        (
            "step",
            {"times": [{"num_seqs": 256, "total_ms": 0.5}, {"num_seqs": 4096, "total_ms": 17}]},
            [("256 sequences, ms", 1, 0.5, True), ("4096 sequences, ms", 16, 17, False)],
        ),
        ("plan", {"groups": [{"last_us": 40.0}]}, [("to the last of 4 ranks, us", 100, 40.0, True)]),
    ],
)
def test_what_a_line_says(
    name: str, line: dict[str, object], found: list[tuple[str, float | None, float | None, bool | None]]
) -> None:
    read = [*BY_NAME[name].read(line)]
    assert [(each.name, each.wanted, each.is_met) for each in read] == [(*each[:2], each[3]) for each in found]
    assert [each.measured for each in read] == [each[2] and pytest.approx(each[2]) for each in found]


def test_what_a_line_says_of_a_gpu() -> None:
    phase = {"name": "decode, 1 at once", "target": 0.85, "share": 0.9}
    line = {"phases": [phase], "attention_s": {"4096": 0.4, "65536": 2.4}, "growth_target": 2.0}
    decode, attention = ON_CUDA[0].read(line)
    assert (decode.wanted, decode.measured, decode.is_met) == (0.85, 0.9, True)
    assert (attention.wanted, attention.measured, attention.is_met) == (2.0, pytest.approx(6), False)


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Run benchmarks that a module of this test stands for; exit status, what was printed, the lines in the file."""
    (tmp_path / "module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def run(*arguments: str) -> tuple[int, str, list[dict[str, object]]]:
        benchmarks = [
            Benchmark(
                name=each,
                command=f"module {each}",
                read=lambda line: [Target(name="value", wanted=2.0, measured=line["value"])],
            )
            for each in arguments
        ]
        monkeypatch.setitem(targets._BY_DEVICE, "cpu", benchmarks)
        with pytest.raises(SystemExit) as ended:
            targets.main(["--json", "lines"])
        lines = [json.loads(line) for line in Path("lines").read_text().splitlines()]
        return int(str(ended.value.code)), capsys.readouterr().out, lines

    return run


def test_what_is_met_and_what_is_missed(measure: Measure) -> None:
    status, told, lines = measure("3 0", "1.5 0")
    assert status == 0
    assert told.count("a table") == 2
    assert [row.split()[-2] for row in told.splitlines() if " value " in row] == ["met", "MISSED"]
    assert [line.get("value") for line in lines] == [3, 1.5, None]
    assert lines[-1] == json.loads(told.splitlines()[-1])


@pytest.mark.parametrize(
    ("one", "reason"), [("3 7", "ended with status 7"), ("silent 0", "ended with status 0 and no line of JSON")]
)
def test_one_that_fails_is_told_and_the_others_go_on(one: str, reason: str, measure: Measure) -> None:
    status, told, lines = measure(one, "3 0")
    assert status == 1
    assert reason in told
    assert "FAILED" in told
    assert "met" in told
    assert lines[-1]["not_run"] == []


def test_ctrl_c_tells_what_there_is(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    run = targets.run

    def run_one(benchmark: Benchmark, **arguments: object) -> object:
        if benchmark.name == "1 0":
            raise KeyboardInterrupt
        return run(benchmark, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(targets, "run", run_one)
    status, told, lines = measure("3 0", "1 0", "4 0")
    assert status == 130
    assert "met" in told
    assert lines[-1]["not_run"] == ["1 0", "4 0"]


def test_an_unknown_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        targets.main(["--only", "step,plans"])
    assert ended.value.code == 2
    assert "--only: 'plans'; allowed: peers-110m, " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_told_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "run", None)
    with pytest.raises(DeviceError, match="cuda"):
        targets.main(["--device", "cuda"])
