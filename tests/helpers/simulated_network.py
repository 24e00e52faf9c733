"""Replicas without sockets: streams of weft.v1.Replica in the test's event loop, which break, stall and lose frames.

Tokens and texts are those of fake_replica.py. Whatever happens at a replica, its owner says.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import grpc
from weft import protocol
from weft.v1 import inference_pb2 as pb
from weft.v1 import replica_pb2

from helpers.fake_replica import HASH_KEY, certain_text, stop_of, token_at


class SimulatedReplica:
    """One replica; `step` moves its requests on."""

    def __init__(self, replica_id: str, rng: random.Random) -> None:
        self.replica_id = replica_id
        self.is_up = True
        self.is_draining = False
        self.is_stalled = False
        self.refusal: grpc.StatusCode | None = None
        self.max_running = 4
        """Requests that get tokens at once; the others wait."""
        self.last_refusal_s = -math.inf
        """When it last did something after which a request may look on, and its wait for a replica goes on."""
        self.calls: list[SimulatedCall] = []
        self._rng = rng

    @property
    def num_requests(self) -> int:
        return sum(len(call.submits) for call in self.calls)

    def load(self) -> replica_pb2.Load:
        return replica_pb2.Load(num_running=self.num_requests, num_blocks=1000, draining=self.is_draining)

    def break_streams(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Frames that are under way are lost, all or the last of them."""
        for call in list(self.calls):
            call.fail(code, num_kept=self._rng.randint(0, len(call.frames)))

    def set_draining(self, is_draining: bool) -> None:
        self.is_draining = is_draining
        self._note_refusal()
        for call in self.calls:
            call.send(load=self.load())

    def fail_requests(self, code: grpc.StatusCode) -> None:
        """Fail some of the requests that are here."""
        self._note_refusal()
        for call in self.calls:
            failed = [request_id for request_id in call.submits if self._rng.random() < 0.5]
            for request_id in failed:
                del call.submits[request_id]
            call.send(outputs=[_failed(request_id, code) for request_id in failed], load=self.load())

    def step(self) -> None:
        """Give a few tokens to the requests that run, in one frame for each router."""
        if self.is_stalled:
            return
        for call in self.calls:
            outputs = []
            for request_id in list(call.submits)[: self.max_running]:
                output = self._advance(request_id, *call.submits[request_id], num_tokens=self._rng.randint(0, 3))
                if output.token_ids:
                    outputs.append(output)
                if output.HasField("finished"):
                    del call.submits[request_id]
            if outputs:
                call.send(outputs=outputs, load=self.load())

    def receive(self, call: "SimulatedCall", message: replica_pb2.ConnectRequest) -> None:
        match message.WhichOneof("message"):
            case "hello":
                call.send(snapshot=self._snapshot(), load=self.load())
            case "submit":
                request_id = message.submit.request_id
                code = grpc.StatusCode.UNAVAILABLE if self.is_draining else self.refusal
                if code is not None:
                    self._note_refusal()
                    call.send(outputs=[_failed(request_id, code)])
                else:
                    call.submits[request_id] = message.submit, list(message.submit.generated_token_ids)
            case "abort":
                call.submits.pop(message.abort.request_id, None)

    def _note_refusal(self) -> None:
        self.last_refusal_s = asyncio.get_running_loop().time()

    def _advance(
        self, request_id: str, submit: replica_pb2.Submit, tokens: list[int], *, num_tokens: int
    ) -> replica_pb2.RequestOutput:
        sampling = submit.sampling
        output = replica_pb2.RequestOutput(request_id=request_id)
        before = "" if sampling.stop else certain_text(tokens)
        for _ in range(num_tokens):
            tokens.append(token_at(submit.prompt_token_ids, sampling.seed, len(tokens)))
            output.token_ids.append(tokens[-1])
            stopped = stop_of(sampling, tokens)
            if stopped is not None or len(tokens) >= sampling.max_tokens:
                text, finished = stopped or (certain_text(tokens, is_over=True), _LENGTH)
                output.text = text[len(before) :]
                output.finished.CopyFrom(finished)
                output.finished.usage.CopyFrom(pb.Usage(completion_tokens=len(tokens), cached_tokens=1))
                return output
        output.text = "" if sampling.stop else certain_text(tokens)[len(before) :]
        return output

    def _snapshot(self) -> replica_pb2.Snapshot:
        return replica_pb2.Snapshot(
            replica_id=self.replica_id,
            model="tiny",
            protocol_version=protocol.VERSION,
            block_size=4,
            hash_key=HASH_KEY,
            max_context=512,
            vocab_size=300,
            num_blocks=1000,
            max_num_seqs=4,
        )


_LENGTH = replica_pb2.RequestFinished(reason=pb.FINISH_REASON_LENGTH)


def _failed(request_id: str, code: grpc.StatusCode) -> replica_pb2.RequestOutput:
    failed = replica_pb2.RequestFailed(code=code.value[0], message="scripted")
    return replica_pb2.RequestOutput(request_id=request_id, failed=failed)


class SimulatedCall:
    """The router's end of a stream, with the replica's behind it."""

    def __init__(self, replica: SimulatedReplica | None, rng: random.Random) -> None:
        self.frames: deque[replica_pb2.ConnectResponse] = deque()
        self.submits: dict[str, tuple[replica_pb2.Submit, list[int]]] = {}
        self._replica = replica
        self._rng = rng
        self._error: grpc.aio.AioRpcError | None = None
        self._changed = asyncio.Event()
        self._num_frames = 0
        if replica is None or not replica.is_up:
            self.fail(grpc.StatusCode.UNAVAILABLE)
        else:
            replica.calls.append(self)

    def send(self, **fields: Any) -> None:
        self.frames.append(replica_pb2.ConnectResponse(frame=self._num_frames, **fields))
        self._num_frames += 1
        self._changed.set()

    def skip_frame(self) -> None:
        self._num_frames += 1

    def fail(self, code: grpc.StatusCode, *, num_kept: int = 0) -> None:
        while len(self.frames) > num_kept:
            self.frames.pop()
        nothing = grpc.aio.Metadata()
        self._error = grpc.aio.AioRpcError(code, nothing, nothing, "scripted break")
        self.close()
        self._changed.set()

    def close(self) -> None:
        self.submits.clear()
        if self._replica is not None and self in self._replica.calls:
            self._replica.calls.remove(self)

    # What router/replica.py uses of a call

    async def write(self, message: replica_pb2.ConnectRequest) -> None:
        await asyncio.sleep(self._rng.choice((0, 0, 0.001, 0.05)))
        if self._error is not None or self._replica is None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._replica.receive(self, message)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> replica_pb2.ConnectResponse:
        await asyncio.sleep(self._rng.choice((0, 0, 0, 0.001, 0.05)))
        while not self.frames:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        return self.frames.popleft()


class _Channel:
    def __init__(self, connect: Callable[[], SimulatedCall]) -> None:
        self._connect = connect
        self._calls: list[SimulatedCall] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.close()

    def open(self) -> SimulatedCall:
        self._calls.append(self._connect())
        return self._calls[-1]


class SimulatedNetwork:
    """Takes the place of `connect` and `ReplicaStub` in router/replica.py."""

    def __init__(self, rng: random.Random) -> None:
        self.replicas: dict[str, SimulatedReplica] = {}
        """By address."""
        self._rng = rng

    def connect(self, address: str, tls: object, options: object) -> _Channel:
        return _Channel(lambda: SimulatedCall(self.replicas.get(address), self._rng))

    def stub(self, channel: _Channel) -> Any:
        class Stub:
            Connect = staticmethod(channel.open)

        return Stub
