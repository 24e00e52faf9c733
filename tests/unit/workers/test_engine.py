"""One engine over the fake model: every request ends once, and what its client sees adds up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.engines import FakeExecutor, Outcome, anonymous_tokens, fake_engine, letter_pieces, request, run
from helpers.fake_model import run_alone
from tokenizers import Tokenizer, decoders, models

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.errors import ConfigError
from workers.config import CacheConfig, EngineConfig
from workers.engine import Engine
from workers.engine_builder import build_engine, read_eos_token_ids
from workers.errors import EngineConfigError, GroupFailedError, InvalidRequestError, QueueFullError, RequestFailedError
from workers.kv_cache import num_blocks_within
from workers.overlap import Lookahead
from workers.plan import ModelOutput, StepPlan
from workers.request import FinishReason, RequestId, TokenLogprobs, Usage
from workers.sequence import Sequence
from workers.tokenizer import TokenTable, load_token_table

PIECES = letter_pieces()


def text_of(token_ids: list[int]) -> str:
    return "".join(PIECES[token_id] for token_id in token_ids)


# What is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "the prompt has 0 tokens; allowed: at least 1"),
        ({"prompt": [0, 97]}, "prompt_token_ids contain 97; allowed: 0 to 96"),
        ({"prompt": [-1, 5]}, "prompt_token_ids contain -1; allowed: 0 to 96"),
        ({"prompt": [1], "generated": [2, 100]}, "generated_token_ids contain 100; allowed: 0 to 96"),
        ({"prompt": [1] * 200}, "the prompt has 200 tokens; allowed: at most 199"),
    ],
)
def test_bad_request_is_refused_and_nothing_else_disturbed(fields: dict[str, Any], message: str) -> None:
    engine = fake_engine()
    good = request("good", [1, 2, 3], max_tokens=10)
    engine.add_request(good)
    engine.step()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add_request(request("bad", **fields))
    assert engine.stats.num_refused == 1
    assert run(engine)["good"].token_ids == run_alone(good)[1:]


def test_full_queue_is_refused() -> None:
    engine = fake_engine(max_waiting=1)
    engine.add_request(request("a", [1]))
    with pytest.raises(QueueFullError):
        engine.add_request(request("b", [1]))


# How requests end


def test_output_ends_at_the_context() -> None:
    outcome = run(fake_engine(max_context=20), [request("a", range(15), max_tokens=100)])["a"]
    assert len(outcome.token_ids) == 5
    assert outcome.finish is not None
    assert outcome.finish.reason is FinishReason.LENGTH


def test_pool_smaller_than_the_context_limits_the_context(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine(FakeExecutor(num_blocks=5), max_context=200)
    assert engine.max_context == 21  # five blocks of four tokens, and one that is never computed
    (told,) = caplog.messages
    assert told.startswith("the context is 21 tokens: the KV cache holds no more; wanted: 200")
    outcome = run(engine, [request("a", range(15), max_tokens=100)])["a"]
    assert len(outcome.token_ids) == 6
    assert outcome.finish is not None
    assert outcome.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize(("num_blocks", "max_context"), [(1, 1), (9, 1)])
def test_context_in_which_nothing_can_be_generated_is_refused(num_blocks: int, max_context: int) -> None:
    with pytest.raises(EngineConfigError, match=r"the context is 1 tokens, with . blocks .* allowed: a larger cache"):
        fake_engine(FakeExecutor(num_blocks=num_blocks), max_context=max_context)


def test_the_smallest_context_has_room_for_one_token_and_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    engine = fake_engine(max_context=2)
    outcome = run(engine, [request("a", [1])])["a"]
    assert len(outcome.token_ids) == 1
    assert outcome.finish is not None
    assert outcome.finish.reason is FinishReason.LENGTH
    assert caplog.records == []


@pytest.mark.parametrize("keeps_it", [False, True])
def test_stop_token_is_among_the_tokens_and_in_the_text_where_it_is_asked_for(keeps_it: bool) -> None:
    alone = run_alone(request("a", [1, 2], max_tokens=30))
    stop = alone[7]
    expected = alone[: alone.index(stop) + 1]
    asked = request("a", [1, 2], max_tokens=30, include_stop_str_in_output=keeps_it)
    outcome = run(fake_engine(eos_token_ids=frozenset([stop])), [asked])["a"]
    assert outcome.token_ids == expected
    assert outcome.text == text_of(expected if keeps_it else expected[:-1])
    assert outcome.finish is not None
    assert outcome.finish.stop_token_id == stop


def test_ignore_eos_goes_on() -> None:
    alone = run_alone(request("a", [1, 2], max_tokens=30))
    outcome = run(fake_engine(eos_token_ids=frozenset(alone)), [request("a", [1, 2], max_tokens=30, ignore_eos=True)])[
        "a"
    ]
    assert outcome.token_ids == alone


def test_stop_string_ends_the_request_and_frees_its_blocks() -> None:
    engine = fake_engine()
    alone = run_alone(request("a", [3], max_tokens=40))
    text = text_of(alone)
    stop = text[9:14]
    outcome = run(engine, [request("a", [3], max_tokens=40, stop=(stop,))])["a"]
    assert outcome.text == text[: text.index(stop)]
    assert outcome.finish is not None
    assert (outcome.finish.reason, outcome.finish.stop_string) == (FinishReason.STOP, stop)
    assert outcome.finish.usage.completion_tokens == len(outcome.token_ids) < 40
    assert engine.load.num_free_blocks == engine.load.num_blocks


def test_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    alone = run_alone(request("a", [3], max_tokens=10))
    stop = text_of(alone)[-3:]
    outcome = run(fake_engine(), [request("a", [3], max_tokens=10, stop=(stop,), min_tokens=10)])["a"]
    assert outcome.finish is not None
    assert (outcome.finish.reason, outcome.finish.stop_string) == (FinishReason.STOP, stop)
    assert outcome.text == text_of(alone)[:-3]


def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    alone = run_alone(request("a", [3], max_tokens=10))
    text = text_of(alone)
    outcome = run(fake_engine(), [request("a", [3], max_tokens=10, stop=(text[-4:] + "!",))])["a"]
    assert outcome.text == text


def test_every_token_comes_with_its_log_probabilities_and_the_last_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = FakeExecutor()
    collect = executor.collect

    def collect_with_logprobs() -> ModelOutput:
        output = collect()
        of_first = {
            slot: TokenLogprobs(token_id=token_id, logprob=-0.5)
            for slot, token_id in zip(output.slots, output.token_ids, strict=True)
            if slot == 0
        }
        return msgspec.structs.replace(output, logprobs=of_first)

    monkeypatch.setattr(executor, "collect", collect_with_logprobs)
    outcomes = run(fake_engine(executor), [request("a", [1, 2], max_tokens=3), request("b", [3], max_tokens=3)])
    assert [each.token_id for each in outcomes["a"].logprobs] == outcomes["a"].token_ids
    assert len(outcomes["a"].token_ids) == 3
    assert outcomes["b"].logprobs == []


def test_failed_sampling_ends_one_request_only() -> None:
    executor = FakeExecutor()
    executor.model.failing_prompts.add((9, 9))
    engine = fake_engine(executor)
    outcomes = run(engine, [request("bad", [9, 9]), request("good", [1, 2])])
    assert isinstance(outcomes["bad"].error, RequestFailedError)
    assert str(outcomes["bad"].error) == "logits are not finite", "the client learns why"
    assert outcomes["good"].token_ids == run_alone(request("good", [1, 2]))
    assert engine.stats.num_failed == 1
    assert run(engine, [request("bad", [1, 2])])["bad"].finish is not None, "its id is free again"


@pytest.mark.parametrize("max_tokens", [9, 1], ids=["of a token", "of the last token"])
def test_a_text_that_cannot_be_made_ends_one_request_only(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    engine = fake_engine()
    engine.add_request(request("bad", [1], max_tokens=max_tokens))
    engine.add_request(request("good", [2]))

    def broken(token_id: int) -> str:
        raise RuntimeError("no text")

    monkeypatch.setattr(engine._delivery._streams[RequestId("bad")].detokenizer, "push", broken)
    outcomes = run(engine)
    assert isinstance(outcomes["bad"].error, RequestFailedError)
    assert outcomes["good"].token_ids == run_alone(request("good", [2]))
    assert engine.load.num_free_blocks == engine.load.num_blocks


@pytest.mark.parametrize("is_late", [False, True])
def test_token_that_is_not_handed_out_yet_comes_before_the_end(is_late: bool) -> None:
    now_s = 0.0
    engine = fake_engine(clock=lambda: now_s)
    engine.add_request(replace(request("a", [1, 2], max_tokens=9), deadline_s=5.0))
    engine.launch()
    engine.collect()
    if is_late:
        now_s = 6.0
        engine.launch()
    else:
        engine.abort(RequestId("a"))
    token, end = engine.take_result().outputs
    assert list(token.token_ids) == run_alone(request("a", [1, 2], max_tokens=9))[:1]
    assert (token.finish, end.token_ids) == (None, ())
    assert end.finish is not None
    assert (end.finish.reason, end.finish.usage.completion_tokens) == (FinishReason.ABORT, 1)


def test_an_id_is_in_use_until_its_end_is_delivered() -> None:
    engine = fake_engine()
    for name in ("other", "a"):
        engine.add_request(request(name, [1, 2], max_tokens=1 if name == "a" else 5))
    engine.launch()
    engine.collect()  # has the last token of a
    with pytest.raises(InvalidRequestError, match="request id 'a' is in use; allowed: a new one"):
        engine.add_request(request("a", [1, 2]))
    outcomes = run(engine)
    assert outcomes["a"].token_ids == run_alone(request("a", [1, 2], max_tokens=1))
    assert outcomes["other"].token_ids == run_alone(request("other", [1, 2], max_tokens=5))
    assert run(engine, [request("a", [1, 2], max_tokens=2)])["a"].has_ended


def test_stop_string_ends_its_request_before_the_next_step_is_planned() -> None:
    alone = run_alone(request("a", [1, 2], max_tokens=9))
    plans: list[StepPlan] = []
    executor = FakeExecutor()
    executor.on_submit = plans.append
    engine = fake_engine(executor)
    engine.add_request(request("a", [1, 2], max_tokens=9, stop=(PIECES[alone[2]],)))
    while engine.has_work:
        engine.launch()
        engine.take_result()
        engine.collect()
    assert len(plans) <= 3


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_abort_frees_blocks_within_one_step_of_each_plan_in_flight(max_in_flight: int) -> None:
    engine = fake_engine(FakeExecutor(max_in_flight=max_in_flight))
    for name in ("a", "b", "c"):
        engine.add_request(request(name, range(12), max_tokens=50, stop=("zz",)))
    for _ in range(8):
        engine.step()
    assert engine.load.num_free_blocks < engine.load.num_blocks
    outcomes = []
    for name in ("a", "b", "c"):
        engine.abort(RequestId(name))
        engine.abort(RequestId(name))
    for _ in range(max_in_flight):
        outcomes += engine.step().outputs
    assert [output.request_id for output in outcomes] == ["a", "b", "c"]
    assert all(output.finish is not None and output.finish.reason is FinishReason.ABORT for output in outcomes)
    assert engine.load.num_free_blocks == engine.load.num_blocks
    assert not engine.has_work


def test_deadline_ends_a_request() -> None:
    now = [0.0]
    engine = fake_engine(clock=lambda: now[0])
    engine.add_request(replace(request("a", [1]), deadline_s=5.0))
    engine.step()
    now[0] = 6.0
    (output,) = engine.step().outputs
    assert output.finish is not None
    assert output.finish.reason is FinishReason.ABORT


def test_group_failure_reaches_the_caller() -> None:
    executor = FakeExecutor()
    engine = fake_engine(executor)
    engine.add_request(request("a", [1]))
    executor.failure = GroupFailedError("rank 1 died")
    with pytest.raises(GroupFailedError, match="rank 1 died"):
        engine.step()


# Going on from tokens generated elsewhere


@pytest.mark.parametrize("stop", [(), ("j",), ("aj", "gb")])
def test_a_request_goes_on_from_every_position_with_the_same_tokens_and_text(stop: tuple[str, ...]) -> None:
    for seed in range(5):
        prompt = [seed, 3, 5]
        whole = run(fake_engine(), [request("whole", prompt, max_tokens=25, stop=stop)])["whole"]
        for split in range(len(whole.token_ids)):
            first = up_to(fake_engine(), prompt, split, max_tokens=25, stop=stop)
            generated = whole.token_ids[:split]
            assert first.token_ids == generated
            rest = run(fake_engine(), [request("rest", prompt, generated=generated, max_tokens=25, stop=stop)])["rest"]
            assert first.token_ids + rest.token_ids == whole.token_ids
            assert first.text + rest.text == whole.text
            assert rest.finish is not None
            assert whole.finish is not None
            assert (rest.finish.reason, rest.finish.stop_string) == (whole.finish.reason, whole.finish.stop_string)
            assert rest.finish.usage.completion_tokens == len(whole.token_ids)


def up_to(engine: Engine, prompt: list[int], num_tokens: int, **sampling: Any) -> Outcome:
    """What a request has got when it has so many tokens."""
    outcome = Outcome()
    engine.add_request(request("first", prompt, **sampling))
    while len(outcome.token_ids) < num_tokens:
        for output in engine.step().outputs:
            outcome.add(output)
    return outcome


@pytest.mark.parametrize(
    ("generated", "sampling", "reason", "held_text"),
    [
        ([4, 5, 6], {"max_tokens": 3}, FinishReason.LENGTH, ""),
        ([4, 5, 6], {"max_tokens": 3, "stop": ("fgh",)}, FinishReason.LENGTH, "fg"),
        ([4, 5, 7], {"max_tokens": 9, "stop_token_ids": (7,)}, FinishReason.STOP, ""),
        ([4, 5, 7], {"stop_token_ids": (7,), "stop": ("hi",)}, FinishReason.STOP, ""),
        (
            [4, 5, 7],
            {"stop_token_ids": (7,), "stop": ("hi",), "include_stop_str_in_output": True},
            FinishReason.STOP,
            "h",
        ),
        ([4, 5, 8], {"max_tokens": 9, "stop": ("fgh",)}, FinishReason.STOP, "f"),
        ([4, 5, 6], {"max_tokens": 9, "stop": ("fg",)}, FinishReason.STOP, ""),
    ],
)
def test_a_request_whose_end_was_lost_ends_at_once(
    generated: list[int], sampling: dict[str, Any], reason: FinishReason, held_text: str
) -> None:
    engine = fake_engine(eos_token_ids=frozenset([8]))
    outcome = run(engine, [request("a", [1], generated=generated, **sampling)])["a"]
    assert outcome.finish is not None
    assert outcome.finish.reason is reason
    is_stop_token = reason is FinishReason.STOP and outcome.finish.stop_string is None
    assert outcome.finish.stop_token_id == (generated[-1] if is_stop_token else None)
    assert outcome.finish.usage == Usage(
        prompt_tokens=1, cached_tokens=0, completion_tokens=3, queue_s=0, prefill_s=0, decode_s=0
    )
    assert outcome.token_ids == []
    assert outcome.text == held_text
    assert engine.stats.num_steps == 0
    assert engine.stats.num_finished == {reason: 1}


# Books


def test_counters_are_the_sums_of_usage_through_abort_preemption_and_failover() -> None:
    executor = FakeExecutor(num_blocks=12)
    engine = fake_engine(executor)
    requests = [request(str(i), [*range(9), i], max_tokens=12) for i in range(6)]
    requests.append(request("resumed", range(10), generated=[3, 4], max_tokens=9))
    for item in requests:
        engine.add_request(item)
    outcomes: dict[str, Outcome] = {item.request_id: Outcome() for item in requests}
    while engine.has_work:
        for output in engine.step().outputs:
            outcomes[output.request_id].add(output)
            if output.request_id == "0" and len(outcomes["0"].token_ids) == 5:
                engine.abort(RequestId("0"))
    usages = [outcome.finish.usage for outcome in outcomes.values() if outcome.finish is not None]
    stats = engine.stats
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0
    assert stats.num_prompt_tokens == sum(usage.prompt_tokens for usage in usages)
    assert stats.num_cached_tokens == sum(usage.cached_tokens for usage in usages) > 0
    assert stats.num_generation_tokens == sum(usage.completion_tokens for usage in usages) - 2
    assert stats.num_generation_tokens == sum(len(outcome.token_ids) for outcome in outcomes.values())
    assert stats.num_finished == {FinishReason.LENGTH: 6, FinishReason.ABORT: 1}
    assert len(list(stats.itl_s.take())) == stats.num_generation_tokens - len(requests)
    assert len(list(stats.ttft_s.take())) == len(requests)
    assert sorted(stats.queue_s.take()) == sorted(usage.queue_s for usage in usages)
    e2e_s = [usage.queue_s + usage.prefill_s + usage.decode_s for usage in usages]
    assert sorted(stats.e2e_s.take()) == sorted(e2e_s)
    assert stats.num_computed_tokens == executor.model.num_computed_tokens
    assert len(list(stats.step_s.take())) == stats.num_steps
    assert list(stats.step_s.take()) == []


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_a_stall_is_seen_between_tokens_and_not_before_the_first(looks_ahead: bool) -> None:
    """Steps of a millisecond, of which the twentieth takes 200 more while three requests run."""
    now_s, num_steps = 7.0, 0

    def wait() -> None:
        nonlocal now_s, num_steps
        num_steps += 1
        now_s += 0.201 if num_steps == 20 else 0.001

    executor = FakeExecutor(looks_ahead=looks_ahead, max_in_flight=1 + looks_ahead)
    executor.on_collect = wait
    engine = fake_engine(executor, clock=lambda: now_s)
    outcomes = run(engine, [request(str(i), [i, 2, 3], max_tokens=40) for i in range(3)])

    itl_s = sorted(engine.stats.itl_s.take())
    assert len(itl_s) == sum(len(outcome.token_ids) for outcome in outcomes.values()) - 3 == 117
    assert itl_s == pytest.approx([0.001] * 114 + [0.201] * 3)
    assert list(engine.stats.ttft_s.take()) == pytest.approx([0.001] * 3)


@pytest.mark.parametrize("num_steps", [1, 5])
def test_events_add_up_to_what_is_resident(num_steps: int) -> None:
    """However many steps were collected for a result."""
    executor = FakeExecutor(num_blocks=10)
    engine = fake_engine(executor)
    resident: set[bytes] = set()
    for i in range(6):
        engine.add_request(request(str(i), [i % 3] * 9, max_tokens=8))  # what was evicted is stored again
    while engine.has_work:
        for _ in range(num_steps):
            engine.launch()
            engine.collect()
        result = engine.take_result()
        resident |= set(result.stored_block_hashes)
        resident -= set(result.evicted_block_hashes)
        assert resident == set(engine._pool.resident_hashes())
    assert resident


@pytest.mark.parametrize(("max_in_flight", "looks_ahead"), [(1, False), (2, False), (4, False), (2, True)])
def test_several_plans_in_flight_change_nothing(max_in_flight: int, looks_ahead: bool) -> None:
    requests = [request(str(i), range(i, i + 3 + 5 * i), max_tokens=5 + i) for i in range(8)]
    outcomes = run(fake_engine(FakeExecutor(max_in_flight=max_in_flight, looks_ahead=looks_ahead)), requests)
    for item in requests:
        assert outcomes[item.request_id].token_ids == run_alone(item)


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_chunks_are_no_smaller_where_windows_slide_and_several_are_in_flight(max_in_flight: int) -> None:
    plans: list[StepPlan] = []
    executor = FakeExecutor(num_blocks=400, windows=(None, 9), max_in_flight=max_in_flight)
    executor.on_submit = plans.append
    engine = fake_engine(executor, prefill_chunk_tokens=16)
    run(engine, [request("a", range(64), max_tokens=1)])
    assert [plan.scheduled.nums_tokens for plan in plans] == [[16]] * 4


def test_steps_can_be_planned_ahead_only_while_requests_wait() -> None:
    executor = FakeExecutor(max_in_flight=2)
    executor.lookahead = Lookahead.WHILE_REQUESTS_WAIT
    engine = fake_engine(executor, max_num_seqs=2)
    requests = [request(str(i), range(i, i + 5), max_tokens=6) for i in range(3)]
    in_flight = set()
    for number, each in enumerate(requests):
        engine.add_request(each)
        engine.launch()
        in_flight.add((number, len(engine._submitted)))
        engine.collect()
    assert in_flight == {(0, 1), (1, 1), (2, 2)}  # the third has no slot
    run(engine)
    assert engine.stats.num_finished == {FinishReason.LENGTH: 3}


def test_finished_sequences_are_forgotten() -> None:
    engine = fake_engine()
    run(engine, [request("a", [1]), request("b", [2])])
    assert engine._delivery.request_ids == []
    run(engine, [request("a", [1])])
    assert isinstance(engine.load.num_running, int)
    assert not any(isinstance(value, Sequence) for value in vars(engine).values())


# What is read from a model folder


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [1, 2]}, {"eos_token_id": 2}, {1, 2}),
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {7}),
        ({}, {"eos_token_id": [3]}, {3}),
        (None, {"eos_token_id": 2}, {2}),
        (None, {}, set()),
        (None, {"text_config": {"eos_token_id": [1, 106]}}, {1, 106}),
        ({}, {"eos_token_id": 2, "text_config": {"eos_token_id": 1}}, {2}),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, generation: dict[str, Any] | None, config: dict[str, Any], expected: set[int]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_eos_token_ids(tmp_path, anonymous_tokens()) == expected


@pytest.mark.parametrize(("eos_token", "expected"), [("<|im_end|>", {0, 1}), ("<|not there|>", {0}), (None, {0})])
def test_the_tokenizer_s_eos_ends_a_text_too(tmp_path: Path, eos_token: str | None, expected: set[int]) -> None:
    tokenizer = Tokenizer(models.BPE({"<|endoftext|>": 0, "<|im_end|>": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos_token}))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')

    assert read_eos_token_ids(tmp_path, load_token_table(tmp_path)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"eos_token_id": "</s>"}', "eos_token_id is '</s>'; allowed: an id or a list of ids"),
        ('{"eos_token_id": true}', "eos_token_id is True; allowed: an id or a list of ids"),
        ('{"eos_token_id": [2, false]}', r"eos_token_id is \[2, False\]; allowed: an id or a list of ids"),
        (f'{{"eos_token_id": {2**70}}}', f"eos_token_id is {2**70}; allowed: an id or a list of ids"),
        ("[" * 100_000, "generation_config.json is no JSON"),
    ],
)
def test_wrong_eos_ids_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_eos_token_ids(tmp_path, anonymous_tokens())


@pytest.mark.parametrize(("max_context", "expected"), [(None, 1024), (40, 40)])
def test_the_context_is_that_of_the_model_unless_a_setting_says_less(max_context: int | None, expected: int) -> None:
    model, cache = str(PACKAGED[DEFAULT_MODEL]), CacheConfig(num_blocks=64)
    config = EngineConfig(model=model, device="cpu", kernels="reference", max_context=max_context, cache=cache)
    engine = build_engine(config)
    assert engine.max_context == expected
    engine.close()


def test_number_of_blocks_is_what_fits_beside_the_peak() -> None:
    assert num_blocks_within(total_bytes=1000, memory_fraction=0.9, peak_bytes=300, block_bytes=70) == 8
    assert num_blocks_within(total_bytes=1000, memory_fraction=0.9, peak_bytes=950, block_bytes=70) == 0


@pytest.mark.parametrize(("stop", "most"), [((), 4), (("zz", "y"), 200)])
def test_what_was_generated_elsewhere_is_not_pushed_again(
    monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], most: int
) -> None:
    """Without stop strings the end of its text is all that matters; else each token is looked up once, if at all."""
    seen: list[int] = []
    piece = TokenTable.piece

    def note(table: TokenTable, token_id: int) -> bytes:
        seen.append(token_id)
        return piece(table, token_id)

    monkeypatch.setattr(TokenTable, "piece", note)
    engine = fake_engine(max_context=5000)
    engine.add_request(request("a", [1], generated=[i % 97 for i in range(3000)], max_tokens=4000, stop=stop))
    assert len(seen) <= most


@pytest.mark.parametrize(("looks_ahead", "busy_s"), [(False, 10 * 1.0), (True, 9 * 1.25 + 1.0)])
def test_busy_time_is_all_time_with_a_step_in_flight(looks_ahead: bool, busy_s: float) -> None:
    """Ten steps of one second, and a quarter of a second in which the engine does other things after each."""
    now_s = 0.0

    def wait() -> None:
        nonlocal now_s
        now_s += 1.0

    executor = FakeExecutor(looks_ahead=looks_ahead, max_in_flight=1 + looks_ahead)
    executor.on_collect = wait
    engine = fake_engine(executor, clock=lambda: now_s)
    engine.add_request(request("a", [1, 2], max_tokens=10))
    while engine.has_work:
        engine.step()
        now_s += 0.25
    assert engine.stats.num_steps == 10
    assert engine.stats.busy_s == busy_s
    assert list(engine.stats.step_s.take()) == [1.0] + 9 * [2.25 if looks_ahead else 1.0]


def test_statistics_say_how_large_steps_were() -> None:
    engine = fake_engine()
    run(engine, [request("a", range(10), max_tokens=2), request("b", range(50, 53), max_tokens=2)])
    assert list(engine.stats.step_sequences.take()) == [2, 2]
    assert list(engine.stats.step_tokens.take()) == [13, 2]


def test_what_steps_in_flight_store_is_told_when_they_are_done() -> None:
    engine = fake_engine(FakeExecutor(looks_ahead=True, max_in_flight=2))
    engine.add_request(request("a", range(8), max_tokens=4))
    engine.launch()
    assert engine.take_result().stored_block_hashes == []
    engine.collect()
    assert len(engine.take_result().stored_block_hashes) == 2


def test_a_stop_token_before_min_tokens_that_was_generated_elsewhere_does_not_end_it() -> None:
    engine = fake_engine(eos_token_ids=frozenset([8]))
    outcome = run(engine, [request("a", [1], generated=[8], min_tokens=3, max_tokens=4)])["a"]
    assert outcome.token_ids
