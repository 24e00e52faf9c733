"""A running service is changed under load: its controller dies, groups are scaled, rolled, drained; nothing is lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from helpers.live_cluster import Ask, Cluster, ask_alone, ask_together, wait_until
from weft.v1 import control_pb2

from cluster.errors import ControllerError
from cluster.operate import is_as_wanted
from router.client import Completion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

READY = control_pb2.GROUP_STATE_READY
PENDING = control_pb2.GROUP_STATE_PENDING

ASKS = [
    Ask(
        prompt="Once upon a time there was a little dog"[: 10 + 4 * index],
        options={"temperature": 0.8, "seed": index, "max_tokens": 360, "ignore_eos": True, "timeout_s": 120.0},
    )
    for index in range(6)
]


@pytest.fixture(scope="module")
def alone(session_cluster: Cluster) -> list[tuple[int, ...]]:
    """What each of the requests gives in peace."""
    return ask_alone(session_cluster.grpc_address, ASKS)


def weft(cluster: Cluster, *arguments: str) -> str:
    command = [sys.executable, "-m", "cluster.cli", *arguments, *cluster.control_flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_as_wanted(cluster: Cluster) -> control_pb2.ModelStatus:
    wait_until(lambda: all(is_as_wanted(model) for model in cluster.status().models), "everything as wanted")
    return cluster.status().models[0]


async def ask_while(cluster: Cluster, alone: list[tuple[int, ...]], act: Callable[[], None]) -> list[Completion]:
    """Send the requests, act when all of them run, and check that each is whole."""
    completions = await ask_together(cluster.grpc_address, ASKS, on_running=act)
    assert [completion.token_ids for completion in completions] == alone
    return completions


async def test_killed_controller_comes_back_and_no_rank_notices(cluster: Cluster, alone: list[tuple[int, ...]]) -> None:
    before = cluster.status()

    def kill() -> None:
        os.kill(before.controller.pid, signal.SIGKILL)
        wait_until(lambda: is_back(cluster, before.controller.pid), "controller came back")

    completions = await ask_while(cluster, alone, kill)
    assert all(len(completion.replica_ids) == 1 for completion in completions), "no request had to move"
    after = cluster.status()
    assert after.controller.restarts == before.controller.restarts + 1
    assert [replica_and_pids(group) for group in after.models[0].groups] == [
        replica_and_pids(group) for group in before.models[0].groups
    ]
    assert after.routers[0].pid == before.routers[0].pid
    assert cluster.service.is_alive()
    weft(cluster, "logs", f"controller/{before.controller.pid}")  # still known: it says why it died

    weft(cluster, "scale", "tiny", "3", "--wait")
    assert wait_as_wanted(cluster).ready_replicas == 3
    weft(cluster, "scale", "tiny", "2", "--wait")
    assert {group.replica_id for group in cluster.groups()} == {group.replica_id for group in before.models[0].groups}


def is_back(cluster: Cluster, old_pid: int) -> bool:
    try:
        status = cluster.status()
    except ControllerError:
        return False
    return status.controller.pid != old_pid and all(group.state == READY for group in status.models[0].groups)


def replica_and_pids(group: control_pb2.GroupStatus) -> tuple[str, list[int]]:
    return group.replica_id, [rank.pid for rank in group.ranks]


async def test_rollout_replaces_groups_under_load_and_undo_goes_back(
    cluster: Cluster, alone: list[tuple[int, ...]]
) -> None:
    num_ready: list[int] = []

    def has_one_new() -> bool:
        model = cluster.status().models[0]
        num_ready.append(model.ready_replicas)
        return any(group.revision == model.revision and group.state == READY for group in model.groups)

    def roll() -> None:
        told = weft(cluster, "rollout", "tiny", "--set", "scheduler.max_num_seqs=64")
        assert "scheduler.max_num_seqs: 256 -> 64" in told

    kept: set[str] = set()
    while not kept:  # both groups may have been replaced by the time that it is undone: then it begins anew
        old = cluster.status().models[0]
        await ask_while(cluster, alone, roll)
        wait_until(has_one_new, "first new group is READY")
        assert min(num_ready) >= 2, "capacity that is wanted was always there"
        weft(cluster, "rollout", "tiny", "--undo", "--wait")
        model = cluster.status().models[0]
        assert (model.revision, model.ready_replicas) == (old.revision, 2)
        kept = {group.replica_id for group in model.groups} & {group.replica_id for group in old.groups}


async def test_drained_replica_hands_its_requests_over(cluster: Cluster, alone: list[tuple[int, ...]]) -> None:
    moved: list[Completion] = []
    while not moved:  # all may have ended by the time that it is drained: then its successor is
        (first, second) = cluster.groups()

        def drain(replica_id: str = first.replica_id) -> None:
            assert weft(cluster, "drain", replica_id, "--grace", "0.1").strip() == f"leaving: {replica_id}"

        completions = await ask_while(cluster, alone, drain)
        moved = [completion for completion in completions if len(completion.replica_ids) > 1]
        assert all(completion.replica_ids == (first.replica_id, second.replica_id) for completion in moved)
        model = wait_as_wanted(cluster)
        assert first.replica_id not in {group.replica_id for group in model.groups}
        cluster.wait_whole()


async def test_group_and_router_told_to_end_finish_what_they_have(
    cluster: Cluster, alone: list[tuple[int, ...]]
) -> None:
    before = cluster.status()
    group, router = before.models[0].groups[0], before.routers[0]

    def terminate() -> None:
        os.kill(group.ranks[1].pid, signal.SIGTERM)  # its leader drains the group
        os.kill(router.pid, signal.SIGTERM)

    completions = await ask_while(cluster, alone, terminate)
    assert all(len(completion.replica_ids) == 1 for completion in completions), "every request ended where it was"
    assert any(completion.replica_ids == (group.replica_id,) for completion in completions)

    def is_replaced() -> bool:
        now = cluster.status()
        return now.routers[0].alive and now.routers[0].pid != router.pid and now.models[0].groups[0].restarts > 0

    wait_until(is_replaced, "router and group came back")
    cluster.wait_whole()
    after = cluster.status()
    assert after.routers[0].grpc_address == router.grpc_address
    assert after.models[0].groups[0].group_id == group.group_id
    assert "SIGTERM" in weft(cluster, "logs", group.replica_id)
    assert "SIGTERM" in weft(cluster, "logs", f"router-0/{router.pid}")


def test_model_without_room_waits_with_its_reason_and_blocks_nobody(
    cluster: Cluster, model_folder: Path, tmp_path: Path
) -> None:
    cores = int(ray.cluster_resources()["CPU"])
    both = tmp_path / "both.yaml"
    tiny = {
        "name": "tiny", "path": str(model_folder), "tensor_parallel": 2, "replicas": 2, "device": "cpu",
        "dtype": "float32", "step_timeout_s": 10.0, "cache": {"num_blocks": 1024},
    }  # fmt: skip
    big = {"name": "big", "path": str(model_folder), "cpus_per_rank": cores, "device": "cpu"}
    both.write_text(json.dumps({"models": [tiny, big]}))  # JSON is YAML
    before = [group.replica_id for group in cluster.groups()]
    shown = weft(cluster, "apply", str(both), "--dry-run")
    assert shown.startswith("+ add big\n")
    assert "tiny" not in shown
    assert len(cluster.status().models) == 1
    weft(cluster, "apply", str(both))

    def waits() -> bool:
        group = cluster.status().models[1].groups[0]
        return group.state == PENDING and group.detail.startswith(f"needs {cores} CPUs on one node; the largest free")

    wait_until(waits, "the reason is told")
    assert "the largest free node has" in " ".join(weft(cluster, "status").split())
    only = tmp_path / "tiny.yaml"
    as_it_started = {"controller": {"port": 0}}
    only.write_text(json.dumps({"models": [tiny], **as_it_started}))
    assert weft(cluster, "apply", str(only), "--wait").startswith("- remove big\n")
    assert weft(cluster, "apply", str(only)) == "Nothing to change.\n"
    assert [group.replica_id for group in cluster.groups()] == before
