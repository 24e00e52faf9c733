"""The commands of the chart's containers for real, each on a host of its own: head, two workers, router, test.

Helm renders them; what KubeRay and Kubernetes would add - the `ray start` command, addresses of Services, files of
ConfigMaps - is put in here. Opt-in, because it takes a minute and root: `pytest -m rayup tests/deploy`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.chart import REPOSITORY, find, render
from helpers.namespaces import Host, Hosts

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


def test_the_charts_containers_make_a_service(hosts: Hosts, tmp_path: Path) -> None:
    head, *workers = hosts.machines
    objects = render(
        "models[0].cache.num_blocks=256",
        f"models[0].cpus_per_rank={os.cpu_count() or 1}",
        "serviceMonitor.enabled=true",
        example="kind-cpu",
    )
    for name, text in find(objects, "ConfigMap", "demo-weft")["data"].items():
        (tmp_path / name).write_text(text)
    places = {
        "/etc/weft/": f"{tmp_path}/",
        "demo-weft-control:": f"{head.address}:",
        "demo-weft:": f"{hosts.operator.address}:",
        "$(POD_NAME)": "router-a",
    }
    cluster = find(objects, "RayCluster")["spec"]
    ray_head = _container(cluster["headGroupSpec"])
    ray_worker = _container(cluster["workerGroupSpecs"][0])
    router = _container(find(objects, "Deployment", "demo-weft-router")["spec"])
    join = f"ray start --address={head.address}:6379 --block --dashboard-agent-listen-port=52365"
    start = (
        f"ray start --head --block --dashboard-host={cluster['headGroupSpec']['rayStartParams']['dashboard-host']} "
        f"--num-cpus={cluster['headGroupSpec']['rayStartParams']['num-cpus']}"
    )
    with ExitStack() as stack:
        stack.enter_context(running(head, ray_head, places, KUBERAY_GEN_RAY_START_CMD=start, POD_IP=head.address))
        wait_for_probe(hosts.operator, head, ray_head["readinessProbe"], 8265)
        for worker in workers:
            stack.enter_context(running(worker, ray_worker, places, KUBERAY_GEN_RAY_START_CMD=join))
            wait_for_probe(hosts.operator, worker, ray_worker["readinessProbe"], 52365)
        stack.enter_context(running(hosts.operator, router, places))
        wait_for_probe(hosts.operator, hosts.operator, router["livenessProbe"])
        wait_for_probe(hosts.operator, hosts.operator, router["readinessProbe"], timeout_s=240)
        request = find(objects, "Pod")["spec"]["containers"][0]
        run(hosts.operator, *_command(request, places))
        (discovery,) = find(objects, "ScrapeConfig")["spec"]["httpSDConfigs"]
        url = discovery["url"].replace("demo-weft-control.llm.svc", head.address)
        ranks = [group for group in json.loads(fetch(hosts.operator, url)) if group["labels"]["job"] == "weft-rank"]
        assert {rank["labels"]["node"] for rank in ranks} == {worker.address for worker in workers}
        for rank in ranks:
            assert "weft_rank_steps_total" in fetch(hosts.operator, f"http://{rank['targets'][0]}/metrics")


@contextmanager
def running(host: Host, container: Any, places: dict[str, str], **environment: str) -> Iterator[None]:
    """Run a container's command on a host; SIGTERM at the end, as Kubernetes does."""
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


def wait_for_probe(operator: Host, host: Host, probe: Any, port: int | None = None, timeout_s: float = 60.0) -> None:
    """Ask as kubelet does until the answer is yes."""
    if "grpc" in probe:
        target = f"{host.address}:{probe['grpc']['port']}"
        command = [str(BIN / "python"), "-c", PROBE, target, probe["grpc"].get("service", "")]
    else:
        command = _fetch(f"http://{host.address}:{port}{probe['httpGet']['path']}")
    deadline_s = time.monotonic() + timeout_s
    while (result := attempt(operator, *command)).returncode != 0:
        assert time.monotonic() < deadline_s, f"{command}: {result.stderr}"
        time.sleep(0.5)


def fetch(operator: Host, url: str) -> str:
    return run(operator, *_fetch(url)).stdout


def run(host: Host, *command: str) -> "subprocess.CompletedProcess[str]":
    result = attempt(host, *command)
    assert result.returncode == 0, result.stderr
    return result


def attempt(host: Host, *command: str) -> "subprocess.CompletedProcess[str]":
    command = tuple(host.command(*command, **_environment()))
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def _fetch(url: str) -> list[str]:
    return [
        str(BIN / "python"),
        "-c",
        f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())",
    ]


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
