"""What the controller tells of its state, in the messages of control.proto: reads groups and settings."""

from collections.abc import Sequence
from typing import NamedTuple

from weft.v1 import control_pb2

from cluster.config import ModelSection
from cluster.lifecycle import GroupState
from cluster.placement import NodeResources
from cluster.replica_group import ReplicaGroup
from cluster.wanted import WantedModel


class LastScaling(NamedTuple):
    """The last change of a model's number of replicas."""

    text: str
    time_s: float


def served_model(model: WantedModel, groups: Sequence[ReplicaGroup]) -> control_pb2.ServedModel:
    """What routers must know of a model with these groups."""
    section, text = model.current.section, model.current.text
    assert text is not None, "whoever wants a model has read it"
    scaling = section.autoscaling
    return control_pb2.ServedModel(
        name=model.name,
        path=text.path,
        max_context=text.max_context,
        starts_on_demand=starts_on_demand(section, groups),
        target_ttft_s=(scaling and scaling.target_ttft_s) or 0.0,
        target_tpot_s=(scaling and scaling.target_tpot_s) or 0.0,
        text_digest=text.digest,
    )


def starts_on_demand(section: ModelSection, groups: Sequence[ReplicaGroup]) -> bool:
    """Return whether a request may wait for the model's first replica; not where no group of it can start."""
    if section.autoscaling is None or section.min_replicas > 0:
        return False
    states = [group.lifecycle.state for group in groups if not group.is_leaving]
    return not states or any(state is not GroupState.FAILED for state in states)


def model_status(name: str, model: WantedModel | None, groups: Sequence[ReplicaGroup]) -> control_pb2.ModelStatus:
    """One model and its groups; `model` is None where it is no longer wanted."""
    is_ready = [group.lifecycle.state is GroupState.READY for group in groups]
    status = control_pb2.ModelStatus(
        name=name, groups=[group.status() for group in groups], ready_replicas=sum(is_ready)
    )
    if model is not None:
        status.path = model.current.text.path if model.current.text else model.current.section.path
        status.wanted_replicas = model.replicas
        status.revision = model.current.number
        status.previous_revision = model.previous.number if model.previous else 0
    return status


def autoscaling_status(
    section: ModelSection, last: LastScaling | None, now_s: float
) -> control_pb2.AutoscalingStatus | None:
    """How the number of replicas follows the load; None where it does not."""
    if section.autoscaling is None:
        return None
    assert section.max_replicas is not None
    return control_pb2.AutoscalingStatus(
        min_replicas=section.min_replicas,
        max_replicas=section.max_replicas,
        last_change=last.text if last else "",
        seconds_since_change=now_s - last.time_s if last else 0.0,
    )


def node_status(node: NodeResources, *, is_drained: bool) -> control_pb2.NodeStatus:
    """One node of the Ray cluster."""
    return control_pb2.NodeStatus(
        node_id=node.node_id,
        address=node.address,
        cpus=node.cpus,
        free_cpus=node.free_cpus,
        gpus=node.gpus,
        free_gpus=node.free_gpus,
        accelerator=", ".join(sorted(node.accelerators)),
        drained=is_drained,
    )
