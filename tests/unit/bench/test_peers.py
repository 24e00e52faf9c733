"""The comparison with peers: the protocol over a fake engine, and what is made of timed sections."""

import io
import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from bench.errors import BenchError
from bench.peers import __main__ as peers_command
from bench.peers import measure as measuring
from bench.peers.__main__ import main
from bench.peers.catalog import PEERS, READY, WEFT, Start, find_start
from bench.peers.comparison import Measured, compare_tokens, interleave, summarize
from bench.peers.measure import Options, Outcome, measure
from bench.peers.process import Worker, WorkerError
from bench.peers.report import make_report, print_report
from bench.peers.worker import Answer, Job, Loaded, Sampling, Setup, answer_lines, cached
from cluster.errors import ClusterError

_SETUP = Setup(model="m", dtype="float32", cache="c", num_threads=1, max_num_seqs=2, max_context=8, cache_tokens=16)
_GREEDY = Sampling()
_JOB = Job(prompts=[[1, 2], [3]], num_out=[2, 1])

_FAKE_WORKER = """
import os, sys
from bench.peers.worker import Answer, Loaded, serve_worker

class Echo:
    def __init__(self, setup):
        if sys.argv[1] == "refuses":
            raise ValueError("no such dtype")
        print("noise on stdout")
    def describe(self):
        return Loaded(packages={"echo": "1"}, dtype="float32")
    def run(self, job):
        if sys.argv[1] == "dies":
            print("out of memory", file=sys.stderr, flush=True)
            os._exit(3)
        first = 7 if sys.argv[1] == "differs" else 0
        tokens = [[first] + [0] * (n - 1) for n in job.num_out]
        return Answer(tokens=tokens, gaps=[[0.5] * n for n in job.num_out] if job.with_gaps else None)

serve_worker(Echo)
"""


class _Fake:
    """Repeats the first token of each prompt."""

    def __init__(self, setup: Setup) -> None:
        self.short = setup.dtype == "int8"

    def describe(self) -> Loaded:
        return Loaded(packages={}, dtype="float32")

    def run(self, job: Job) -> Answer:
        number = 1 if self.short else None
        return Answer(tokens=[[prompt[0]] * (number or n) for prompt, n in zip(job.prompts, job.num_out, strict=True)])


def _talk(*messages: dict[str, object]) -> list[dict[str, object]]:
    replies = io.StringIO()
    answer_lines(io.StringIO("".join(json.dumps(each) + "\n" for each in messages)), replies, _Fake)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


def _fake_worker(mode: str, tmp_path: Path) -> Worker:
    return Worker(mode, _fake_start(mode).command, environment={}, log=tmp_path / f"{mode}.log")


def _fake_start(mode: str) -> Start:
    root = str(Path(measuring.__file__).parents[2])
    command = (sys.executable, "-c", f"import sys; sys.path.append({root!r})\n{_FAKE_WORKER}", mode)
    return Start(command=command, environment={})


def _job() -> dict[str, object]:
    return {"prompts": _JOB.prompts, "num_out": _JOB.num_out}


def _setup(dtype: str = "float32") -> dict[str, object]:
    return {name: getattr(_SETUP, name) for name in Setup.__dataclass_fields__} | {"dtype": dtype}


def test_a_worker_answers_until_it_is_told_to_quit() -> None:
    loaded, ran = _talk(
        {"do": "load", "setup": _setup()}, {"do": "run", "job": _job()}, {"do": "quit"}, {"do": "run", "job": _job()}
    )
    assert loaded == {"ok": {"packages": {}, "dtype": "float32", "note": ""}}
    assert ran["ok"]["tokens"] == [[1, 1], [3]]  # type: ignore[index]


def test_an_engine_that_stops_early_is_an_error() -> None:
    _, ran = _talk({"do": "load", "setup": _setup("int8")}, {"do": "run", "job": _job()})
    assert "[1, 1]" in str(ran["error"])
    assert "[2, 1]" in str(ran["error"])


def test_an_unknown_message_is_refused_with_those_allowed() -> None:
    assert _talk({"do": "dance"}) == [{"error": "do is 'dance'; allowed: 'load', 'run', 'quit'"}]


def test_what_an_engine_prints_does_not_disturb_the_protocol(tmp_path: Path) -> None:
    worker = _fake_worker("works", tmp_path)
    try:
        assert worker.load(_SETUP, timeout_s=60).packages == {"echo": "1"}
        assert worker.run(_JOB, timeout_s=60).tokens == [[0, 0], [0]]
    finally:
        worker.close()
    assert "noise on stdout" in (tmp_path / "works.log").read_text()


def test_a_worker_that_dies_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    worker = _fake_worker("dies", tmp_path)
    try:
        worker.load(_SETUP, timeout_s=60)
        with pytest.raises(WorkerError, match=r"(?s)exit 3\): .*out of memory"):
            worker.run(_JOB, timeout_s=60)
    finally:
        worker.close()


def test_a_worker_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    worker = Worker("mute", (sys.executable, "-c", "input(); input()"), environment={}, log=tmp_path / "mute.log")
    with pytest.raises(WorkerError, match=r"no answer to 'load' within 0\.1 s"):
        worker.load(_SETUP, timeout_s=0.1)
    worker.close()


def _write(content: str, path: Path) -> None:
    path.write_text(content)


def _options(tmp_path: Path, *peers: str, sampling: Sampling = _GREEDY) -> Options:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 100}')
    return Options(
        model=tmp_path / "model",
        dtype="float32",
        peers=peers,
        workloads=("W1",),
        rounds=2,
        num_threads=1,
        venvs=tmp_path / "venvs",
        seed=0,
        weft_kv_cache_dtype="int8",
        device="cpu",
        sampling=sampling,
        settle_s=0.0,
    )


def test_engines_that_fail_are_left_out_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = {WEFT: "works", "vllm": "differs", "openvino": "refuses", "llama.cpp": "dies"}

    def start(name: str, **_: object) -> Start:
        if name not in modes:
            raise BenchError("no environment")
        return _fake_start(modes[name])

    closed: list[str] = []
    close = Worker.close
    monkeypatch.setattr(measuring, "find_start", start)
    monkeypatch.setattr(Worker, "close", lambda worker: (closed.append(worker.name), close(worker)))
    options = _options(tmp_path, "vllm", "openvino", "llama.cpp", "transformers")
    lines: list[str] = []

    outcome = measure(options, tell=lines.append)

    assert sorted(closed) == sorted(modes)
    assert [(each.round, each.engine) for each in outcome.measured] == [(1, WEFT), (1, "vllm"), (2, WEFT), (2, "vllm")]
    assert {(each.workload, each.num_requests, each.num_tokens) for each in outcome.measured} == {("W1", 1, 64)}
    assert all(each.wall_s > 0 for each in outcome.measured)
    assert lines[1] == "vllm: echo 1, float32"
    assert lines[2].startswith("openvino is skipped: openvino: ValueError: no such dtype")
    assert [line.partition(":")[0] for line in lines[5:]] == [
        "W1 vllm",
        "llama.cpp is left out from here on",
        *(f"round {index} W1 {engine}" for index in (1, 2) for engine in (WEFT, "vllm")),
    ]
    assert lines[4] == "transformers is skipped: no environment"
    assert lines[5] == (
        "W1 vllm: 0 of 1 answers are Weft's, 0 leave it at a small gap, 1 at a larger one (widest 0.500); "
        "0% of tokens before that"
    )
    assert set(outcome.skipped) == {"openvino", "llama.cpp", "transformers"}
    assert "no such dtype" in outcome.skipped["openvino"]
    assert outcome.agreements["W1"]["vllm"].num_far == 1
    report = json.loads(json.dumps(make_report(options, outcome)))
    assert [(row["workload"], row["engine"]) for row in report["rows"]] == [("W1", WEFT), ("W1", "vllm")]


def test_tokens_are_compared_greedily_and_the_rounds_are_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "find_start", lambda name, **_: _fake_start("works"))
    asked: list[tuple[str, Sampling]] = []
    prompts: list[list[list[int]]] = []
    run = Worker.run

    def note(worker: Worker, job: Job, *, timeout_s: float) -> object:
        asked.append((worker.name, job.sampling))
        prompts.append(job.prompts)
        return run(worker, job, timeout_s=timeout_s)

    monkeypatch.setattr(Worker, "run", note)
    slept_s: list[float] = []
    monkeypatch.setattr(measuring, "time", SimpleNamespace(sleep=slept_s.append))
    drawn = Sampling(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.1)
    options = replace(_options(tmp_path, "vllm", sampling=drawn), settle_s=0.5)
    outcome = measure(options, tell=lambda line: None)
    warm_up = [each for name in (WEFT, "vllm") for each in ((name, _GREEDY), (name, drawn))]
    assert asked == [(WEFT, _GREEDY), *warm_up, *[(WEFT, drawn), ("vllm", drawn)] * 2]
    assert slept_s == [0.5] * 8, "before each but the reference, which comes first"
    assert prompts[:5] == [prompts[0]] * 5
    assert prompts[0] != prompts[5] == prompts[6] != prompts[7] == prompts[8], "a round's are its own"
    assert make_report(options, outcome)["sampling"]["top_k"] == 20


def test_how_tokens_are_drawn_reaches_the_engine() -> None:
    seen: list[Sampling] = []

    class Seeing(_Fake):
        def run(self, job: Job) -> Answer:
            seen.append(job.sampling)
            return super().run(job)

    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "repetition_penalty": 1.2}
    messages = [
        {"do": "load", "setup": _setup()},
        {"do": "run", "job": _job()},
        {"do": "run", "job": _job() | {"sampling": sampling}},
    ]
    answer_lines(io.StringIO("".join(json.dumps(each) + "\n" for each in messages)), io.StringIO(), Seeing)
    assert seen == [_GREEDY, Sampling(temperature=0.5, top_k=3, top_p=0.9, repetition_penalty=1.2)]


def test_an_interrupt_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_start", lambda name, **_: _fake_start("works"))
    options = _options(tmp_path, "vllm")
    lines: list[str] = []

    def tell(line: str) -> None:
        lines.append(line)
        if line.startswith("round 1 W1 vllm"):
            raise KeyboardInterrupt

    outcome = measure(options, tell=tell)

    assert outcome.failure is None
    assert [(each.round, each.engine) for each in outcome.measured] == [(1, WEFT), (1, "vllm")]
    assert outcome.was_interrupted
    assert "interrupted" in lines[-1]
    assert make_report(options, outcome)["was_interrupted"]


def test_an_interrupt_before_anything_was_measured_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_start", lambda name, **_: _fake_start("works"))

    def interrupt(run: object, index: int, workload: str, engine: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring._Run, "section", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure(_options(tmp_path), tell=lambda line: None)


def test_a_failure_of_weft_itself_ends_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_start", lambda name, **_: _fake_start("refuses"))
    with pytest.raises(WorkerError, match="weft: ValueError: no such dtype"):
        measure(_options(tmp_path), tell=lambda line: None)


def test_a_failure_of_weft_amid_the_rounds_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_start", lambda name, **_: _fake_start("works"))
    lines: list[str] = []
    run = Worker.run

    def fail_later(worker: Worker, job: Job, *, timeout_s: float) -> object:
        if worker.name == WEFT and any(line.startswith("round 1") for line in lines):
            raise WorkerError("weft: out of memory")
        return run(worker, job, timeout_s=timeout_s)

    monkeypatch.setattr(Worker, "run", fail_later)
    outcome = measure(_options(tmp_path, "vllm"), tell=lines.append)
    assert lines[-1] == "weft: out of memory; medians are of the rounds till then"
    assert [(each.round, each.engine) for each in outcome.measured] == [(1, WEFT), (1, "vllm")]
    assert outcome.was_interrupted

    monkeypatch.setattr(peers_command, "measure", lambda *_, **__: outcome)
    with pytest.raises(WorkerError, match="weft: out of memory"):
        main(["--geometry", str(tmp_path / "model"), "--peers", "vllm", "--json", str(tmp_path / "line")])
    assert json.loads((tmp_path / "line").read_text())["was_interrupted"]


def test_a_peer_without_an_environment_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"python -m bench\.peers\.install transformers"):
        find_start("transformers-cb", venvs=tmp_path, num_threads=2, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "vllm,llamacpp"], "--peers has 'llamacpp'; allowed: transformers, transformers-cb, llama.cpp"),
        (["--peers", "weft"], "--peers has 'weft'; allowed: transformers"),
        (["--settle", "-1"], "--settle is -1; allowed: seconds, at least 0"),
        (["--workloads", "W9"], "--workloads is 'W9'"),
        (["--temperature", "-1"], "temperature is -1.0; allowed: 0 to 1e+36"),
        (["--temperature", "1", "--top-p", "0"], "top_p is 0.0; allowed: more than 0, at most 1"),
        (["--json", "/nowhere/lines"], "/nowhere/lines cannot be written: No such file"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_loaded(arguments: list[str], message: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(message)):
        main(["--geometry", "weft-tiny", *arguments])


def test_a_model_that_changes_in_its_place_is_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "find_start", lambda name, **_: _fake_start("works"))
    options = _options(tmp_path, "vllm")
    for size, number in ((100, 1), (100, 1), (101, 2)):
        config = tmp_path / "model" / "config.json"
        if json.loads(config.read_text())["vocab_size"] != size:
            config.write_text(f'{{"vocab_size": {size}, "more": 0}}')
        measure(options, tell=lambda line: None)
        assert len(list((tmp_path / "venvs" / "checkpoints").iterdir())) == number


def test_a_gpu_is_for_the_engines_that_can_use_one(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="vllm on cuda; allowed for it: cpu"):
        find_start("vllm", venvs=tmp_path, num_threads=2, device="cuda")
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / READY).touch()
    for name in (WEFT, "transformers", "transformers-cb"):
        find_start(name, venvs=tmp_path, num_threads=2, device="cuda")


def test_every_engine_gets_the_same_sizes_and_weft_alone_its_cache(tmp_path: Path) -> None:
    options = replace(_options(tmp_path), device="cuda", workloads=("W1", "W3"), num_threads=3)
    ours, theirs = (measuring._setup(name, options) for name in (WEFT, "transformers"))
    assert (ours.kv_cache_dtype, theirs.kv_cache_dtype) == ("int8", "auto")
    assert ours == replace(theirs, kv_cache_dtype="int8", cache=ours.cache)
    assert ours.cache != theirs.cache
    assert (ours.model, ours.dtype, ours.device, ours.num_threads) == (str(tmp_path / "model"), "float32", "cuda", 3)
    # W1 is one of 128 tokens in and 64 out; W3 32 of 544 and 32
    assert (ours.max_num_seqs, ours.max_context, ours.cache_tokens) == (32, 576, 32 * 576)


@pytest.mark.parametrize("name", list(PEERS))
def test_each_worker_starts_in_its_own_environment(name: str, tmp_path: Path) -> None:
    venv = PEERS[name].venv
    if venv is not None:
        (tmp_path / venv).mkdir()
        (tmp_path / venv / READY).touch()
    start = find_start(name, venvs=tmp_path, num_threads=3, device="cpu")
    assert start.command[0] == (sys.executable if venv is None else str(tmp_path / venv / "bin" / "python"))
    assert start.environment["OMP_NUM_THREADS"] == "3"
    root = Path(start.command[-1])
    assert (root / PEERS[name].module.replace(".", "/")).with_suffix(".py").is_file()


def test_engines_take_turns_on_each_workload() -> None:
    order = list(interleave(["a", "b"], ["W1", "W2"], 2))
    assert order[:4] == [(1, "W1", "a"), (1, "W1", "b"), (1, "W2", "a"), (1, "W2", "b")]
    assert [index for index, _, _ in order] == [1] * 4 + [2] * 4


def _measured(engine: str, index: int, rate: float, *, others: float | None = 0.0) -> Measured:
    return Measured(
        round=index,
        workload="W1",
        engine=engine,
        num_requests=1,
        num_tokens=64,
        wall_s=64 / rate,
        others_cores=others,
        first_s=0.1,
    )


def test_medians_and_ratios_leave_contended_rounds_out() -> None:
    rows = summarize(
        [
            *(_measured("weft", 1, 80), _measured("peer", 1, 40)),
            *(_measured("weft", 2, 90), _measured("peer", 2, 5, others=0.5)),
            *(_measured("weft", 3, 10, others=0.2), _measured("peer", 3, 50)),
            *(_measured("weft", 4, 100), _measured("peer", 4, 40)),
        ],
        reference="weft",
    )
    weft, peer = rows
    assert weft.median_rate == pytest.approx(90)
    assert weft.ratio == pytest.approx(1)
    assert peer.rates == pytest.approx((40, 50, 40))
    assert peer.dropped_rates == pytest.approx((5,))
    assert peer.median_rate == pytest.approx(40)
    assert peer.ratio == pytest.approx((80 / 40 + 100 / 40) / 2)


def test_report_shows_rates_ratios_and_milliseconds_and_the_best_peer(tmp_path: Path) -> None:
    measured = [_measured(WEFT, 1, 80), _measured("slow", 1, 20), _measured("vllm", 1, 40), _measured("last", 1, 16)]
    measured += [_measured("vllm", 2, 5, others=0.5), _measured("busy", 1, 90, others=0.5)]
    measured += [replace(_measured(engine, 1, rate), workload="W2") for engine, rate in ((WEFT, 30), ("slow", 60))]
    outcome = Outcome(measured=measured, skipped={"openvino": "no environment"})
    out = io.StringIO()
    print_report(Console(file=out, width=200, force_terminal=True), outcome)
    assert re.findall(r"\x1b\[1m *(\w+) +\x1b\[0m", out.getvalue().partition("engine")[2]) == ["vllm", "slow"]
    text = " ".join(re.sub(r"\x1b\[\d+m|[^\x00-\x7f]", " ", out.getvalue()).split())
    for row in (
        "engine tokens/s of rounds Weft / it TTFT ms TPOT ms",
        "weft 80.0 80.0 1.00 100 11.1",
        "vllm 40.0 40.0, 5.0* 2.00 100 23.8",
        "slow 20.0 20.0 4.00 100 49.2",
        "busy - 90.0* - - -",
        "openvino is missing: no environment",
    ):
        assert row in text
    report = make_report(_options(tmp_path, "vllm"), outcome)
    assert {workload: row["engine"] for workload, row in report["best_peer"].items()} == {"W1": "vllm", "W2": "slow"}
    assert [section["is_contended"] for section in report["sections"]] == [False] * 4 + [True] * 2 + [False] * 2


def test_an_engine_without_a_quiet_round_has_no_number() -> None:
    rows = summarize([_measured("weft", 1, 80), _measured("peer", 1, 40, others=1.0)], reference="weft")
    assert (rows[1].median_rate, rows[1].ratio, rows[1].ttft_s) == (None, None, None)


def test_where_the_system_does_not_tell_every_round_counts() -> None:
    (row,) = summarize([_measured("weft", 1, 80, others=None)], reference="weft")
    assert row.median_rate == pytest.approx(80)


def test_time_per_token_is_that_of_one_request_after_its_first_token() -> None:
    one = _measured("weft", 1, 64)
    assert one.tpot_s == pytest.approx(0.9 / 63)
    assert replace(one, num_requests=2).tpot_s is None
    assert replace(one, first_s=None).tpot_s is None
    assert replace(one, num_tokens=1).tpot_s is None
    assert replace(one, num_tokens=2).tpot_s == pytest.approx(0.9)
    alone, together = summarize([one, replace(one, workload="W2", num_requests=2)], reference="weft")
    assert (alone.ttft_s, together.ttft_s) == (0.1, None)


def test_tokens_are_compared_up_to_the_first_difference() -> None:
    agreement = compare_tokens(
        [[1, 2, 3, 4], [5, 6], [7, 8]],
        [[0.9, 0.05, 0.9, 0.9], [0.9, 0.9], [0.8, 0.9]],
        [[1, 9, 9, 9], [5, 6], [0, 8]],
        small_gap=0.1,
    )
    assert (agreement.num_same, agreement.num_close, agreement.num_far) == (1, 1, 1)
    assert agreement.widest_gap == pytest.approx(0.8)
    assert agreement.mean_prefix == pytest.approx((1 / 4 + 1 + 0) / 3)


def test_a_converted_checkpoint_is_made_once_and_put_in_place_whole(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached(str(tmp_path), "m.gguf", fail)
    assert not (tmp_path / "m.gguf").exists()
    for content in ("whole", "again"):
        path = cached(str(tmp_path), "m.gguf", partial(_write, content))
        assert path.read_text() == "whole"
