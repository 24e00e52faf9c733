"""`weft serve` as users run it: in the background, in the foreground until a signal, and with what cannot work."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from helpers.ipv6 import needs_ipv6
from helpers.live_cluster import Ask, ask_together, scrape, wait_until
from helpers.ports import unlisted_port

from router.client import Client
from router.client_values import Options, UnavailableError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

WEFT = (sys.executable, "-m", "cluster.cli")
ANY_PORTS = ("--port", "0", "--http-port", "0", "--metrics-port", "0")


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((*WEFT, *arguments), capture_output=True, text=True, timeout=240, check=False)


@contextmanager
def nothing_left() -> Iterator[set[int]]:
    """Collect pids; at the end no process of them may run."""
    pids: set[int] = set()
    yield pids
    assert pids, "the test has noted no process"
    wait_until(lambda: not any(runs(pid) for pid in pids), f"processes ended ({pids})")


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also when it ends meanwhile
        return False


def ask(router: str, decisions: Path) -> None:
    """Send requests that share a prefix, wait for each other, end by stop strings and are given up."""
    texts = ["Once upon a time", "Once upon a time there was", "The"]
    options: list[Options] = [{"max_tokens": 40}, {"max_tokens": 40, "stop": ["e"]}, {"priority": 1}]
    asyncio.run(ask_together(router, [Ask(prompt=text, options=each) for text in texts for each in options]))
    with Client(router) as client:
        client.complete("Once upon a time", max_tokens=5)

        def has_given_up() -> bool:  # a request may end before word of that comes: then another is sent
            stream = client.generate("Once upon a time", max_tokens=600, ignore_eos=True)
            next(stream)
            stream.close()
            return any(b"abort" in path.read_bytes() for path in decisions.glob("weights*"))

        wait_until(has_given_up, "a request given up while it ran")


def test_background_service_generates_stops_and_decides_the_same_again(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")  # a Ray that looked at it would end everything
    control = f"127.0.0.1:{unlisted_port()}"
    flags = ("--control-port", control.rpartition(":")[2], "--detach", "--log-file", str(tmp_path / "log"), *ANY_PORTS)
    flags += ("--record-decisions", str(tmp_path / "decisions"), "--max-num-seqs", "4", "--num-blocks", "40")
    with nothing_left() as pids:
        started = weft("serve", str(model_folder), *flags)
        assert started.returncode == 0, started.stderr
        assert f"weft stop --control {control}" in started.stdout
        try:
            status = json.loads(weft("status", "--json", "--control", control).stdout)
            pids |= {rank["pid"] for rank in status["models"][0]["groups"][0]["ranks"]}
            (rank,) = pids
            own = Path("/proc/self/oom_score_adj").read_text()
            assert Path(f"/proc/{rank}/oom_score_adj").read_text() == own, "the kernel would end it first"
            ancestors = set(psutil.Process(rank).parents()) - set(psutil.Process().parents())
            pids |= {process.pid for process in ancestors if process.pid != 1}
            said = weft("generate", "Once upon a time", "--router", status["routers"][0]["grpc_address"], "--json")
            assert json.loads(said.stdout)["usage"]["completion_tokens"] > 0
            ask(status["routers"][0]["grpc_address"], tmp_path / "decisions")
        finally:
            stopped = weft("stop", "--control", control)
        assert stopped.returncode == 0, stopped.stderr
    replayed = weft("replay", str(tmp_path / "decisions"), "--json")
    assert replayed.returncode == 0, replayed.stdout
    outcomes = {outcome["kind"]: outcome for outcome in json.loads(replayed.stdout)}
    assert outcomes["scheduler"]["calls"]["add"] >= 12
    assert outcomes["scheduler"]["calls"].keys() >= {"add", "abort", "finish", "schedule", "update"}
    assert outcomes["router"]["calls"]["route"] == outcomes["scheduler"]["calls"]["add"]
    assert outcomes["autoscaler"]["calls"] == {}, "nothing scales by itself"


@needs_ipv6
def test_service_on_an_ipv6_address_serves_answers_and_stops(model_folder: Path, tmp_path: Path) -> None:
    flags = ("--host", "::1", "--control-port", "0", "--detach", "--log-file", str(tmp_path / "log"), *ANY_PORTS)
    with nothing_left() as pids:
        started = weft("serve", str(model_folder), *flags)
        assert started.returncode == 0, started.stderr
        (control,) = re.findall(r"control +(\[::1\]:\d+)", started.stdout)
        try:
            status = json.loads(weft("status", "--json", "--control", control).stdout)
            pids |= {rank["pid"] for rank in status["models"][0]["groups"][0]["ranks"]}
            (router,) = status["routers"]
            said = weft("generate", "Once upon a time", "--router", router["grpc_address"], "--json")
            assert json.loads(said.stdout)["usage"]["completion_tokens"] > 0, said.stderr
            http: Any = openai.OpenAI(base_url=f"http://{router['http_address']}/v1", api_key="unused")
            with http:
                assert http.completions.create(model="weights", prompt="The", max_tokens=5).usage.completion_tokens == 5
            for address in (router["metrics_address"], status["metrics_address"]):
                assert address.startswith("[::1]:")
                assert scrape(address)
        finally:
            stopped = weft("stop", "--control", control)
        assert stopped.returncode == 0, stopped.stderr


@contextmanager
def foreground_service(*arguments: str) -> Iterator[tuple[str, int]]:
    """Run `weft serve` until the block has ended it; yields what it said, and its process group."""
    with nothing_left() as pids:
        command = (*WEFT, "serve", *arguments, *ANY_PORTS, "--control-port", "0")
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            assert process.stdout is not None
            shown = ""
            while "Stop it with" not in shown:
                line = process.stdout.readline()
                assert line, shown
                shown += line
            pids |= {process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))}
            try:
                yield shown, process.pid
            except BaseException:
                process.send_signal(signal.SIGINT)
                raise
            assert process.wait(timeout=120) == 0
            assert process.stdout.read().splitlines()[-1] == "Stopped."


def test_routers_share_their_ports_and_one_outlives_the_other(model_folder: Path) -> None:
    with foreground_service(str(model_folder), "--routers", "2") as (shown, process_group):
        (grpc_address,) = re.findall(r"gRPC +(\S+)", shown)
        (http_address,) = re.findall(r"http://(\S+)/v1", shown)
        pages = re.findall(r"http://(\S+)/metrics", shown)
        (control,) = re.findall(r"--control (\S+)`", shown)

        def ask_both_fronts() -> None:
            with Client(grpc_address) as client:
                assert client.complete("Once upon a time", max_tokens=5).usage.completion_tokens == 5
            http: Any = openai.OpenAI(base_url=f"http://{http_address}/v1", api_key="unused")
            with http:
                assert http.completions.create(model="weights", prompt="The", max_tokens=5).usage.completion_tokens == 5

        def have_both_served() -> bool:
            ask_both_fronts()
            return len(pages) == 2 and all(scrape(page).get("weft_router_requests_total") for page in pages)

        wait_until(have_both_served, "both routers had requests")
        before = json.loads(weft("status", "--json", "--control", control).stdout)["routers"]
        os.kill(before[0]["pid"], signal.SIGKILL)
        with suppress(UnavailableError):  # of a connection to a process that is just ending
            ask_both_fronts()
        wait_until(lambda: not psutil.pid_exists(before[0]["pid"]), "the router ended")
        for _ in range(4):
            ask_both_fronts()

        def is_back() -> bool:
            first, second = json.loads(weft("status", "--json", "--control", control).stdout)["routers"]
            assert second["pid"] == before[1]["pid"]
            return first["alive"] and first["pid"] != before[0]["pid"]

        wait_until(is_back, "the router came back")
        wait_until(have_both_served, "both routers had requests again")
        with Client(grpc_address) as client:
            deltas = client.generate("Once upon a time", max_tokens=400, ignore_eos=True)
            next(deltas)
            os.killpg(process_group, signal.SIGTERM)  # as `timeout` does; what is begun is finished
            assert [delta.finish.reason for delta in deltas if delta.finish] == ["length"]


def test_corrupt_weights_are_told_in_one_line(model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(model_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = weft("serve", str(folder), *ANY_PORTS, "--control-port", "0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Error: broken-0: {weights} is not a complete safetensors file: " + (
        done.stderr.rpartition("file: ")[2].strip()
    )
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--tensor-parallel", "7"), 1, "which does not divide over tensor_parallel 7"),
        (("--expert-parallel",), 1, "expert_parallel is asked for; allowed: for models with experts"),
        (("--tensor-parallel", "0"), 2, "models[0].tensor_parallel: 0; allowed: greater than or equal to 1"),
        (("--max-context", "1000000"), 1, "max_context is 1000000; allowed: at most that of the model"),
        (("--policy", "fastest"), 2, "router.policy: \"fastest\"; allowed: 'round_robin'"),
        (("--log-level", "loud"), 2, "--log-level is 'loud'; allowed: debug, info"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    model_folder: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = weft("serve", str(model_folder), *arguments, *ANY_PORTS, "--control-port", "0")
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_unknown_key_in_yaml_is_told_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models:\n  - path: weft-tiny\n    cache: {blocksize: 8}\n")
    done = weft("serve", str(file))
    assert done.returncode == 2
    assert done.stderr.startswith("Error: models[0].cache.blocksize: unknown key; allowed: block_size, num_blocks")
