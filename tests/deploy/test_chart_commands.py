"""The commands of the chart's containers for real, each on a host of its own: head, two workers, router, test.

Helm renders them; what KubeRay and Kubernetes would add - the `ray start` command, addresses of Services, files of
ConfigMaps - is put in here. Opt-in, because it takes a minute and root: `pytest -m rayup tests/deploy`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.chart import REPOSITORY, find, render
from helpers.namespaces import Host, Hosts

from cluster.models import PACKAGED

pytestmark = [pytest.mark.rayup, pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
PROBE = """
import sys, grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    request = health_pb2.HealthCheckRequest(service=sys.argv[2])
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The containers of the chart, and the hosts in place of its Pods."""

    hosts: Hosts
    objects: list[Any]
    places: dict[str, str]
    environment: dict[str, str]

    @property
    def cluster(self) -> Any:
        return find(self.objects, "RayCluster")["spec"]

    @property
    def router(self) -> Any:
        return _container(find(self.objects, "Deployment", "demo-weft-router")["spec"])

    @contextmanager
    def head(self) -> Iterator[None]:
        """Run the head until it is READY for workers, and to the end of the block."""
        head = self.hosts.machines[0]
        start = f"ray start --head --block {_flags(self.cluster['headGroupSpec'])}"
        container = _container(self.cluster["headGroupSpec"])
        environment = {"KUBERAY_GEN_RAY_START_CMD": start, "POD_IP": head.address, **self.environment}
        with running(head, container, self.places, **environment):
            wait_for_probe(self.hosts.operator, head, container["readinessProbe"], 8265)
            yield

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Run both workers."""
        head, *machines = self.hosts.machines
        (group,) = self.cluster["workerGroupSpecs"]
        start = f"ray start --address={head.address}:6379 --block {_flags(group)}"
        container = _container(group)
        with ExitStack() as stack:
            for worker in machines:
                environment = {"KUBERAY_GEN_RAY_START_CMD": start, **self.environment}
                stack.enter_context(running(worker, container, self.places, **environment))
                wait_for_probe(self.hosts.operator, worker, container["readinessProbe"])
            yield

    @contextmanager
    def routers(self) -> Iterator[None]:
        """Run a router until it is ready: until the model is served."""
        operator = self.hosts.operator
        with running(operator, self.router, self.places):
            wait_for_probe(operator, operator, self.router["livenessProbe"])
            wait_for_probe(operator, operator, self.router["readinessProbe"], timeout_s=240)
            yield

    def request(self) -> None:
        """Send the request of the test hook."""
        run(self.hosts.operator, *_command(find(self.objects, "Pod")["spec"]["containers"][0], self.places))

    def group(self) -> Any:
        """Return the only group, as `weft status` tells it."""
        control = f"--control={self.hosts.machines[0].address}:50050"
        status = run(self.hosts.operator, str(BIN / "python"), "-m", "cluster.cli", "status", "--json", control).stdout
        return json.loads(status)["models"][0]["groups"][0]


def make_chart(hosts: Hosts, folder: Path, *settings: str, **environment: str) -> Chart:
    """Render the chart for the hosts; its model lies on a volume that only head and workers have."""
    volume = folder / "volume"
    shutil.copytree(PACKAGED["weft-tiny"], volume / "tiny")
    hosts.operator.run("mount", "-t", "tmpfs", "tmpfs", str(volume))
    objects = render(
        f"models[0].path={volume}/tiny",
        "models[0].cache.num_blocks=256",
        f"models[0].cpus_per_rank={os.cpu_count() or 1}",
        "serviceMonitor.enabled=true",
        *settings,
        example="kind-cpu",
    )
    for name, text in find(objects, "ConfigMap", "demo-weft")["data"].items():
        (folder / name).write_text(text)
    places = {
        "/etc/weft/": f"{folder}/",
        "demo-weft-control:": f"{hosts.machines[0].address}:",
        "demo-weft.llm:": f"{hosts.operator.address}:",
        "$(POD_NAME)": "router-a",
    }
    return Chart(hosts=hosts, objects=objects, places=places, environment=environment)


def test_the_charts_containers_make_a_service(hosts: Hosts, tmp_path: Path) -> None:
    chart = make_chart(hosts, tmp_path)
    head, *workers = hosts.machines
    with chart.head(), chart.workers(), chart.routers():
        chart.request()
        (discovery,) = find(chart.objects, "ScrapeConfig")["spec"]["httpSDConfigs"]
        url = discovery["url"].replace("demo-weft-control.llm.svc", head.address)
        ranks = [group for group in json.loads(fetch(hosts.operator, url)) if group["labels"]["job"] == "weft-rank"]
        assert {rank["labels"]["node"] for rank in ranks} == {worker.address for worker in workers}
        for rank in ranks:
            assert "weft_rank_steps_total" in fetch(hosts.operator, f"http://{rank['targets'][0]}/metrics")

        container = _container(chart.cluster["workerGroupSpecs"][0])
        (control,) = [each["value"] for each in container["env"] if each["name"] == "WEFT_CONTROL"]
        hook = {"command": container["lifecycle"]["preStop"]["exec"]["command"], "args": []}
        served = chart.group()["replica_id"]
        drained = run(
            workers[0], *_command(hook, chart.places), WEFT_CONTROL=control.replace("demo-weft-control", head.address)
        )
        assert drained.stdout.splitlines()[0] == f"leaving: {served}"
        assert drained.stdout.splitlines()[-1] == "Drained."
        assert chart.group()["state"] == "GROUP_STATE_PENDING", "there is one node left, for a model of two"


def test_workers_outlive_a_head_whose_tables_lie_in_a_redis(hosts: Hosts, tmp_path: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian package redis-server)")
    operator = hosts.operator
    address = f"{operator.address}:6380"
    chart = make_chart(
        hosts,
        tmp_path,
        f"gcsFaultTolerance.redisAddress={address}",
        RAY_REDIS_ADDRESS=address,  # these three KubeRay sets
        RAY_external_storage_namespace="demo",
        RAY_gcs_rpc_server_reconnect_timeout_s="600",
    )
    redis = operator.command(
        "redis-server", "--bind", operator.address, "--port", "6380", "--protected-mode", "no", "--save", ""
    )
    with subprocess.Popen(redis, stdout=subprocess.DEVNULL) as process:
        try:
            with ExitStack() as stack:
                with chart.head():
                    stack.enter_context(chart.workers())
                    stack.enter_context(chart.routers())
                    before = chart.group()
                chart.request()  # nobody at the head
                with chart.head():
                    after = wait_for_group(chart)
                    chart.request()
                    assert (after["replica_id"], after["ranks"]) == (before["replica_id"], before["ranks"])
        finally:
            process.terminate()


def wait_for_group(chart: Chart, timeout_s: float = 120.0) -> Any:
    """Wait until a controller tells that the group is READY; return it."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        seen: object = "no controller"
        try:
            seen = chart.group()
        except (AssertionError, IndexError) as error:
            seen = error
        else:
            if seen["state"] == "GROUP_STATE_READY":
                return seen
        assert time.monotonic() < deadline_s, seen
        time.sleep(0.5)


@contextmanager
def running(host: Host, container: Any, places: dict[str, str], **environment: str) -> Iterator[None]:
    """Run a container's command on a host; at the end SIGTERM, and whatever it leaves dies, as in Kubernetes."""
    process = subprocess.Popen(host.command(*_command(container, places), **_environment(), **environment))
    try:
        yield
        assert process.poll() is None, "a container ends only when it is told"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        attempt(host, "pkill", "--signal", "KILL", "--full", "ray|weft")


def wait_for_probe(operator: Host, host: Host, probe: Any, port: int | None = None, timeout_s: float = 120.0) -> None:
    """Ask as kubelet does until the answer is yes."""
    if "grpc" in probe:
        target = f"{host.address}:{probe['grpc']['port']}"
        command = [str(BIN / "python"), "-c", PROBE, target, probe["grpc"].get("service", "")]
    else:
        command = _fetch(f"http://{host.address}:{port or probe['httpGet']['port']}{probe['httpGet']['path']}")
    deadline_s = time.monotonic() + timeout_s
    while (result := attempt(operator, *command)).returncode != 0:
        assert time.monotonic() < deadline_s, f"{command}: {result.stderr}"
        time.sleep(0.5)


def fetch(operator: Host, url: str) -> str:
    return run(operator, *_fetch(url)).stdout


def run(host: Host, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    result = attempt(host, *command, **environment)
    assert result.returncode == 0, result.stderr
    return result


def attempt(host: Host, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = tuple(host.command(*command, **_environment(), **environment))
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def _fetch(url: str) -> list[str]:
    return [
        str(BIN / "python"),
        "-c",
        f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())",
    ]


def _flags(group: Any) -> str:
    """What KubeRay makes of a group's parameters for `ray start`."""
    return " ".join(f"--{name}={value}" for name, value in group["rayStartParams"].items())


def _container(owner: Any) -> Any:
    return owner["template"]["spec"]["containers"][0]


def _command(container: Any, places: dict[str, str]) -> list[str]:
    """Command and arguments, with what only exists in Kubernetes replaced; `weft` is the one of this checkout."""
    words = [*container["command"], *container["args"]]
    for name, value in places.items():
        words = [word.replace(name, value) for word in words]
    return words


def _environment() -> dict[str, str]:
    return {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'proto'}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",  # as KubeRay sets it with rayTokenAuthentication
        "RAY_AUTH_TOKEN": "0123456789abcdef0123456789abcdef",
        "HF_HUB_OFFLINE": "1",
    }
