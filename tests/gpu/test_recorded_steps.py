"""Steps are recorded before the first request, and their memory is counted. Not yet run."""

from typing import Any

import pytest

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.device.cuda import CudaDevice
from parallel.kernels.cuda_buckets import largest_pieces, largest_steps
from parallel.mesh import Mesh
from workers.config import CacheConfig, EngineConfig
from workers.rank import _load

pytestmark = pytest.mark.gpu

_SLACK_BYTES = 256 << 20
"""What is taken only once the cache is there: code that the driver loads, and a step's tensors that torch keeps."""


def test_all_steps_are_recorded_inside_of_the_memory_that_was_counted() -> None:
    config = EngineConfig(
        model=str(PACKAGED[DEFAULT_MODEL]), device="cuda", dtype="bfloat16", cache=CacheConfig(memory_fraction=0.3)
    )
    device = CudaDevice()
    runner = _load(config, Mesh.single(), None, None)
    runner.allocate(runner.choose_num_blocks())
    layers: Any = runner._decoder._run
    max_context = runner._decoder.description.max_context
    steps = [*largest_pieces(512), *largest_steps(max_num_seqs=256, max_context=max_context)]
    assert len(layers._graphs) == len(steps)
    total_bytes = device.total_memory_bytes()
    assert total_bytes - device.free_memory_bytes() < 0.3 * total_bytes + _SLACK_BYTES
