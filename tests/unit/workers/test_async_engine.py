"""The engine's thread and the event loop: nothing blocks, nothing is lost, everything comes in order."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import FakeExecutor, Outcome, fake_engine, request
from helpers.fake_model import run_alone
from helpers.polling import until
from weft.recording import Recorder, Recording

from workers import async_engine
from workers.async_engine import AsyncEngine
from workers.detokenizer import IncrementalDetokenizer
from workers.engine import Engine, StepResult
from workers.errors import EngineStoppedError, GroupFailedError, InvalidRequestError, RequestFailedError
from workers.plan import StepPlan
from workers.recording import Added, SchedulerCall, SchedulerSetup, Updated
from workers.request import FinishReason, Request, RequestId, RequestOutput
from workers.turn_watch import NUM_LOOKS


class HeardEngine(AsyncEngine):
    """An engine that tells the outputs of one request from those of others."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[StepResult], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
        longest_turn_s: float | None = None,
    ) -> None:
        self._heard: dict[RequestId, asyncio.Queue[RequestOutput | BaseException]] = {}

        def hear(result: StepResult) -> None:
            for output in result.outputs:
                if output.request_id in self._heard:
                    self._heard[output.request_id].put_nowait(output)
            if on_step is not None:
                on_step(result)

        def hear_failure(error: BaseException) -> None:
            for queue in self._heard.values():
                queue.put_nowait(error)
            if on_failure is not None:
                on_failure(error)

        super().__init__(engine, on_step=hear, on_failure=hear_failure, longest_turn_s=longest_turn_s)

    async def generate(self, item: Request) -> AsyncIterator[RequestOutput]:
        """Submit a request and yield its outputs; raise what it failed with, or the group."""
        queue = self._heard[item.request_id] = asyncio.Queue()
        self.submit(item)
        has_ended = False
        while not has_ended:
            output = await queue.get()
            if isinstance(output, BaseException):
                raise output
            if output.error is not None:
                raise output.error
            has_ended = output.finish is not None
            yield output


@asynccontextmanager
async def started(
    executor: FakeExecutor,
    *,
    on_step: Callable[[StepResult], None] | None = None,
    on_failure: Callable[[BaseException], None] | None = None,
) -> AsyncIterator[HeardEngine]:
    """An engine that does a step when the loop has seen the one before: it cannot run ahead of the test."""
    seen = threading.Semaphore(1)

    def wait_for_loop() -> None:
        assert seen.acquire(timeout=120)

    def see(result: StepResult) -> None:
        seen.release()
        if on_step is not None:
            on_step(result)

    executor.on_collect = wait_for_loop
    engine = HeardEngine(fake_engine(executor), on_step=see, on_failure=on_failure)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert executor.is_closed


class StuckExecutor(FakeExecutor):
    """A model that is stuck in its steps until `release` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck, self.release = threading.Event(), threading.Event()

    def submit(self, plan: StepPlan) -> None:
        self.is_stuck.set()
        assert self.release.wait(120)
        super().submit(plan)


async def test_a_step_that_does_not_end_fails_the_group(caplog: pytest.LogCaptureFixture) -> None:
    executor, failures = StuckExecutor(), list[BaseException]()
    engine = HeardEngine(fake_engine(executor), on_failure=failures.append, longest_turn_s=0.2)
    engine.start()
    try:
        async with asyncio.timeout(30):
            with pytest.raises(GroupFailedError, match=r"a step has not ended within 0.2 s; allowed: smaller steps"):
                await collect(engine, "a", [1, 2, 3])
            with pytest.raises(GroupFailedError, match="a step has not ended"):
                await collect(engine, "b", [1, 2, 3])
            await engine.stop()  # though the thread is still there
        assert not executor.is_closed
    finally:
        executor.release.set()
    await until(lambda: executor.is_closed)  # it was not that stuck
    await asyncio.sleep(0)
    assert [str(failure).partition(";")[0] for failure in failures] == ["a step has not ended within 0.2 s"]


async def test_stop_leaves_a_step_that_hangs_to_itself() -> None:
    executor, failures = StuckExecutor(), list[BaseException]()
    engine = AsyncEngine(fake_engine(executor), on_failure=failures.append, longest_turn_s=0.2)
    engine.start()
    engine.submit(request("a", [1, 2, 3]))
    try:
        async with asyncio.timeout(30):
            await asyncio.to_thread(executor.is_stuck.wait)
            await engine.stop()  # before anybody knows
        assert [str(failure).partition(";")[0] for failure in failures] == ["a step has not ended within 0.2 s"]
    finally:
        executor.release.set()
    await until(lambda: executor.is_closed)


async def test_what_has_failed_does_not_hang_besides() -> None:
    executor, failures = FakeExecutor(), list[BaseException]()
    engine = HeardEngine(fake_engine(executor), on_failure=failures.append)
    engine.start()
    executor.failure = GroupFailedError("rank 1 died")
    with pytest.raises(GroupFailedError, match="rank 1 died"):
        await collect(engine, "a", [1, 2, 3])
    assert not any(engine._watch.look() for _ in range(3 * NUM_LOOKS))
    assert failures == [executor.failure]
    await engine.stop()


async def test_steps_may_go_on_for_longer_than_one_may_last() -> None:
    executor, failures = FakeExecutor(), list[BaseException]()
    executor.on_submit = lambda _: time.sleep(0.05)  # the model
    engine = HeardEngine(fake_engine(executor), on_failure=failures.append, longest_turn_s=1.0)
    engine.start()
    item = request("a", [1, 2, 3], max_tokens=30)
    assert (await collect(engine, "a", [1, 2, 3], max_tokens=30)).token_ids == run_alone(item)
    await engine.stop()
    assert not failures
    assert asyncio.all_tasks() == {asyncio.current_task()}, "nobody looks any more"


async def test_an_engine_with_nothing_to_do_sleeps_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "IDLE_CHECK_S", 60)
    inner, rests = fake_engine(), list[None]()
    monkeypatch.setattr(inner, "rest", lambda: rests.append(None))
    engine = AsyncEngine(inner)
    engine.start()
    await until(lambda: bool(rests))
    assert not any(engine._watch.look() for _ in range(3 * NUM_LOOKS))
    await engine.stop()
    assert len(rests) <= 2, "as it began, and woken by the stop"


def calls_in(path: Path) -> list[SchedulerCall]:
    recording = Recording(path)
    recording.read_header(SchedulerSetup)
    calls = list(recording.read_frames(SchedulerCall))
    recording.close()
    return calls


async def collect(engine: HeardEngine, name: str, prompt: list[int], **sampling: Any) -> Outcome:
    outcome = Outcome()
    async for output in engine.generate(request(name, prompt, **sampling)):
        outcome.add(output)
    return outcome


async def test_concurrent_requests_get_their_own_tokens() -> None:
    async with started(FakeExecutor()) as engine:
        outcomes = await asyncio.gather(*(collect(engine, str(i), [i, 2, 3], max_tokens=20) for i in range(20)))
    for i, outcome in enumerate(outcomes):
        assert outcome.token_ids == run_alone(request(str(i), [i, 2, 3], max_tokens=20))


@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_next_step_runs_before_what_the_last_gave_is_made_ready(
    monkeypatch: pytest.MonkeyPatch, looks_ahead: bool
) -> None:
    events: list[str] = []  # all of the engine's thread
    push = IncrementalDetokenizer.push

    def note_text(detokenizer: IncrementalDetokenizer, token_id: int) -> str:
        events.append("text")
        return push(detokenizer, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "push", note_text)
    executor = FakeExecutor(looks_ahead=looks_ahead, max_in_flight=1 + looks_ahead)
    executor.on_submit = lambda plan: events.append(f"step {plan.number}")
    engine = HeardEngine(fake_engine(executor))
    engine.start()
    await collect(engine, "a", [1, 2, 3], max_tokens=4)
    await engine.stop()
    if looks_ahead:
        assert events == ["step 0", "step 1", "step 2", "text", "step 3", "text", "text", "text"]
    else:
        assert events == ["step 0", "step 1", "text", "step 2", "text", "step 3", "text", "text"]


async def test_refusal_comes_back_as_the_requests_output() -> None:
    results: list[StepResult] = []
    async with started(FakeExecutor(), on_step=results.append) as engine:
        engine.submit(request("bad", []))
        await until(lambda: any(result.outputs for result in results))
        with pytest.raises(InvalidRequestError, match="the prompt has 0 tokens"):
            await collect(engine, "bad again", [])
    (output,) = results[0].outputs
    assert output.request_id == "bad"
    assert isinstance(output.error, InvalidRequestError)


async def test_an_id_in_use_is_refused_until_the_request_that_uses_it_has_ended() -> None:
    outputs: list[RequestOutput] = []
    async with started(FakeExecutor(), on_step=lambda result: outputs.extend(result.outputs)) as engine:
        await anext(engine.generate(request("a", [1], max_tokens=20)))
        engine.submit(request("a", [2], max_tokens=20))
        await until(lambda: any(output.finish for output in outputs))
        assert (await collect(engine, "a", [4, 5])).token_ids == run_alone(request("a", [4, 5]))
    (refusal,) = (output.error for output in outputs if output.error)
    assert isinstance(refusal, InvalidRequestError)
    assert str(refusal) == "request id 'a' is in use; allowed: a new one"
    token_ids = [token_id for output in outputs for token_id in output.token_ids]
    assert token_ids[:20] == run_alone(request("a", [1], max_tokens=20))


async def test_abort_of_a_running_request_frees_its_blocks() -> None:
    results: list[StepResult] = []
    async with started(FakeExecutor(), on_step=results.append) as engine:
        await anext(engine.generate(request("a", [1], max_tokens=190)))
        engine.abort(RequestId("a"))
        await until(lambda: any(output.finish for result in results for output in result.outputs))
        finishes = [output.finish for result in results for output in result.outputs if output.finish]
        assert [finish.reason for finish in finishes] == [FinishReason.ABORT]
        assert results[-1].load.num_free_blocks == results[-1].load.num_blocks


@pytest.mark.parametrize("ends", ["by a token", "by an abort"])
@pytest.mark.parametrize("shape", [{"max_in_flight": 1}, {"max_in_flight": 2, "looks_ahead": True}])
async def test_when_all_has_ended_the_load_says_so(
    ends: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the last request ended with more of its steps in flight, which give nobody anything."""
    monkeypatch.setattr(async_engine, "IDLE_CHECK_S", 60.0)
    results: list[StepResult] = []
    last = run_alone(request("a", [1, 2, 3], max_tokens=7))[-1]
    executor = FakeExecutor(num_blocks=640, **shape)
    engine = HeardEngine(fake_engine(executor, eos_token_ids=frozenset([last])), on_step=results.append)
    engine.start()
    try:
        outputs = engine.generate(request("a", [1, 2, 3], max_tokens=150, ignore_eos=ends == "by an abort"))
        if ends == "by a token":
            async for _ in outputs:
                pass
        else:
            await anext(outputs)
            engine.abort(RequestId("a"))
        await until(lambda: results[-1].load.num_free_blocks == 640)
    finally:
        await engine.stop()


async def test_commands_never_wait_for_a_step() -> None:
    """While the model is stuck in a step, submit and abort return."""
    executor = StuckExecutor()
    results: list[StepResult] = []
    async with started(executor, on_step=results.append) as engine:
        engine.submit(request("a", [1], max_tokens=100))
        await until(executor.is_stuck.is_set)
        engine.submit(request("b", [2], max_tokens=100))
        engine.abort(RequestId("a"))
        engine.abort(RequestId("b"))
        executor.release.set()
        await until(lambda: sum(len(result.outputs) for result in results) >= 3)
    finishes = {output.request_id: output.finish for result in results for output in result.outputs}
    assert {name: finish and finish.reason for name, finish in finishes.items()} == dict.fromkeys(
        "ab", FinishReason.ABORT
    )


async def test_the_wait_for_the_step_in_flight_is_a_part_of_the_times() -> None:
    """A request comes at 10 s; the engine's thread is in a step until 17 s, and a step takes no time from then on."""
    now_s = 10.0
    executor = StuckExecutor()
    inner = fake_engine(executor, clock=lambda: now_s)
    engine = HeardEngine(inner)
    engine.start()
    engine.submit(request("a", [1], max_tokens=100))
    await until(executor.is_stuck.is_set)
    late = asyncio.create_task(collect(engine, "b", [2], max_tokens=3))
    await until(lambda: bool(engine._commands))
    now_s = 17.0
    executor.release.set()
    finish = (await late).finish
    await engine.stop()
    assert finish is not None
    assert (finish.usage.queue_s, finish.usage.prefill_s, finish.usage.decode_s) == (7.0, 0.0, 0.0)
    assert 7.0 in list(inner.stats.ttft_s.take())
    assert 7.0 in list(inner.stats.e2e_s.take())


async def test_request_that_comes_just_before_the_stop_is_ended_too() -> None:
    executor = StuckExecutor()
    outputs: list[RequestOutput] = []
    engine = AsyncEngine(fake_engine(executor), on_step=lambda result: outputs.extend(result.outputs))
    engine.start()
    engine.submit(request("a", [1], max_tokens=100))
    await until(executor.is_stuck.is_set)
    engine.submit(request("b", [2], max_tokens=100))
    stop = asyncio.create_task(engine.stop())
    await until(lambda: engine._is_stopping)
    executor.release.set()
    await stop
    finishes = {output.request_id: output.finish.reason for output in outputs if output.finish}
    assert finishes == dict.fromkeys("ab", FinishReason.ABORT)


@pytest.mark.parametrize("was_started", [True, False])
async def test_a_request_after_the_stop_is_refused(was_started: bool) -> None:
    outputs: list[RequestOutput] = []
    engine = HeardEngine(fake_engine(), on_step=lambda result: outputs.extend(result.outputs))
    if was_started:
        engine.start()
    else:
        engine.submit(request("early", [1]))
    await engine.stop()
    async with asyncio.timeout(120):
        with pytest.raises(EngineStoppedError, match="it takes no more requests"):
            await collect(engine, "late", [1])
    engine.submit(request("later", [1]))
    names = ["late", "later"] if was_started else ["early", "late", "later"]
    await until(lambda: len(outputs) == len(names))
    assert [output.request_id for output in outputs] == names
    assert all(isinstance(output.error, EngineStoppedError) for output in outputs)


async def test_an_engine_stops_though_requests_keep_coming() -> None:
    """Each of its steps brings one more; those that come after the stop are refused, and each ends once."""
    executor, names, ends = FakeExecutor(num_blocks=640), iter(range(1 << 30)), list[RequestOutput]()
    num_submitted = 0

    def submit(plan: StepPlan | None = None) -> None:
        nonlocal num_submitted
        num_submitted += 1
        engine.submit(request(f"r{next(names)}", [1], max_tokens=2))

    executor.on_submit = submit
    engine = AsyncEngine(
        fake_engine(executor), on_step=lambda result: ends.extend(o for o in result.outputs if o.finish or o.error)
    )
    engine.start()
    submit()
    await until(lambda: len(ends) > 3)
    async with asyncio.timeout(120):
        await engine.stop()
    await until(lambda: len(ends) == num_submitted)
    assert len({output.request_id for output in ends}) == num_submitted
    assert any(output.finish for output in ends)


async def test_requests_that_a_failing_engine_did_not_come_to_are_refused() -> None:
    executor = StuckExecutor()
    outputs: list[RequestOutput] = []
    failures: list[BaseException] = []
    engine = AsyncEngine(
        fake_engine(executor), on_step=lambda result: outputs.extend(result.outputs), on_failure=failures.append
    )
    engine.start()
    engine.submit(request("a", [1]))
    await until(executor.is_stuck.is_set)
    engine.submit(request("b", [2]))
    executor.failure = GroupFailedError("rank 1 died")
    executor.release.set()
    await until(lambda: bool(failures))
    engine.submit(request("c", [3]))
    await until(lambda: len(outputs) == 2)
    await engine.stop()
    assert [output.request_id for output in outputs] == ["b", "c"]
    assert all(isinstance(output.error, GroupFailedError) for output in outputs)


async def test_an_idle_engine_makes_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_engine, "IDLE_CHECK_S", 0.001)
    results: list[StepResult] = []
    plans: list[StepPlan] = []
    executor = FakeExecutor()
    executor.on_submit = plans.append
    async with started(executor, on_step=results.append) as engine:
        await collect(engine, "a", [1], max_tokens=3)
        seen, num_checks = (len(results), len(plans)), executor.num_checks
        await until(lambda: executor.num_checks >= num_checks + 10)  # it is idle, and looks whether its ranks are there
        assert (len(results), len(plans)) == seen


async def test_snapshot_agrees_with_the_steps_seen_so_far() -> None:
    resident: set[bytes] = set()
    engines: list[AsyncEngine] = []
    num_checks = 0

    def on_step(result: StepResult) -> None:
        nonlocal num_checks
        resident.update(result.stored_block_hashes)
        resident.difference_update(result.evicted_block_hashes)
        snapshot = engines[0].snapshot()
        assert set(snapshot.block_hashes) == resident
        assert snapshot.load == result.load
        num_checks += 1

    async with started(FakeExecutor(num_blocks=12), on_step=on_step) as engine:
        engines.append(engine)
        await asyncio.gather(*(collect(engine, str(i), [i] * 10, max_tokens=15) for i in range(10)))
    assert num_checks > 10
    assert resident


async def test_stop_ends_every_request_with_an_abort() -> None:
    results: list[StepResult] = []
    async with started(FakeExecutor(), on_step=results.append) as engine:
        for name in ("a", "b"):
            engine.submit(request(name, [1], max_tokens=190))
        await until(lambda: bool(results))
    finishes = {output.request_id: output.finish for result in results for output in result.outputs if output.finish}
    assert {name: finish.reason for name, finish in finishes.items()} == dict.fromkeys("ab", FinishReason.ABORT)


@pytest.mark.parametrize("is_idle", [False, True])
async def test_group_failure_reaches_everyone(is_idle: bool) -> None:
    failures: list[BaseException] = []
    executor = FakeExecutor()
    async with started(executor, on_failure=failures.append) as engine:
        if is_idle:
            executor.failure = GroupFailedError("rank 1 died")
        else:
            outputs = engine.generate(request("a", [1], max_tokens=190))
            await anext(outputs)
            executor.failure = GroupFailedError("rank 1 died")
            with pytest.raises(GroupFailedError, match="rank 1 died"):
                async for _ in outputs:
                    pass
        await until(lambda: bool(failures))
        with pytest.raises(GroupFailedError, match="rank 1 died"):
            await collect(engine, "late", [1])
    assert [str(failure) for failure in failures] == ["rank 1 died"]


async def test_what_is_recorded_is_in_the_file_as_soon_as_there_is_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever stops a service then kills the process, which closes nothing."""
    monkeypatch.setattr(async_engine, "IDLE_CHECK_S", 60.0)
    recorder = Recorder(tmp_path / "decisions", max_bytes=1 << 20, clock=lambda: 0.0)  # no second ever passes
    engine = HeardEngine(fake_engine(recorder=recorder))
    engine.start()
    try:
        await collect(engine, "a", [1, 2, 3], max_tokens=3)
        await until(lambda: any(isinstance(call, Updated) and call.ends for call in calls_in(recorder.path)))
    finally:
        await engine.stop()


def test_what_is_recorded_is_in_the_file_when_the_engine_is_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "decisions", max_bytes=1 << 20, clock=lambda: 0.0)
    engine = fake_engine(recorder=recorder)
    engine.add_request(request("a", [1, 2, 3]))
    engine.close()
    assert [type(call) for call in calls_in(recorder.path)] == [Added]


async def test_a_request_that_cannot_be_added_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(FakeExecutor()) as engine:
        add = engine._engine.add_request

        def add_request(item: Any, **fields: Any) -> None:
            if item.request_id == "bad":
                raise RuntimeError("our bug")
            add(item, **fields)

        monkeypatch.setattr(engine._engine, "add_request", add_request)
        with pytest.raises(RequestFailedError, match="cannot be added: RuntimeError"):
            await anext(engine.generate(request("bad", [1, 2])))
        good = request("good", [1, 2], max_tokens=3)
        tokens = [token_id async for output in engine.generate(good) for token_id in output.token_ids]
        assert tokens == run_alone(good)
