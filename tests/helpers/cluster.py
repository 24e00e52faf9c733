"""Doubles for the cluster: a clock, an engine, a group's life and a router that do what tests say."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.v1 import control_pb2

from cluster.config import ModelSpec, build_spec
from cluster.formation import FormationListener
from cluster.log_reader import LogSource
from cluster.rank_values import Outcome, RankPlace, ReplicaAddresses, ReplicaLoad
from cluster.revision_files import RevisionText
from cluster.saved_state import RouterRecord
from workers.async_engine import Snapshot
from workers.engine import EngineLoad, StepResult
from workers.request import Request, RequestId, RequestOutput

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
}
"""config.json of a model that is described and divided, and never loaded."""


class FakeClock:
    """Time that passes when a test says so."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeLife:
    """One life of a group, driven by a test."""

    def __init__(
        self,
        replica_id: str,
        model: ModelSpec,
        listener: FormationListener,
        *,
        text: RevisionText | None = None,
        adopts: bool = False,
    ) -> None:
        self.text = text
        self.adopts = adopts
        self.replica_id = replica_id
        self.model = model
        self.listener = listener
        self.begun = asyncio.Event()
        self.was_cancelled = False
        self.drained_s: float | None = None
        self.holds_requests = False
        self.bundles = [{"CPU": 1.0}] * model.engine.parallel.pipeline_parallel
        self.busy: ReplicaLoad | None = ReplicaLoad(num_running=0, num_waiting=0, kv_usage=0.0)
        self.requests_ended = asyncio.Event()
        self._end: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self._end.done()

    async def run(self) -> Outcome:
        self.begun.set()
        try:
            return await self._end
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def drain(self, grace_s: float) -> None:
        self.drained_s = grace_s
        if self.holds_requests:
            ended = asyncio.ensure_future(self.requests_ended.wait())
            waited: list[asyncio.Future[Any]] = [ended, self._end]
            try:
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            finally:
                ended.cancel()

    async def load(self) -> ReplicaLoad | None:
        return self.busy

    def become_ready(self, node_id: str = "node-a") -> None:
        self.listener.on_placed([node_id])
        self.listener.on_ranks(self.places(node_id))
        self.listener.on_progress(0.5)
        self.listener.on_ready(self.addresses)

    def be_adopted(self, *, is_ready: bool = True) -> None:
        self.listener.on_adopted(self.places("node-a"), self.addresses if is_ready else None)

    def places(self, node_id: str) -> list[RankPlace]:
        ranks = range(self.model.engine.parallel.world_size)
        return [RankPlace(node="127.0.0.1", pid=1000 + rank, node_id=node_id) for rank in ranks]

    @property
    def addresses(self) -> ReplicaAddresses:
        return ReplicaAddresses(address=f"127.0.0.1:{self.replica_id}", metrics_address="127.0.0.1:9")

    async def end(self, outcome: Outcome) -> None:
        self._end.set_result(outcome)
        await turns()

    async def break_down(self, error: Exception) -> None:
        self._end.set_exception(error)
        await turns()


async def turns() -> None:
    for _ in range(8):  # the task that runs it ends, its callbacks run, and whoever waits for it goes on
        await asyncio.sleep(0)


@dataclass
class Formations:
    """Makes fake lives and keeps them in order."""

    lives: list[FakeLife] = field(default_factory=list)

    def __call__(
        self,
        replica_id: str,
        model: ModelSpec,
        listener: FormationListener,
        *,
        text: RevisionText | None = None,
        adopts: bool,
    ) -> FakeLife:
        self.lives.append(FakeLife(replica_id, model, listener, text=text, adopts=adopts))
        return self.lives[-1]

    def of(self, replica_id: str) -> FakeLife:
        return next(life for life in self.lives if life.replica_id == replica_id)


class FakeRouter:
    """A router that always lives."""

    def __init__(self, router_id: str = "router-0") -> None:
        self.router_id = router_id
        self.num_reconciled = 0
        self.is_adopting = False
        self.record = RouterRecord(grpc=0, http=0, metrics=0)
        self.stopped_with_s: float | None = None
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    def reconcile(self) -> None:
        self.num_reconciled += 1

    async def stop(self, grace_s: float) -> None:
        self.stopped_with_s = grace_s
        await self.may_stop.wait()

    def status(self) -> control_pb2.RouterStatus:
        return control_pb2.RouterStatus(router_id=self.router_id, alive=True, grpc_address="127.0.0.1:1")

    def log_sources(self) -> list[LogSource]:
        return []


def model_spec(path: str, **settings: object) -> ModelSpec:
    """One model's spec, by the way that users take."""
    return build_spec({"models": [{"path": path, **settings}]}).models[0]


def write_tokenizer(folder: Path, *words: str) -> None:
    """Write a tokenizer of these words and an unknown one."""
    vocabulary = {word: number for number, word in enumerate(("?", *words))}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    description = {"version": "1.0", "model": model, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    (folder / "tokenizer.json").write_text(json.dumps(description))


class FakeEngine:
    """An engine that does what a test says: collects what it is told, and gives the steps that the test makes."""

    def __init__(self, *, num_blocks: int = 64) -> None:
        self.submitted: list[Request] = []
        self.aborted: list[RequestId] = []
        self.resident: list[bytes] = []
        self.load = EngineLoad(
            num_running=0, num_waiting=0, num_free_blocks=num_blocks, num_blocks=num_blocks, num_pending_tokens=0
        )
        self.told = asyncio.Event()

    def submit(self, request: Request) -> None:
        self.submitted.append(request)
        self.told.set()

    def abort(self, request_id: RequestId) -> None:
        self.aborted.append(request_id)
        self.told.set()

    def snapshot(self) -> Snapshot:
        return Snapshot(block_hashes=list(self.resident), load=self.load)

    def step(self, *outputs: RequestOutput, stored: Sequence[bytes] = (), evicted: Sequence[bytes] = ()) -> StepResult:
        """One step's result, already part of the next snapshot."""
        self.resident = [block for block in (*self.resident, *stored) if block not in evicted]
        return StepResult(
            outputs=list(outputs), stored_block_hashes=list(stored), evicted_block_hashes=list(evicted), load=self.load
        )

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until what it was told satisfies a condition."""
        async with asyncio.timeout(120):
            while not condition():
                self.told.clear()
                await self.told.wait()
