"""Every request ends once, whole or with a reason, and leaves nothing behind, whatever replicas and clients do.

The whole router but its sockets, in virtual time: both fronts, the dispatcher, the directory and its links. Replicas
break, hang, lose frames, refuse, drain, come and go, and change their tokenizer; the model goes for a while; clients
leave at any moment, read slowly, have deadlines and used-up keys, and ask for several choices.
"""

import asyncio
import hashlib
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml
from helpers.fake_replica import certain_text, expected_tokens, stop_of
from helpers.router_harness import ByteTokenizer
from helpers.simulated_clients import HTTP_ERRORS, AbortedError, GrpcEnd, HttpEnd, dawdle
from helpers.simulated_network import SimulatedNetwork, SimulatedReplica
from helpers.virtual_time import VirtualLoop, run_in_virtual_time
from weft.v1 import inference_pb2 as pb

from router import directory, flight, keys, metrics, replica
from router.admission import Admission
from router.call import GenerateCall
from router.config import (
    AdmissionConfig,
    BreakerConfig,
    FailoverConfig,
    LinkConfig,
    MetricsConfig,
    PolicyName,
    RouterConfig,
    StaticModel,
)
from router.directory import Directory, Membership
from router.dispatch import Dispatcher
from router.errors import RouterError
from router.keys import KeyRing
from router.metrics import RouterMetrics
from router.model_text import ModelText
from router.openai import create_app
from router.places import Places
from router.prefix_index import ReplicaId
from router.replica import Endpoint, ReplicaLink
from router.request_log import RequestRecord
from router.route import ServedModel
from router.server import InferenceServer
from router.tokenizer_pool import TokenizerPool

NUM_REPLICAS = 3
NUM_CLIENTS = 40
MODEL = "tiny"
OLD, NEW = (ModelText(path=f"/{name}", digest=name, revision=i) for i, name in enumerate(("old", "new")))


class RevisedTokenizer(ByteTokenizer):
    """Puts another token before a text with each revision."""

    def __init__(self, text: ModelText) -> None:
        self._first = 257 + text.revision

    def encode(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        return (self._first, *text.encode())


class World:
    """A router, its replicas and its clients."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, folder: Path, log: list[RequestRecord]) -> None:
        self.loop = loop
        self.rng = rng
        self.log = log
        self.network = SimulatedNetwork(rng)
        self.config = RouterConfig(
            models=(StaticModel(name="anchor", path="/anchor", addresses=("anchor",)),),
            failover=FailoverConfig(
                new_request_wait_s=5, failover_wait_s=rng.choice((3, 20)), max_attempts=rng.choice((2, 4, 100))
            ),
            breaker=BreakerConfig(max_failures=2),
            link=LinkConfig(stall_timeout_s=8),
            admission=AdmissionConfig(max_in_flight=rng.choice((3, 10, 1000)), max_queued=rng.choice((2, 20))),
            policy=rng.choice(list(PolicyName)),
            metrics=MetricsConfig(log_requests=True),
        )
        self.keys_file = _write_keys(folder)
        self.keys = KeyRing(self.keys_file, loop.time)
        self.pool = TokenizerPool(RevisedTokenizer, num_threads=1)
        self.metrics = RouterMetrics(self.config.metrics, loop.time)
        self.directory = Directory(self.config, rng, self._keep_texts)
        self.admission = Admission(Places(self.config.admission), loop.time)
        self.dispatcher = Dispatcher(
            self.config,
            directory=self.directory,
            admission=self.admission,
            pool=self.pool,
            metrics=self.metrics,
            rng=rng,
        )
        self.app = create_app(self.dispatcher, ready=lambda: True, keys=self.keys)
        self.servicer = InferenceServer(self.dispatcher, self.keys, write_timeout_s=15, reads_trace_context=False)
        self.endpoints = {f"r{i}": self.new_endpoint(f"r{i}", OLD) for i in range(NUM_REPLICAS)}
        self.draining: set[str] = set()
        self.is_named = True
        self.num_calls = 0
        self.links: set[ReplicaLink] = set()
        self.seen: Counter[str] = Counter()
        self.last_found_s = loop.time()
        """When some replica took requests."""
        self.last_dismissal_s = -math.inf
        self.troubles: list[asyncio.Task[None]] = []

    def _keep_texts(self) -> None:
        self.pool.keep(text for route in self.directory.routes for text in route.texts)

    def new_endpoint(self, name: str, text: ModelText) -> Endpoint:
        address = f"{name}-{len(self.network.replicas)}"
        self.network.replicas[address] = SimulatedReplica(name, self.rng)
        return Endpoint(replica_id=ReplicaId(name), model=MODEL, address=address, text=text)

    def apply(self) -> None:
        anchor = Endpoint(replica_id=ReplicaId("anchor"), model="anchor", address="anchor")
        names = ("anchor", MODEL)[: 1 + self.is_named]
        self.directory.apply(
            Membership(
                models=tuple(ServedModel(name=each, path="/old", max_context=0, digest="old") for each in names),
                replicas=(anchor, *self.endpoints.values()),
                draining=frozenset(map(ReplicaId, self.draining)),
            )
        )
        self.links.update(link for route in self.directory.routes for link in route.links.values())

    # Replicas

    async def run_engines(self) -> None:
        while True:
            await asyncio.sleep(0.05)
            for each in list(self.network.replicas.values()):
                each.step()
            if self.is_named and self.directory.resolve(MODEL).find(set(), self.loop.time()):
                self.last_found_s = self.loop.time()
            for link in self.links:
                assert link._unanswered or not link.breaker._is_probing, "no request is the probe"

    async def disturb(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(1.5))
            name = self.rng.choice(list(self.endpoints) or ["r0"])
            kinds: tuple[Callable[[str], Coroutine[Any, Any, None]], ...]
            kinds = (self.break_stream, self.hang, self.lose_frame, self.refuse, self.fail, self.restart, self.drain)
            kinds += (self.replace, self.dismiss, self.break_all, self.change_keys, self.forget)
            self.troubles.append(self.loop.create_task(self.rng.choice(kinds)(name)))

    def replica(self, name: str) -> SimulatedReplica:
        endpoint = self.endpoints.get(name) or next(iter(self.endpoints.values()))
        return self.network.replicas[endpoint.address]

    async def break_stream(self, name: str) -> None:
        self.replica(name).break_streams(self.rng.choice((grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)))

    async def break_all(self, _: str) -> None:
        await asyncio.gather(*(self.restart(name) for name in self.endpoints))

    async def hang(self, name: str) -> None:
        hung = self.replica(name)
        hung.is_stalled = True
        await asyncio.sleep(self.rng.uniform(0, 15))
        hung.is_stalled = False

    async def lose_frame(self, name: str) -> None:
        for call in self.replica(name).calls:
            call.skip_frame()

    async def refuse(self, name: str) -> None:
        refusing = self.replica(name)
        codes = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL
        refusing.refusal = self.rng.choice(codes)
        await asyncio.sleep(self.rng.uniform(0, 3))
        refusing.refusal = None

    async def fail(self, name: str) -> None:
        codes = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED
        self.replica(name).fail_requests(self.rng.choice(codes))

    async def restart(self, name: str) -> None:
        dying = self.replica(name)
        dying.is_up = False
        dying.break_streams()
        await asyncio.sleep(self.rng.uniform(0, 10))
        dying.is_up = True

    async def drain(self, name: str) -> None:
        draining = self.replica(name)
        draining.set_draining(True)
        await asyncio.sleep(self.rng.uniform(0, 4))
        if self.rng.random() < 0.5:
            draining.break_streams()
        draining.set_draining(False)

    async def replace(self, name: str) -> None:
        """The replica goes, and comes back elsewhere under the same name, perhaps of another revision."""
        self.last_dismissal_s = self.loop.time()
        if self.rng.random() < 0.5 and len(self.endpoints) > 1:
            self.endpoints.pop(name, None)
            self.apply()
            await asyncio.sleep(self.rng.uniform(0, 5))
        self.endpoints[name] = self.new_endpoint(name, self.rng.choice((OLD, NEW)))
        self.apply()

    async def dismiss(self, name: str) -> None:
        self.last_dismissal_s = self.loop.time()
        self.draining.add(name)
        self.apply()
        await asyncio.sleep(self.rng.uniform(0, 4))
        self.draining.discard(name)
        self.apply()

    async def forget(self, _: str) -> None:
        """The model is removed for a while."""
        self.is_named, self.last_dismissal_s = False, self.loop.time()
        self.apply()
        await asyncio.sleep(self.rng.uniform(0, 2))
        self.is_named = True
        self.apply()

    async def change_keys(self, _: str) -> None:
        """The file of the keys is written again; their rates stay."""
        self.keys_file.write_text(self.keys_file.read_text() + "# again\n")
        self.keys.reload()

    # Clients

    def draw_sampling(self) -> pb.SamplingParams:
        rng = self.rng
        stop = [chr(rng.randrange(97, 123)) * rng.choice((1, 1, 2))] if rng.random() < 0.2 else []
        return pb.SamplingParams(max_tokens=rng.randint(1, 60), seed=rng.randrange(100), stop=stop)

    async def ask(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, 20))
        asking = self.loop.create_task(self.rng.choice((self.ask_dispatcher, self.ask_grpc, self.ask_http))())
        if self.rng.random() < 0.2:
            await asyncio.wait((asking,), timeout=self.rng.choice((0, 0.02, 0.3, 3)))
            asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    async def ask_dispatcher(self) -> None:
        self.num_calls += 1
        call = GenerateCall(
            model=MODEL, text=self.draw_text(), sampling=self.draw_sampling(), timeout_s=self.draw_timeout()
        )
        begin_s = self.loop.time()
        tokens, text, finished = list[int](), "", None
        prompt: tuple[int, ...] = ()
        try:
            async with aclosing(self.dispatcher.generate(call)) as deltas:
                async for delta in deltas:
                    assert finished is None
                    prompt = delta.prompt_token_ids
                    tokens.extend(delta.token_ids)
                    text += delta.text
                    finished = delta.finished
                    check_begun(prompt, call.sampling, tokens, text)
                    await dawdle(self.rng)
                    if self.rng.random() < 0.01:
                        return
        except RouterError as error:
            self.note_error(error.code.name, begin_s, call.timeout_s)
            self.check_wait(str(error), has_tokens=bool(tokens))
        else:
            assert finished is not None
            check_whole(prompt, call.sampling, tokens, text, finished)

    async def ask_grpc(self) -> None:
        self.num_calls += 1
        timeout_s = self.draw_timeout()
        request = pb.GenerateRequest(model=MODEL, text=self.draw_text(), sampling=self.draw_sampling())
        context = GrpcEnd(self.rng, authorization=self.authorization(), timeout_s=timeout_s)
        begin_s = self.loop.time()
        try:
            await self.servicer.Generate(request, context)  # type: ignore[arg-type]
        except AbortedError as error:
            self.note_error(str(error), begin_s, timeout_s)
        else:
            tokens = [token for each in context.written for token in each.token_ids]
            (finished,) = (each.finished for each in context.written if each.HasField("finished"))
            text = "".join(each.text for each in context.written)
            prompts = [RevisedTokenizer(each).encode(request.text) for each in (OLD, NEW)]
            prompt = next(p for p in prompts if expected_tokens(p, request.sampling.seed, len(tokens)) == tokens)
            check_whole(prompt, request.sampling, tokens, text, finished)

    async def ask_http(self) -> None:
        rng, sampling, timeout_s = self.rng, self.draw_sampling(), self.draw_timeout()
        prompts, n = [self.draw_text() for _ in range(rng.randint(1, 2))], rng.randint(1, 3)
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": prompts,
            "n": n,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed,
        }
        echo = rng.random() < 0.2
        body |= {"stream": rng.random() < 0.5, "stop": list(sampling.stop), "echo": echo}
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        exchange = HttpEnd(self.rng, json.dumps(body).encode(), authorization=self.authorization(), timeout_s=timeout_s)
        begin_s = self.loop.time()
        self.num_calls += n * len(prompts)
        await self.app(exchange.scope, exchange.receive, exchange.send)
        if exchange.has_left:
            return
        assert exchange.is_over
        answers = exchange.answers()
        error = next((each["error"] for each in answers if "error" in each), None)
        if error is not None:
            self.note_error(HTTP_ERRORS[error["code"] or error["type"]], begin_s, timeout_s)
            return
        by_choice = dict.fromkeys(range(n * len(prompts)), "")
        ends = Counter[int]()
        for choice in (choice for answer in answers for choice in answer["choices"]):
            assert choice["index"] not in ends, "a choice goes on after its end"
            by_choice[choice["index"]] += choice["text"]
            if choice["finish_reason"] is not None:
                ends[choice["index"]] += 1
        assert len(ends) == len(by_choice)
        usage = answers[-1]["usage"]
        num_tokens = 0
        for index, text in by_choice.items():
            own = pb.SamplingParams()
            own.CopyFrom(sampling)
            own.seed += index % n
            prompt = prompts[index // n]
            wanted = {}
            for revision in (OLD, NEW):
                tokens, answer = whole(RevisedTokenizer(revision).encode(prompt), own)
                wanted[prompt * echo + answer] = len(tokens)
            assert text in wanted
            num_tokens += wanted[text]
        if not sampling.stop:
            assert usage["completion_tokens"] == num_tokens
        assert usage["prompt_tokens"] == sum(len(prompt) + 1 for prompt in prompts)
        records = [each for each in self.log if each.request_id.startswith(answers[0]["id"])]
        assert len(records) == len(by_choice)
        assert sum(each.prompt_tokens for each in records) == usage["prompt_tokens"]
        assert sum(each.generation_tokens for each in records) == usage["completion_tokens"]

    def draw_text(self) -> str:
        return "hello" * self.rng.randint(1, 10) + str(self.rng.randrange(5))

    def draw_timeout(self) -> float | None:
        return self.rng.choice((None, None, 0.05, 1.0, 8.0))

    def authorization(self) -> str:
        return f"Bearer {self.rng.choice(('free', 'free', 'few', 'small'))}"

    def note_error(self, code: str, begin_s: float, timeout_s: float | None) -> None:
        self.seen[code] += 1
        if code == "DEADLINE_EXCEEDED":
            assert timeout_s is not None
            assert self.loop.time() >= begin_s + timeout_s - 0.2

    def check_wait(self, message: str, *, has_tokens: bool) -> None:
        """Check that a request which waited in vain has waited for as long as it says, and for a replica of any kind
        unless it has begun."""
        waited = re.match(r"no replica of model 'tiny'(.*) was ready for (\d+) s", message)
        if waited is None:
            return
        assert has_tokens or not waited[1]
        since_s = self.loop.time() - float(waited[2])
        has_refused = any(each.last_refusal_s > since_s for each in self.network.replicas.values())
        has_refused |= self.last_dismissal_s > since_s
        assert waited[1] or has_refused or self.last_found_s < since_s + 0.1

    # What is left

    def check_nothing_is_left(self) -> None:
        assert self.admission.places.num_in_flight == 0
        assert self.admission.places.num_queued == 0
        assert not self.admission._waiters
        assert not self.pool._encodings
        turns = self.directory._turns
        assert not turns._held
        assert not any(not turn.done() for line in (turns._line, turns._first_line) for turn in line)
        route = self.directory.resolve(MODEL)
        assert (route.num_waiting, route.demand.num_held) == (0, 0)
        for link in self.links:
            assert not link._inboxes
            assert not link.load._entries
            assert not link._unanswered
            assert not link.breaker._is_probing
            assert not any(message.HasField("submit") for message in link._outgoing)
        for each in self.network.replicas.values():
            assert each.num_requests == 0, "it works for nobody"

    def check_accounts(self, taken: Counter[int]) -> None:
        families = self.metrics.requests.collect()
        ended = sum(s.value for family in families for s in family.samples if s.name.endswith("_total"))
        assert ended == len(self.log) == self.num_calls
        ids = Counter(record.request_id for record in self.log)
        assert not [request_id for request_id, count in ids.items() if request_id and count > 1]
        assert "internal" not in {r.outcome for r in self.log} or self.seen["INTERNAL"]
        for tenant in self.keys._tenants.values():
            records = [record for record in self.log if record.tenant == tenant.name]
            spent = sum(record.prompt_tokens + record.generation_tokens for record in records)
            if tenant._tokens is not None:
                assert taken[id(tenant._tokens)] == spent


def whole(prompt: Sequence[int], sampling: pb.SamplingParams) -> tuple[list[int], str]:
    """Return the tokens and the text of a request that nothing disturbs."""
    tokens = expected_tokens(prompt, sampling.seed, sampling.max_tokens)
    for num_tokens in range(1, len(tokens) + 1):
        stopped = stop_of(sampling, tokens[:num_tokens])
        if stopped is not None:
            return tokens[:num_tokens], stopped[0]
    return tokens, certain_text(tokens, is_over=True)


def check_begun(prompt: Sequence[int], sampling: pb.SamplingParams, tokens: list[int], text: str) -> None:
    all_tokens, all_text = whole(prompt, sampling)
    assert tokens == all_tokens[: len(tokens)]
    assert all_text.startswith(text)


def check_whole(
    prompt: Sequence[int], sampling: pb.SamplingParams, tokens: list[int], text: str, finished: pb.Finished
) -> None:
    assert (tokens, text) == whole(prompt, sampling)
    assert finished.usage.completion_tokens == len(tokens)
    assert finished.usage.prompt_tokens == len(prompt)


def _write_keys(folder: Path) -> Path:
    entries: list[dict[str, Any]] = [
        {"name": "free", "tokens_per_minute": 1e9},
        {"name": "few", "requests_per_minute": 10},
        {"name": "small", "tokens_per_minute": 300, "isolate_cache": True},
    ]
    for entry in entries:
        entry["sha256"] = hashlib.sha256(entry["name"].encode()).hexdigest()
    file = folder / "keys.yaml"
    file.write_text(yaml.safe_dump({"keys": entries}))
    return file


def run_world(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    rng = random.Random(seed)
    log: list[RequestRecord] = []
    taken: Counter[int] = Counter()
    take = keys.Bucket.take

    def note_taken(bucket: keys.Bucket, amount: float, now_s: float) -> None:
        taken[id(bucket)] += int(amount)
        take(bucket, amount, now_s)

    async def main(loop: VirtualLoop) -> Counter[str]:
        world = World(loop, rng, folder, log)
        monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic=loop.time))
        monkeypatch.setattr(directory, "ReplicaLink", partial(ReplicaLink, clock=loop.time))
        monkeypatch.setattr(replica, "connect", world.network.connect)
        monkeypatch.setattr(replica, "ReplicaStub", world.network.stub)
        running = [loop.create_task(world.directory.run())]
        await asyncio.sleep(0)
        world.apply()
        async with asyncio.TaskGroup() as while_asked:
            disturbing = [while_asked.create_task(world.run_engines()), while_asked.create_task(world.disturb())]
            await asyncio.gather(*(world.ask() for _ in range(NUM_CLIENTS)))
            leaving = [while_asked.create_task(world.ask_dispatcher()) for _ in range(3)]
            await asyncio.sleep(0.2)
            for task in (*disturbing, *leaving):
                task.cancel()
        await asyncio.sleep(3)  # in which no replica makes a step, and none is found to hang
        world.check_nothing_is_left()
        world.check_accounts(taken)
        ending = [*running, *world.troubles]
        for task in ending:
            task.cancel()
        ends = await asyncio.gather(*ending, return_exceptions=True)
        assert {type(end) for end in ends} <= {asyncio.CancelledError, type(None)}, ends
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return world.seen + Counter(record.outcome for record in log)

    monkeypatch.setattr(metrics, "log_request", log.append)
    monkeypatch.setattr(keys.Bucket, "take", note_taken)
    return run_in_virtual_time(main, rng)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_and_leaves_nothing(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_world(seed, tmp_path, monkeypatch)
