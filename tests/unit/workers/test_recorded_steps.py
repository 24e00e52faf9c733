"""Steps are recorded before the first request, on a CPU that stands for a GPU, its recordings calling again."""

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.plans import make_plan
from helpers.recording import MAX_CONTEXT, RecordingKernels, make_runner
from torch import Tensor

from parallel.decoder import Decoder
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.cuda_buckets import StepBucket, choose_bucket
from parallel.kernels.cuda_graphs import Recording, Result
from parallel.random_model import write_random_model
from workers import model_runner, step_times
from workers.plan import ModelOutput, NewSequence, ScheduledSequence
from workers.rehearsal import Rehearsal
from workers.request import SamplingParams

PIECES = [StepBucket(size, 0) for size in (64, 32, 16)]
"""Up to all tokens of a step."""
MIXED = [StepBucket(size, context, 4) for context in (2048, 512) for size in (64, 32, 16)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Which steps are recorded does not depend on the model: two layers, as small as they can be."""
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
    }
    folder = tmp_path_factory.mktemp("models") / "model"
    write_random_model(folder, config, 0, torch.float32)
    return folder


@pytest.mark.parametrize("records_chunks", [True, False])
def test_every_step_that_can_come_is_recorded_before_the_first_request(model: Path, records_chunks: bool) -> None:
    runner, kernels, stats = make_runner(model, max_num_seqs=5, records_chunks=records_chunks)
    runner.allocate(200)
    recorded = kernels.recorded.copy()
    with_chunks = MIXED if records_chunks else PIECES
    assert recorded == [*with_chunks, *[StepBucket(size, context) for context in (2048, 512) for size in (8, 4, 2, 1)]]
    assert (stats.num_steps, stats.model_busy_s) == (0, 0.0), "these steps are nobody's"
    assert stats.num_recorded_steps == len(recorded)
    assert stats.recording_s > 0

    sampling, number = SamplingParams(temperature=0.0), 0
    for num_seqs in (1, 3, 5):
        for context in (3, 513):
            blocks = list(range(-(-context // 16)))
            prompts = [NewSequence(slot, [1] * (context - 1), context - 1, sampling, []) for slot in range(num_seqs)]
            budget = 64 // num_seqs
            for start in range(0, context - 1, budget):
                num, new_blocks = min(budget, context - 1 - start), blocks if start == 0 else []
                chunks = [ScheduledSequence(slot, start, num, [], new_blocks, True) for slot in range(num_seqs)]
                runner.run(make_plan(number, [], prompts if start == 0 else [], chunks))
                number += 1
            decodes = [ScheduledSequence(slot, context - 1, 1, [7], [], True) for slot in range(num_seqs)]
            output = runner.run(make_plan(number, [], [], decodes))
            assert output is not None
            assert len(output.token_ids) == num_seqs
            number += 1
    assert kernels.recorded == recorded
    assert stats.num_steps == number


@pytest.mark.parametrize(("max_size", "sizes"), [(0, []), (1, [1]), (3, [4, 2, 1]), (64, [8, 4, 2, 1])])
def test_the_largest_size_is_a_setting(model: Path, max_size: int, sizes: list[int]) -> None:
    runner, kernels, _ = make_runner(model, max_num_seqs=5, max_size=max_size)
    runner.allocate(200)
    whole = [StepBucket(size, context) for context in (2048, 512) for size in sizes]
    assert kernels.recorded == [*MIXED, *whole] * (max_size > 0)


def test_memory_of_all_graphs_is_estimated_from_the_three_largest_of_each_kind(model: Path) -> None:
    runner, kernels, _ = make_runner(model, max_num_seqs=5)
    assert runner._rehearsal().measure_graph_bytes() == 50_000 + (5 + 8) * 1000
    whole = [choose_bucket(num_tokens=n, num_decodes=n, max_context_len=MAX_CONTEXT) for n in (5, 4, 2)]
    assert kernels.recorded == [*MIXED[:3], *whole]
    runner.allocate(200)
    assert len(kernels.recorded) == 6 + 6 + 8, "those of the small cache are of no use to the real one"


def test_what_the_second_largest_adds_to_the_shared_memory_counts_once(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens may have more partitions, which the others then have room for too."""
    record = RecordingKernels._record

    def record_more(self: RecordingKernels, run: Callable[[], Result], memory: object) -> Recording:
        recording = record(self, run, memory)
        self._device.free_bytes -= 20_000 * (self.recorded == MIXED[:2])
        return recording

    monkeypatch.setattr(RecordingKernels, "_record", record_more)
    runner, _, _ = make_runner(model, max_num_seqs=5)
    assert runner._rehearsal().measure_graph_bytes() == 70_000 + (5 + 8) * 1000


@pytest.mark.parametrize("is_measured", [True, False])
def test_where_whole_steps_are_refused_all_are_in_pieces(
    model: Path, is_measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention that is planned on the host cannot be recorded: the first step shows that."""
    runner, kernels, stats = make_runner(model, max_num_seqs=24)  # in other pieces than the 16 that are next
    kernels.is_planned_on_host = True
    if is_measured:
        assert runner._rehearsal().measure_graph_bytes() == 50_000 + 2 * 1000
    run_size, steps = Rehearsal._run_size, list[StepBucket]()

    def note(self: Rehearsal, step: StepBucket) -> None:
        steps.append(step)
        run_size(self, step)

    monkeypatch.setattr(Rehearsal, "_run_size", note)
    runner.allocate(200)
    assert stats.num_recorded_steps == len(PIECES)
    assert steps == ([] if is_measured else [StepBucket(64, MAX_CONTEXT, 4)]) + PIECES


@pytest.mark.parametrize(("max_partitions", "contexts"), [(5, [512, MAX_CONTEXT]), (16384, [MAX_CONTEXT])])
def test_the_profile_sees_the_longest_context_and_the_most_partitions(
    model: Path, max_partitions: int, contexts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attention keeps for a moment grows with both."""
    monkeypatch.setattr("parallel.kernels.cuda_buckets.MAX_PARTITIONS", max_partitions)
    monkeypatch.setattr("parallel.kernels.cuda_buckets.MAX_PARTITION_SIZE", 512)
    seen: list[tuple[int, int, int]] = []

    def note(self: RecordingKernels, q: Tensor, cache: LayerCache, meta: AttentionMeta, _: AttentionParams) -> Tensor:
        seen.append((len(q), meta.num_decodes, meta.max_context_len))
        return q

    monkeypatch.setattr(RecordingKernels, "_attend", note)
    runner, _, _ = make_runner(model, max_num_seqs=5, max_size=0)
    runner._rehearsal().profile()
    assert seen[::2] == [(64, 4, context) for context in contexts]


def test_without_graphs_there_is_nothing_to_measure(model: Path) -> None:
    runner, kernels, stats = make_runner(model, max_size=0)
    assert runner._rehearsal().measure_graph_bytes() == 0
    assert kernels.recorded == []
    runner.allocate(200)
    assert (stats.num_recorded_steps, stats.recording_s) == (0, 0.0)


def test_without_graphs_kernels_meet_the_sizes_of_graphs_before_the_first_request(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles them when they are first launched."""
    seen: list[tuple[int, int, int]] = []

    def note(self: RecordingKernels, q: Tensor, cache: LayerCache, meta: AttentionMeta, _: AttentionParams) -> Tensor:
        seen.append((len(q), meta.num_decodes, meta.max_context_len))
        return q

    monkeypatch.setattr(RecordingKernels, "_attend", note)
    runner, _, _ = make_runner(model, max_num_seqs=5, max_size=0)
    runner.allocate(200)
    chunks = [(bucket.num_tokens, 0, min(bucket.max_context_len, MAX_CONTEXT)) for bucket in MIXED]
    decodes = [(size, size, context) for context in (MAX_CONTEXT, 512) for size in (5, 4, 2, 1)]
    assert {*seen} >= {*chunks, *decodes}


def test_dropped_recordings_are_gone_at_once(model: Path) -> None:
    """NCCL's communicators, which are destroyed next, wait for them."""
    runner, _, _ = make_runner(model, max_num_seqs=2)
    runner.allocate(200)
    layers = weakref.ref(runner._decoder._run)
    runner.drop_recordings()
    assert layers() is None


def test_time_in_two_steps_at_once_counts_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device works by itself, a step is started while the one before it runs. Pages are taken in none."""
    now_s, seen = 0.0, list[Callable[[], bool]]()
    monkeypatch.setattr(model_runner, "select_taking", lambda *_: lambda *_: None)
    monkeypatch.setattr(model_runner, "populate_when_idle", lambda rows_RBX, is_resting, _: seen.append(is_resting))
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: now_s))
    runner, _, stats = make_runner(model, max_size=0)
    runner.allocate(200)
    (is_resting,) = seen

    def start(slot: int) -> Callable[[], ModelOutput | None]:
        new = NewSequence(slot, [1, 2], 2, SamplingParams(temperature=0.0), [])
        plan = make_plan(slot, [], [new], [ScheduledSequence(slot, 0, 2, [], [slot], True)])
        return runner.start(runner.prepare(plan))

    now_s = 10.0
    first = start(0)
    now_s = 12.0
    second = start(1)
    now_s = 15.0
    first()
    assert not is_resting()
    now_s = 19.0
    second()
    now_s = 30.0
    assert is_resting()
    third = start(2)
    now_s = 31.0
    third()
    assert (stats.num_steps, stats.busy_s) == (3, 10.0)


def test_a_request_without_finite_logits_fails_alone_though_its_next_step_is_planned(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no token to go on with, and the step of the others is on its way."""
    runner, _, _ = make_runner(model)
    runner.allocate(200)
    logits = Decoder.logits

    def broken(decoder: Decoder, *args: Any) -> torch.Tensor | None:
        logits_SV = logits(decoder, *args)
        assert logits_SV is not None
        logits_SV[0] = torch.nan
        return logits_SV

    wants_logits = SamplingParams(temperature=0.0, logprobs=1)
    prompts = [NewSequence(slot, [1, 2, 3, 4], 4, wants_logits, [2]) for slot in range(2)]
    begin = make_plan(0, [], prompts, [ScheduledSequence(slot, 0, 4, [], [slot], True) for slot in range(2)])
    go_on = make_plan(1, [], [], [ScheduledSequence(slot, 4, 1, [], [], True) for slot in range(2)])
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "logits", broken)
        first = runner.run(begin)
    second = runner.run(go_on)
    assert first is not None
    assert first.errors.keys() == {0}
    assert second is not None
    assert not second.errors
    assert second.slots == [0, 1]
