"""Steps recorded in pieces, with attention called between them: on a CPU, by a tape of torch's operations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged_layout import make_meta
from helpers.taped_graphs import TapedKernels, record_operations
from helpers.tiny_models import tiny_model
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.decoder import Decoder
from parallel.errors import DeviceError
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.cuda_buckets import StepBucket
from parallel.kernels.cuda_graphs import GraphedLayers, Recordable, Recording
from parallel.kernels.cuda_pieces import CutAttention
from parallel.kernels.inductor import InductorKernels
from parallel.kernels.reference import ReferenceKernels
from parallel.mesh import Axis, Mesh

CPU = torch.device("cpu")
P, NUM_BLOCKS = 16, 60
MODELS = ["llama-bias", "mistral-window", "qwen3", "gemma2", "gptj", "bloom", "gpt_oss", "qwen2_moe", "deepseek_v3"]
STEPS = [
    [(1, 4), (20, 30)],
    [(1, 5), (3, 33), (5, 5)],  # fewer tokens of the same bucket, more sequences
    [(1, 6), (1, 34), (1, 6)],
    [(70, 70)],
    [(1, 7), (1, 35), (17, 17)],
    [(1, 8), (2, 72)],
]
"""(query, context) of the sequences of each step."""


def load(name: str, kernels: Any, *, mesh: Mesh | None = None, int8_linears: bool = False) -> Decoder:
    folder, mesh = tiny_model(name), mesh or Mesh.single()
    return load_decoder(folder, mesh=mesh, device=CPU, dtype=torch.float32, kernels=kernels, int8_linears=int8_linears)


def new_caches(decoder: Decoder) -> list[LayerCache]:
    memory = torch.randn(NUM_BLOCKS * P * decoder.cache_entry.num_elements, generator=torch.Generator().manual_seed(1))
    return [decoder.cache_entry.lay_out(memory.clone(), P) for _ in range(decoder.num_local_layers)]


def group_metas(decoder: Decoder, spans: list[tuple[int, int]]) -> list[AttentionMeta]:
    """One for each layer; groups of layers have block tables of their own."""
    groups = decoder.layer_groups.group_of_layer
    metas = [make_meta(spans, block_size=P, num_blocks=NUM_BLOCKS, seed=seed) for seed in range(max(groups) + 1)]
    return [metas[groups[index]] for index in decoder.layer_indices]


@torch.inference_mode()
def hidden_states(decoder: Decoder, caches: list[LayerCache]) -> list[Tensor]:
    results = []
    for spans in STEPS:
        positions = torch.cat([torch.arange(context - query, context) for query, context in spans])
        results.append(decoder(positions * 7 % 100, positions, caches, group_metas(decoder, spans)).clone())
    return results


def check(taped: Decoder, called: Decoder) -> None:
    """Hidden states and caches, twice with new caches. Block 0 is where rows without a token are written."""
    for _ in range(2):
        taped_caches, called_caches = new_caches(taped), new_caches(called)
        results = zip(hidden_states(taped, taped_caches), hidden_states(called, called_caches), strict=True)
        for one, other in results:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for mine, its in zip(taped_caches, called_caches, strict=True):
            for one, other in zip(mine[:2], its[:2], strict=True):
                torch.testing.assert_close(one[1:], other[1:], rtol=1e-4, atol=1e-4)
        assert isinstance(taped._run, GraphedLayers)
        assert list(taped._run._graphs) == [StepBucket(32, 0), StepBucket(16, 0), StepBucket(128, 0)]


@pytest.mark.parametrize("name", MODELS)
def test_pieces_with_attention_between_are_the_layers(name: str) -> None:
    check(load(name, TapedKernels()), load(name, ReferenceKernels()))


def test_rows_in_8_bits_do_not_see_what_fills_up_a_step() -> None:
    check(
        load("llama-bias", TapedKernels(), int8_linears=True), load("llama-bias", ReferenceKernels(), int8_linears=True)
    )


def test_decode_steps_are_in_pieces_where_attention_cannot_be_recorded() -> None:
    check(load("llama-bias", TapedKernels(max_num_seqs=8)), load("llama-bias", ReferenceKernels()))


def test_what_a_stage_sends_outlives_its_next_step() -> None:
    """It may still be on its way then."""
    stage = load("llama-bias", TapedKernels(), mesh=Mesh(tp=Axis(), pp=Axis(size=2)))
    caches, positions = new_caches(stage), torch.arange(9)
    with torch.inference_mode():
        first = stage(positions, positions, caches, group_metas(stage, [(9, 9)]))
        kept = first.clone()
        stage(positions + 1, positions, caches, group_metas(stage, [(9, 9)]))
    assert torch.equal(first, kept)


def test_compiled_layers_are_cut_at_the_same_places(tmp_path: Path) -> None:
    kernels = InductorKernels(TapedKernels(), CPU, tmp_path, lambda module, _: module)
    check(load("llama-bias", kernels), load("llama-bias", ReferenceKernels()))


def test_there_is_a_piece_more_than_layers_and_attention_sees_the_rows_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_rows: list[int] = []
    attend = ReferenceKernels.attention

    def note(self: ReferenceKernels, q_TNH: Tensor, *args: Any) -> Tensor:
        num_rows.append(len(q_TNH))
        return attend(self, q_TNH, *args)

    monkeypatch.setattr(ReferenceKernels, "attention", note)
    decoder = load("llama-bias", TapedKernels())
    num_layers = decoder.num_local_layers
    hidden_states(decoder, new_caches(decoder))
    recorded = (0, 1, 3)  # steps that were run before their recording
    wanted = [
        num_rows
        for step, spans in enumerate(STEPS)
        for num_rows in [sum(query for query, _ in spans)] * num_layers * (2 if step in recorded else 1)
    ]
    assert num_rows == wanted


def test_layers_and_recordings_share_the_memory_of_the_largest() -> None:
    """What is made during a recording would lie in its memory."""
    attention = CutAttention(ReferenceKernels().attention)
    cache = LayerCache(*torch.zeros(2, NUM_BLOCKS, P, 1, 8))
    meta = make_meta([(32, 32)], block_size=P, num_blocks=NUM_BLOCKS)
    with attention.cutting(lambda _: None, tuple):
        results = [
            attention(torch.zeros(num_rows, num_heads, 8), cache, meta, AttentionParams(scale=1.0))
            for num_rows, num_heads in ((32, 4), (32, 4), (16, 4), (16, 2))
        ]
    first, *rest = (result.data_ptr() for result in results)
    assert [place == first for place in rest] == [True, True, False]
    assert [result.shape for result in results[1:]] == [(32, 4, 8), (16, 4, 8), (16, 2, 8)]


def test_larger_steps_run_as_they_are() -> None:
    recorded = []

    def record(run: Recordable, memory: object) -> Recording:
        recorded.append(1)
        return record_operations(run, memory)

    layers = GraphedLayers(lambda x, *_: (x, x), record, attention=CutAttention(ReferenceKernels().attention))
    caches = [LayerCache(*torch.zeros(2, NUM_BLOCKS, P, 1, 8))]
    for num_tokens, num_recorded in ((513, 0), (512, 1)):
        layers(
            torch.zeros(num_tokens, 8),
            [],
            caches,
            [make_meta([(num_tokens, num_tokens)], block_size=P, num_blocks=NUM_BLOCKS)],
        )
        assert len(recorded) == num_recorded


def test_a_failure_of_layers_in_pieces_ends_the_step() -> None:
    """There is no other way to record them."""
    failures = iter([DeviceError("attention has no memory")])

    def run(*_: object) -> Any:
        raise next(failures)

    layers = GraphedLayers(run, record_operations, attention=CutAttention(ReferenceKernels().attention))
    caches = [LayerCache(*torch.zeros(2, NUM_BLOCKS, P, 1, 8))]
    with pytest.raises(DeviceError, match="no memory"):
        layers(torch.zeros(20, 8), [], caches, [make_meta([(20, 20)], block_size=P, num_blocks=NUM_BLOCKS)])
    assert layers.records_whole_steps, "those are not refused"
