"""The tensors of the paged KV cache: how many blocks fit, and their memory. Owners are block_pool.py's."""

import logging
import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.decoder import Decoder
from parallel.device.base import Device
from parallel.host_memory import use_huge_pages
from parallel.kernels.base import LayerCache
from workers.config import CacheConfig
from workers.errors import EngineConfigError

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2


def block_bytes(decoder: Decoder, block_size: int) -> int:
    """Return what one block takes on this rank, in all its planes: as much as one layer in each."""
    entry = decoder.cache_entry
    return _num_planes(decoder) * block_size * entry.num_elements * entry.dtype.itemsize


def num_blocks_within(*, total_bytes: int, memory_fraction: float, peak_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit beside the peak of a step: floor((fraction * total - peak) / block), at least 0."""
    return max(0, math.floor((memory_fraction * total_bytes - peak_bytes) / block_bytes))


def choose_num_blocks(
    config: CacheConfig,
    decoder: Decoder,
    device: Device,
    profile: Callable[[], None],
    graph_bytes: Callable[[], int] = lambda: 0,
) -> int:
    """Return how many blocks this rank can hold.

    Args:
        config: says the number, or how much memory the cache may have.
        decoder: this rank's, loaded.
        device: this rank's.
        profile: runs the largest step there can be, without a cache to speak of; called on CUDA only, where every
            rank of the group must then call it.
        graph_bytes: what recorded steps will take besides; called after `profile`, and like it.

    Raises:
        EngineConfigError: fewer than MIN_BLOCKS fit.
    """
    size = block_bytes(decoder, config.block_size)
    if config.num_blocks is not None:
        return config.num_blocks
    if device.torch_device.type == "cpu":
        num_blocks = config.cpu_cache_bytes // size
        logger.info("KV cache: %d blocks of %d bytes in %d bytes", num_blocks, size, config.cpu_cache_bytes)
    else:
        total, peak = device.total_memory_bytes(), _peak_bytes(device, profile)
        graphs = graph_bytes()
        peak += graphs
        fraction = config.memory_fraction
        num_blocks = num_blocks_within(total_bytes=total, memory_fraction=fraction, peak_bytes=peak, block_bytes=size)
        logger.info(
            "KV cache: %d blocks of %d bytes in %.2f of %d bytes, beside %d of weights, activations and graphs (%d)",
            *(num_blocks, size, fraction, total, peak, graphs),
        )
    if num_blocks < MIN_BLOCKS:
        raise EngineConfigError(
            f"the KV cache has room for {num_blocks} blocks of {size} bytes; allowed: at least {MIN_BLOCKS} "
            "(give it more memory, or split the model over more ranks)"
        )
    return num_blocks


def num_host_blocks(config: CacheConfig, decoder: Decoder) -> int:
    """Return how many blocks the host tier has, the same on every rank: as the stage with the largest ones can hold.

    Raises:
        EngineConfigError: there is to be a tier, and it has no room for a block.
    """
    num_planes = max(decoder.layer_groups.num_planes)
    size = block_bytes(decoder, config.block_size) // _num_planes(decoder) * num_planes
    if 0 < config.host_cache_bytes < size:
        raise EngineConfigError(f"host_cache_bytes is {config.host_cache_bytes}; allowed: 0, or a block of {size}")
    return config.host_cache_bytes // size


def allocate_planes(decoder: Decoder, *, num_blocks: int, block_size: int) -> Tensor:
    """Return the memory of this rank's blocks, [planes, elements], zeroed. On a CPU untouched blocks cost no memory."""
    entry = decoder.cache_entry
    shape = (_num_planes(decoder), num_blocks * block_size * entry.num_elements)
    if decoder.device.type == "cpu":
        return lazy_zeros(shape, entry.dtype)
    return torch.zeros(shape, dtype=entry.dtype, device=decoder.device)


def lay_out_caches(decoder: Decoder, planes: Tensor, *, block_size: int) -> list[LayerCache]:
    """Return the cache of each layer of this rank in that memory.

    Layers of different groups have a plane in common: whose keys are in it depends on which group has the block.
    """
    groups = decoder.layer_groups
    return [decoder.cache_entry.lay_out(planes[groups.plane_of_layer[i]], block_size) for i in decoder.layer_indices]


def block_rows(decoder: Decoder, planes: Tensor, *, num_blocks: int) -> Tensor:
    """Return that memory by blocks, [rows, num_blocks, elements]: a row is the keys, or the values, of a plane."""
    num_halves = 1 if decoder.cache_entry.is_key_value else 2
    return planes.view(len(planes) * num_halves, num_blocks, -1)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system hands out page by page when they are first written; torch.zeros would write them all.

    Raises EngineConfigError: the system would not hand out so many.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise EngineConfigError(
            f"the KV cache asks for {num_bytes} bytes of this host ({error}); allowed: fewer than its memory has"
        ) from error
    zeros = torch.frombuffer(pages, dtype=dtype)
    use_huge_pages(zeros)
    return zeros.view(shape)


def _num_planes(decoder: Decoder) -> int:
    return decoder.layer_groups.num_planes[decoder.mesh.pp.rank]


def _peak_bytes(device: Device, profile: Callable[[], None]) -> int:
    """Return the bytes in use on the device, whoever uses them, plus what the largest step takes for a moment."""
    device.reset_peak_memory()
    profile()
    device.synchronize()
    peak = device.peak_memory_bytes()
    device.reset_peak_memory()
    transient = peak - device.peak_memory_bytes()
    return device.total_memory_bytes() - device.free_memory_bytes() + transient
