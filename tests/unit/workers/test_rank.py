"""Where ranks meet, and what a group needs to form."""

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from cluster.models import DEFAULT_MODEL, PACKAGED
from parallel.errors import DeviceError, GraphCaptureError
from parallel.kernels.native import build
from workers.config import CacheConfig, EngineConfig, ParallelConfig
from workers.errors import EngineConfigError, GroupFailedError
from workers.overlap import StepExecution
from workers.rank import Rendezvous, _choose_attention, _leave, follow_group, follow_plans, lead_group
from workers.stats import RankStats


def test_rendezvous_listens_on_its_address_only() -> None:
    rendezvous = Rendezvous.open()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(os.getpid()).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    }
    assert listening == {"127.0.0.1"}
    assert rendezvous.host == "127.0.0.1"


def test_a_group_of_several_ranks_needs_a_rendezvous() -> None:
    config = EngineConfig(model="anything", parallel=ParallelConfig(tensor_parallel=2))
    with pytest.raises(EngineConfigError, match="a group of 2 ranks needs a rendezvous"):
        lead_group(config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"kernels": "cuda"}, "allowed"), ({"kernels": "cpu-native", "compile": True}, "compile with kernels")],
)
def test_kernels_that_cannot_be_had_are_settings_that_cannot_be_used(settings: dict[str, Any], message: str) -> None:
    config = EngineConfig(model=str(PACKAGED[DEFAULT_MODEL]), device="cpu", cache=CacheConfig(num_blocks=8), **settings)
    with pytest.raises(EngineConfigError, match=message):
        lead_group(config)


def _choose_together(monkeypatch: pytest.MonkeyPatch, installed: list[set[str]], **settings: Any) -> list[str]:
    """What each rank of a group with GPUs attends with, by what there is on its node."""
    rank_of_thread, values, meeting = local(), [0] * len(installed), Barrier(len(installed))

    def agree(value: int) -> int:
        values[rank_of_thread.rank] = value
        meeting.wait(30)
        least = min(values)
        meeting.wait(30)
        return least

    def choose(rank: int) -> str:
        rank_of_thread.rank = rank
        return _choose_attention(EngineConfig(model="any", **settings), torch.device("cuda"), agree)

    def has(_device: torch.device, backend: str) -> bool:
        return backend in installed[rank_of_thread.rank]

    monkeypatch.setattr("workers.rank.has_attention", has)
    with ThreadPoolExecutor(len(installed)) as pool:
        return [*pool.map(choose, range(len(installed)))]


@pytest.mark.parametrize(
    ("installed", "chosen"),
    [
        ([{"flash-attention", "flashinfer", "triton"}, {"flash-attention", "triton"}], "flash-attention"),
        ([{"flashinfer", "triton"}, {"flash-attention", "flashinfer", "triton"}], "flashinfer"),
        ([{"flash-attention", "triton"}, {"flashinfer", "triton"}], "triton"),
        ([{"triton"}, {"flash-attention", "flashinfer", "triton"}, {"triton"}], "triton"),
        ([set(), {"triton"}], "auto"),
    ],
)
def test_ranks_attend_with_the_first_of_what_all_their_nodes_have(
    monkeypatch: pytest.MonkeyPatch, installed: list[set[str]], chosen: str
) -> None:
    assert {*_choose_together(monkeypatch, installed)} == {chosen}


def test_the_attention_that_is_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [{"triton", "flashinfer"}, {"triton"}]
    assert _choose_together(monkeypatch, installed, attention_backend="flashinfer") == ["flashinfer"] * 2


def test_a_rank_says_what_it_computes_with() -> None:
    stats = RankStats()
    config = EngineConfig(
        model=str(PACKAGED[DEFAULT_MODEL]),
        device="cpu",
        dtype="bfloat16",
        kernels="cpu",
        cache=CacheConfig(num_blocks=8),
    )
    lead_group(config, stats=stats).close()
    assert stats.info == {
        "kernels": "cpu",
        "attention_backend": "torch",
        "dtype": "bfloat16",
        "quantization": "none",
        "device": "cpu",
    }
    assert not stats.axes, "it has nobody to exchange anything with"
    assert stats.peak_memory_bytes is not None
    assert stats.peak_memory_bytes() > 50e6, "torch alone takes more"
    assert stats.energy_j is not None
    assert stats.energy_j() is None, "there is no GPU"


def test_a_compilation_that_fails_is_not_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take half a minute, and the other ranks of the machine wait for it."""
    asked: list[str] = []

    def fail(compiler: list[str], flags: tuple[str, ...], library: Path) -> None:
        asked.append(library.name)
        raise DeviceError("c++ failed: no space left")

    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "default_cache", lambda holds: tmp_path)
    monkeypatch.setattr(build, "_build", fail)
    stats = RankStats()
    config = EngineConfig(
        model=str(PACKAGED[DEFAULT_MODEL]), device="cpu", dtype="bfloat16", cache=CacheConfig(num_blocks=8)
    )
    lead_group(config, stats=stats).close()
    assert stats.slowness == "c++ failed: no space left"
    assert asked == ["weft_kernels_key.so"]


class NotedRank:
    """A link and a runner in one: plans come in groups, each of which is there when the last output of the one before
    was sent."""

    def __init__(self, *groups: list[int], execution: StepExecution) -> None:
        self.execution = execution
        self._groups = [list(group) for group in groups]
        self.events: list[str] = []

    def receive_plan(self) -> int | None:
        if self._groups and not self._groups[0]:
            self._groups.pop(0)
        return self._groups[0].pop(0) if self._groups else None

    def has_message(self) -> bool:
        return bool(self._groups[0])

    def prepare(self, plan: int) -> int:
        return plan

    def start(self, work: int) -> Callable[[], int | None]:
        self.events.append(f"start {work}")
        return lambda: work if work % 5 else None

    def send_output(self, output: int) -> None:
        self.events.append(f"send {output}")


def events_of(*groups: list[int], execution: StepExecution) -> list[str]:
    rank: Any = NotedRank(*groups, execution=execution)
    follow_plans(rank, rank)
    events: list[str] = rank.events
    return events


def test_a_step_that_is_planned_is_on_the_device_before_an_output_is_waited_for() -> None:
    events = events_of([1, 2], [3], [4, 5], execution=StepExecution.QUEUED)
    assert events == ["start 1", "start 2", "send 1", "send 2", "start 3", "send 3", "start 4", "start 5", "send 4"]


def test_on_a_cpu_an_output_goes_before_the_next_step_is_computed() -> None:
    assert events_of([1, 2], execution=StepExecution.COMPUTED) == ["start 1", "send 1", "start 2", "send 2"]


@pytest.mark.parametrize(
    ("backend", "has_failed", "expected"),
    [
        ("nccl", False, ["recordings dropped", "destroyed"]),
        ("nccl", True, []),
        ("gloo", True, ["recordings dropped", "destroyed"]),
    ],
)
def test_recordings_go_before_communicators_and_those_of_nccl_stay_after_a_failure(
    backend: str, has_failed: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    runner: Any = SimpleNamespace(drop_recordings=lambda: events.append("recordings dropped"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: events.append("destroyed"))
    _leave(runner, has_failed=has_failed)
    assert events == expected


def test_a_rank_that_fails_says_so_before_it_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Link:
        def __init__(self, endpoint: str, rank: int) -> None: ...

        def __enter__(self) -> "Link":
            return self

        def __exit__(self, kind: object, error: BaseException, tb: object) -> None:
            events.append(f"last words: {error}")

        def report(self, value: int, timeout_s: float) -> int:
            raise GraphCaptureError("out of memory")

    store = SimpleNamespace(get=lambda key: b"endpoint")
    monkeypatch.setattr("workers.rank.TCPStore", lambda *args, **options: store)
    monkeypatch.setattr("workers.rank.RankLink", Link)
    monkeypatch.setattr("workers.rank._leave", lambda *args, has_failed: events.append(f"leaves, failed {has_failed}"))
    with pytest.raises(GraphCaptureError):
        follow_group(EngineConfig(model="anything"), rank=1, host="127.0.0.1", port=1)
    assert events == ["last words: out of memory", "leaves, failed True"]


def test_a_rank_that_follows_plans_tells_of_a_leader_that_is_lost_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Link(contextlib.nullcontext[Any]):
        def __init__(self, endpoint: str, rank: int) -> None:
            super().__init__(self)

        def report(self, value: int, timeout_s: float) -> int:
            return value

        @contextlib.contextmanager
        def watched(self, on_lost: Callable[[GroupFailedError], object]) -> Iterator[None]:
            on_lost(GroupFailedError("the leader is gone"))
            yield
            events.append("is watched no more")

    runner = SimpleNamespace(choose_num_blocks=lambda: 1, allocate=lambda num_blocks: None)
    monkeypatch.setattr("workers.rank.TCPStore", lambda *args, **options: SimpleNamespace(get=lambda key: b"endpoint"))
    monkeypatch.setattr("workers.rank.RankLink", Link)
    monkeypatch.setattr("workers.rank.join_mesh", lambda *args: None)
    monkeypatch.setattr("workers.rank._load", lambda *args: runner)
    monkeypatch.setattr("workers.rank.follow_plans", lambda link, runner: events.append("follows"))
    monkeypatch.setattr("workers.rank._leave", lambda *args: events.append("leaves"))
    config = EngineConfig(model="anything")
    follow_group(config, rank=1, host="127.0.0.1", port=1, on_lost=lambda error: events.append(str(error)))
    assert events == ["the leader is gone", "follows", "is watched no more", "leaves"]
