"""The setting `quantization` reaches the layers of an engine, and nothing else is taken for it."""

from pathlib import Path
from typing import Any

import pytest

from cluster.default_model import corpus
from workers.config import CacheConfig, EngineConfig
from workers.engine_builder import build_engine
from workers.errors import EngineConfigError
from workers.request import Request, RequestId, SamplingParams

MODEL = str(Path(corpus.__file__).parent / "weights")


def serve(quantization: str, **sampling: Any) -> tuple[list[int], list[float]]:
    """Tokens after a prompt, and the logprobs of the best where they are wanted."""
    config = EngineConfig(
        model=MODEL, dtype="float32", device="cpu", quantization=quantization, cache=CacheConfig(num_blocks=16)
    )
    engine = build_engine(config)
    params = SamplingParams(max_tokens=8, ignore_eos=True, **sampling)
    engine.add_request(Request(request_id=RequestId("a"), prompt_token_ids=(1, 9, 30, 7), sampling=params))
    token_ids: list[int] = []
    logprobs: list[float] = []
    while len(token_ids) < 8:
        for output in engine.step().outputs:
            assert output.error is None
            token_ids += output.token_ids
            logprobs += [each.top[0][1] for each in output.logprobs]
    engine.close()
    return token_ids, logprobs


def test_8_bits_move_the_predictions_of_an_engine_a_little() -> None:
    (_, plain), (_, quantized) = (serve(kind, temperature=0.0, logprobs=1) for kind in ("none", "int8"))
    assert quantized != plain
    assert quantized[0] == pytest.approx(plain[0], abs=0.2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_in_8_bits_give_the_tokens_of_all_logits(temperature: float) -> None:
    """Which are made where logprobs are wanted."""
    sampling = {"temperature": temperature, "seed": 3, "presence_penalty": 1.5}
    assert serve("int8", **sampling)[0] == serve("int8", **sampling, logprobs=1)[0]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("quantization", "fp8", "'none', 'int8'"),
        ("max_context", -5, "at least 2"),
        ("num_threads", 0, "1 to 1024"),
        ("step_timeout_s", 0.0, "more than 0"),
    ],
)
def test_engine_settings_out_of_range_are_refused_with_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(EngineConfigError, match=f"{name} is {value!r}; allowed: {allowed}"):
        EngineConfig(model=MODEL, **{name: value})
