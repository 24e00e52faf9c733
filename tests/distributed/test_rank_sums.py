"""Sums in memory that ranks share, alone and within the layers' one call; what a rank means that does not come."""

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from helpers.compiled_decoders import (
    BLOCK_SIZE,
    COMPILED,
    CONFIG,
    STEPS,
    EagerKernels,
    build,
    compiled,
    filled_caches,
    has_dot_products,
    load,
    run,
)
from helpers.gloo_pool import GlooPool
from helpers.paged_layout import make_meta
from torch import Tensor

from parallel.collectives import all_reduce, share_memory
from parallel.errors import CollectiveError
from parallel.kernels.cpu_native import NativeCpuKernels
from parallel.kernels.native.rank_sums import NativeAllReduce
from parallel.kernels.reference import ReferenceKernels
from parallel.local_exchange import LocalExchange
from parallel.mesh import Mesh
from parallel.random_model import write_random_model

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SLOT_BYTES = 512 << 10
_LARGE = CONFIG | {"hidden_size": 256, "intermediate_size": 768}
"""Of which a half still is packed."""
MODELS: dict[str, dict[str, Any]] = {
    **{name: COMPILED[name] for name in ("llama", "mixtral", "tied")},
    "int8": {},
    "gpt-neox": COMPILED["gpt-neox"] | {"num_attention_heads": 4},
    "opt": COMPILED["opt"] | {"num_attention_heads": 4, "ffn_dim": 768},
    "gpt-oss": COMPILED["gpt-oss"] | {"num_attention_heads": 4},
    "olmo2": COMPILED["olmo2"] | {"num_attention_heads": 4},
    "deepseek-v2": COMPILED["deepseek-v2"] | {"moe_intermediate_size": 192},
}


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    """Compile, which may take longer than ranks have; or skip."""
    for dtype in DTYPES:
        build(dtype=dtype)


def _values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _connect(mesh: Mesh, dtype: torch.dtype) -> NativeAllReduce:
    share_memory(mesh.tp, build(dtype=dtype))
    assert isinstance(mesh.tp.one_shot, NativeAllReduce)
    return mesh.tp.one_shot


def _sums(mesh: Mesh, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    _connect(mesh, dtype)
    return [all_reduce(_values(mesh.tp.rank, numel, dtype), mesh.tp) for numel in sizes]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_made_in_the_order_of_ranks_and_rounded_once(
    gloo_pool: GlooPool, size: int, dtype: torch.dtype
) -> None:
    slot = SLOT_BYTES // dtype.itemsize
    sizes = [1, 7, 4096, 100_000, slot, slot + 5, 3 * slot + 1]
    for results in gloo_pool.run(_sums, sizes, dtype, tp=size):
        for numel, result in zip(sizes, results, strict=True):
            expected = torch.zeros(numel)
            for rank in range(size):
                expected += _values(rank, numel, dtype).float()
            assert torch.equal(result, expected.to(dtype))


def _sum_often(mesh: Mesh) -> int:
    _connect(mesh, torch.bfloat16)
    of_this_rank, numel_of = random.Random(mesh.tp.rank), random.Random(7)
    for number in range(400):
        numel = numel_of.choice([1, 64, 3000, 300_000])
        if of_this_rank.random() < 0.05:
            torch.randn(200_000).sort()  # now this rank is late, now another
        total = all_reduce(torch.full((numel,), float(number + mesh.tp.rank)), mesh.tp)
        assert torch.equal(total, torch.full((numel,), 3.0 * number + 3.0))
    return mesh.tp.counts["all_reduce"]


def test_no_rank_overtakes_another(gloo_pool: GlooPool) -> None:
    assert gloo_pool.run(_sum_often, tp=3) == [400] * 3


def _build_beside_a_rank_that_dies(mesh: Mesh) -> str:
    if mesh.tp.rank == 1:
        os._exit(1)
    try:
        share_memory(mesh.tp, build())
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_rank_that_dies_before_memory_is_shared_is_a_collective_error(gloo_pool: GlooPool) -> None:
    messages = gloo_pool.run(_build_beside_a_rank_that_dies, tp=2, may_die=True)
    assert messages[0].startswith("sharing memory failed on rank 0 of 2")


def _sum_without(mesh: Mesh, without: int) -> tuple[bool, Tensor]:
    share_memory(mesh.tp, ReferenceKernels() if mesh.tp.rank == without else build())
    return mesh.tp.one_shot is None, all_reduce(torch.ones(3), mesh.tp)


@pytest.mark.parametrize("without", [0, 1])
def test_memory_is_shared_by_all_ranks_or_none(gloo_pool: GlooPool, without: int) -> None:
    for is_none, total in gloo_pool.run(_sum_without, without, tp=2):
        assert is_none
        assert torch.equal(total, torch.full((3,), 2.0))


def _sum_without_memory(mesh: Mesh, step: str) -> tuple[bool, Tensor]:
    with patch.object(os, step, side_effect=OSError("no memory")):
        share_memory(mesh.tp, build())
    return mesh.tp.one_shot is None, all_reduce(torch.ones(3), mesh.tp)


@pytest.mark.parametrize("step", ["memfd_create", "truncate"])
def test_system_without_memory_to_share_adds_up_by_sockets(gloo_pool: GlooPool, step: str) -> None:
    for is_none, total in gloo_pool.run(_sum_without_memory, step, tp=2):
        assert is_none
        assert torch.equal(total, torch.full((3,), 2.0))


def _message(mesh: Mesh, numel: int) -> str:
    try:
        all_reduce(torch.ones(numel), mesh.tp)
    except CollectiveError as error:
        return str(error)
    return "no error"


def _die_before_the_second(mesh: Mesh) -> str:
    _connect(mesh, torch.bfloat16)
    all_reduce(torch.ones(3), mesh.tp)
    if mesh.tp.rank == 1:
        os._exit(1)
    return _message(mesh, 3)


def test_dead_rank_is_a_collective_error(gloo_pool: GlooPool) -> None:
    messages = gloo_pool.run(_die_before_the_second, tp=2, may_die=True)
    assert messages[0].startswith("all_reduce failed on rank 0 of 2")
    assert "another rank is gone" in messages[0]


def _wait_for_a_late_rank(mesh: Mesh) -> str:
    assert mesh.tp.group is not None
    mesh.tp.local = LocalExchange.connect(mesh.tp.group, mesh.tp.rank, 2, timeout_s=0.05)
    _connect(mesh, torch.bfloat16)
    message = _message(mesh, 3) if mesh.tp.rank == 0 else ""
    dist.barrier()
    return message


def test_late_rank_is_a_collective_error(gloo_pool: GlooPool) -> None:
    assert "another rank is late" in gloo_pool.run(_wait_for_a_late_rank, tp=2)[0]


def _add_up_another_size(mesh: Mesh) -> str:
    _connect(mesh, torch.bfloat16)
    return _message(mesh, 3 + mesh.tp.rank)


def test_ranks_that_add_up_different_tensors_are_told(gloo_pool: GlooPool) -> None:
    for message in gloo_pool.run(_add_up_another_size, tp=2):
        assert "another rank adds up a tensor of another size" in message


def _run_model(
    mesh: Mesh, kind: type[NativeCpuKernels], folder: Path, dtype: torch.dtype, num_threads: int, is_int8: bool
) -> tuple[list[Tensor], int, bool]:
    """Hidden states of some steps; all-reduces; whether the layers are one call."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        decoder = load(folder, {}, build(kind, dtype), mesh=mesh, int8_linears=is_int8)
        caches = filled_caches(decoder, 120)
        metas = [
            make_meta(sorted(spans, key=lambda span: span[0] != 1), block_size=BLOCK_SIZE, num_blocks=120)
            for spans in STEPS
        ]
        hidden = []
        for meta in metas:
            hidden.append(of_all := run(decoder, caches, meta))
            for rows in ([], [len(of_all) - 1], [*range(0, len(of_all), 3)]):
                rows_S = torch.tensor(rows, dtype=torch.int64)
                assert torch.equal(run(decoder, caches, meta, rows_S=rows_S), of_all[rows_S])
    finally:
        torch.set_num_threads(before)
    is_compiled = kind is NativeCpuKernels and compiled(decoder)._program is not None
    assert mesh.tp.wait_s > 0
    return hidden, mesh.tp.counts["all_reduce"], is_compiled


@pytest.mark.parametrize(
    ("name", "dtype", "num_threads"),
    [
        *((name, torch.bfloat16, 1) for name in MODELS),
        *(("llama", dtype, 2) for dtype in DTYPES),
        ("mixtral", torch.bfloat16, 2),
        *(("olmo2", dtype, 2) for dtype in DTYPES),
        ("int8", torch.float32, 1),
    ],
)
def test_split_layers_are_one_call_with_the_same_bits(
    gloo_pool: GlooPool, name: str, dtype: torch.dtype, num_threads: int, tmp_path: Path
) -> None:
    folder, is_int8 = tmp_path / "model", name == "int8"
    write_random_model(folder, _LARGE | MODELS[name], 0, dtype)
    if is_int8 and not has_dot_products(build(), is_int8=True):
        pytest.skip("this CPU has no dot products of 8 bits")
    fast, eager = (
        gloo_pool.run(_run_model, kind, folder, dtype, num_threads, is_int8, tp=2)
        for kind in (NativeCpuKernels, EagerKernels)
    )
    first, num_sums, _ = fast[0]
    for (hidden, count, is_compiled), (expected, expected_count, _) in zip(fast, eager, strict=True):
        assert is_compiled
        assert count == expected_count == num_sums
        for one, other, of_first in zip(hidden, expected, first, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, of_first)


def _prefill(mesh: Mesh, folder: Path, dtype: torch.dtype, cuts: list[list[int]]) -> list[Tensor]:
    """Hidden states of a prompt's last token, for each way to cut the prompt."""
    decoder, last = load(folder, {}, build(dtype=dtype), mesh=mesh), []
    for chunks in cuts:
        caches, end, hidden = filled_caches(decoder, 60), 0, torch.empty(0)
        for chunk in chunks:
            end += chunk
            hidden = run(decoder, caches, make_meta([(chunk, end)], block_size=BLOCK_SIZE, num_blocks=60))
        last.append(hidden[-1])
    assert compiled(decoder)._program is not None
    return last


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_how_a_prompt_is_cut_over_four_ranks(
    gloo_pool: GlooPool, dtype: torch.dtype, tmp_path: Path
) -> None:
    kernels = build(dtype=dtype)
    if not has_dot_products(kernels):
        pytest.skip("this CPU has no dot products")
    write_random_model(tmp_path / "model", _LARGE | {"head_dim": 64}, 0, dtype)
    cuts = [[599, 1], [600], [1, 599], [64, 64, 472], [333, 1, 1, 265]]
    for last in gloo_pool.run(_prefill, tmp_path / "model", dtype, cuts, tp=4):
        assert all(torch.equal(hidden, last[0]) for hidden in last)


def _die_within_a_step(mesh: Mesh, folder: Path) -> str:
    decoder = load(folder, {}, build(), mesh=mesh)
    caches = filled_caches(decoder, 120)
    meta = make_meta([(5, 40)], block_size=BLOCK_SIZE, num_blocks=120)
    run(decoder, caches, meta)
    assert compiled(decoder)._program is not None
    decoder._embedding = None
    x = torch.zeros(5, _LARGE["hidden_size"], dtype=torch.bfloat16)
    if mesh.tp.rank == 1:
        os._exit(1)
    try:
        decoder(x, torch.arange(35, 40), caches, [meta] * decoder.num_local_layers)
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_rank_that_dies_within_a_step_fails_it(gloo_pool: GlooPool, tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", _LARGE, 0, torch.bfloat16)
    messages = gloo_pool.run(_die_within_a_step, tmp_path / "model", tp=2, may_die=True)
    assert messages[0].startswith("all_reduce failed on rank 0 of 2")


def _record_over_sums_of_another(mesh: Mesh, folder: Path) -> bool:
    first = load(folder, {}, build(), mesh=mesh)
    load(folder, {}, build(), mesh=replace(mesh))
    run(first, filled_caches(first, 120), make_meta([(5, 40)], block_size=BLOCK_SIZE, num_blocks=120))
    return compiled(first)._program is None


def test_sums_of_another_model_are_not_recorded(gloo_pool: GlooPool, tmp_path: Path) -> None:
    write_random_model(tmp_path / "model", _LARGE, 0, torch.bfloat16)
    assert gloo_pool.run(_record_over_sums_of_another, tmp_path / "model", tp=2) == [True, True]
