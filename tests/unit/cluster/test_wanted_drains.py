"""Replicas and nodes that are drained, and the grace that they have."""

import json
from dataclasses import replace

import pytest
from helpers.cluster import turns
from helpers.wanted_bench import Bench

from cluster.errors import NotServedError
from cluster.saved_state import decode


async def test_drained_replica_finishes_and_another_group_takes_its_place(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.settle()
    bench.forms.of("m-0.1").holds_requests = True
    assert await bench.state.drain("m-0.1", 5.0) == (["m-0.1"], "")
    bench.state.reconcile()
    await turns()
    endpoints = {endpoint.replica_id: endpoint.draining for endpoint in bench.state.replicas()}
    assert endpoints == {"m-0.1": True, "m-1.1": False}
    bench.forms.of("m-2.1").become_ready()
    assert bench.forms.of("m-0.1").drained_s == 5.0
    bench.forms.of("m-0.1").requests_ended.set()
    await bench.settle()
    assert bench.replicas() == ["m-1.1", "m-2.1"]


async def test_drained_node_loses_its_groups_and_gets_none_until_it_is_undone(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.of("m-0.1").become_ready("node-a")
    bench.forms.of("m-1.1").become_ready("node-b")
    assert await bench.state.drain("10.0.0.1", None) == (["m-1.1"], "node-b")
    assert bench.state.drained_nodes == {"node-b"}
    assert [node.drained for node in await bench.state.node_statuses()] == [False, True]
    bench.restart()
    assert bench.state.drained_nodes == {"node-b"}
    assert await bench.state.undrain("node-b") == "node-b"
    assert not bench.state.drained_nodes
    with pytest.raises(NotServedError, match=r"'x'; replicas: .*; nodes: 10\.0\.0\.0, 10\.0\.0\.1"):
        await bench.state.drain("x", None)


async def test_only_the_drain_of_a_node_can_be_undone(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    with pytest.raises(NotServedError) as refused:
        await bench.state.undrain("m-0.1")
    told = "no node is 'm-0.1', and only a node's drain can be undone; nodes: 10.0.0.0, 10.0.0.1"
    assert str(refused.value) == told


async def test_nodes_at_one_address_are_told_apart_by_their_ids(bench: Bench) -> None:
    bench.nodes = [replace(node, address="10.0.0.0") for node in bench.nodes]
    for change in (bench.state.drain("10.0.0.0", None), bench.state.undrain("10.0.0.0")):
        with pytest.raises(NotServedError, match=r"several nodes are at 10\.0\.0\.0; allowed: .* node-a, node-b"):
            await change
    assert await bench.state.drain("node-b", None) == ([], "node-b")


async def test_group_that_starts_on_a_node_that_is_drained_leaves_and_another_is_formed(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    bench.forms.lives[0].listener.on_placed(["node-b"])
    assert await bench.state.drain("10.0.0.1", None) == (["m-0.1"], "node-b")
    await turns()
    bench.state.reconcile()
    await turns()
    assert bench.forms.of("m-0.1").was_cancelled
    assert [life.replica_id for life in bench.forms.lives] == ["m-0.1", "m-1.1"]


async def test_group_that_turns_out_to_be_on_a_drained_node_leaves(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    life = bench.forms.lives[0]
    assert await bench.state.drain("10.0.0.1", None) == ([], "node-b")
    life.become_ready("node-b")
    bench.state.reconcile()
    assert decode(bench.saved).groups[0].is_leaving
    await turns()
    assert bench.replicas() == []
    bench.state.reconcile()
    assert [group.group_id for group in bench.model().groups] == ["m-1"]


@pytest.mark.parametrize("is_ready", [False, True])
async def test_node_that_is_drained_during_an_adoption_loses_what_is_on_it(bench: Bench, is_ready: bool) -> None:
    await bench.apply({"replicas": 2})
    bench.forms.of("m-1.1").become_ready("node-b")
    if is_ready:
        bench.forms.of("m-0.1").become_ready("node-a")
    else:
        bench.forms.of("m-0.1").listener.on_placed(["node-a"])
    bench.restart()
    assert await bench.state.drain("10.0.0.0", 5.0) == (["m-0.1"], "node-a")
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-0.1").be_adopted(is_ready=is_ready)
    await turns()
    assert bench.forms.of("m-0.1").drained_s == (5.0 if is_ready else None)
    assert bench.forms.of("m-0.1").was_cancelled
    assert not bench.forms.of("m-1.1").was_cancelled


@pytest.mark.parametrize("booted_s", [120.0, 1.0, 1e7])  # 120: on the machine of the controller before
@pytest.mark.parametrize(("grace_s", "left_s"), [(100.0, 80.0), (21.0, 1.0), (5.0, None)])
async def test_grace_of_a_drain_ends_when_it_would_have_without_a_restart(
    bench: Bench, grace_s: float, left_s: float | None, booted_s: float
) -> None:
    await bench.apply({"replicas": 1, "drain_timeout_s": 30.0})
    bench.forms.of("m-0.1").become_ready()
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("m-0", grace_s)
    bench.clock.advance(20.0)
    bench.move(booted_s=booted_s)
    bench.restart()
    bench.state.reconcile()
    await turns()
    life = bench.forms.of("m-0.1")
    life.be_adopted()
    await turns()
    assert life.drained_s == left_s
    assert life.was_cancelled


async def test_a_pass_leaves_a_node_s_drain_the_grace_that_was_asked_for(bench: Bench) -> None:
    await bench.apply({"replicas": 1, "drain_timeout_s": 30.0})
    bench.forms.of("m-0.1").become_ready("node-b")
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("10.0.0.1", 60.0)
    bench.state.reconcile()
    await turns()
    assert decode(bench.saved).groups[0].left_s == 60.0


async def test_a_group_that_leaves_a_drained_node_is_saved_though_others_are_still_looked_for(bench: Bench) -> None:
    await bench.apply({"replicas": 2})
    await bench.state.drain("10.0.0.0", None)
    bench.restart()
    bench.state.reconcile()
    bench.forms.of("m-0.1").be_adopted()
    bench.state.reconcile()
    assert bench.state.is_adopting
    assert [group.is_leaving for group in decode(bench.saved).groups] == [True, False]


async def test_a_group_that_has_left_is_forgotten_though_another_one_has_long_taken_its_place(bench: Bench) -> None:
    await bench.apply({"replicas": 1})
    await bench.settle()
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("m-0", None)
    await bench.settle()
    assert [group.group_id for group in decode(bench.saved).groups] == ["m-0", "m-1"]
    bench.forms.of("m-0.1").requests_ended.set()
    await turns()
    bench.state.reconcile()
    assert [group.group_id for group in decode(bench.saved).groups] == ["m-1"]


async def test_a_grace_that_an_older_controller_did_not_save_begins_anew(bench: Bench) -> None:
    await bench.apply({"replicas": 1, "drain_timeout_s": 30.0})
    await bench.settle()
    bench.forms.of("m-0.1").holds_requests = True
    await bench.state.drain("m-0", 60.0)
    saved = json.loads(bench.saved)
    del saved["groups"][0]["left_s"]
    bench.saved = json.dumps(saved).encode()
    bench.restart()
    bench.state.reconcile()
    await turns()
    bench.forms.of("m-0.1").be_adopted()
    await turns()
    assert bench.forms.of("m-0.1").drained_s == 30.0


async def test_drained_node_that_has_gone_is_forgotten_at_the_next_drain(bench: Bench) -> None:
    await bench.state.drain("node-a", None)
    del bench.nodes[0]
    await bench.state.drain("node-b", None)
    assert bench.state.drained_nodes == {"node-b"}


async def test_a_node_whose_drain_was_undone_stays_so_after_a_restart(bench: Bench) -> None:
    await bench.state.drain("node-b", None)
    await bench.state.undrain("node-b")
    bench.restart()
    assert not bench.state.drained_nodes
