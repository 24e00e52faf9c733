"""A program of its own: Ray on four loopback addresses, a pipeline over two of them, and a drain of one of the two.

Prints what happened as JSON on its last line. Its own process, for a process can be part of one Ray only.
"""

import json
import os
import sys
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_prestart_worker_first_driver="0", RAY_enable_metrics_collection="0")

from ray.cluster_utils import Cluster as RayCluster
from weft.v1 import control_pb2

from cluster.config import build_spec
from cluster.operate import is_as_wanted
from cluster.service import Service
from helpers.live_cluster import wait_until
from router.client import Client

OPTIONS: dict[str, Any] = {"max_tokens": 200, "temperature": 0.9, "seed": 3, "ignore_eos": True, "timeout_s": 90.0}
PROMPT = "Once upon a time"


def start_nodes() -> RayCluster:
    """A head without room, and three nodes of one CPU and one GPU that is none."""
    memory = {"object_store_memory": 80 << 20}
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 0, "include_dashboard": False, **memory}
    cluster = RayCluster(initialize_head=True, head_node_args=head)
    for number in (3, 4, 5):
        cluster.add_node(wait=False, node_ip_address=f"127.0.0.{number}", num_cpus=1, num_gpus=1, **memory)
    cluster.wait_for_nodes()
    return cluster


def operate(service: Service, settings: dict[str, Any], told: dict[str, Any]) -> None:
    """Serve, drain a node under a request, then want what no node can hold."""
    service.wait_ready(timeout_s=240)
    status = service.status()
    told["nodes_before"] = [rank.node for rank in status.models[0].groups[0].ranks]
    drained = told["drained"] = told["nodes_before"][1]
    with Client(status.routers[0].grpc_address) as client:
        client.wait_ready(30)
        told["alone"] = client.complete(PROMPT, **OPTIONS).token_ids
        stream = client.generate(PROMPT, **OPTIONS)
        tokens = list(next(stream).token_ids)
        service.client.drain(drained, grace_s=0.1)
        for delta in stream:
            tokens += delta.token_ids
        told["moved"] = tokens
    wait_until(lambda: is_as_wanted(service.status().models[0]), "formed elsewhere")
    told["nodes_after"] = [rank.node for rank in service.status().models[0].groups[0].ranks]

    gpu = {"name": "gpu", "path": "weft-tiny", "device": "cuda", "tensor_parallel": 2}
    typed = {**gpu, "name": "typed", "tensor_parallel": 1, "accelerator": "H100"}
    service.client.apply({**settings, "models": [*settings["models"], gpu, typed]}, dry_run=False)

    def groups() -> list[control_pb2.GroupStatus]:
        return [model.groups[0] for model in service.status().models[1:] if model.groups]

    wait_until(lambda: [group.detail[:5] for group in groups()] == ["needs", "needs"], "reasons are told")
    told["states"] = [control_pb2.GroupState.Name(group.state) for group in groups()]
    told["reasons"] = [group.detail for group in groups()]
    told["ready"] = service.status().models[0].ready_replicas


def main() -> None:
    cluster = start_nodes()
    told: dict[str, Any] = {}
    try:
        settings: dict[str, Any] = {
            "models": [
                {
                    "name": "tiny", "path": "weft-tiny", "pipeline_parallel": 2, "cpus_per_rank": 1, "device": "cpu",
                    "dtype": "float32", "num_threads": 1, "cache": {"num_blocks": 64},
                }
            ],
            "router": {"port": 0, "http_port": 0, "metrics_port": 0},
            "controller": {"port": 0},
            "ray": {"address": cluster.address, "spare_s": 0.0},
        }  # fmt: skip
        with Service.start(build_spec(settings)) as service:
            try:
                operate(service, settings, told)
            finally:
                service.shut_down(0.0)
    finally:
        cluster.shutdown()
    print(json.dumps(told))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
