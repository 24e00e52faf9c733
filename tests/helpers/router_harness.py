"""A whole router in the test's event loop: real gRPC to fake replicas, tokens that are bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families
from weft.v1 import inference_pb2 as pb
from weft.v1.inference_pb2_grpc import InferenceStub

from helpers.fake_replica import EOS
from helpers.polling import GUARD_S, poll
from router.app import BoundAddresses, run_router
from router.call import Conversation, TokenName
from router.config import FailoverConfig, LinkConfig, RouterConfig, StaticModel
from router.generation_config import GenerationDefaults
from router.model_text import ModelText
from router.server import READINESS_SERVICE
from router.spans import Tracer
from router.tokenizer_pool import Tokenizer

if TYPE_CHECKING:
    from weft.v1.inference_pb2_grpc import InferenceAsyncStub

BOS = 256

SMALLEST_WINDOW = (("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0))
"""Of a client that takes 5 bytes, the head of a message, before it reads."""


class ByteTokenizer:
    """One token a byte, and a beginning-of-sequence token before a plain prompt."""

    vocab_size = 300
    eos_token_id = EOS
    generation_defaults = GenerationDefaults(sampling={"top_k": 40})

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return (*((BOS,) if add_special_tokens else ()), *text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode()

    def token_name(self, token_id: int) -> TokenName:
        return TokenName(self.decode((token_id,)).encode())

    def render_chat(self, chat: Conversation) -> tuple[int, ...]:
        variables = "".join(f"[{name}={value}]" for name, value in chat.template_kwargs.items())
        end = "..." if chat.continue_final_message else "" if chat.add_generation_prompt else "."
        return tuple((variables + "".join(f"<{m.role}>{m.content}" for m in chat.messages) + end).encode())


@dataclass
class Answer:
    """All that a stream gave."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[pb.TokenLogprobs] = field(default_factory=list)
    finished: pb.Finished | None = None
    num_finished: int = 0

    def add(self, response: pb.GenerateResponse) -> None:
        assert self.finished is None, "nothing may follow the last message"
        self.text += response.text
        self.token_ids.extend(response.token_ids)
        self.logprobs.extend(response.logprobs)
        if response.HasField("finished"):
            self.finished = response.finished
            self.num_finished += 1


@dataclass
class RunningRouter:
    """A router that serves, and a client's channel to it."""

    addresses: BoundAddresses
    channel: grpc.aio.Channel
    stop: asyncio.Event
    task: asyncio.Task[None]

    @property
    def stub(self) -> "InferenceAsyncStub":
        return InferenceStub(self.channel)

    async def generate(self, request: pb.GenerateRequest, timeout_s: float | None = GUARD_S) -> Answer:
        answer = Answer()
        async for response in self.stub.Generate(request, timeout=timeout_s):
            answer.add(response)
        return answer

    async def wait_ready(self, num_replicas: int, model: str = "tiny", timeout_s: float = GUARD_S) -> None:
        await poll(lambda: self._num_ready(model), num_replicas, timeout_s)

    async def is_ready(self) -> bool:
        """Return what its readiness service says."""
        health = health_pb2_grpc.HealthStub(self.channel)  # type: ignore[no-untyped-call]
        answer = await health.Check(health_pb2.HealthCheckRequest(service=READINESS_SERVICE))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def metric(self, name: str, **labels: str) -> float:
        """Return the value of one series; 0 when there is none."""
        return {tuple(sorted(found.items())): value for found, value in await self.series(name)}.get(
            tuple(sorted(labels.items())), 0.0
        )

    async def series(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of all series of a name."""
        families = text_string_to_metric_families(await self.scrape())
        return [(s.labels, s.value) for family in families for s in family.samples if s.name == name]

    async def outcomes(self, num_requests: int) -> dict[str, float]:
        """Wait until so many requests have ended, and return how many ended how."""
        found: dict[str, float] = {}
        async with asyncio.timeout(GUARD_S):
            while sum(found.values()) < num_requests:
                series = await self.series("weft_router_requests_total")
                found = {labels["outcome"]: value for labels, value in series if value}
        return found

    async def scrape(self) -> str:
        url = f"http://{self.addresses.metrics}/metrics"
        return await asyncio.to_thread(lambda: urlopen(url, timeout=GUARD_S).read().decode())

    async def _num_ready(self, model: str) -> int:
        models = (await self.stub.ListModels(pb.ListModelsRequest())).models
        return next((m.ready_replicas for m in models if m.name == model), -1)


def router_config(*addresses: str, control: str | None = None, **changes: object) -> RouterConfig:
    """Return a configuration on free ports, with short waits."""
    models = (StaticModel(name="tiny", path="/tiny", addresses=addresses),) if addresses else ()
    settings: dict[str, object] = {
        "grpc_port": 0,
        "http_port": None,
        "metrics_port": None,
        "grace_s": 5.0,
        "link": LinkConfig(backoff_s=0.01, max_backoff_s=0.05, connect_timeout_s=5.0),
        "failover": FailoverConfig(new_request_wait_s=0.5, failover_wait_s=5.0),
        **changes,
    }
    return RouterConfig(control=control, models=models, **settings)  # type: ignore[arg-type]


def _bytes(text: ModelText) -> ByteTokenizer:
    return ByteTokenizer()


@asynccontextmanager
async def running_router(
    config: RouterConfig,
    *,
    tracer: Tracer | None = None,
    load_tokenizer: Callable[[ModelText], Tokenizer] | None = _bytes,
    grace_s: Callable[[], float] | None = None,
) -> AsyncIterator[RunningRouter]:
    """Run a router for the length of the block."""
    stop = asyncio.Event()
    ready: asyncio.Future[BoundAddresses] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        run_router(
            config,
            stop=stop,
            on_ready=ready.set_result,
            grace_s=grace_s,
            load_tokenizer=load_tokenizer,
            tracer=tracer,
        )
    )
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    addresses = ready.result()
    async with grpc.aio.insecure_channel(addresses.grpc) as channel:
        try:
            yield RunningRouter(addresses, channel, stop, task)
        finally:
            stop.set()
            await asyncio.wait((task,))
            if not task.cancelled():  # by the test
                task.result()


def text_request(text: str, *, max_tokens: int = 10, seed: int = 1, **fields: object) -> pb.GenerateRequest:
    """Return a request for the tiny model."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=seed)
    return pb.GenerateRequest(model="tiny", text=text, sampling=sampling, **fields)  # type: ignore[arg-type]


def prompt_ids(text: str) -> list[int]:
    """Return the tokens of a text prompt."""
    return [BOS, *text.encode()]
