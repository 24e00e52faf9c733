"""How near the engine comes to the device: what counts as decoding, the least it takes, and the command."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import roofline
from bench.errors import BenchConfigError
from bench.load.geometries import GEOMETRIES
from bench.load.model_cost import ModelCost, Work
from bench.load.records import CallRecord, Usage
from cluster.make_model import PRESETS, make_model
from parallel.families.registry import describe_config

CONFIG = {
    "model_type": "mistral",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 16,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def record(*times_s: float) -> CallRecord:
    made = CallRecord(num_asked=len(times_s), due_s=None, sent_s=0.0)
    for time_s in times_s:
        made.note(1, time_s)
    return made


def test_only_what_comes_while_all_decode_counts() -> None:
    window = roofline.find_window([record(1, 2, 3, 4, 5), record(2, 3, 4, 5, 6)], num_in=10)
    assert window.duration_s == 3
    assert window.seen == (12, 13, 14, 11, 12, 13)


def test_sequences_that_never_decode_together_are_told() -> None:
    with pytest.raises(BenchConfigError, match="more --output-tokens"):
        roofline.find_window([record(1, 2), record(3, 4)], num_in=10)


@pytest.mark.parametrize("window", [None, 4])
def test_decoding_costs_what_a_run_costs_beyond_its_prompt(window: int | None) -> None:
    cost = ModelCost.of(describe_config({**CONFIG, "sliding_window": window}, source="test"), torch.bfloat16)
    prompt, whole = (Work(step_tokens=(3, *[1] * (num_out - 1)), requests=(_usage(3, num_out),)) for num_out in (1, 4))
    assert cost.decode_bytes(1, 3, (4, 5, 6)) == cost.bytes_read(whole) - cost.bytes_read(prompt)
    assert cost.decode_flops((4, 5, 6)) == cost.flops(whole) - cost.flops(prompt)


def _usage(num_in: int, num_out: int) -> Usage:
    return Usage(prompt_tokens=num_in, cached_tokens=0, completion_tokens=num_out)


def test_eight_billion_parameters_are_that_many() -> None:
    preset = {"model_type": "llama", "rms_norm_eps": 1e-5, **PRESETS[GEOMETRIES["llama3-8b"]]}
    cost = ModelCost.of(describe_config(preset, source="test"), torch.bfloat16)
    assert cost.weights.num_parameters == 8_030_261_248, "as Llama 3 has them"


def test_command_measures_every_phase(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, lines = tmp_path / "model", tmp_path / "lines"
    make_model(model, preset="tiny", sizes={}, dtype="float32", seed=0, tokenizer=None)
    sizes = ["--input-tokens", "8", "--output-tokens", "12", "--prompt-tokens", "32", "--contexts", "32,256"]
    roofline.main(["--model", str(model), "--dtype", "float32", "--batches", "1,3", *sizes, "--json", str(lines)])
    out = capsys.readouterr().out
    line: dict[str, Any] = json.loads(lines.read_text())
    assert json.loads(out.splitlines()[-1]) == line
    assert [phase["name"] for phase in line["phases"]] == [
        "decode, 1 at once",
        "decode, 3 at once",
        "8 prompts of 32 tokens",
    ]
    assert [phase["target"] for phase in line["phases"]] == [0.85, None, 0.6]
    for phase in line["phases"]:
        assert 0 < phase["share"] == phase["least_s"] / phase["measured_s"] < 1.5
    assert list(line["attention_s"]) == ["32", "256"]
    assert min(line["attention_s"].values()) > 0
    assert {"torch", "commit"} <= line.keys()


def test_a_phase_of_decoding_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_run", lambda *_: [record(1, 2, 3, 4, 5), record(1, 2, 3, 4, 5)])
    cost: Any = SimpleNamespace(decode_bytes=lambda num, steps, seen: steps * 50.0, decode_flops=lambda seen: 8.0)
    ceiling: Any = SimpleNamespace(read_bytes_per_s=100.0, flops_per_s=100.0)
    engine: Any = None
    phase = roofline.measure_decode(engine, cost, ceiling, num_seqs=2, num_in=10, num_out=5)
    assert (phase.measured_s, phase.least_s, phase.bound, phase.share) == (1.0, 0.5, "memory", 0.5)
