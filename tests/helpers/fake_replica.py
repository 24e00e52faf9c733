"""A replica without a model: a real gRPC server of weft.v1.Replica whose engine is a script.

Tokens are a pure function of prompt, seed and position; text comes in threes, as characters of several tokens would,
and all at once where a stop string may cut it.
Nothing happens by time: steps are free, or given one by one; streams break, frames vanish and requests fail on command.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from weft import protocol
from weft.block_hash import block_hashes, root_hash
from weft.v1 import inference_pb2 as pb
from weft.v1 import replica_pb2
from weft.v1.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server

from router.tls import InnerTls, bind

EOS = 299
VOCAB_SIZE = 300
HASH_KEY = b"fake"
TOKENS_PER_CHARACTER = 3


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    """Return the token that every fake replica generates at a position of the output: a small letter."""
    return ord("a") + (sum(prompt) * 7 + seed * 13 + position * position + position) % 26


def expected_tokens(prompt: Sequence[int], seed: int, num_tokens: int) -> list[int]:
    """Return the output of a request that nothing disturbs."""
    return [token_at(prompt, seed, i) for i in range(num_tokens)]


def stop_of(sampling: pb.SamplingParams, tokens: Sequence[int]) -> tuple[str, replica_pb2.RequestFinished] | None:
    """Return the whole text and how it ended, where the last token met a condition to stop."""
    text = "".join(map(chr, tokens))
    for stop in sampling.stop:
        if stop in text:
            end = text.index(stop) + len(stop) * sampling.include_stop_str_in_output
            return text[:end], replica_pb2.RequestFinished(reason=pb.FINISH_REASON_STOP, stop_string=stop)
    if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS and not sampling.ignore_eos):
        return text[:-1], replica_pb2.RequestFinished(reason=pb.FINISH_REASON_STOP, stop_token_id=tokens[-1])
    return None


def certain_text(token_ids: Sequence[int], *, is_over: bool = False) -> str:
    """Return the text that is certain after these tokens; a group of three that is not whole is held back."""
    whole = len(token_ids) if is_over else len(token_ids) // TOKENS_PER_CHARACTER * TOKENS_PER_CHARACTER
    return "".join(map(chr, token_ids[:whole]))


@dataclass
class FakeSequence:
    """A request in the fake engine."""

    submit: replica_pb2.Submit
    tokens: list[int]
    cached_tokens: int
    is_new: bool = True


@dataclass(eq=False)
class FakeStream:
    """One router's connection."""

    router_id: str
    frames: asyncio.Queue[replica_pb2.ConnectResponse | None] = field(default_factory=asyncio.Queue)
    next_frame: int = 0
    sequences: dict[str, FakeSequence] = field(default_factory=dict)

    def send(self, frame: replica_pb2.ConnectResponse) -> None:
        frame.frame = self.next_frame
        self.next_frame += 1
        self.frames.put_nowait(frame)


class FakeReplica(ReplicaServicer):
    """Serves a scripted engine. Knobs may be turned at any time; `wait_until` waits for what a test wants to see."""

    def __init__(
        self,
        replica_id: str = "replica-0",
        *,
        model: str = "tiny",
        block_size: int = 4,
        max_context: int = 512,
        vocab_size: int = VOCAB_SIZE,
        paused: bool = False,
        tls: InnerTls | None = None,
    ) -> None:
        self.replica_id = replica_id
        self.model = model
        self.block_size = block_size
        self.max_context = max_context
        self.vocab_size = vocab_size
        self._tls = tls
        self.resident: set[bytes] = set()
        self.submits: list[replica_pb2.Submit] = []
        self.aborts: list[str] = []
        self.refusal: grpc.StatusCode | None = None
        """New requests fail with this code."""
        self.protocol_version = protocol.VERSION
        self.finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_LENGTH
        self.eos_position: int | None = None
        """At this position of the output comes the end-of-sequence token."""
        self.is_draining = False
        self.before_step: Callable[[], None] = lambda: None
        self.num_steps = 0
        self.streams: list[FakeStream] = []
        self.num_connections = 0
        self._steps_allowed: int | None = 0 if paused else None
        self._changed = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._engine: asyncio.Task[None] | None = None
        self.address = ""

    # Life

    async def start(self, port: int = 0) -> str:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_ReplicaServicer_to_server(self, self._server)
        bound = bind(self._server, f"127.0.0.1:{port}", self._tls)
        await self._server.start()
        self._engine = asyncio.create_task(self._run())
        self.address = f"127.0.0.1:{bound}"
        return self.address

    async def die(self) -> None:
        """Vanish: all streams break, the port closes, the cache is lost."""
        assert self._server is not None
        assert self._engine is not None
        self._engine.cancel()
        self.resident.clear()
        await self._server.stop(None)

    async def __aenter__(self) -> "FakeReplica":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    # Script

    def pause(self) -> None:
        self._steps_allowed = 0

    def resume(self) -> None:
        self._steps_allowed = None
        self._notify()

    async def step(self, num_steps: int = 1) -> None:
        """Let a paused engine make steps, and return when it has made them."""
        assert self._steps_allowed is not None
        wanted = self.num_steps + self._steps_allowed + num_steps
        self._steps_allowed += num_steps
        self._notify()
        await self.wait_until(lambda: self.num_steps >= wanted)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    def break_streams(self) -> None:
        """End every stream with an error; what was queued and not sent is lost."""
        for stream in list(self.streams):
            stream.frames = _closed(stream.frames)
        self._notify()

    def skip_frame(self) -> None:
        """Lose a frame of every stream: the next has a number too high."""
        for stream in self.streams:
            stream.next_frame += 1

    def evict(self, hashes: Sequence[bytes]) -> None:
        self.resident -= set(hashes)
        self._broadcast(evicted=b"".join(hashes))

    def fail_requests(self, code: grpc.StatusCode, message: str) -> None:
        """Fail every request in flight."""
        failed = replica_pb2.RequestFailed(code=code.value[0], message=message)
        for stream in self.streams:
            outputs = [replica_pb2.RequestOutput(request_id=i, failed=failed) for i in stream.sequences]
            stream.sequences.clear()
            stream.send(replica_pb2.ConnectResponse(outputs=outputs, load=self.load()))

    def drain(self) -> None:
        self.is_draining = True
        self._broadcast()

    @property
    def num_requests(self) -> int:
        return sum(len(stream.sequences) for stream in self.streams)

    def load(self) -> replica_pb2.Load:
        pending = sum(
            len(sequence.submit.prompt_token_ids) - sequence.cached_tokens
            for stream in self.streams
            for sequence in stream.sequences.values()
            if sequence.is_new
        )
        return replica_pb2.Load(
            num_running=self.num_requests, num_pending_tokens=pending, num_blocks=1000, draining=self.is_draining
        )

    # weft.v1.Replica

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[replica_pb2.ConnectRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[replica_pb2.ConnectResponse]:
        hello = await anext(aiter(request_iterator))
        stream = FakeStream(hello.hello.router_id)
        stream.send(replica_pb2.ConnectResponse(snapshot=self._snapshot(), load=self.load()))
        self.streams.append(stream)
        self.num_connections += 1
        self._notify()
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while (frame := await stream.frames.get()) is not None:
                yield frame
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted break")
        finally:
            reader.cancel()
            self.streams.remove(stream)
            self._notify()

    async def _read(self, requests: AsyncIterator[replica_pb2.ConnectRequest], stream: FakeStream) -> None:
        async for message in requests:
            if message.WhichOneof("message") == "submit":
                self._submit(message.submit, stream)
            else:
                self.aborts.append(message.abort.request_id)
                if stream.sequences.pop(message.abort.request_id, None) and self._steps_allowed != 0:
                    self._broadcast()
            self._notify()

    def _submit(self, submit: replica_pb2.Submit, stream: FakeStream) -> None:
        self.submits.append(submit)
        if self.refusal is not None:
            failed = replica_pb2.RequestFailed(code=self.refusal.value[0], message="scripted refusal")
            output = replica_pb2.RequestOutput(request_id=submit.request_id, failed=failed)
            stream.send(replica_pb2.ConnectResponse(outputs=[output], load=self.load()))
            return
        cached = 0
        for block in self._hashes(submit):
            if block not in self.resident:
                break
            cached += self.block_size
        stream.sequences[submit.request_id] = FakeSequence(submit, list(submit.generated_token_ids), cached)

    # Engine

    async def _run(self) -> None:
        while True:
            if self._steps_allowed == 0 or (self._steps_allowed is None and not self.num_requests):
                await self._changed.wait()
                continue
            if self._steps_allowed is not None:
                self._steps_allowed -= 1
            self.before_step()
            self._step()
            self.num_steps += 1
            self._notify()
            await asyncio.sleep(0)

    def _step(self) -> None:
        stored: set[bytes] = set()
        outputs = {stream: self._advance(stream, stored) for stream in self.streams}
        new = stored - self.resident
        self.resident |= new
        for stream, its_outputs in outputs.items():
            stream.send(
                replica_pb2.ConnectResponse(
                    outputs=its_outputs, stored_block_hashes=b"".join(sorted(new)), load=self.load()
                )
            )

    def _advance(self, stream: FakeStream, stored: set[bytes]) -> list[replica_pb2.RequestOutput]:
        outputs = []
        for request_id, sequence in list(stream.sequences.items()):
            if sequence.is_new:
                sequence.is_new = False
                stored.update(self._hashes(sequence.submit))
            outputs.append(self._next_output(request_id, sequence))
            if outputs[-1].HasField("finished"):
                del stream.sequences[request_id]
        return outputs

    def _next_output(self, request_id: str, sequence: FakeSequence) -> replica_pb2.RequestOutput:
        submit, tokens, sampling = sequence.submit, sequence.tokens, sequence.submit.sampling
        before = "" if sampling.stop else certain_text(tokens)
        is_eos = len(tokens) == self.eos_position
        tokens.append(EOS if is_eos else token_at(submit.prompt_token_ids, sampling.seed, len(tokens)))
        stopped = stop_of(sampling, tokens)
        is_over = stopped is not None or len(tokens) >= sampling.max_tokens
        text = certain_text(tokens, is_over=is_over)
        if stopped is not None:
            text = stopped[0]
        elif sampling.stop and not is_over:
            text = ""  # of a text that may yet be cut, nothing is certain
        output = replica_pb2.RequestOutput(request_id=request_id, token_ids=tokens[-1:], text=text[len(before) :])
        if sampling.HasField("logprobs"):
            top = [pb.Logprob(token_id=tokens[-1] + i, logprob=-0.5 - i) for i in range(sampling.logprobs)]
            output.logprobs.add(chosen=pb.Logprob(token_id=tokens[-1], logprob=-0.5), top=top)
        if is_over:
            usage = pb.Usage(
                prompt_tokens=len(submit.prompt_token_ids),
                cached_tokens=sequence.cached_tokens,
                completion_tokens=len(tokens),
                queue_s=0.25,
                prefill_s=0.5,
                decode_s=1.0,
            )
            output.finished.CopyFrom(replica_pb2.RequestFinished(reason=self.finish_reason, usage=usage))
            if stopped is not None:
                output.finished.MergeFrom(stopped[1])
        return output

    def _hashes(self, submit: replica_pb2.Submit) -> list[bytes]:
        root = root_hash(HASH_KEY, submit.cache_salt)
        return block_hashes(root, submit.prompt_token_ids, self.block_size)

    def _snapshot(self) -> replica_pb2.Snapshot:
        return replica_pb2.Snapshot(
            replica_id=self.replica_id,
            model=self.model,
            protocol_version=self.protocol_version,
            block_size=self.block_size,
            hash_key=HASH_KEY,
            block_hashes=b"".join(sorted(self.resident)),
            max_context=self.max_context,
            vocab_size=self.vocab_size,
            num_blocks=1000,
            max_num_seqs=64,
        )

    def _broadcast(self, evicted: bytes = b"") -> None:
        for stream in self.streams:
            stream.send(replica_pb2.ConnectResponse(evicted_block_hashes=evicted, load=self.load()))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _closed(
    frames: asyncio.Queue[replica_pb2.ConnectResponse | None],
) -> asyncio.Queue[replica_pb2.ConnectResponse | None]:
    while not frames.empty():
        frames.get_nowait()
    frames.put_nowait(None)
    return frames
