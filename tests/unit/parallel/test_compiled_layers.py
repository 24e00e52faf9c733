"""Layers as one call of the compiled kernels: the same bits as call by call, and only where all is recorded."""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from helpers.compiled_decoders import (
    BLOCK_SIZE,
    COMPILED,
    CONFIG,
    CPU,
    GROUPED_LATENTS,
    LATENTS,
    STEPS,
    EagerKernels,
    build,
    compiled,
    filled_caches,
    has_dot_products,
    load,
    positions_of,
    run,
)
from helpers.paged_layout import make_meta, meta_of_one
from helpers.sampling_cases import make_draws, make_edits
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.kernels.base import AttentionMeta
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.cpu_sampling import make_native_choice
from parallel.kernels.linears import Search, Sift
from parallel.kernels.native import packed_linear
from parallel.kernels.native.program import Program
from parallel.kernels.native.structures import Kind
from parallel.kernels.native.tape import CannotRecordError, Tape
from parallel.kernels.sampling import IN_TORCH, edit_in_torch
from parallel.mesh import Axis, Mesh
from parallel.random_model import write_random_model
from workers.kv_cache import lay_out_caches


@pytest.fixture(autouse=True)
def _same_threads_after() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize(
    ("int8_linears", "int8_cache", "dtype"),
    [
        (False, False, torch.bfloat16),
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float16),
        (True, True, torch.float16),
        (False, False, torch.float32),
        (True, True, torch.float32),
    ],
    ids=["bfloat16", "int8", "int8-cache", "float16", "float16-int8", "float32", "float32-int8"],
)
def test_compiled_layers_give_the_same_bits(
    name: str, int8_linears: bool, int8_cache: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    if int8_cache and not has_dot_products(NativeCpuKernels.build(), is_int8=True):
        pytest.skip("this CPU has no dot products of 8 bits: single operations leave chunks to torch")
    int8_cache = int8_cache and "kv_lora_rank" not in COMPILED[name]
    config = CONFIG | COMPILED[name] | ({"head_dim": 64} if int8_cache else {})
    in_8_bits = {"int8_linears": int8_linears, "int8_cache": int8_cache}
    eager = load(tmp_path / "model", config, build(EagerKernels, dtype), **in_8_bits)
    is_compiled = not int8_linears or bool(NativeCpuKernels.build()._int8)  # a CPU may multiply no vectors of 8 bits
    for recorded in (STEPS[0], STEPS[3]):  # chunks, and one token
        fast = load(tmp_path / "model", config, build(dtype=dtype), **in_8_bits)
        caches = [filled_caches(decoder, 120) for decoder in (fast, eager)]
        for spans in [recorded, *STEPS]:  # the first one is recorded, and compared as well
            meta = make_meta(sorted(spans, key=lambda span: span[0] != 1), block_size=BLOCK_SIZE, num_blocks=120)
            one, other = (run(decoder, of, meta) for decoder, of in zip((fast, eager), caches, strict=True))
            assert torch.equal(one, other), (recorded, spans)
            assert one.isfinite().all()
        for mine, its in zip(*caches, strict=True):
            assert torch.equal(mine.k_BPKH, its.k_BPKH)
            assert torch.equal(mine.v_BPKH, its.v_BPKH)
        assert (compiled(fast)._program is not None) == is_compiled


def test_layers_that_rotate_may_follow_one_that_does_not(tmp_path: Path) -> None:
    config = CONFIG | {
        "model_type": "cohere2",
        "head_dim": 64,
        "sliding_window": 40,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }
    decoders = [load(tmp_path / "model", config, build(kind)) for kind in (NativeCpuKernels, EagerKernels)]
    caches = [filled_caches(decoder, 120) for decoder in decoders]
    for spans in STEPS:
        meta = make_meta(sorted(spans, key=lambda span: span[0] != 1), block_size=BLOCK_SIZE, num_blocks=120)
        fast, eager = (run(decoder, of, meta) for decoder, of in zip(decoders, caches, strict=True))
        assert torch.equal(fast, eager)
    program = compiled(decoders[0])._program
    assert program is not None
    assert len(program._angles) == 2, "room for both kinds, which operations find by their place among them"


def test_a_gate_is_a_part_of_the_product_that_it_alone_reads(tmp_path: Path) -> None:
    decoder = load(tmp_path / "model", CONFIG, build())
    run(decoder, filled_caches(decoder, 8), make_meta([(1, 1)], block_size=BLOCK_SIZE, num_blocks=8))
    program = compiled(decoder)._program
    assert program is not None
    kinds = [operation.kind for operation in program._operations]
    assert (kinds.count(Kind.MULTIPLY_GATED), kinds.count(Kind.GATE)) == (decoder.num_local_layers, 0)


def test_layers_of_two_groups_that_share_memory_keep_to_their_blocks(tmp_path: Path) -> None:
    windows = {
        "model_type": "qwen3",
        "head_dim": 64,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 32,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }
    results = []
    for kind in (NativeCpuKernels, EagerKernels):
        decoder = load(tmp_path / "model", CONFIG | windows, build(kind))
        groups = decoder.layer_groups
        assert len(groups.windows) == 2
        size = 200 * BLOCK_SIZE * decoder.cache_entry.num_elements
        planes = torch.zeros(max(groups.num_planes), size, dtype=torch.bfloat16)
        caches = lay_out_caches(decoder, planes, block_size=BLOCK_SIZE)
        num_tokens = 0
        for num_new in (1, 70, 1, 1):
            num_tokens += num_new
            meta = make_meta([(num_new, num_tokens)], block_size=BLOCK_SIZE, num_blocks=200)
            metas = [_in_half(meta, half) for half in range(2)]
            of_layers = [metas[groups.group_of_layer[i]] for i in decoder.layer_indices]
            positions = positions_of(meta)
            results.append(decoder(positions * 7 % 512, positions, caches, of_layers).clone())
    for fast, eager in zip(results[:4], results[4:], strict=True):
        assert torch.equal(fast, eager)


def _in_half(meta: AttentionMeta, half: int) -> AttentionMeta:
    """The same of one sequence, its blocks in one half of 200."""
    (context_len,) = meta.context_lens_host
    table_M = 100 * half + torch.arange(-(-context_len // BLOCK_SIZE), dtype=torch.int32)
    positions = positions_of(meta)
    slots_T = table_M[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    return replace(meta, block_tables=table_M[None].contiguous(), slot_mapping=slots_T)


@pytest.mark.parametrize("delay_s", [0.0, 0.02], ids=["soon", "late"])
@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("name", ["llama", "tied", "mistral", "mixtral"])
def test_layers_begun_by_other_threads_give_the_same_bits(
    name: str, num_threads: int, delay_s: float, tmp_path: Path
) -> None:
    torch.set_num_threads(num_threads)
    decoder = load(tmp_path / "model", CONFIG | COMPILED[name], build())
    caches = filled_caches(decoder, 120)
    for spans in [[(1, 1)], *STEPS]:  # the first one is recorded
        meta = make_meta(sorted(spans, key=lambda span: span[0] != 1), block_size=BLOCK_SIZE, num_blocks=120)
        positions, metas = positions_of(meta), [meta] * decoder.num_local_layers
        expected = run(decoder, caches, meta)
        assert decoder.can_start(metas)
        for search in (None, Search(None), Search(make_draws(len(positions), [*range(0, len(positions), 2)]).noise)):
            finish = decoder.start(positions * 7 % 512, positions, caches, metas, rows_S=None, search=search)
            Event().wait(delay_s)  # the others may be done before this thread joins, or in the midst of it
            hidden, found = finish()
            assert torch.equal(hidden, expected)
            if search is None:
                assert found is None
                continue
            assert decoder.finds_largest
            assert decoder.draws
            expected_ids = decoder.find(hidden, search, IN_TORCH)
            assert found is not None
            assert expected_ids is not None
            assert torch.equal(found, expected_ids)
        assert torch.equal(run(decoder, caches, meta), expected)  # nothing is left of the start


@pytest.mark.parametrize("num_threads", [2, 3])
def test_layers_begun_by_other_threads_end_with_draws_from_the_logits_that_matter(
    num_threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_LEAST_PANELS", 0)
    torch.set_num_threads(num_threads)
    decoder = load(tmp_path / "model", CONFIG | COMPILED["tied"], build())
    caches, choice = filled_caches(decoder, 120), make_native_choice()
    meta = make_meta([(1, 1), (1, 30), (1, 17), (1, 64)], block_size=BLOCK_SIZE, num_blocks=120)
    positions, metas = positions_of(meta), [meta] * decoder.num_local_layers
    hidden = run(decoder, caches, meta)
    draws = replace(make_draws(4, [0, 1, 3]), top_k=np.array([3.0, 2.0, 0.0, 4.0]))
    for edits in (None, make_edits(4, 512, 1.0)):
        sift = Sift(make_draws(4, []).noise, np.array([3, 2, 1, 4], np.int32), edits, draws)
        if not decoder.sifts(sift):
            pytest.skip("the kernels of this CPU give all logits")
        finish = decoder.start(positions * 7 % 512, positions, caches, metas, rows_S=None, search=sift)
        _, found = finish()
        logits = decoder.logits(hidden)
        assert found is not None
        assert logits is not None
        if edits is not None:
            edit_in_torch(logits, edits, 0)
        assert torch.equal(found, choice.choose(logits, draws))


@pytest.mark.parametrize("name", [*COMPILED])
@pytest.mark.parametrize("int8_linears", [False, True], ids=["bfloat16", "int8"])
def test_only_wanted_tokens_go_past_the_last_attention(name: str, int8_linears: bool, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    decoder = load(tmp_path / "model", CONFIG | COMPILED[name], build(), int8_linears=int8_linears)
    caches = filled_caches(decoder, 120)
    for spans in [[(1, 1)], *STEPS]:
        meta = make_meta(sorted(spans, key=lambda span: span[0] != 1), block_size=BLOCK_SIZE, num_blocks=120)
        positions, metas = positions_of(meta), [meta] * decoder.num_local_layers
        expected = run(decoder, caches, meta)
        if not decoder.can_start(metas):
            assert int8_linears, "a CPU may multiply no vectors of 8 bits"
            return
        ends = [start - 1 for start in meta.query_starts_host[1:]]
        for rows in ([], [0], ends, ends[1:], [*range(1, len(expected), 3)], [*range(len(expected))]):
            rows_S = torch.tensor(rows, dtype=torch.int64)
            search = Search(None) if decoder.finds_largest else None
            finish = decoder.start(positions * 7 % 512, positions, caches, metas, rows_S=rows_S, search=search)
            hidden, found = finish()
            assert torch.equal(hidden, expected[rows_S])
            if found is not None:
                assert len(found) == len(rows)
                assert not rows or torch.equal(found, decoder.find(hidden, Search(None), IN_TORCH))
        assert torch.equal(run(decoder, caches, meta), expected)


class TwoBegun:
    """Two models on two threads, of which the first has begun a step; what both give by themselves."""

    def __init__(self, folder: Path, num_tokens: tuple[int, int] = (90, 90)) -> None:
        torch.set_num_threads(2)
        self.models = [load(folder, CONFIG, build()) for _ in range(2)]
        self.caches = [filled_caches(model, 120) for model in self.models]
        self.metas = [make_meta([(num, num)], block_size=BLOCK_SIZE, num_blocks=120) for num in num_tokens]
        self.expected = [self.run(index) for index in range(2)]
        self.finish = self.begin()

    def run(self, index: int) -> Tensor:
        return run(self.models[index], self.caches[index], self.metas[index])

    def begin(self) -> Callable[[], tuple[Tensor, Tensor | None]]:
        positions, metas = positions_of(self.metas[0]), [self.metas[0]] * self.models[0].num_local_layers
        assert self.models[0].can_start(metas)
        token_ids = positions * 7 % 512
        return self.models[0].start(token_ids, positions, self.caches[0], metas, rows_S=None, search=None)


@pytest.mark.parametrize("num_tokens", [(90, 90), (90, 700)])
def test_another_step_of_the_thread_waits_for_the_one_that_has_begun(
    num_tokens: tuple[int, int], tmp_path: Path
) -> None:
    """Their scratch memory is the same."""
    both = TwoBegun(tmp_path / "model", num_tokens)
    for _ in range(10):
        assert torch.equal(both.run(1), both.expected[1])
        assert torch.equal(both.finish()[0], both.expected[0])
        both.finish = both.begin()
    assert torch.equal(both.finish()[0], both.expected[0])


def test_a_step_that_is_forgotten_has_ended_and_others_can_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    end = Program.finish
    monkeypatch.setattr(Program, "finish", lambda program, started: ended.append(started) or end(program, started))
    both = TwoBegun(tmp_path / "model")
    both.finish = both.begin()
    assert len(ended) == 1, "the first was forgotten"
    assert torch.equal(both.finish()[0], both.expected[0])
    del both
    gc.collect()
    assert len(ended) == 2


def test_a_step_that_another_thread_ends_leaves_the_first_able_to_begin_others(tmp_path: Path) -> None:
    both = TwoBegun(tmp_path / "model")
    with ThreadPoolExecutor(1) as others:
        assert torch.equal(others.submit(both.finish).result()[0], both.expected[0])
    both.finish = both.begin()
    assert torch.equal(both.finish()[0], both.expected[0])
    assert torch.equal(both.run(1), both.expected[1])


def test_one_thread_begins_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    decoder = load(tmp_path / "model", CONFIG, build())
    meta = make_meta([(5, 40)], block_size=BLOCK_SIZE, num_blocks=40)
    caches = filled_caches(decoder, 120)
    hidden = run(decoder, caches, meta)
    assert compiled(decoder)._program is not None
    assert not decoder.can_start([meta] * decoder.num_local_layers)
    for rows in ([], [4], [0, 2, 3]):
        rows_S = torch.tensor(rows, dtype=torch.int64)
        assert torch.equal(run(decoder, caches, meta, rows_S=rows_S), hidden[rows_S])


def test_new_caches_are_followed(tmp_path: Path) -> None:
    decoder = load(tmp_path / "model", CONFIG, build())
    meta = make_meta([(5, 40)], block_size=BLOCK_SIZE, num_blocks=40)
    first, second = filled_caches(decoder, 120), filled_caches(decoder, 120)
    expected = run(decoder, first, meta)
    for cache in first:
        cache.k_BPKH.fill_(torch.nan)
    assert torch.equal(run(decoder, second, meta), expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 144, "head_dim": 32}, "aten::mm between"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(
    changes: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = load(tmp_path / "model", CONFIG | changes, build())
    meta = make_meta([(5, 40)], block_size=BLOCK_SIZE, num_blocks=40)
    caches = filled_caches(decoder, 40)
    with caplog.at_level(logging.INFO):
        first = run(decoder, caches, meta)
    assert "one operation at a time" in caplog.text
    assert reason in caplog.text
    assert torch.equal(run(decoder, caches, meta), first)


def test_a_part_of_each_head_is_no_run_of_columns() -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    tape, heads = Tape(x, [], []), x.view(3, 4, 32)
    tape.add(heads[:, :2], heads[:, 2:])
    (operation,) = tape.operations
    assert (operation.input.column, operation.second.column, operation.size) == (0, 64, 64)
    for part in (heads[:, :, :16], heads[:, ::2], heads.transpose(1, 2)):
        with pytest.raises(CannotRecordError, match="is no run of columns"):
            tape.read(part)
    for part in (heads.transpose(1, 2), x):
        with pytest.raises(CannotRecordError, match="heads are no runs of columns"):
            tape.read_heads(part)
    assert tape.read_heads(heads[:, 1:, 8:24]).column == 40


def test_what_is_clamped_or_put_together_in_another_way_is_not_recorded() -> None:
    x = torch.zeros(3, 128, dtype=torch.bfloat16)
    tape = Tape(x, [], [])
    tape.clamp(x, -2.0, 2.0)
    for least, most in ((-1.0, 2.0), (None, 2.0), (-2.0, None)):
        with pytest.raises(CannotRecordError, match="numbers clamped to"):
            tape.clamp(x, least, most)
    heads = x.view(3, 4, 32)
    tape.concatenate(torch.cat((heads, heads[..., :16]), -1), (heads, heads[..., :16]), -1)
    first, second = tape.operations[1:]
    assert (first.output.column, second.output.column, second.size, second.out_head_stride) == (0, 32, 16, 48)
    for out, dim in ((torch.cat((x, x), -1), -1), (torch.cat((heads, heads), 1), 1)):
        with pytest.raises(CannotRecordError, match="put together along dim"):
            tape.concatenate(out, (x, x), dim)


def test_another_dtype_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_random_model(folder, CONFIG, 0, torch.float32)
    mesh = Mesh(tp=Axis(size=1, rank=0), pp=Axis(size=1, rank=0))
    decoder = load_decoder(folder, mesh=mesh, device=CPU, dtype=torch.float32, kernels=build(dtype=torch.bfloat16))
    meta = make_meta([(5, 40)], block_size=BLOCK_SIZE, num_blocks=40)
    memories = [torch.zeros(40 * BLOCK_SIZE * decoder.cache_entry.num_elements) for _ in range(3)]
    caches = [decoder.cache_entry.lay_out(memory, BLOCK_SIZE) for memory in memories]
    assert run(decoder, caches, meta).isfinite().all()
    assert compiled(decoder)._program is None


@pytest.mark.parametrize(
    ("changes", "int8_linears", "int8_cache"),
    [
        ({}, False, False),
        ({"head_dim": 48}, False, False),
        ({"head_dim": 64}, False, True),
        ({"intermediate_size": 300}, True, False),
        ({"head_dim": 64}, True, True),
        (COMPILED["mistral"], False, False),
        (COMPILED["mistral"] | {"head_dim": 64, "sliding_window": 270}, True, True),
        (LATENTS, False, False),
        (GROUPED_LATENTS, False, False),
    ],
    ids=[
        "as it is",
        "heads of 48 in a program",
        "int8 cache",
        "int8 linears of any size",
        "int8",
        "window",
        "int8, window",
        "latents",
        "latents, experts in groups",
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_bit_depends_on_how_a_prompt_is_cut(
    changes: dict[str, Any], int8_linears: bool, int8_cache: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    kernels = build(dtype=dtype)
    if not has_dot_products(kernels):
        pytest.skip("this CPU has no dot products")
    if int8_cache and not has_dot_products(kernels, is_int8=True):
        pytest.skip("this CPU has no dot products of 8 bits; chunks are torch's")
    decoder = load(tmp_path / "model", CONFIG | changes, kernels, int8_linears=int8_linears, int8_cache=int8_cache)
    expected = _prefill(decoder, [599, 1])
    for chunks in ([600], [1, 599], [64, 64, 472], [333, 1, 1, 265], [560, *[1] * 40]):
        assert torch.equal(_prefill(decoder, chunks)[-1], expected[-1]), chunks


def _prefill(decoder: Decoder, chunks: Sequence[int]) -> Tensor:
    caches, end, hidden = filled_caches(decoder, 60), 0, torch.empty(0)
    for chunk in chunks:
        end += chunk
        hidden = run(decoder, caches, make_meta([(chunk, end)], block_size=BLOCK_SIZE, num_blocks=60))
    return hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_bit_depends_on_other_sequences(dtype: torch.dtype, tmp_path: Path) -> None:
    kernels = build(dtype=dtype)
    if not has_dot_products(kernels):
        pytest.skip("this CPU has no dot products")
    decoder = load(tmp_path / "model", CONFIG, kernels)
    meta = make_meta([(1, 40 + 9 * row) for row in range(70)], block_size=BLOCK_SIZE, num_blocks=2000)
    together = run(decoder, filled_caches(decoder, 2000), meta)
    for row in (0, 17, 69):
        alone = run(decoder, filled_caches(decoder, 2000), meta_of_one(meta, row))
        assert torch.equal(alone[0], together[row])
