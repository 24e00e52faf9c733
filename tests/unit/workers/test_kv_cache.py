"""How many blocks a rank can hold, and what they are made of."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parallel.decoder import Decoder
from parallel.device.base import Device
from parallel.device.cpu import CpuDevice
from parallel.kernels.base import CacheEntry, LayerCache
from parallel.layer_groups import group_layers
from parallel.mesh import Mesh
from workers.config import CacheConfig
from workers.errors import EngineConfigError
from workers.kv_cache import (
    allocate_planes,
    block_bytes,
    block_rows,
    choose_num_blocks,
    lay_out_caches,
    lazy_zeros,
    num_host_blocks,
)

# 2 (k, v) * 3 layers * 16 tokens * 2 heads * 8 dims * 4 bytes
BLOCK_BYTES = 2 * 3 * 16 * 2 * 8 * 4


HEADS = CacheEntry(num_heads=2, head_dim=8, dtype=torch.float32)


def decoder(entry: CacheEntry = HEADS, *, windows: tuple[int | None, ...] = (None, None, None)) -> Decoder:
    """As much of a decoder as the cache looks at."""
    fields: dict[str, Any] = {
        "layer_groups": group_layers(windows, stages=[range(len(windows))], max_context=1000),
        "layer_indices": range(len(windows)),
        "mesh": Mesh.single(),
        "cache_entry": entry,
        "device": torch.device("cpu"),
    }
    return cast(Decoder, SimpleNamespace(**fields))


class FakeGpu:
    """Holds 1,000,000 bytes: 200,000 of weights, 50,000 of others; a step takes 150,000 for a moment.

    While the weights were loaded they took twice as much.
    """

    torch_device = torch.device("cuda")
    collective_backend = "nccl"
    works_by_itself = True

    def __init__(self) -> None:
        self._peak = 400_000

    def default_dtype(self, checkpoint_dtype: torch.dtype) -> torch.dtype:
        return checkpoint_dtype

    def total_memory_bytes(self) -> int:
        return 1_000_000

    def free_memory_bytes(self) -> int:
        return 750_000

    def peak_memory_bytes(self) -> int:
        return self._peak

    def reset_peak_memory(self) -> None:
        self._peak = 200_000

    def synchronize(self) -> None: ...

    def run_step(self) -> None:
        self._peak = max(self._peak, 350_000)


def no_profile() -> None:
    raise AssertionError("no profiling run is needed")


def allocate_caches(decoder: Decoder, *, num_blocks: int) -> list[LayerCache]:
    planes = allocate_planes(decoder, num_blocks=num_blocks, block_size=16)
    return lay_out_caches(decoder, planes, block_size=16)


def choose(config: CacheConfig, device: Device | None = None) -> int:
    return choose_num_blocks(config, decoder(), device or CpuDevice(), no_profile)


def test_block_bytes_count_keys_and_values_of_all_layers() -> None:
    assert block_bytes(decoder(), 16) == BLOCK_BYTES


def test_a_cache_in_8_bits_has_room_for_almost_twice_as_many_tokens() -> None:
    """Each head of a token takes 4 bytes of scale besides: 128 / 68 of 64 numbers in 16 bits."""
    plain, integers = (
        decoder(CacheEntry(num_heads=2, head_dim=64, dtype=dtype)) for dtype in (torch.bfloat16, torch.int8)
    )
    assert block_bytes(plain, 16) == 2 * 3 * 16 * 2 * 128
    assert block_bytes(integers, 16) == 2 * 3 * 16 * 2 * 68
    config = CacheConfig(cpu_cache_bytes=1 << 20)
    numbers = [choose_num_blocks(config, each, CpuDevice(), no_profile) for each in (plain, integers)]
    assert numbers == [42, 80]


def test_blocks_in_8_bits_are_copied_whole() -> None:
    integers = decoder(CacheEntry(num_heads=2, head_dim=8, dtype=torch.int8))
    planes = allocate_planes(integers, num_blocks=5, block_size=16)
    caches = lay_out_caches(integers, planes, block_size=16)
    rows = block_rows(integers, planes, num_blocks=5)
    assert rows.shape == (6, 5, 16 * 2 * 12)
    for cache in caches:
        for half in cache:
            assert half is not None
            half.copy_(torch.randint(1, 100, half.shape).to(half.dtype))
    wanted = [[half[3].clone() for half in cache if half is not None] for cache in caches]
    rows[:, 1] = rows[:, 3]
    for cache, of_block in zip(caches, wanted, strict=True):
        for half, expected in zip(cache, of_block, strict=True):
            assert half is not None
            assert torch.equal(half[1], expected)


def test_layers_of_different_groups_share_planes() -> None:
    alternating = decoder(windows=(None, 8, None, 8, None))
    caches = allocate_caches(alternating, num_blocks=5)

    assert block_bytes(alternating, 16) == BLOCK_BYTES
    places = [cache.k_BPKH.data_ptr() for cache in caches]
    assert places[0] == places[1] != places[2] == places[3] != places[4]
    assert len({*places, *(cache.v_BPKH.data_ptr() for cache in caches)}) == 6


def test_a_given_number_is_taken() -> None:
    assert choose(CacheConfig(num_blocks=77)) == 77


def test_a_cpu_fills_its_cache_bytes() -> None:
    assert choose(CacheConfig(cpu_cache_bytes=10 * BLOCK_BYTES + 5)) == 10


@pytest.mark.parametrize("rank", [0, 1])
def test_every_stage_has_the_host_slots_that_the_largest_has_room_for(rank: int) -> None:
    stage = decoder()
    groups = group_layers((None, None, None), stages=[range(1), range(1, 3)], max_context=1000)
    vars(stage).update(layer_groups=groups, mesh=SimpleNamespace(pp=SimpleNamespace(rank=rank)))
    bytes_of_largest = BLOCK_BYTES // 3 * 2
    assert num_host_blocks(CacheConfig(host_cache_bytes=10 * bytes_of_largest + 5), stage) == 10
    with pytest.raises(EngineConfigError, match=f"allowed: 0, or a block of {bytes_of_largest}"):
        num_host_blocks(CacheConfig(host_cache_bytes=bytes_of_largest - 1), stage)


def test_a_gpu_fills_what_the_largest_step_leaves() -> None:
    gpu = FakeGpu()
    num_blocks = choose_num_blocks(CacheConfig(memory_fraction=0.9), decoder(), gpu, gpu.run_step)
    assert num_blocks == (900_000 - (250_000 + 150_000)) // BLOCK_BYTES


def test_recorded_steps_leave_less_of_a_gpu() -> None:
    gpu = FakeGpu()
    config = CacheConfig(memory_fraction=0.9)
    num_blocks = choose_num_blocks(config, decoder(), gpu, gpu.run_step, lambda: 100_000)
    assert num_blocks == (900_000 - (250_000 + 150_000) - 100_000) // BLOCK_BYTES


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(EngineConfigError, match="room for 1 blocks of 6144 bytes; allowed: at least 2"):
        choose(CacheConfig(cpu_cache_bytes=2 * BLOCK_BYTES - 1))
    assert choose(CacheConfig(cpu_cache_bytes=2 * BLOCK_BYTES)) == 2


def test_caches_are_zeros_of_the_fixed_layout() -> None:
    caches = allocate_caches(decoder(), num_blocks=5)
    assert len(caches) == 3
    for cache in caches:
        for tensor in cache[:2]:
            assert tensor.shape == (5, 16, 2, 8)
            assert tensor.is_contiguous()
            assert not tensor.any()
    caches[0].k_BPKH.fill_(1.0)
    assert not caches[0].v_BPKH.any()


def test_keys_that_are_values_are_stored_once() -> None:
    latents = decoder(CacheEntry(num_heads=1, head_dim=8, dtype=torch.float32, is_key_value=True))
    assert block_bytes(latents, 16) == 3 * 16 * 8 * 4
    keys, values = allocate_caches(latents, num_blocks=5)[0][:2]
    assert keys.shape == (5, 16, 1, 8)
    keys.copy_(torch.rand(keys.shape))
    assert torch.equal(values, keys)


@pytest.mark.parametrize("num_elements", [2**62, 2**64])
def test_memory_that_no_host_has_is_a_wrong_setting(num_elements: int) -> None:
    with pytest.raises(EngineConfigError, match=rf"asks for {2 * num_elements} bytes of this host .* fewer than"):
        lazy_zeros((num_elements,), torch.bfloat16)


@pytest.mark.parametrize("cpu_cache_bytes", [0, -5])
def test_no_cache_at_all_is_a_wrong_setting(cpu_cache_bytes: int) -> None:
    with pytest.raises(EngineConfigError, match=f"cpu_cache_bytes is {cpu_cache_bytes}; allowed: at least 1"):
        CacheConfig(cpu_cache_bytes=cpu_cache_bytes)
