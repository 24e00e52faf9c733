"""What the nodes of the Ray cluster have, and what of it is free."""

import ray

from cluster.placement import ACCELERATOR_PREFIX, NodeResources


def cluster_nodes() -> list[NodeResources]:
    """Return the alive nodes of the Ray cluster and what of them is free. Blocks for a round trip."""
    free = ray._private.state.available_resources_per_node()  # the public functions only tell totals
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            total, left = node["Resources"], free.get(node["NodeID"], {})
            nodes.append(
                NodeResources(
                    node_id=node["NodeID"],
                    cpus=total.get("CPU", 0.0),
                    gpus=total.get("GPU", 0.0),
                    free_cpus=left.get("CPU", 0.0),
                    free_gpus=left.get("GPU", 0.0),
                    address=node["NodeManagerAddress"],
                    accelerators=frozenset(
                        name.removeprefix(ACCELERATOR_PREFIX) for name in total if name.startswith(ACCELERATOR_PREFIX)
                    ),
                )
            )
    return nodes
