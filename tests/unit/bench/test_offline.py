"""`weft bench offline` on small models, and what its utilisations are counted from."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import FakeExecutor, fake_engine
from msgspec import structs
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from bench.errors import BenchConfigError, BenchError
from bench.load import geometries, offline
from bench.load.calls import Call, Session
from bench.load.datasets import DatasetKind, DatasetOptions
from bench.load.engine_run import run_engine
from bench.load.geometries import GEOMETRIES, find_model
from bench.load.hardware import Ceiling
from bench.load.model_cost import ModelCost, Work
from bench.load.records import CallRecord, ErrorKind, Usage
from bench.load.watcher import OfflineWatcher
from cluster.cli import app
from cluster.errors import ClusterConfigError
from cluster.make_model import make_model
from parallel.device.energy import GpuEnergy
from parallel.families.registry import describe_config, describe_model
from workers.errors import EngineConfigError, GroupFailedError, InvalidRequestError
from workers.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture
def known_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine can is not measured, which takes longer than to run a small model."""
    ceiling = Ceiling(read_bytes_per_s=1e10, flops_per_s=1e11)
    monkeypatch.setattr(offline, "measure_ceiling", lambda *_args, **_kwargs: ceiling)


def usage(num_in: int, num_out: int, *, cached: int = 0) -> Usage:
    return Usage(prompt_tokens=num_in, cached_tokens=cached, completion_tokens=num_out)


def session(*lengths: tuple[int, int]) -> Session:
    return Session(calls=tuple(Call(prompt=(1,) * num_in, num_out=num_out) for num_in, num_out in lengths))


def test_engine_runs_all_at_once_and_turns_one_by_one() -> None:
    clock_s = iter(range(1000))
    records = run_engine(
        fake_engine(),
        [session((3, 4)), session((5, 2), (8, 3))],
        GREEDY,
        cache_salt="a",
        clock=lambda: float(next(clock_s)),
    )
    assert [(record.num_in, record.num_out, record.num_asked) for record in records] == [
        (3, 4, 4),
        (5, 2, 2),
        (8, 3, 3),
    ]
    first, second, third = records
    assert (first.sent_s, second.sent_s, third.sent_s) == (0.0, 0.0, second.last_s)
    assert all(len(record.gaps_s) == record.num_out - 1 for record in records)


@pytest.mark.parametrize("max_waiting", [600, 8])
def test_more_requests_than_the_engine_lets_wait_are_fed_in_turn(max_waiting: int) -> None:
    engine = fake_engine(max_waiting=max_waiting)
    records = run_engine(engine, [session((3, 1))] * 1500, GREEDY, cache_salt="a")
    assert sum(record.is_answered for record in records) == 1500


def test_time_before_the_engine_lets_a_request_in_counts() -> None:
    clock_s = iter(range(10_000))
    records = run_engine(
        fake_engine(max_waiting=600),
        [session((3, 1), (4, 1))] * 1500,
        GREEDY,
        cache_salt="a",
        clock=lambda: float(next(clock_s)),
    )
    first, later = records[:1500], records[1500:]
    assert {record.num_in for record in first} == {3}
    assert {record.sent_s for record in first} == {0.0}
    assert sorted(record.sent_s for record in later) == sorted(record.end_s for record in first)
    ttfts_s = [record.ttft_s for record in first if record.ttft_s is not None]
    assert ttfts_s == sorted(ttfts_s)
    assert ttfts_s[-1] > 100


def test_prompt_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="allowed: at most 199"):
        run_engine(fake_engine(), [session((500, 1))], GREEDY, cache_salt="a")


def test_request_that_fails_alone_is_told_and_the_turns_after_it_are_not_run() -> None:
    executor = FakeExecutor()

    def spoil() -> None:
        output, executor.on_collect = executor._outputs.popleft(), None
        token_ids, errors = [-1, *output.token_ids[1:]], {output.slots[0]: "logits are NaN"}
        executor._outputs.appendleft(structs.replace(output, token_ids=token_ids, errors=errors))

    executor.on_collect = spoil
    failed, answered = run_engine(
        fake_engine(executor), [session((3, 4), (4, 1)), session((5, 2))], GREEDY, cache_salt="a"
    )
    assert failed.error is not None
    assert (failed.error.kind, "logits are NaN" in str(failed.error)) == (ErrorKind.SERVER, True)
    assert (failed.is_answered, answered.num_out) == (False, 2)


def test_cost_of_a_dense_model_by_hand() -> None:
    cost = ModelCost.of(describe_config(LLAMA, source="test"), torch.bfloat16)
    layer = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 16 * 8  # q, k and v, output, MLP
    norms = 2 * 2 * 8 + 8
    assert cost.weights.num_parameters == 2 * layer + norms + 2 * 32 * 8
    assert cost.weights.always_bytes == 2 * (2 * layer + norms + 32 * 8)
    # 3 tokens in, 2 out: the prompt reads 3 keys and the next token 4, in 2 layers of 16 bytes a token
    work = Work(step_tokens=(3, 1), requests=(usage(3, 2),))
    assert cost.bytes_read(work) == 2 * cost.weights.always_bytes + 2 * (3 + 4) * 16
    # 4 tokens through the layers, 2 through the head; they see 1 + 2 + 3 + 4
    assert cost.flops(work) == 4 * 2 * 2 * layer + 2 * 2 * 32 * 8 + 2 * 10 * 4 * 8


def test_matrices_in_8_bits_are_read_as_such() -> None:
    cost, plain = (
        ModelCost.of(describe_config(LLAMA, source="test"), torch.bfloat16, int8_linears=int8_linears)
        for int8_linears in (True, False)
    )
    assert cost.weights.always_bytes == plain.weights.always_bytes - (
        plain.weights.matrix_elements + plain.weights.head_elements
    )
    assert cost.weights.num_parameters == plain.weights.num_parameters


def test_a_cache_in_8_bits_is_read_as_such() -> None:
    cost = ModelCost.of(describe_config(LLAMA, source="test"), torch.bfloat16, int8_cache=True)
    assert cost.kv_bytes == 2 * 1 * (4 + 4)  # keys and values of one head of 4, and their scales


def test_cached_tokens_are_read_and_not_computed() -> None:
    cost = ModelCost.of(describe_config(LLAMA, source="test"), torch.bfloat16)
    whole, cached = (Work(step_tokens=(1,), requests=(usage(6, 1, cached=n),)) for n in (0, 4))
    assert cost.bytes_read(whole) == cost.bytes_read(cached)
    layers = cost.weights.matrix_elements
    assert cost.flops(whole) - cost.flops(cached) == 4 * 2 * layers + 2 * (1 + 2 + 3 + 4) * cost.attention_flops


def test_tied_head_is_read_as_a_head() -> None:
    tied, untied = (
        ModelCost.of(describe_config({**LLAMA, "tie_word_embeddings": is_tied}, source="test"), torch.float32)
        for is_tied in (True, False)
    )
    assert tied.weights.always_bytes == untied.weights.always_bytes
    assert tied.weights.num_parameters == untied.weights.num_parameters - 32 * 8


def test_window_bounds_what_a_token_sees() -> None:
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 4}
    cost = ModelCost.of(describe_config(config, source="test"), torch.bfloat16)
    assert cost.windows == (4, 4)
    # the prompt reads 6, tokens 7 and 8 read 4 each; seen: 1 + 2 + 3 + 4 + 4 + 4 + 4 + 4
    work = Work(step_tokens=(6, 1, 1), requests=(usage(6, 3),))
    assert cost.bytes_read(work) == 3 * cost.weights.always_bytes + 2 * (6 + 4 + 4) * 16
    per_token = 8 * 2 * cost.weights.matrix_elements + 3 * 2 * cost.weights.head_elements
    assert cost.flops(work) == per_token + 2 * 26 * cost.attention_flops


def test_experts_count_as_far_as_they_are_chosen(tmp_path: Path) -> None:
    make_model(tmp_path, preset="tiny-moe", sizes={}, dtype="float32", seed=0, tokenizer=None)
    cost = ModelCost.of(describe_model(tmp_path), torch.float32)
    assert cost.weights.expert_share == 2 / 8
    assert cost.weights.expert_elements == 4 * 8 * 3 * 96 * 64
    one = Work(step_tokens=(1,), requests=())
    many = Work(step_tokens=(1000,), requests=())
    assert cost.bytes_read(one) == cost.weights.always_bytes + cost.weights.expert_bytes / 4
    assert cost.bytes_read(many) == pytest.approx(cost.weights.always_bytes + cost.weights.expert_bytes)
    for int8_experts, itemsize in ((True, 1), (False, 4)):  # as on a CPU, and on CUDA
        in_8_bits = ModelCost.of(describe_model(tmp_path), torch.float32, int8_linears=True, int8_experts=int8_experts)
        assert in_8_bits.weights.expert_bytes == itemsize * cost.weights.expert_elements
    chosen = cost.weights.matrix_elements + cost.weights.expert_elements / 4
    first = 2 * (chosen + cost.weights.head_elements) + 4 * cost.attention_flops
    assert cost.flops(Work(step_tokens=(1,), requests=(usage(1, 1),))) == first
    assert cost.decode_flops((1,)) == first


def test_no_energy_without_a_gpu() -> None:
    assert GpuEnergy.of(torch.device("cpu")).read_j() is None


def test_energy_is_what_nvml_counts() -> None:
    class Nvml:
        NVMLError = RuntimeError

        def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
            assert handle == "gpu"
            return 2500

    assert GpuEnergy(Nvml(), "gpu").read_j() == 2.5


def test_geometry_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GEOMETRIES, "llama-110m", "tiny")  # type: ignore[index]
    monkeypatch.setenv("HOME", str(tmp_path / "new"))
    folder = find_model("llama-110m")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert find_model("llama-110m") == folder == tmp_path / "new" / ".cache" / "weft" / "models" / "llama-110m"
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [each.name for each in folder.parent.iterdir()] == ["llama-110m"], "nothing is left of the making"


def test_geometry_that_another_process_wrote_meanwhile_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_too_late(folder: Path, *, preset: str, **settings: Any) -> None:
        make_model(folder, preset="tiny", **settings)
        make_model(tmp_path / "llama-110m", preset="tiny", **settings)

    monkeypatch.setattr(geometries, "make_model", make_too_late)
    assert (find_model("llama-110m", cache=tmp_path) / "config.json").is_file()
    assert [each.name for each in tmp_path.iterdir()] == ["llama-110m"]


def test_cache_of_geometries_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GEOMETRIES, "llama-110m", "tiny")  # type: ignore[index]
    file = tmp_path / "llama-110m" / "file"
    file.parent.mkdir()
    file.touch()
    for cache, why in ((tmp_path, "Directory not empty"), (file, "File exists|Not a directory")):
        with pytest.raises(BenchError, match=f"llama-110m cannot be written: ({why}); allowed: a home folder that can"):
            find_model("llama-110m", cache=cache)


def test_what_a_killed_process_left_of_a_geometry_is_removed_but_not_what_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_while_another_is_made(folder: Path, *, preset: str, **settings: Any) -> None:
        make_model(folder, preset="tiny", **settings)
        if preset == GEOMETRIES["llama-110m"]:
            find_model("qwen2.5-0.5b", cache=tmp_path)

    monkeypatch.setattr(geometries, "make_model", make_while_another_is_made)
    left = tmp_path / "make-dead" / "llama3-8b"
    left.mkdir(parents=True)
    (left / "model.safetensors").touch()
    (tmp_path / "make-new").mkdir()  # it may be too new to be locked
    assert (find_model("llama-110m", cache=tmp_path) / "config.json").is_file()
    assert {each.name for each in tmp_path.iterdir()} == {"llama-110m", "qwen2.5-0.5b", "make-new"}


def test_command_reports_every_workload(tmp_path: Path) -> None:
    model, lines = tmp_path / "model", tmp_path / "lines"
    make_model(model, preset="tiny", sizes={}, dtype="float32", seed=0, tokenizer=None)
    arguments = ["bench", "offline", "--model", str(model), "--repeats", "2", "--json", str(lines), "--threads", "1"]
    arguments += ["--ttft-target", "60000"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert f"{model}:" in result.output.replace("\n", "")
    assert "good" in result.output
    line = json.loads(lines.read_text())
    assert all(rate > 1e8 for rate in line["result"]["ceiling"].values())
    repeats = line["result"]["repeats"]
    assert list(repeats) == ["W1", "W2", "W3"]
    for name, num_in, num_out in (("W1", 128, 64), ("W2", 4608, 2304), ("W3", 32 * 544, 32 * 32)):
        first, second = repeats[name]
        assert name in result.output
        for repeat in (first, second):
            assert (repeat["summary"]["input_tokens"], repeat["summary"]["output_tokens"]) == (num_in, num_out)
            assert 0 < repeat["mbu"] < 1.5
            assert 0 < repeat["flop_utilization"] < 1.5
            assert 0 < repeat["model_idle_share"] < 1
            assert repeat["peak_memory_bytes"] > 1e6
            assert repeat["energy_j"] is None
    # only what the requests of one round share is cached, nothing of the round before
    assert {repeat["summary"]["cached_tokens"] for repeat in repeats["W1"]} == {0}
    assert {repeat["summary"]["cached_tokens"] <= 31 * 512 for repeat in repeats["W3"]} == {True}
    assert {"torch", "threads", "cpu", "commit"} <= line.keys()


@pytest.mark.usefixtures("known_ceiling")
def test_a_head_that_is_stored_beside_a_tied_embedding_counts_if_it_is_another(tmp_path: Path) -> None:
    make_model(tmp_path, preset="tiny", sizes={}, dtype="float32", seed=0, tokenizer=None)
    weights, lines = tmp_path / "model.safetensors", tmp_path / "lines"
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(weights)
    embedding = tensors["model.embed_tokens.weight"]
    numbers = []
    for head in (embedding.clone(), embedding + 1):
        save_file(tensors | {"lm_head.weight": head}, weights)
        arguments = ["bench", "offline", "--model", str(tmp_path), "--dataset", "random", "-n", "1", "--repeats", "1"]
        arguments += ["--input-tokens", "4", "--output-tokens", "2", "--json", str(lines), "--threads", "1"]
        assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
        numbers.append(json.loads(lines.read_text().splitlines()[-1])["result"]["num_parameters"])
    assert numbers[1] - numbers[0] == embedding.numel()


@pytest.mark.usefixtures("known_ceiling")
def test_offline_takes_texts_too(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n{"messages": [{"role": "user", "content": "Who are you?"}]}\n')
    arguments = ["bench", "offline", "--model", "weft-tiny", "--dataset", "prompts", "--file", str(file)]
    for flags, cache in (([], ""), (["--kv-cache-dtype", "int8"], ", cache int8")):
        result = CliRunner().invoke(
            app, [*arguments, "-n", "4", "--repeats", "1", "--output-tokens", "5", *flags], catch_exceptions=False
        )
        assert result.exit_code == 0
        assert "prompts" in result.output
        assert f"{cache} on " in " ".join(result.output.split())


@pytest.mark.usefixtures("known_ceiling")
def test_answers_that_ended_early_are_told(tmp_path: Path) -> None:
    file, lines = tmp_path / "prompts.jsonl", tmp_path / "lines"
    file.write_text('{"messages": [{"role": "user", "content": "Who are you?"}]}\n')
    arguments = ["bench", "offline", "--model", "weft-tiny", "--dataset", "prompts", "--file", str(file)]
    arguments += ["--no-ignore-eos", "--repeats", "2", "--output-tokens", "200", "--json", str(lines)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    repeats = json.loads(lines.read_text())["result"]["repeats"]["prompts"]
    num_tokens = sum(repeat["summary"]["output_tokens"] for repeat in repeats)
    assert num_tokens < 400
    told = f"prompts: 2 of 2 answers ended with fewer tokens than asked for: {num_tokens} of 400 tokens came"
    assert told in " ".join(result.output.split())


@pytest.mark.usefixtures("known_ceiling")
def test_a_files_prompts_are_run_once_unless_more_are_asked_for(tmp_path: Path) -> None:
    file, lines = tmp_path / "prompts.jsonl", tmp_path / "lines"
    file.write_text('{"prompt": "Once upon a time"}\n{"prompt": "Who are you?"}\n')
    arguments = ["bench", "offline", "--model", "weft-tiny", "--dataset", "prompts", "--file", str(file)]
    arguments += ["--repeats", "1", "--output-tokens", "2", "--json", str(lines)]
    for flags in ([], ["-n", "3"]):
        CliRunner().invoke(app, [*arguments, *flags], catch_exceptions=False)
    results = [json.loads(line)["result"]["repeats"]["prompts"] for line in lines.read_text().splitlines()]
    assert [repeat["summary"]["num_requests"] for (repeat,) in results] == [2, 3]


@pytest.mark.usefixtures("known_ceiling")
def test_a_trace_with_fewer_requests_than_asked_for_is_told(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"input_length": 4, "output_length": 2}\n' * 2)
    arguments = ["bench", "offline", "--model", "weft-tiny", "--dataset", "trace", "--file", str(file)]
    for flags, is_told in ((["-n", "3"], True), (["-n", "2"], False), ([], False)):
        result = CliRunner().invoke(app, [*arguments, "--repeats", "1", *flags], catch_exceptions=False)
        assert ("the dataset has only 2 requests: less was sent" in " ".join(result.output.split())) == is_told


@pytest.mark.usefixtures("known_ceiling")
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_was_measured_before_a_signal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, exit_code: int
) -> None:
    """The first workload whole, of the second the repeat that was done."""
    lines = tmp_path / "lines"
    begun = []

    def interrupt_the_sixth(*args: Any, **settings: Any) -> list[CallRecord]:
        begun.append(None)
        if len(begun) == 6:
            signal.raise_signal(number)
        return run_engine(*args, **settings)

    monkeypatch.setattr(offline, "run_engine", interrupt_the_sixth)
    arguments = ["bench", "offline", "--model", "weft-tiny", "--repeats", "2", "--json", str(lines)]
    result = CliRunner().invoke(app, [*arguments, "--workload", "W1", "--workload", "W3"], catch_exceptions=False)
    assert result.exit_code == exit_code
    assert "W3" in result.output
    line = json.loads(lines.read_text())
    assert [len(repeats) for repeats in line["result"]["repeats"].values()] == [2, 1]
    assert not line["complete"]


@pytest.mark.usefixtures("known_ceiling")
def test_what_was_measured_before_a_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "lines"
    run = offline._Bench._run

    def fail_at_w2(bench: offline._Bench, dataset: DatasetOptions, watcher: OfflineWatcher) -> Iterator[offline.Repeat]:
        if dataset.kind is DatasetKind.W2:
            raise GroupFailedError("scripted")
        return run(bench, dataset, watcher)

    monkeypatch.setattr(offline._Bench, "_run", fail_at_w2)
    arguments = ["bench", "offline", "--model", "weft-tiny", "--repeats", "1", "--json", str(lines), "-n", "3"]
    with pytest.raises(GroupFailedError, match="scripted"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    line = json.loads(lines.read_text())
    assert (list(line["result"]["repeats"]), line["complete"]) == (["W1"], False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--workload", "W1", "--dataset", "random"], BenchConfigError, "--workload and --dataset are both given"),
        (["--workload", "random"], BenchConfigError, "--workload is 'random'; allowed: W1, W2, W3, W4"),
        (
            ["--model", "weft-tiny", "--kv-cache-dtype", "fp8"],
            ClusterConfigError,
            "cache.dtype: \"fp8\"; allowed: 'auto' or 'int8'",
        ),
        (["--model", "weft-tiny", "--device", "cuda"], BenchConfigError, "device is 'cuda'.*; allowed: auto, cpu"),
        (["--model", "weft-tiny", "--set", "tensor_parallel=2"], EngineConfigError, "2 ranks are asked for"),
        (["--model", "weft-tiny", "--set", "replicas=3"], EngineConfigError, "3 ranks are asked for"),
    ],
)
def test_what_offline_cannot_do_is_told(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CliRunner().invoke(app, ["bench", "offline", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--dataset", "random", "--input-tokens", "1024"],
            "random: a prompt has 1024 tokens; allowed: at most 1023, ",
        ),
        (["--set", "max_context=128"], "W1: a prompt has 128 tokens; allowed: at most 127, .* context of 128"),
        (["--dataset", "trace", "--file", "nowhere"], "nowhere cannot be read"),
        (["--seed", "-1"], "seed is -1; allowed: 0 to"),
    ],
)
def test_what_cannot_be_sent_is_told_before_the_model_is_loaded(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.load.offline.build_engine", None)
    with pytest.raises((BenchConfigError, InvalidRequestError), match=message):
        CliRunner().invoke(app, ["bench", "offline", "--model", "weft-tiny", *arguments], catch_exceptions=False)


@pytest.mark.usefixtures("known_ceiling")
def test_no_round_finds_the_prefixes_of_another(tmp_path: Path) -> None:
    file, lines = tmp_path / "prompts.jsonl", tmp_path / "lines"
    file.write_text(json.dumps({"prompt": "Once upon a time " * 20}) + "\n")
    arguments = ["bench", "offline", "--model", "weft-tiny", "--dataset", "prompts", "--file", str(file)]
    arguments += ["--repeats", "2", "--output-tokens", "2", "--json", str(lines)]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    repeats = json.loads(lines.read_text())["result"]["repeats"]["prompts"]
    assert [repeat["summary"]["cached_tokens"] for repeat in repeats] == [0, 0]
