"""The whole line through real Ray and real gRPC: same tokens alone, together, and when processes die under them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import openai
import psutil
import pytest
import ray
from helpers.live_cluster import Ask, Cluster, ask_alone, ask_together, scrape, wait_until
from weft.v1 import control_pb2, inference_pb2, replica_pb2
from weft.v1.inference_pb2_grpc import InferenceStub
from weft.v1.replica_pb2_grpc import ReplicaStub

from cluster.controller import CONTROLLER_NAME, NAMESPACE
from cluster.errors import ControllerError
from cluster.saved_state import RayStateStore, decode
from router.client import Client, Completion

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

READY = control_pb2.GROUP_STATE_READY
TEXT = (
    "Once upon a time there was a little dog. It ran to the big tree and saw a red bird. The bird sang a song about "
    "the sea and the sun, and the dog was happy. Then they went home to the old house, and everybody was glad. "
)


def mixed_asks(number: int, *, max_tokens: int | None = None) -> list[Ask]:
    """Requests of many lengths, every second one greedy, the others sampled with a seed."""
    asks = []
    for index in range(number):
        greedy = index % 2 == 0
        asks.append(
            Ask(
                prompt=TEXT[: 8 + (index * 37) % 150],
                options={
                    "temperature": 0.0 if greedy else 0.9,
                    "top_p": 1.0 if greedy else 0.9,
                    "seed": index,
                    "max_tokens": max_tokens or 8 + (index * 29) % 90,
                    "ignore_eos": True,
                    "timeout_s": 120.0,
                },
            )
        )
    return asks


async def test_32_streams_together_give_the_tokens_that_each_gives_alone(cluster: Cluster) -> None:
    asks = mixed_asks(32)
    alone = ask_alone(cluster.grpc_address, asks)
    together = await ask_together(cluster.grpc_address, asks)
    assert [completion.token_ids for completion in together] == alone
    assert len({completion.replica_ids for completion in together}) == cluster.num_replicas


LONG = mixed_asks(12, max_tokens=150)


@pytest.fixture(scope="module")
def long_alone(session_cluster: Cluster) -> list[tuple[int, ...]]:
    """What each of the LONG requests gives alone, before anything was killed."""
    return ask_alone(session_cluster.grpc_address, LONG)


def has_anew(cluster: Cluster, before: control_pb2.GroupStatus) -> bool:
    return cluster.groups()[0].replica_id != before.replica_id


@pytest.mark.parametrize(
    ("rank", "number"),
    [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP), (0, signal.SIGSTOP)],
    ids=["follower dies", "leader dies", "follower hangs", "leader hangs"],
)
async def test_streams_outlive_a_lost_rank_and_the_group_comes_back(
    cluster: Cluster, long_alone: list[tuple[int, ...]], rank: int, number: signal.Signals
) -> None:
    moved: list[Completion] = []
    while not moved:  # all may have ended by the time that the rank is lost: then another one is
        before = cluster.groups()[0]
        pid = before.ranks[rank].pid
        together = await ask_together(cluster.grpc_address, LONG, on_running=partial(os.kill, pid, number))
        assert [completion.token_ids for completion in together] == long_alone
        assert all(completion.finish_reason == "length" for completion in together)
        moved = [completion for completion in together if len(completion.replica_ids) > 1]
        assert all(completion.replica_ids[0] == before.replica_id for completion in moved)
        if not moved and (rank, number) == (1, signal.SIGSTOP):  # in an idle group nobody notices
            os.kill(pid, signal.SIGCONT)
        else:
            wait_until(partial(has_anew, cluster, before), "the group is formed anew")
            cluster.wait_whole()

    after = cluster.groups()[0]
    assert after.restarts == before.restarts + 1
    wait_until(lambda: not any(is_running(each.pid) for each in before.ranks), "old ranks ended")
    # The new formation gives the same tokens.
    again = await ask_together(cluster.grpc_address, LONG)
    assert [completion.token_ids for completion in again] == long_alone
    assert {replica_id for completion in again for replica_id in completion.replica_ids} == {
        group.replica_id for group in cluster.groups()
    }


def test_killed_router_comes_back_on_the_same_ports(cluster: Cluster) -> None:
    before = cluster.status().routers[0]
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        router = cluster.status().routers[0]
        return router.alive and router.pid != before.pid

    wait_until(is_back, "router restarted")
    after = cluster.status().routers[0]
    assert (after.grpc_address, after.http_address) == (before.grpc_address, before.http_address)
    cluster.wait_whole()
    ask = mixed_asks(1)
    assert len(ask_alone(cluster.grpc_address, ask)[0]) == ask[0].options["max_tokens"]
    assert all(group.state == READY for group in cluster.groups())


def test_cancelled_stream_frees_its_blocks(cluster: Cluster) -> None:
    metrics = [group.metrics_address for group in cluster.groups()]

    def num_finished(**labels: str) -> float:
        return sum(scrape(address, **labels)["weft_requests_finished_total"] for address in metrics)

    before, aborted_before = num_finished(), num_finished(reason="abort")
    num_asked = 0
    with Client(cluster.grpc_address) as client:

        def was_cancelled() -> bool:  # it may end before word of that comes: then another is sent
            nonlocal num_asked
            stream = client.generate(TEXT, max_tokens=400, temperature=0.0, ignore_eos=True)
            for _ in range(3):
                next(stream)
            stream.close()
            num_asked += 1
            wait_until(lambda: num_finished() == before + num_asked, "the request ended")
            return num_finished(reason="abort") > aborted_before

        wait_until(was_cancelled, "a request cancelled while it ran")

    def is_idle() -> bool:
        return all(
            seen["weft_requests_running"] == seen["weft_requests_waiting"] == seen["weft_kv_usage_ratio"] == 0
            for seen in map(scrape, metrics)
        )

    wait_until(is_idle, "blocks freed")
    assert num_finished() == before + num_asked


def sampling(**fields: Any) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(**fields)


def chat(*messages: tuple[str, str]) -> inference_pb2.ChatPrompt:
    return inference_pb2.ChatPrompt(
        messages=[inference_pb2.ChatMessage(role=role, content=content) for role, content in messages]
    )


INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
BAD_REQUESTS: dict[str, tuple[Callable[[], inference_pb2.GenerateRequest], grpc.StatusCode, str]] = {
    "empty prompt": (lambda: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds()), INVALID, "empty"),
    "no prompt": (lambda: inference_pb2.GenerateRequest(), INVALID, "prompt"),
    "prompt longer than the context": (
        lambda: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 100_000)),
        INVALID,
        "100000",
    ),
    "token id out of range": (
        lambda: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[1, 4_000_000_000])),
        INVALID,
        "4000000000",
    ),
    "negative temperature": (
        lambda: inference_pb2.GenerateRequest(text="a", sampling=sampling(temperature=-1.0)),
        INVALID,
        "temperature is -1",
    ),
    "NaN temperature": (
        lambda: inference_pb2.GenerateRequest(text="a", sampling=sampling(temperature=float("nan"))),
        INVALID,
        "temperature is nan",
    ),
    "unknown model": (lambda: inference_pb2.GenerateRequest(model="gpt-9", text="a"), NOT_FOUND, "gpt-9"),
    "chat without messages": (lambda: inference_pb2.GenerateRequest(chat=chat()), INVALID, "messages"),
    "chat with an unknown role": (
        lambda: inference_pb2.GenerateRequest(chat=chat(("wizard", "hi"))),
        INVALID,
        "wizard",
    ),
    "max_tokens of 0": (
        lambda: inference_pb2.GenerateRequest(text="a", sampling=sampling(max_tokens=0)),
        INVALID,
        "max_tokens is 0; allowed: at least 1",
    ),
    "10 MB message": (
        lambda: inference_pb2.GenerateRequest(text="a" * (10 << 20)),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "4194304",
    ),
}


async def test_bad_requests_are_refused_and_a_running_stream_is_unharmed(cluster: Cluster) -> None:
    asks = mixed_asks(1, max_tokens=300)
    alone = ask_alone(cluster.grpc_address, asks)
    outcomes: dict[str, tuple[grpc.StatusCode, str]] = {}

    def send_bad_requests() -> None:
        with grpc.insecure_channel(cluster.grpc_address) as channel:
            stub = InferenceStub(channel)
            for name, (make, _, _) in BAD_REQUESTS.items():
                with pytest.raises(grpc.RpcError) as caught:
                    list(stub.Generate(make(), timeout=30))
                outcomes[name] = (caught.value.code(), caught.value.details() or "")

    together = await ask_together(cluster.grpc_address, asks, on_running=send_bad_requests)
    assert [completion.token_ids for completion in together] == alone
    for name, (_, code, words) in BAD_REQUESTS.items():
        assert outcomes[name][0] is code, (name, outcomes[name])
        assert words in outcomes[name][1], (name, outcomes[name])


def test_openai_package_talks_to_the_http_front(cluster: Cluster) -> None:
    client: Any = openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="unused", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    prompt, options = TEXT[:40], {"temperature": 0.0, "max_tokens": 24}
    whole = client.completions.create(model="tiny", prompt=prompt, **options)
    streamed = client.completions.create(model="tiny", prompt=prompt, stream=True, **options)
    text = "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    with Client(cluster.grpc_address) as grpc_client:
        assert whole.choices[0].text == text == grpc_client.complete(prompt, temperature=0.0, max_tokens=24).text
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, **options)
    deltas = client.chat.completions.create(model="tiny", messages=messages, stream=True, **options)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in deltas if chunk.choices)
    assert answer.choices[0].message.content == said != ""
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model="tiny", prompt="a", max_tokens=0)


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_only_ranks_carry_torch_and_ray_has_no_process_without_a_use(cluster: Cluster) -> None:
    ranks = {rank.pid for group in cluster.groups() for rank in group.ranks}
    # What tests before this one have let go may still be ending.
    wait_until(lambda: {pid for pid in below_raylet() if has_mapped(pid, "libtorch")} == ranks, "only ranks have torch")
    wait_until(lambda: "ray::IDLE" not in below_raylet().values(), "each process has work")
    agents = [command for command in below_raylet().values() if "agent" in command.lower()]
    assert sorted("late_agent.py" in command for command in agents) == [True, True], agents
    others = [command_of(process) for process in psutil.Process().children(recursive=True)]
    assert not [command for command in others if "monitor.py" in command or "dashboard.py" in command]


def below_raylet() -> dict[int, str]:
    """The processes that Ray's node has started, by pid: their commands."""
    processes = psutil.Process().children(recursive=True)
    (raylet,) = (process for process in processes if command_of(process).split(" ")[0].endswith("/raylet"))
    return {process.pid: command_of(process) for process in raylet.children()}


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()  # a title is padded
    except psutil.NoSuchProcess:
        return ""


def has_mapped(pid: int, library: str) -> bool:
    try:
        return any(library in region.path for region in psutil.Process(pid).memory_maps())
    except psutil.NoSuchProcess:
        return False


def test_command_line_shows_status_and_generates(cluster: Cluster) -> None:
    flags = cluster.control_flags
    told = json.loads(weft("status", "--json", *flags).stdout)
    assert [group["state"] for group in told["models"][0]["groups"]] == ["GROUP_STATE_READY"] * cluster.num_replicas
    shown = weft("status", *flags).stdout
    assert all(str(rank.pid) in shown for group in cluster.groups() for rank in group.ranks)
    flags = ("--router", cluster.grpc_address, "--max-tokens", "12", "--temperature", "0")
    streamed = weft("generate", TEXT[:30], *flags)
    with Client(cluster.grpc_address) as client:
        assert streamed.stdout == client.complete(TEXT[:30], max_tokens=12, temperature=0.0).text + "\n"
    assert "TTFT" in streamed.stderr
    refused = weft("generate", "a", "--model", "gpt-9", *flags)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "gpt-9" in refused.stderr


def test_nobody_without_a_certificate_is_served_inside_the_cluster(cluster: Cluster) -> None:
    refused = weft("status", "--control", cluster.service.control_address)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "With inner_tls it wants WEFT_CONTROL_TLS_CERT, _KEY and _CA" in refused.stderr
    hello = replica_pb2.ConnectRequest(hello=replica_pb2.Hello(router_id="r", protocol_version=1))
    with grpc.insecure_channel(cluster.groups()[0].address) as channel, pytest.raises(grpc.RpcError) as caught:
        next(ReplicaStub(channel).Connect(iter([hello]), timeout=30))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_stop_ends_the_service_though_the_controller_dies_meanwhile(cluster: Cluster) -> None:
    """Last in this file: nothing is left of the service after it."""
    before = cluster.status()
    pids = [rank.pid for group in before.models[0].groups for rank in group.ranks]
    router = before.routers[0].pid
    os.kill(router, signal.SIGSTOP)  # it does not finish
    command = [sys.executable, "-m", "cluster.cli", "stop", *cluster.control_flags, "--grace", "300"]
    stopping = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: cluster.status().routers[0].draining, "stop begins")
    os.kill(before.controller.pid, signal.SIGKILL)
    wait_until(lambda: has_successor(cluster, before.controller.pid), "controller came back")
    refused = weft("scale", "tiny", "1", *cluster.control_flags)
    assert (refused.returncode, "the service is stopping" in refused.stderr) == (1, True)
    assert stopping.poll() is None, "it waits for the successor, which goes on"
    stopping.kill()
    assert "asked again" in stopping.communicate()[1]
    successor = cluster.status().controller.pid
    os.kill(router, signal.SIGCONT)
    wait_until(lambda: decode(RayStateStore().load() or b"").ended_controller, "all has stopped", poll_s=0.005)
    with suppress(ProcessLookupError):  # where this is late, it has ended by itself
        os.kill(successor, signal.SIGKILL)
    wait_until(lambda: cluster.service.wait_stopped(timeout_s=0.1), "controller ended")
    wait_until(lambda: not any(is_running(pid) for pid in pids), "ranks ended")
    wait_until(lambda: not has_controller(), "a third controller, if any, ended: another service may begin")
    assert "no controller answers" in weft("status", *cluster.control_flags).stderr


def has_successor(cluster: Cluster, old_pid: int) -> bool:
    try:
        return cluster.status().controller.pid != old_pid
    except ControllerError:
        return False


def has_controller() -> bool:
    try:
        ray.get_actor(CONTROLLER_NAME, NAMESPACE)
    except ValueError:
        return False
    return True


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
