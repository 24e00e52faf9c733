"""Weft's service beside another server: what is made of rounds, and which models can be compared."""

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from weft.v1 import control_pb2

from bench.errors import BenchConfigError, BenchError
from bench.load.arrivals import ClosedLoop, Load, OpenLoop
from bench.load.datasets import DatasetOptions
from bench.load.records import CallError, CallRecord, ErrorKind, Usage
from bench.load.statistics import Summary
from bench.load.statistics import summarize as summarize_run
from bench.peers import served
from bench.peers.catalog import Start
from bench.peers.served import Measured, Options, Times, _find_http, main, summarize
from cluster.make_model import make_model
from cluster.serve import print_addresses

VLLM = Start(command=("python",), environment={})


def measured(service: str, *firsts_s: float, load: str = "8 at a time") -> Measured:
    """Requests of 11 tokens, which come 10 ms apart after the first."""
    records = []
    for first_s in firsts_s:
        record = CallRecord(num_asked=11, due_s=None, sent_s=0.0)
        for number in range(11):
            record.note(1, first_s + 0.01 * number)
        record.finish(Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=11), first_s + 0.1)
        records.append(record)
    return Measured(service=service, load=load, summary=summarize_run(records))


def test_a_row_has_the_medians_of_its_rounds() -> None:
    rounds = [measured("weft", first_s) for first_s in (0.3, 0.1, 0.2)]
    weft, vllm = summarize([*rounds, measured("vllm", 0.4)])
    assert (weft.service, vllm.service) == ("weft", "vllm")
    assert weft.ttft == pytest.approx(Times(0.2, 0.2))
    assert weft.tpot == pytest.approx(Times(0.01, 0.01))
    assert weft.output_rate == pytest.approx(11 / 0.3)
    assert vllm.output_rate == pytest.approx(11 / 0.5)
    assert (weft.weft_ratio, vllm.weft_ratio) == (1, pytest.approx(0.5 / 0.3))


def test_percentiles_of_a_round_stay_apart() -> None:
    (row,) = summarize([measured("weft", 0.1, 0.2, 0.9)])
    assert row.ttft == pytest.approx(Times(0.2, 0.886))


def test_services_take_turns_with_the_same_prompts_and_every_second_round_the_other_is_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int, int]] = []

    def ask(service: Any, options: Options, load: Load, *, seed: int, num_warmup: int = 0) -> Summary:
        asked.append((service, seed, num_warmup))
        return measured(service, 0.1 + seed).summary

    for name in ("weft", "vllm"):
        monkeypatch.setattr(served, f"_start_{name}", lambda options, name=name: nullcontext(name))
    monkeypatch.setattr(served, "_ask", ask)
    monkeypatch.setattr(served, "give_way", lambda: None)
    options = Options(
        model=Path("m"),
        vocab_size=9,
        dtype="float32",
        loads=(ClosedLoop(concurrency=8),),
        dataset=DatasetOptions(),
        duration_s=1.0,
        rounds=3,
        max_num_seqs=4,
        vllm=VLLM,
    )
    assert options.max_context == 128 + 64
    found: list[Measured] = []
    lines: list[str] = []
    served.measure_both(options, found, tell=lines.append)
    assert asked[:2] == [("weft", -1, 16), ("vllm", -1, 16)]
    assert asked[2:6] == [("vllm", 0, 0), ("weft", 0, 0), ("weft", 1, 0), ("vllm", 1, 0)]
    assert asked[6:] == [("vllm", 2, 0), ("weft", 2, 0)]
    assert [(each.service, each.load) for each in found] == [(name, "8 at a time") for name, _, _ in asked[2:]]
    assert "round 2, 8 at a time, vllm: 9.2 tokens/s" in lines


def test_weft_is_ready_when_it_says_how_it_is_stopped() -> None:
    out = io.StringIO()
    router = control_pb2.RouterStatus(grpc_address="h:1", http_address="h:2")
    print_addresses(
        Console(file=out), control_pb2.GetStatusResponse(routers=[router]), "h:3", None, has_https=False, stays=True
    )
    *addresses, _ = out.getvalue().splitlines(keepends=True)
    assert _find_http(out.getvalue()) == "http://h:2/v1"
    assert _find_http("".join(addresses)) is None
    assert _find_http("Stop it with Ctrl-C.") is None


def test_a_round_without_an_answer_counts_for_the_rate_only() -> None:
    failed = CallRecord(num_asked=1, due_s=None, sent_s=0.0)
    failed.fail(CallError(ErrorKind.SERVER, "gone"), 1.0)
    lost = Measured(service="weft", load="8 at a time", summary=summarize_run([failed]))
    (row,) = summarize([lost, measured("weft", 0.2), lost])
    assert (row.output_rate, row.ttft) == (0.0, pytest.approx(Times(0.2, 0.2)))
    (row,) = summarize([lost])
    assert (row.ttft, row.tpot, row.weft_ratio) == (None, None, None)


def test_loads_have_rows_of_their_own() -> None:
    rows = summarize([measured("weft", 0.1), measured("weft", 0.3, load="1 at a time")])
    assert [(row.load, row.ttft and row.ttft.p50_s) for row in rows] == [("8 at a time", 0.1), ("1 at a time", 0.3)]


def test_command_tells_what_was_measured_also_where_it_was_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Options] = []
    error: BaseException = KeyboardInterrupt()
    rounds = [measured("weft", 0.1), measured("weft", 0.3), measured("vllm", 0.4)]

    def measure_both(options: Options, found: list[Measured], *, tell: Callable[[str], None]) -> None:
        asked.append(options)
        found += rounds
        if len(asked) > 1:
            raise error

    monkeypatch.setattr(served, "find_start", lambda *_, **__: VLLM)
    monkeypatch.setattr(served, "measure_both", measure_both)
    arguments = ["weft-tiny", "--rate", "1,2", "--concurrency", "8", "--json", str(tmp_path / "lines")]
    main(arguments)
    assert asked[0].loads == (OpenLoop(rate=1.0), OpenLoop(rate=2.0), ClosedLoop(concurrency=8))
    shown = " ".join(re.sub(r"[^\x00-\x7f]", " ", capsys.readouterr().out).split())
    assert shown.startswith("weft-tiny, bfloat16, over HTTP")
    assert "load service tokens/s ratio p50, p99 p50, p99" in shown
    assert "8 at a time weft 41.2 1.00 200.0, 200.0 10.0, 10.0" in shown
    with pytest.raises(SystemExit, match="130"):
        main(arguments)
    error = BenchError("vllm is gone")
    with pytest.raises(BenchError, match="is gone"):
        main(arguments)
    rounds.clear()
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [line["was_interrupted"] for line in lines] == [False, True, True]
    assert [row["service"] for row in lines[0]["rows"]] == ["weft", "vllm"]
    assert len(lines[0]["measured"]) == 3


def test_a_tokenizer_that_knows_few_of_the_tokens_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "m", preset="tiny", sizes={"vocab_size": 9000}, dtype="float32", seed=0, tokenizer=None)
    with pytest.raises(BenchConfigError, match="has 2048 of 9000 tokens"):
        main([str(tmp_path / "m")])


def test_a_missing_environment_is_told_before_a_service_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "m", preset="tiny", sizes={"vocab_size": 2048}, dtype="float32", seed=0, tokenizer=None)
    monkeypatch.setattr("bench.peers.served.start_service", lambda *_, **__: pytest.fail("started"))
    with pytest.raises(BenchError, match=r"vllm: no environment in .*; `python -m bench.peers.install vllm` makes it"):
        main([str(tmp_path / "m"), "--venvs", str(tmp_path)])
