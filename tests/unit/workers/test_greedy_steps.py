"""Steps of requests that need no logits: the head tells their tokens, which are those that all logits would give."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.decoder import Decoder
from parallel.embedding import VocabParallelHead
from parallel.kernels.base import AttentionMeta
from parallel.kernels.linears import SearchedLinear, Sift, SiftedLinear
from parallel.kernels.native import packed_linear
from parallel.kernels.native.program import Program
from parallel.kernels.sampling import NOISE
from parallel.kernels.select import select_kernels
from workers.config import CacheConfig, EngineConfig
from workers.engine import Engine
from workers.engine_builder import build_engine
from workers.errors import GroupFailedError
from workers.model_runner import ModelRunner
from workers.request import Request, RequestId, SamplingParams

PROMPTS = {f"plain {i}": tuple(range(7 * i, 11 * i + 5)) for i in range(5)}
TEMPERATURES = {"greedy": [0.0] * 5, "drawn": [0.3, 0.7, 1.0, 1.3, 2.0], "mixed": [0.0, 0.8, 0.0, 1.0, 1.0]}
KINDS: dict[str, list[dict[str, Any]]] = {
    **{name: [{"temperature": each} for each in temperatures] for name, temperatures in TEMPERATURES.items()},
    "edited": [
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": tuple(range(0, 1000, 3))},
        {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": -2.0},
        {"temperature": 0.0},
        {"temperature": 1.0, "repetition_penalty": 0.7},
    ],
}
LIMITED = (
    {"top_k": 2, "repetition_penalty": 1.3},
    {"top_k": 3, "top_p": 0.7, "min_p": 0.2},
    {"temperature": 0.0, "presence_penalty": 1.0},
    {},
)
"""As many as kernels without tiles look for together."""


def build() -> Engine:
    model = str(PACKAGED[DEFAULT_MODEL])
    return build_engine(EngineConfig(model=model, dtype="bfloat16", cache=CacheConfig(num_blocks=64)))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = build()
    yield engine
    engine.close()


def complete(engine: Engine, kinds: list[dict[str, Any]], more: SamplingParams | None = None) -> dict[str, list[int]]:
    """What the requests get, one of each kind, beside one that asks for more if there is one."""
    for seed, (kind, (name, prompt)) in enumerate(zip(kinds, PROMPTS.items(), strict=False)):
        params = SamplingParams(**kind, seed=seed, max_tokens=12, ignore_eos=True)
        engine.add_request(Request(request_id=RequestId(name), prompt_token_ids=prompt, sampling=params))
    if more is not None:
        engine.add_request(Request(request_id=RequestId("more"), prompt_token_ids=(1, 2), sampling=more))
    tokens: dict[str, list[int]] = {name: [] for name in (*PROMPTS, "more")}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.token_ids
    del tokens["more"]
    return tokens


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("more", [{"temperature": 0.0, "logprobs": 1}, {"temperature": 1.0, "top_p": 0.9}])
def test_tokens_are_the_same_beside_a_request_that_asks_for_more(
    engine: Engine, kind: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    logits = Decoder.logits

    def ask(decoder: Decoder, hidden_SE: Tensor, sift: Sift | None = None) -> Tensor | None:
        asked.append(len(hidden_SE))
        return logits(decoder, hidden_SE, sift)

    monkeypatch.setattr(Decoder, "logits", ask)
    kinds = KINDS[kind]
    alone = complete(engine, kinds)
    num_asked_alone = len(asked)
    beside = complete(engine, kinds, SamplingParams(**more, max_tokens=12, ignore_eos=True))
    assert beside == alone
    assert all(5 < len(tokens) <= 12 for tokens in alone.values())
    assert len(asked) > num_asked_alone
    linear = select_kernels(torch.device("cpu"), torch.bfloat16).pack_linear(torch.zeros(128, 128).bfloat16(), None)
    assert (num_asked_alone == 0) == isinstance(linear, SearchedLinear)


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_where_a_limit_leaves_one_token_it_is_the_largest(engine: Engine, limit: dict[str, Any]) -> None:
    greedy = complete(engine, [{"temperature": 0.0}] * 3)
    assert complete(engine, [{"temperature": 1.5, **limit}] * 3) == greedy


@pytest.mark.parametrize("is_begun", [False, True], ids=["by this thread", "by others"])
def test_tokens_are_the_same_whether_all_logits_are_known_or_those_that_matter(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    left_out: list[int] = []
    logits = Decoder.logits

    def ask(decoder: Decoder, hidden_SE: Tensor, sift: Sift | None = None) -> Tensor | None:
        found_SV = logits(decoder, hidden_SE, sift)
        assert found_SV is not None
        left_out.append(int(found_SV.isneginf().sum()))
        return found_SV

    monkeypatch.setattr(Decoder, "logits", ask)
    monkeypatch.setattr(packed_linear, "_LEAST_PANELS", 1)
    num_begun, can_start = 0, Decoder.can_start

    def begins(decoder: Decoder, metas: list[AttentionMeta]) -> bool:
        nonlocal num_begun
        can = is_begun and can_start(decoder, metas)
        num_begun += can
        return can

    monkeypatch.setattr(Decoder, "can_start", begins)
    kinds = [{"temperature": 1.5, **limits} for limits in LIMITED]
    some = complete(engine, kinds)
    num_left_out, num_given = sum(left_out), 12 - len(left_out)
    monkeypatch.setattr(Decoder, "sifts", lambda *_: False)
    assert complete(engine, kinds) == some
    assert sum(left_out) == num_left_out
    linear = select_kernels(torch.device("cpu"), torch.bfloat16).pack_head(
        torch.zeros(2048, 128).bfloat16(), None, is_shared=True
    )
    one = Sift(np.zeros(1, NOISE), np.ones(1, np.int32))
    sifts = isinstance(linear, SiftedLinear) and linear.can_sift(one)
    if num_begun:
        assert (num_given > 0) == sifts, "tokens, not logits"
    else:
        assert (num_left_out > 0) == sifts


def test_a_head_that_finds_no_finite_logit_fails_the_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_head: VocabParallelHead, hidden_SE: Tensor, *_: object) -> Tensor:
        return torch.full((len(hidden_SE),), -1)

    monkeypatch.setattr(VocabParallelHead, "find", broken)
    monkeypatch.setattr(Decoder, "can_start", lambda *_: False)  # other threads ask the weight
    greedy = SamplingParams(temperature=0.0, max_tokens=2)
    engine.add_request(Request(request_id=RequestId("bad"), prompt_token_ids=(1, 2), sampling=greedy))
    (output,) = engine.step().outputs
    if output.error is None:
        pytest.skip("the kernels of this CPU give logits")
    assert "not finite" in str(output.error)
    assert not engine.has_work


def test_what_others_compute_has_ended_when_its_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would go on in memory that is freed."""
    engine, ended, begin, end = build(), list[int](), Decoder.start, Program.finish
    begun: list[object] = []
    monkeypatch.setattr(Decoder, "start", lambda *args, **kinds: begun.append(begin(*args, **kinds)) or begun[-1])
    monkeypatch.setattr(Program, "finish", lambda program, started: ended.append(started) or end(program, started))
    monkeypatch.setattr(ModelRunner, "_cost", lambda *_: pytest.fail("scripted"))
    engine.add_request(Request(request_id=RequestId("a"), prompt_token_ids=(1, 2), sampling=SamplingParams()))
    with pytest.raises((GroupFailedError, pytest.fail.Exception), match="scripted"):
        engine.step()
    assert len(ended) == len(begun)
    engine.close()
