"""What generation_config.json sets, compared with what transformers reads from the same file."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from weft.v1 import inference_pb2 as pb

from router.convert import complete_sampling
from router.errors import ModelFilesError
from router.generation_config import GenerationDefaults, read_generation_defaults
from router.tokenizer import ModelTokenizer

FILE = Path("generation_config.json")

PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3": {"bos_token_id": 1, "do_sample": True, "eos_token_id": [2, 3], "temperature": 0.6, "top_p": 0.9},
    "qwen2": {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "baichuan": {"do_sample": True, "max_new_tokens": 2048, "temperature": 0.3, "top_k": 5, "top_p": 0.85},
    "gemma3": {"do_sample": True, "cache_implementation": "hybrid", "top_k": 64, "top_p": 0.95},
    "greedy": {"do_sample": False, "eos_token_id": [1, 2]},
    "greedy-whatever-else": {"do_sample": False, "temperature": 0.7, "top_p": 0.9, "max_length": 4096},
    "minimal": {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2},
    "greedy-unsaid": {"temperature": 0.7, "top_k": 20},
    "lengths": {"max_length": 64, "max_new_tokens": 16, "min_new_tokens": 4, "min_p": 0.05},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_fields_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / FILE).write_text(json.dumps(PUBLISHED[name]))
    original = transformers.GenerationConfig.from_pretrained(tmp_path)

    defaults = read_generation_defaults(PUBLISHED[name], tmp_path / FILE)

    expected = {
        field: getattr(original, field)
        for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if getattr(original, field) is not None
    }
    if original.min_new_tokens is not None:
        expected["min_tokens"] = original.min_new_tokens
    if original.do_sample is not True:
        assert original.get_generation_mode() == transformers.generation.GenerationMode.GREEDY_SEARCH
        expected["temperature"] = 0.0
    assert dict(defaults.sampling) == expected
    assert (defaults.max_new_tokens, defaults.max_length) == (original.max_new_tokens, original.max_length)


@pytest.mark.parametrize(
    ("defaults", "num_prompt", "expected"),
    [
        (GenerationDefaults(), 10, 90),
        (GenerationDefaults(max_new_tokens=16), 10, 16),
        (GenerationDefaults(max_new_tokens=16, max_length=20), 10, 16),  # new tokens count before the whole length
        (GenerationDefaults(max_new_tokens=200), 10, 90),
        (GenerationDefaults(max_length=64), 10, 54),
        (GenerationDefaults(max_length=200), 10, 90),
        (GenerationDefaults(max_length=10), 10, 90),
    ],
)
def test_number_of_tokens_for_clients_that_set_none(
    defaults: GenerationDefaults, num_prompt: int, expected: int
) -> None:
    assert defaults.max_tokens(num_prompt, 100 - num_prompt) == expected


def test_what_the_client_sets_counts_more() -> None:
    defaults = read_generation_defaults({"do_sample": False, "top_k": 20, "min_new_tokens": 8}, FILE)

    def complete(max_tokens: int = 50, **sampling: Any) -> pb.SamplingParams:
        return complete_sampling(pb.SamplingParams(**sampling), defaults.sampling, max_tokens=max_tokens, seed=1)

    assert complete().temperature == 0.0
    assert (complete(temperature=1.5).temperature, complete(temperature=1.5).top_k) == (1.5, 20)
    assert complete(top_k=-1).top_k == 0
    assert (complete().min_tokens, complete(max_tokens=3).min_tokens, complete(min_tokens=0).min_tokens) == (8, 3, 0)
    assert complete(max_tokens=3, min_tokens=30).max_tokens == 30


def test_model_without_the_file_samples_as_the_protocol_does(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(Tokenizer(WordLevel({"a": 0}, "a")).to_str())
    assert dict(ModelTokenizer.from_folder(tmp_path).generation_defaults.sampling) == {}

    (tmp_path / FILE).write_text("{}")
    assert dict(ModelTokenizer.from_folder(tmp_path).generation_defaults.sampling) == {"temperature": 0.0}


def test_what_is_not_served_is_said(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        "num_beams": 4,
        "no_repeat_ngram_size": 0,
        "suppress_tokens": [7],
        "typical_p": 1.0,
        "guidance_scale": None,
        "min_length": 30,
        "encoder_repetition_penalty": 1.2,
        "encoder_no_repeat_ngram_size": 0,
        "watermarking_config": {"bias": 2.0},
    }

    with caplog.at_level(logging.WARNING):
        read_generation_defaults(config, FILE)

    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json asks for num_beams 4, which is not served; ignored",
        "generation_config.json asks for min_length 30, which is not served; ignored",
        "generation_config.json asks for encoder_repetition_penalty 1.2, which is not served; ignored",
        "generation_config.json asks for suppress_tokens [7], which is not served; ignored",
        "generation_config.json asks for watermarking_config {'bias': 2.0}, which is not served; ignored",
    ]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"top_p": "high"}, "top_p in generation_config.json is 'high'; allowed: a number"),
        ({"top_k": True}, "top_k in"),
        ({"top_k": 2.5}, "whole number"),
        ({"top_k": -2}, "whole number, none below 0"),
        ({"max_new_tokens": 0}, "no maximum of 0"),
        ({"do_sample": "yes"}, "do_sample in generation_config.json is 'yes'; allowed: true, false"),
    ],
)
def test_broken_field_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelFilesError, match=said):
        read_generation_defaults(config, FILE)


def test_top_k_may_be_off_as_clients_write_it() -> None:
    assert dict(read_generation_defaults({"do_sample": True, "top_k": -1}, FILE).sampling) == {}


def test_values_that_would_be_refused_of_a_client_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    config = {"do_sample": True, "top_p": 0, "repetition_penalty": 0.0, "temperature": float("nan"), "top_k": 3}

    with caplog.at_level(logging.WARNING):
        defaults = read_generation_defaults(config, FILE)

    assert defaults.sampling == {"top_k": 3}
    assert [record.getMessage() for record in caplog.records] == [
        "generation_config.json: temperature is nan; allowed: 0 to 1e+36; ignored",
        "generation_config.json: top_p is 0.0; allowed: more than 0, at most 1; ignored",
        "generation_config.json: repetition_penalty is 0.0; allowed: a finite number, more than 0; ignored",
    ]
