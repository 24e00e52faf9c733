"""Replicas that compute nothing: real servers whose running requests all get a token each step. A process of its own.

python -m bench.router_load.replicas REPLICAS STEP_MS

The text of a token is the moment at which its step ended, by the clock that all processes of a machine share. The
addresses are the first line that is printed.
"""

import asyncio
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from cluster.replica_server import ReplicaInfo, ReplicaServer
from workers.async_engine import Snapshot
from workers.engine import EngineLoad, StepResult
from workers.request import Finish, FinishReason, Request, RequestId, RequestOutput, Usage

_TOKEN_ID = 65
_HOST = "127.0.0.1"


@dataclass(slots=True)
class _Running:
    request: Request
    num_tokens: int = 0


class StandIn:
    """An engine of as many sequences as are asked for, none of which needs computing."""

    def __init__(self) -> None:
        self._running: dict[RequestId, _Running] = {}

    def submit(self, request: Request) -> None:
        """Begin a request with the next step."""
        self._running[request.request_id] = _Running(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request."""
        self._running.pop(request_id, None)

    def snapshot(self) -> Snapshot:
        """Return an empty cache, and how many run."""
        return Snapshot(block_hashes=[], load=self._load())

    def step(self) -> StepResult | None:
        """Give each request a token; None where there is none."""
        if not self._running:
            return None
        text = f" {time.monotonic():.4f}"
        outputs = [self._advance(running, text) for running in list(self._running.values())]
        return StepResult(outputs=outputs, stored_block_hashes=[], evicted_block_hashes=[], load=self._load())

    def _advance(self, running: _Running, text: str) -> RequestOutput:
        request, finish = running.request, None
        running.num_tokens += 1
        if running.num_tokens == request.sampling.max_tokens:
            usage = Usage(
                prompt_tokens=len(request.prompt_token_ids),
                cached_tokens=0,
                completion_tokens=running.num_tokens,
                queue_s=0.0,
                prefill_s=0.0,
                decode_s=0.0,
            )
            finish = Finish(reason=FinishReason.LENGTH, usage=usage)
            del self._running[request.request_id]
        return RequestOutput(request_id=request.request_id, token_ids=(_TOKEN_ID,), text=text, finish=finish)

    def _load(self) -> EngineLoad:
        return EngineLoad(
            num_running=len(self._running), num_waiting=0, num_free_blocks=1, num_blocks=1, num_pending_tokens=0
        )


async def _serve(num_replicas: int, step_s: float) -> None:
    replicas: list[tuple[StandIn, ReplicaServer]] = []
    addresses = []
    for number in range(num_replicas):
        info = ReplicaInfo(
            replica_id=f"stand-in-{number}",
            model="stand-in",
            block_size=16,
            hash_key=b"stand-in",
            max_context=1 << 20,
            vocab_size=256,
            num_blocks=1,
            max_num_seqs=1 << 20,
        )
        engine = StandIn()
        server = ReplicaServer(info, engine)
        addresses.append(f"{_HOST}:{await server.start(_HOST)}")
        replicas.append((engine, server))
    print(*addresses, flush=True)
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + step_s, time.monotonic())  # a step that comes late makes none of the next ones early
        await asyncio.sleep(due_s - time.monotonic())
        for engine, server in replicas:
            result = engine.step()
            if result is not None:
                server.on_step(result)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(int(sys.argv[1]), float(sys.argv[2]) / 1e3))
