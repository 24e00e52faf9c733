"""What a service gives of its engine: who runs when, what counts, and where the service is found."""

import asyncio
import io
import json
import multiprocessing
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import pytest
from helpers.fake_replica import FakeReplica
from helpers.router_harness import router_config, running_router
from rich.console import Console
from weft.v1 import control_pb2

from bench import served_share
from bench.load.datasets import DatasetKind
from bench.paused_service import PausedService
from cluster.models import PACKAGED
from cluster.serve import print_addresses


class FakeEngine:
    """Notes its turns; it is twice as fast in odd rounds."""

    def __init__(self, turns: list[str]) -> None:
        self.turns = turns

    def run(self, kind: DatasetKind, seed: int) -> float:
        self.turns.append(f"engine {kind} {seed}")
        return 200.0 if seed % 2 else 100.0


def test_engine_and_service_take_turns_and_the_first_round_does_not_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns: list[str] = []

    def run_served(service: object, kind: DatasetKind, seed: int) -> float:
        turns.append(f"service {kind} {seed}")
        return 10.0 if seed == 0 else 90.0

    monkeypatch.setattr(served_share, "_engine", lambda folder: nullcontext(FakeEngine(turns)))
    monkeypatch.setattr(served_share, "_service", lambda folder: nullcontext())
    monkeypatch.setattr(served_share, "_run_served", run_served)
    monkeypatch.setattr(served_share, "give_way", lambda: None)
    monkeypatch.setattr(sys, "argv", ["served_share", "weft-tiny", "--rounds", "W2:2,W1:1"])
    served_share.main()
    *_, line = capsys.readouterr().out.splitlines()
    assert turns == [
        *("service W2 0", "engine W2 0", "engine W2 1", "service W2 1", "service W2 2", "engine W2 2"),
        *("service W1 0", "engine W1 0", "engine W1 1", "service W1 1"),
    ]
    assert json.loads(line)["rows"] == [
        {"workload": "W2", "pairs": [[200.0, 90.0], [100.0, 90.0]], "ratios": pytest.approx([0.5625, 0.675, 0.7875])},
        {"workload": "W1", "pairs": [[200.0, 90.0]], "ratios": [0.45] * 3},
    ]


async def test_service_gets_the_requests_of_a_workload_and_no_others() -> None:
    async with FakeReplica("a") as replica, running_router(router_config(replica.address)) as router:
        await router.wait_ready(1)
        service = cast(PausedService, SimpleNamespace(address=router.addresses.grpc, awake=nullcontext))
        assert await asyncio.to_thread(served_share._run_served, service, DatasetKind.W1, 0) > 0
        assert [(len(each.prompt_token_ids), each.sampling.max_tokens) for each in replica.submits] == [(128, 64)]


def test_engine_runs_the_requests_of_a_workload_until_nobody_asks_any_more() -> None:
    ours, theirs = multiprocessing.Pipe()
    thread = threading.Thread(target=served_share._run_engine, args=(theirs, PACKAGED["weft-tiny"]), daemon=True)
    thread.start()
    assert ours.poll(60), "it is not loaded"
    ours.recv()
    assert [served_share._Engine(ours).run(DatasetKind.W1, seed) > 0 for seed in (0, 1)] == [True, True]
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


def test_service_is_found_when_it_says_that_it_is_ready() -> None:
    out = io.StringIO()
    status = control_pb2.GetStatusResponse(routers=[control_pb2.RouterStatus(grpc_address="h:1", http_address="h:2")])
    print_addresses(Console(file=out), status, "h:5", None, has_https=False, stays=True)
    addresses, end = out.getvalue().split("Stop")
    assert served_share._find_grpc(addresses) is None
    assert served_share._find_grpc(f"{addresses}Stop{end}") == "h:1"
