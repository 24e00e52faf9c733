"""A model that scales by itself, on real Ray: from nothing for the first request, to more, and back to nothing."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from helpers.live_cluster import Ask, Cluster, ask_together, wait_until
from weft.v1 import control_pb2

from router.client import Client

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

QUICK = {"target_requests": 1, "window_s": 1, "upscale_delay_s": 2, "downscale_delay_s": 3, "idle_s": 4}


def weft(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments, *cluster.control_flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def lazy_file(cluster: Cluster, model_folder: Path, tmp_path: Path) -> Iterator[Path]:
    """A file with the session's model and one that scales by itself, served for the length of the test."""
    tiny = {
        "name": "tiny", "path": str(model_folder), "tensor_parallel": 2, "replicas": 2, "device": "cpu",
        "dtype": "float32", "step_timeout_s": 10.0, "cache": {"num_blocks": 1024},
    }  # fmt: skip
    lazy = {
        "name": "lazy", "path": str(model_folder), "replicas": 0, "max_replicas": 2, "device": "cpu", "num_threads": 1,
        "dtype": "float32", "cache": {"num_blocks": 1024}, "autoscaling": QUICK,
    }  # fmt: skip
    both, only = tmp_path / "both.yaml", tmp_path / "only.yaml"
    both.write_text(json.dumps({"models": [tiny, lazy]}))  # JSON is YAML
    only.write_text(json.dumps({"models": [tiny]}))
    assert weft(cluster, "apply", str(both)).startswith("+ add lazy\n")
    try:
        yield both
    finally:
        weft(cluster, "apply", str(only), "--wait")


def lazy(cluster: Cluster) -> control_pb2.ModelStatus:
    return next(model for model in cluster.status().models if model.name == "lazy")


async def test_model_scales_from_zero_to_more_and_back_to_zero(cluster: Cluster, lazy_file: Path) -> None:
    assert (lazy(cluster).wanted_replicas, len(lazy(cluster).groups)) == (0, 0)
    with Client(cluster.grpc_address) as client:
        ask = partial(client.complete, model="lazy", seed=1, max_tokens=5, timeout_s=120.0)
        asked = asyncio.create_task(asyncio.to_thread(ask, "Once upon a time"))
        begun = "0 -> 1: 1 requests wait for the first replica"
        await asyncio.to_thread(wait_until, lambda: lazy(cluster).autoscaling.last_change == begun, begun)
        first = await asked
    assert first.replica_ids == ("lazy-0.1",)

    has_grown = asyncio.Event()

    async def keep_asking(seed: int) -> None:
        ask = Ask(
            prompt="Once upon a time",
            options={"model": "lazy", "seed": seed, "max_tokens": 200, "ignore_eos": True, "timeout_s": 60.0},
        )
        while not has_grown.is_set():
            await ask_together(cluster.grpc_address, [ask])

    asking = [asyncio.create_task(keep_asking(seed)) for seed in range(3)]
    await asyncio.to_thread(wait_until, lambda: lazy(cluster).ready_replicas == 2, "a second replica is READY")
    assert weft(cluster, "apply", str(lazy_file)) == "Nothing to change.\n", "the file's 0 is where it began"
    has_grown.set()
    await asyncio.gather(*asking)

    assert "(0 to 2)" in weft(cluster, "status")
    wait_until(lambda: not lazy(cluster).groups, "nothing of it is left")
    assert lazy(cluster).autoscaling.last_change == "1 -> 0: no request for 4 s"
    with Client(cluster.grpc_address) as client:
        again = client.complete("Once upon a time", model="lazy", seed=1, max_tokens=5, timeout_s=120.0)
    assert again.token_ids == first.token_ids
