"""A recorded run is decided again in the same way; what was changed since is named."""

import json
import logging
import random
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.engines import FakeExecutor, fake_engine, request, run
from typer.testing import CliRunner
from weft.recording import VERSION, Recorder, Recording, RecordingError

from bench.errors import BenchConfigError, BenchError
from bench.simulation.replay import Outcome, first_difference, replay_file
from bench.simulation.replayed_modules import KINDS
from cluster.cli import app
from workers.config import SchedulingPolicy
from workers.errors import EngineError, GroupFailedError
from workers.recording import Aborted, Added, Scheduled, SchedulerCall, SchedulerSetup, Updated
from workers.request import FinishReason, Request, RequestId, SamplingParams
from workers.scheduler import Scheduler

EOS_TOKEN_IDS = frozenset(range(0, 97, 24))


def draw_request(rng: random.Random, name: str, now_s: float) -> Request:
    """One of several prefixes, and all that may end a request or make it wait."""
    shared = [rng.randrange(3)] * rng.choice((0, 8, 16))
    max_tokens = rng.randrange(1, 60)
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=(*shared, *(rng.randrange(97) for _ in range(rng.randrange(1, 20)))),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.randrange(max_tokens + 1),
            stop=rng.choice(((), (), ("a", "bc"), ("j",))),
            ignore_eos=rng.random() < 0.5,
            presence_penalty=float(rng.random() < 0.2),
        ),
        priority=rng.randrange(3),
        deadline_s=now_s + rng.uniform(0.1, 2.0) if rng.random() < 0.3 else None,
    )


def record_run(path: Path, seed: int, **settings: Any) -> dict[str, int]:
    """Serve drawn requests with an engine that records; return how often what should happen did."""
    rng = random.Random(seed)
    executor = FakeExecutor(**{"num_blocks": 24, **settings.pop("executor", {})})
    recorder = Recorder(path, max_bytes=1 << 24)
    engine = fake_engine(executor, eos_token_ids=EOS_TOKEN_IDS, recorder=recorder, **settings)
    names: list[RequestId] = []
    ends = {"stop": 0, "length": 0, "abort": 0, "stop strings": 0, "refused": 0}
    for _ in range(150):
        for _ in range(rng.choice((0, 0, 1, 3))):
            drawn = draw_request(rng, f"r{len(names)}", engine._clock())
            names.append(drawn.request_id)
            try:
                engine.add_request(drawn)
            except EngineError:
                ends["refused"] += 1
        if names and rng.random() < 0.1:
            engine.abort(rng.choice(names))
        for output in engine.step().outputs:
            if output.finish is not None:
                ends[output.finish.reason] += 1
                ends["stop strings"] += output.finish.stop_string is not None
    engine.close()
    return {**ends, "preempted": engine.stats.num_preemptions, "cached": engine.stats.num_cached_tokens}


@pytest.mark.parametrize("plans", [{}, {"max_in_flight": 2, "looks_ahead": True}, {"max_in_flight": 3}])
@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_recorded_run_is_decided_again_in_the_same_way(
    tmp_path: Path, policy: SchedulingPolicy, plans: dict[str, Any]
) -> None:
    settings = {"policy": policy, "max_waiting": 6, "max_num_seqs": 6, "promote_after_s": 0.2}
    happened = record_run(tmp_path / "file", 8, executor={**plans, "num_host_blocks": 6}, **settings)
    assert min(happened.values()) > 0, happened
    outcome = replay_file(tmp_path / "file")
    assert outcome.difference is None
    assert outcome.num_equal == sum(outcome.calls.values()) > 300
    assert outcome.calls.keys() == {"add", "abort", "expire", "finish", "schedule", "update"}


def test_engine_that_does_not_record_has_the_plain_scheduler() -> None:
    assert type(fake_engine()._scheduler).__name__ == "Scheduler"


def test_failure_of_the_group_is_recorded_and_comes_again(tmp_path: Path) -> None:
    executor = FakeExecutor()
    recorder = Recorder(tmp_path / "file", max_bytes=1 << 24)
    engine = fake_engine(executor, recorder=recorder)
    engine.add_request(request("r", [1, 2, 3]))
    engine.launch()
    executor._outputs[0] = msgspec.structs.replace(executor._outputs[0], number=5)
    with pytest.raises(GroupFailedError):
        engine.collect()
    recorder.close()
    *_, last = read_calls(tmp_path / "file")
    assert isinstance(last, Updated)
    assert last.failure == "GroupFailedError"
    assert replay_file(tmp_path / "file").difference is None


def test_failure_to_plan_and_whether_an_abort_found_somebody_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    recorder = Recorder(tmp_path / "file", max_bytes=1 << 24)
    engine = fake_engine(recorder=recorder)
    engine.add_request(request("r", [1, 2, 3]))
    engine.abort(RequestId("nobody"))
    engine.abort(RequestId("r"))
    monkeypatch.setattr(Scheduler, "schedule", fail)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    recorder.close()
    _, nobody, found, failed = read_calls(tmp_path / "file")
    assert isinstance(nobody, Aborted)
    assert isinstance(found, Aborted)
    assert (nobody.is_found, found.is_found) == (False, True)
    assert isinstance(failed, Scheduled)
    assert failed.failure == "ZeroDivisionError"


# What was changed


def read_calls(path: Path) -> Iterator[SchedulerCall]:
    recording = Recording(path)
    recording.read_header(SchedulerSetup)
    yield from recording.read_frames(SchedulerCall)
    recording.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A recording of three requests that share a prefix, two of them at once."""
    path = tmp_path / "tiny-0.1.decisions"
    recorder = Recorder(path, max_bytes=1 << 24)
    engine = fake_engine(recorder=recorder)
    run(engine, [request(name, [5] * 12, max_tokens=10) for name in "abc"])
    engine.close()
    return path


def rewrite(path: Path, *, setup: dict[str, Any] | None = None, calls: dict[int, msgspec.Struct] | None = None) -> None:
    """Change the header, or calls by their number."""
    recording = Recording(path)
    header = msgspec.structs.replace(recording.read_header(SchedulerSetup), **(setup or {}))
    frames = list(recording.read_frames(SchedulerCall))
    recording.close()
    path.unlink()
    recorder = Recorder(path, max_bytes=1 << 24)
    recorder.begin("scheduler", header)
    for number, frame in enumerate(frames, 1):
        recorder.write((calls or {}).get(number, frame))
    recorder.close()


def test_another_setting_is_noticed_at_the_first_plan_that_it_changes(file: Path) -> None:
    config = Recording(file).read_header(SchedulerSetup).config
    rewrite(file, setup={"config": msgspec.convert({**msgspec.to_builtins(config), "max_num_seqs": 2}, type(config))})
    outcome = replay_file(file)
    assert outcome.difference is not None
    assert (outcome.difference.call, outcome.difference.kind) == (4, "schedule")
    assert outcome.difference.place == "plan.new[2]", "there is no third slot"
    assert outcome.difference.now == "nothing"
    assert outcome.num_equal == 3


def test_another_block_size_changes_the_blocks_of_a_plan(file: Path) -> None:
    rewrite(file, setup={"block_size": 6})
    difference = replay_file(file).difference
    assert difference is not None
    assert difference.place == "plan.scheduled.starts[1]"


def test_changed_decision_is_named(file: Path) -> None:
    number, call = next(
        (number, call) for number, call in enumerate(read_calls(file), 1) if isinstance(call, Updated) and call.ends
    )
    name, finish = call.ends[0]
    changed = [(name, msgspec.convert({**msgspec.to_builtins(finish), "reason": "abort"}, type(finish)))]
    rewrite(file, calls={number: msgspec.structs.replace(call, ends=changed + call.ends[1:])})
    difference = replay_file(file).difference
    assert difference is not None
    assert (difference.call, difference.kind, difference.place) == (number, "update", "ends[0][1].reason")
    assert (difference.recorded, difference.now) == (FinishReason.ABORT, FinishReason.LENGTH)


def test_changed_input_is_noticed_where_it_first_matters(file: Path) -> None:
    calls = list(read_calls(file))
    number, call = next((i, call) for i, call in enumerate(calls, 1) if isinstance(call, Updated))
    output = msgspec.structs.replace(call.output, token_ids=[96, *call.output.token_ids[1:]])
    rewrite(file, calls={number: msgspec.structs.replace(call, output=output)})
    difference = replay_file(file).difference
    assert difference is not None
    assert difference.place == "plan.scheduled.learnt[0]"
    assert difference.now == "96"


def test_call_that_cannot_be_made_is_a_difference(file: Path) -> None:
    calls = list(read_calls(file))
    number = next(i for i, call in enumerate(calls, 1) if isinstance(call, Scheduled))
    assert isinstance(calls[0], Added)
    rewrite(file, calls={number: msgspec.structs.replace(calls[0], refusal=None)})
    difference = replay_file(file).difference
    assert difference is not None
    assert (difference.call, difference.kind, difference.place) == (number, "add", "refusal")
    assert (difference.recorded, difference.now) == ("None", "InvalidRequestError")


def test_output_of_a_plan_that_was_not_made_is_a_difference(file: Path) -> None:
    calls = list(read_calls(file))
    update = next(call for call in calls if isinstance(call, Updated))
    rewrite(file, calls={1: update})
    difference = replay_file(file).difference
    assert difference is not None
    assert (difference.call, difference.kind, difference.now) == (1, "update", "IndexError: pop from an empty deque")


def test_torn_file_is_replayed_up_to_its_last_whole_frame(file: Path) -> None:
    num_calls = len(list(read_calls(file)))
    file.write_bytes(file.read_bytes()[:-3])
    outcome = replay_file(file)
    assert outcome.is_torn
    assert outcome.num_equal == num_calls - 1
    assert outcome.difference is None
    assert "its last frame is torn" in CliRunner().invoke(app, ["replay", str(file)]).stdout


def test_recording_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"weft decisions 3 weather\n")
    with pytest.raises(RecordingError, match="of 'weather'; allowed: scheduler, router, autoscaler"):
        replay_file(tmp_path / "file")


def test_first_difference_says_where_it_is_and_what_differs() -> None:
    assert first_difference([1, (2, 3)], [1, (2, 3)]) is None
    assert first_difference([1, (2, 3)], [1, (2, 4)]) == ("[1][1]", "3", "4")
    assert first_difference([1], [1, 2]) == ("[1]", "nothing", "2")
    assert first_difference(Scheduled(0.0, None), "it failed") == ("", str(Scheduled(0.0, None)), "it failed")


# The format


def shape_of(*types: Any) -> str:
    """Fingerprint of how values of these types are written: names and types of their fields, no texts and defaults."""

    def strip(schema: Any) -> Any:
        if isinstance(schema, list | tuple):
            return [strip(item) for item in schema]
        if isinstance(schema, dict):
            return {key: strip(value) for key, value in schema.items() if key not in ("description", "default")}
        return schema

    schemas = strip(msgspec.json.schema_components(types, ref_template="{name}"))
    return sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:8]


@pytest.mark.parametrize(
    ("kind", "shape"), [("scheduler", "ceae4110"), ("router", "562309b1"), ("autoscaler", "414ea414")]
)
def test_files_of_another_shape_have_another_version(kind: str, shape: str) -> None:
    """Where this fails, a field was added or changed: raise VERSION unless files recorded before still replay."""
    assert VERSION == 3
    assert shape_of(KINDS[kind].header, KINDS[kind].call) == shape


# The command


def test_command_tells_of_every_file_in_a_folder(file: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(file.parent)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "tiny-0.1.decisions" in result.stdout
    calls = list(read_calls(file))
    assert f"{len(calls)} of {len(calls)} decisions are equal: 3 add, " in result.stdout
    assert "torn" not in result.stdout


def test_command_names_the_first_difference_and_fails(file: Path) -> None:
    rewrite(file, setup={"block_size": 6})
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert isinstance(result.exception, BenchError)  # exit code 1, by cluster.cli.run_and_report
    assert "call 4, schedule at 0." in result.stdout
    assert "in        plan.scheduled.starts[1]" in result.stdout


def test_command_speaks_json(file: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(file), "--json"], catch_exceptions=False)
    (outcome,) = json.loads(result.stdout)
    assert outcome.keys() == set(Outcome.__slots__)
    assert outcome["difference"] is None
    assert outcome["calls"]["add"] == 3
    times_s = [call.now_s for call in read_calls(file) if hasattr(call, "now_s")]
    assert outcome["recorded_s"] == times_s[-1] - times_s[0] > 0


def test_command_refuses_what_is_no_recording(tmp_path: Path) -> None:
    with pytest.raises(BenchConfigError, match="no recording; wanted: files that end in"):
        CliRunner().invoke(app, ["replay", str(tmp_path)], catch_exceptions=False)


def test_preemptions_are_told_again_after_a_replay(file: Path) -> None:
    CliRunner().invoke(app, ["replay", str(file)], catch_exceptions=False)
    assert logging.getLogger("workers.roster").isEnabledFor(logging.WARNING)
