"""Steps that other threads begin while the engine does something else: the same tokens, and ends amid one."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import Outcome, anonymous_tokens, engine_over, exact_config, request, run, runner_of

from parallel.errors import DeviceError
from parallel.kernels.native.build import find_compiler
from parallel.random_model import write_random_model
from workers.config import CacheConfig, SchedulerConfig
from workers.engine import Engine
from workers.errors import GroupFailedError
from workers.executor import Executor
from workers.overlap import Lookahead, StepExecution
from workers.rank import lead_group
from workers.request import Request, RequestId

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_compiler()
    except DeviceError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("models") / "model"
    write_random_model(folder, MODEL, 0, torch.bfloat16)
    return folder


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_engine(
    folder: Path, *, num_threads: int = 2, looks_ahead: bool | None = None, max_num_seqs: int = 8
) -> tuple[Engine, Executor]:
    config = replace(
        exact_config(
            folder,
            cache=CacheConfig(block_size=4, num_blocks=200),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=64, async_scheduling=looks_ahead
            ),
        ),
        dtype="bfloat16",
        num_threads=num_threads,
    )
    executor = lead_group(config)
    return engine_over(executor, config, tokens=anonymous_tokens(), vocab_size=512, max_context=256), executor


def begins_steps(executor: Executor) -> bool:
    runner = runner_of(executor)
    decoder = runner._decoder
    assert runner.execution is StepExecution.JOINED
    return decoder._started is not None and decoder._started._program is not None  # type: ignore[attr-defined]


def requests() -> list[Request]:
    prompts = [[(7 * i + 13 * j) % 500 + 3 for j in range(10 + 9 * i)] for i in range(6)]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 5},
        {"logprobs": 2},
        {"repetition_penalty": 1.3},
        {"stop": ("no such text",)},
        {"max_tokens": 3},
    ]
    return [
        request(f"{i}", prompt, **{"max_tokens": 40, "ignore_eos": True, **option})
        for i, (prompt, option) in enumerate(zip(prompts, options, strict=True))
    ]


def tokens_of(outcomes: dict[str, Outcome]) -> dict[str, list[int]]:
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


def test_steps_begun_by_other_threads_give_the_same_tokens(folder: Path) -> None:
    engine, executor = make_engine(folder, num_threads=1)
    assert executor.lookahead is Lookahead.NEVER  # nobody would begin a step
    expected = [tokens_of(run(engine, requests())), tokens_of(run(engine, requests()[:1]))]
    engine.close()
    lookaheads = {False: Lookahead.NEVER, True: Lookahead.ALWAYS, None: Lookahead.WHILE_REQUESTS_WAIT}
    for looks_ahead, max_num_seqs in ((False, 8), (True, 8), (None, 8), (None, 2)):
        engine, executor = make_engine(folder, looks_ahead=looks_ahead, max_num_seqs=max_num_seqs)
        if not begins_steps(executor):
            pytest.skip("this CPU has no products of bfloat16 pairs")
        assert executor.lookahead is lookaheads[looks_ahead]
        assert [tokens_of(run(engine, requests())), tokens_of(run(engine, requests()[:1]))] == expected
        engine.close()


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_who_is_aborted_or_leaves_in_the_midst_of_a_step_harms_nobody(folder: Path, looks_ahead: bool) -> None:
    engine, _ = make_engine(folder, looks_ahead=looks_ahead)
    first, second = requests()[:2]
    (expected,) = tokens_of(run(engine, [second])).values()
    engine.add_request(first)
    for _ in range(4):
        engine.step()
    engine.add_request(replace(second, request_id=RequestId("again"), cache_salt="other"))
    engine.launch()  # under way
    engine.abort(first.request_id)
    outputs = engine.take_result().outputs
    engine.collect()
    while engine.has_work:
        outputs += engine.step().outputs
    engine.check_integrity()
    assert [token for output in outputs if output.request_id == "again" for token in output.token_ids] == expected
    engine.add_request(replace(first, request_id=RequestId("last")))
    engine.step()
    engine.launch()
    engine.close()  # waits for it: its memory goes


def test_a_step_that_fails_when_it_is_joined_fails_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, executor = make_engine(folder)
    engine.add_request(requests()[0])
    engine.step()
    engine.launch()

    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no tokens today")

    monkeypatch.setattr(runner_of(executor)._sampler, "take", fail)
    with pytest.raises(GroupFailedError, match="no tokens today"):
        engine.collect()
    engine.close()
