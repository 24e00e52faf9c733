from dataclasses import replace

import pytest

from cluster.placement import NodeResources, Placement, why_never, why_not
from workers.config import ParallelConfig


def placement(tp: int = 1, pp: int = 1, *, gpus: int = 1, cpus: float = 0.1) -> Placement:
    parallel = ParallelConfig(tensor_parallel=tp, pipeline_parallel=pp)
    return Placement(parallel=parallel, gpus_per_rank=gpus, cpus_per_rank=cpus)


def node(gpus: float = 0, free: float | None = None, *, cpus: float = 8) -> NodeResources:
    free_gpus = gpus if free is None else free
    return NodeResources(node_id="n", cpus=cpus, gpus=gpus, free_cpus=cpus, free_gpus=free_gpus)


def test_tensor_parallel_ranks_share_one_bundle() -> None:
    wanted = placement(4, 1)
    assert wanted.bundles == [{"CPU": pytest.approx(0.4), "GPU": 4.0}]
    assert wanted.strategy == "STRICT_PACK"


def test_each_stage_is_a_bundle_and_may_lie_elsewhere() -> None:
    wanted = placement(2, 3)
    assert len(wanted.bundles) == 3
    assert wanted.strategy == "PACK"
    assert [wanted.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_messages_wait_for_each_other_only_where_a_cpu_computes() -> None:
    assert placement(gpus=1).default_stream_interval_s == 0
    assert placement(gpus=0).default_stream_interval_s == 0.02


def test_cpu_group_asks_for_no_gpu() -> None:
    assert "GPU" not in placement(2, gpus=0).bundle


@pytest.mark.parametrize(
    ("wanted", "nodes", "reason"),
    [
        (placement(2), [], "the cluster has no node that takes groups"),
        (placement(2), [node(0)], "needs 2 GPUs on one node; the largest node has none"),
        (placement(2), [node(1), node(1)], "needs 2 GPUs on one node; the largest node has 1"),
        (placement(2), [node(4, 1), node(4, 0)], "needs 2 GPUs on one node; the largest free node has 1"),
        (placement(2, 2), [node(2), node(2, 1)], "needs 2 stages of 2 GPUs and 0.2 CPUs; free nodes have room for 1"),
        (placement(2, gpus=0, cpus=8), [node()], "needs 16 CPUs on one node; the largest node has 8"),
    ],
)
def test_what_does_not_fit_is_told_in_words(wanted: Placement, nodes: list[NodeResources], reason: str) -> None:
    assert why_not(wanted, nodes) == reason


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        (placement(2, 2), [node(2), node(2)]),
        (placement(2, 2), [node(4)]),
        (placement(2, gpus=0), [node()]),
        (placement(2, gpus=0, cpus=0), [node()]),
        (placement(1, 3, gpus=0, cpus=0.1), [node(cpus=0.3)]),  # 0.3 / 0.1 is less than 3
    ],
)
def test_what_fits_has_no_reason(wanted: Placement, nodes: list[NodeResources]) -> None:
    assert why_not(wanted, nodes) is None


def test_what_only_others_take_up_is_no_reason_for_never() -> None:
    assert why_not(placement(2), [node(2, 0)]) == "needs 2 GPUs on one node; the largest free node has 0"
    assert why_never(placement(2), [node(2, 0)]) is None
    assert why_never(placement(2, 2), [node(2, 0)]) == (
        "needs 2 stages of 2 GPUs and 0.2 CPUs; free nodes have room for 1"
    )


def test_type_of_accelerator_is_a_resource_of_every_bundle() -> None:
    parallel = ParallelConfig(tensor_parallel=2, pipeline_parallel=2)
    wanted = Placement(parallel=parallel, gpus_per_rank=1, cpus_per_rank=0.1, accelerator="A100")
    assert all(bundle["accelerator_type:A100"] == 0.001 for bundle in wanted.bundles)


def test_type_of_accelerator_that_nobody_has_is_told() -> None:
    parallel = ParallelConfig(tensor_parallel=2)
    wanted = Placement(parallel=parallel, gpus_per_rank=1, cpus_per_rank=0.1, accelerator="H100")
    nodes = [replace(node(8), accelerators=frozenset({"A100"})), replace(node(4), accelerators=frozenset({"L4"}))]
    assert why_not(wanted, nodes) == "needs H100 accelerators; the nodes have A100, L4"
    nodes.append(replace(node(8, 1), accelerators=frozenset({"H100"})))
    assert why_not(wanted, nodes) == "needs 2 GPUs on one node; the largest free node has 1"
