"""What a status means for somebody who waits for a service to come up."""

from weft.v1 import control_pb2


def is_ready(status: control_pb2.GetStatusResponse) -> bool:
    """Return whether every group is READY and every router listens."""
    groups_ready = all(
        group.state == control_pb2.GROUP_STATE_READY for model in status.models for group in model.groups
    )
    return groups_ready and all(router.alive and not router.draining for router in status.routers)


def first_failure(status: control_pb2.GetStatusResponse) -> str | None:
    """Say which group or router was given up, and why; None when none was."""
    for model in status.models:
        for group in model.groups:
            if group.state == control_pb2.GROUP_STATE_FAILED:
                return f"{group.group_id}: {group.detail}"
    for router in status.routers:
        if router.failed:
            return f"{router.router_id}: {router.detail}"
    return None
