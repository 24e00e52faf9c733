"""What a status tells of nodes and of the last scaling."""

from cluster.config import build_section
from cluster.placement import NodeResources
from cluster.state_messages import LastScaling, autoscaling_status, node_status


def test_a_node_tells_what_is_free_of_what_it_has() -> None:
    node = NodeResources(
        node_id="n", cpus=8, gpus=4, free_cpus=7.5, free_gpus=1, accelerators=frozenset({"L4", "A100"})
    )
    status = node_status(node, is_drained=True)
    assert (status.cpus, status.free_cpus, status.gpus, status.free_gpus) == (8, 7.5, 4, 1)
    assert (status.accelerator, status.drained) == ("A100, L4", True)


def test_the_last_scaling_is_so_long_ago() -> None:
    section = build_section({"path": "/m", "max_replicas": 3, "autoscaling": {}})
    status = autoscaling_status(section, LastScaling(text="1 -> 2: load", time_s=100.0), now_s=130.0)
    assert status is not None
    assert (status.max_replicas, status.last_change, status.seconds_since_change) == (3, "1 -> 2: load", 30.0)
    never = autoscaling_status(section, None, now_s=130.0)
    assert never is not None
    assert (never.last_change, never.seconds_since_change) == ("", 0.0)
