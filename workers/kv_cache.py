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
    return _num_planes(decoder) * block_size * decoder.cache_entry.num_elements * decoder.dtype.itemsize


def num_blocks_within(*, total_bytes: int, memory_fraction: float, peak_bytes: int, block_bytes: int) -> int:
    """Return how many blocks fit beside the peak of a step: floor((fraction * total - peak) / block), at least 0."""
    return max(0, math.floor((memory_fraction * total_bytes - peak_bytes) / block_bytes))


def choose_num_blocks(config: CacheConfig, decoder: Decoder, device: Device, profile: Callable[[], None]) -> int:
    """Return how many blocks this rank can hold.

    Args:
        config: says the number, or how much memory the cache may have.
        decoder: this rank's, loaded.
        device: this rank's.
        profile: runs the largest step there can be, without a cache to speak of; called on CUDA only, where every
            rank of the group must then call it.

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
        fraction = config.memory_fraction
        num_blocks = num_blocks_within(total_bytes=total, memory_fraction=fraction, peak_bytes=peak, block_bytes=size)
        logger.info(
            "KV cache: %d blocks of %d bytes in %.2f of %d bytes, beside %d of weights and activations",
            *(num_blocks, size, fraction, total, peak),
        )
    if num_blocks < MIN_BLOCKS:
        raise EngineConfigError(
            f"the KV cache has room for {num_blocks} blocks of {size} bytes; allowed: at least {MIN_BLOCKS} "
            "(give it more memory, or split the model over more ranks)"
        )
    return num_blocks


def allocate_caches(decoder: Decoder, *, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Return the cache of each layer of this rank, zeroed. On a CPU untouched blocks cost no memory.

    Layers of different groups have a plane in common: whose keys are in it depends on which group has the block.
    """
    entry, groups = decoder.cache_entry, decoder.layer_groups
    shape = (_num_planes(decoder), num_blocks * block_size * entry.num_elements)
    zeros = _lazy_zeros(shape, decoder.dtype) if decoder.device.type == "cpu" else _zeros(shape, decoder)
    return [entry.lay_out(zeros[groups.plane_of_layer[i]], block_size) for i in decoder.layer_indices]


def _num_planes(decoder: Decoder) -> int:
    return decoder.layer_groups.num_planes[decoder.mesh.pp.rank]


def _zeros(shape: tuple[int, ...], decoder: Decoder) -> Tensor:
    return torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that the system hands out page by page when they are first written; torch.zeros would write them all."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(pages, dtype=dtype)
    use_huge_pages(zeros)
    return zeros.view(shape)


def _peak_bytes(device: Device, profile: Callable[[], None]) -> int:
    """What is in use on the device, whoever uses it, plus what the largest step takes for a moment."""
    device.reset_peak_memory()
    profile()
    device.synchronize()
    peak = device.peak_memory_bytes()
    device.reset_peak_memory()
    transient = peak - device.peak_memory_bytes()
    return device.total_memory_bytes() - device.free_memory_bytes() + transient
