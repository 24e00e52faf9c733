"""`ray up` for real: three hosts with ssh, a model over two of them, one of them lost, and the service goes on.

Opt-in, because it takes minutes and root: `pytest -m rayup tests/deploy/test_ray_up.py`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.chart import REPOSITORY
from helpers.namespaces import Host, Hosts

pytestmark = [pytest.mark.rayup, pytest.mark.slow, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
PYTHON_PATH = f"{REPOSITORY}:{REPOSITORY}/proto"
PROMPT = "Once upon a time"
NUM_TOKENS = 600


def test_service_outlives_a_lost_host(hosts: Hosts, tmp_path: Path) -> None:
    machines, operator = hosts.machines, hosts.operator
    config = cluster_file(machines, hosts.private_key, tmp_path)
    operator.run(
        str(BIN / "ray"), "up", "--yes", "--no-config-cache", str(config),
        timeout_s=300, RAY_UP_enable_autoscaler_v2="0", RAY_USAGE_STATS_ENABLED="0", TERM="dumb",
    )  # fmt: skip
    head = machines[0].address
    first = wait_ready(operator, head)
    nodes = {rank["node"] for rank in first["ranks"]}
    assert len(nodes) == 2, "the two stages lie on two hosts"

    undisturbed = generate(operator, head)
    lost = next(host for host in machines[1:] if host.address in nodes)
    command = weft(operator, head, "generate", PROMPT, "--stream")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        begun = client.stdout.read(10)
        lost.kill()
        text = begun + client.stdout.read()
    assert client.returncode == 0
    assert text.strip() == undisturbed.strip(), "the request went on with the tokens that it would have had"

    second = wait_ready(operator, head)
    assert second["replica_id"] != first["replica_id"]
    assert lost.address not in {rank["node"] for rank in second["ranks"]}
    assert generate(operator, head) == undisturbed


def cluster_file(machines: list[Host], key: Path, folder: Path) -> Path:
    """The repository's local.yaml, with these machines and without installing; it serves a model of two stages."""
    head, *workers = machines
    served = folder / "served"
    served.mkdir()
    (served / "serve.sh").write_bytes((REPOSITORY / "deploy/ray/serve.sh").read_bytes())
    (served / "serve.sh").chmod(0o755)
    settings = yaml.safe_load((REPOSITORY / "deploy/ray/cluster.yaml").read_text())
    settings["models"] = [
        {
            "path": "weft-tiny",
            "name": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "pipeline_parallel": 2,
            "cpus_per_rank": float(os.cpu_count() or 1),  # a host has room for one rank
            "num_threads": 1,
            "step_timeout_s": 20.0,
            "cache": {"num_blocks": 512},
        }
    ]
    (served / "cluster.yaml").write_text(yaml.safe_dump(settings))
    environment = f"PATH={BIN}:$PATH PYTHONPATH={PYTHON_PATH} RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1"
    config = yaml.safe_load((REPOSITORY / "deploy/ray/local.yaml").read_text())
    config["provider"] |= {"head_ip": head.address, "worker_ips": [worker.address for worker in workers]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(key)}
    config["file_mounts"] = {"~/weft/deploy/ray": str(served)}
    config["setup_commands"] = [f"echo 'export {environment}' > ~/.bashrc"]
    path = folder / "local.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def wait_ready(operator: Host, head: str, timeout_s: float = 240.0) -> Any:
    """Wait until the only group is READY; return it."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        seen: object = "no controller"
        result = subprocess.run(weft(operator, head, "status", "--json"), capture_output=True, text=True)
        if result.returncode == 0:
            (model,) = json.loads(result.stdout)["models"]
            (group,) = model["groups"]
            if group["state"] == "GROUP_STATE_READY":
                return group
            seen = group
        assert time.monotonic() < deadline_s, f"not READY: {seen}\n{result.stderr}"
        time.sleep(1.0)


def generate(operator: Host, head: str) -> str:
    """Return what the service makes of the prompt."""
    result = subprocess.run(
        weft(operator, head, "generate", PROMPT, "--no-stream"), capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def weft(operator: Host, head: str, command: str, *arguments: str) -> list[str]:
    """The command line of `weft` on the operator's machine."""
    if command == "status":
        arguments = (*arguments, f"--control={head}:50050")
    else:
        length = (f"--max-tokens={NUM_TOKENS}", "--temperature=0", "--ignore-eos", "--timeout=180")
        arguments = (*arguments, f"--router={head}:50051", *length)
    return operator.command(str(BIN / "python"), "-m", "cluster.cli", command, *arguments, PYTHONPATH=PYTHON_PATH)
