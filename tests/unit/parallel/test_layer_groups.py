"""Layers fall into groups whose blocks have one size, on every stage."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from helpers.paged_layout import make_meta
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.checkpoint import load_decoder
from parallel.kernels.base import AttentionMeta, AttentionParams, LayerCache
from parallel.kernels.reference import ReferenceKernels
from parallel.layer_groups import LayerGroups, group_layers
from parallel.mesh import Mesh
from parallel.random_model import write_random_model
from parallel.shard import split_layers


def alternate(pattern: str, num_layers: int, window: int) -> list[int | None]:
    """One window per layer: `s` slides, `f` sees everything."""
    return [window if pattern[i % len(pattern)] == "s" else None for i in range(num_layers)]


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("num_stages", [1, 3])
def test_layers_of_one_kind_are_one_group(window: int | None, num_stages: int) -> None:
    groups = group_layers([window] * 32, stages=split_layers(32, num_stages), max_context=32768)
    assert groups.windows == (window,)
    assert set(groups.group_of_layer) == {0}
    assert groups.num_planes == ((32,) if num_stages == 1 else (11, 11, 10))
    assert groups.plane_of_layer[:10] == tuple(range(10))


def test_window_as_long_as_the_context_is_none() -> None:
    groups = group_layers([64, None, 64], stages=[range(3)], max_context=64)
    assert groups.windows == (None,)


@pytest.mark.parametrize(("max_context", "window"), [(64, None), (65, 64)])
def test_attention_is_told_of_windows_that_are_shorter_than_the_context(
    tmp_path: Path, max_context: int, window: int | None
) -> None:
    """Others would keep out what attends without them."""
    config = {
        "model_type": "mistral",
        "sliding_window": 64,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
    }
    write_random_model(tmp_path, config, 0, torch.float32)
    told: list[int | None] = []

    class NotingKernels(ReferenceKernels):
        def attention(self, q_TNH: Tensor, cache: LayerCache, meta: AttentionMeta, params: AttentionParams) -> Tensor:
            told.append(params.sliding_window)
            return super().attention(q_TNH, cache, meta, params)

    decoder = load_decoder(
        tmp_path,
        mesh=Mesh.single(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernels=NotingKernels(),
        max_context=max_context,
    )
    meta = make_meta([(3, 3)], block_size=16, num_blocks=2)
    cache = decoder.cache_entry.lay_out(torch.zeros(2 * 16 * decoder.cache_entry.num_elements), 16)
    with torch.inference_mode():
        decoder(torch.arange(3), torch.arange(3), [cache], [meta])
    assert told == [window]


@pytest.mark.parametrize(
    ("name", "windows", "max_context", "expected", "num_planes"),
    [
        ("gemma 2, 27b", alternate("sf", 46, 4096), 8192, {None: 1, 4096: 1}, 23),
        ("gemma 3, 4b", alternate("sssssf", 34, 1024), 131072, {None: 1, 1024: 6}, 5),
        ("gemma 3, 27b", alternate("sssssf", 62, 1024), 131072, {None: 1, 1024: 6}, 10),
        ("command r7b", alternate("sssf", 32, 4096), 131072, {None: 1, 4096: 3}, 8),
        ("gpt-oss, 20b", alternate("sf", 24, 128), 131072, {None: 1, 128: 1}, 12),
        ("upper layers slide", [None] * 28 + [4096] * 20, 32768, {None: 1, 4096: 1}, 28),
    ],
)
def test_layers_of_published_models_make_few_groups_of_equal_size(
    name: str, windows: list[int | None], max_context: int, expected: dict[int | None, int], num_planes: int
) -> None:
    groups = group_layers(windows, stages=[range(len(windows))], max_context=max_context)
    assert Counter(groups.windows) == expected
    assert groups.num_planes == (num_planes,)


def test_many_kinds_have_a_group_each_shortest_windows_first() -> None:
    groups = group_layers([*range(90, 0, -10), None], stages=[range(10)], max_context=100)
    assert groups.windows == (None, *range(10, 100, 10))


def _check(groups: LayerGroups, windows: list[int | None], stages: list[range], max_context: int) -> None:
    for layers, num_planes in zip(stages, groups.num_planes, strict=True):
        places = [(groups.group_of_layer[i], groups.plane_of_layer[i]) for i in layers]
        assert len(set(places)) == len(places), "two layers of a stage at one place"
        assert all(plane < num_planes for _, plane in places)
    for i, window in enumerate(windows):
        seen = groups.windows[groups.group_of_layer[i]]
        assert seen == window or (seen is None and window is not None and window >= max_context)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    windows=st.lists(st.sampled_from([None, 8, 8, 32, 100]), min_size=1, max_size=24),
    cuts=st.sets(st.integers(1, 23), max_size=3),
    max_context=st.sampled_from([64, 1000]),
)
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(
    windows: list[int | None], cuts: set[int], max_context: int
) -> None:
    ends = [*sorted(cut for cut in cuts if cut < len(windows)), len(windows)]
    stages = [range(start, end) for start, end in pairwise([0, *ends])]
    groups = group_layers(windows, stages=stages, max_context=max_context)
    _check(groups, windows, stages, max_context)
    assert len(groups.windows) <= 8
    assert set(groups.group_of_layer) == set(range(len(groups.windows))), "a group without layers"
