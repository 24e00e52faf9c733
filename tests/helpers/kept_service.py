"""A program of its own: Ray, and a service that deploy/ray/serve.sh keeps, whose front is killed, ended, begun anew.

Prints what happened as JSON on its last line. Its own process, so that whatever is left of it can be ended with it.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_prestart_worker_first_driver="0", RAY_enable_metrics_collection="0")
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0123456789abcdef0123456789abcdef")  # it has no home with one

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster as RayCluster
from weft.v1 import control_pb2

from cluster.control_client import ControlClient
from cluster.errors import ControllerError
from cluster.readiness import is_ready
from helpers.live_cluster import wait_until
from router.client import Client

SERVE = Path(__file__).resolve().parents[2] / "deploy/ray/serve.sh"
NUM_TOKENS = 300


class Keeper:
    """Starts serve.sh, as a head does, and sees what it keeps."""

    def __init__(self, folder: Path, ray_address: str, control: str) -> None:
        self._folder = folder
        self._control = control
        tiny = {"name": "tiny", "path": "weft-tiny", "device": "cpu", "dtype": "float32", "num_threads": 1}
        settings = {
            "models": [{**tiny, "cache": {"num_blocks": 64}}],
            "router": {"port": 0, "http_port": 0, "metrics_port": 0},
            "controller": {"port": int(control.rpartition(":")[2])},
            "ray": {"address": ray_address},
        }
        (folder / "cluster.yaml").write_text(json.dumps(settings))
        (folder / "weft").write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m cluster.cli "$@"\n')
        (folder / "weft").chmod(0o755)

    @contextmanager
    def running(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run serve.sh, and wait until the service is READY; it is told to end at the end, and must."""
        environment = os.environ | {"PATH": f"{self._folder}:{os.environ['PATH']}", "HOME": str(self._folder)}
        with (self._folder / "log").open("ab") as log:
            process = subprocess.Popen([SERVE, self._folder / "cluster.yaml"], env=environment, stdout=log, stderr=log)
        try:
            wait_until(self.is_ready, "ready")
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def status(self) -> control_pb2.GetStatusResponse:
        """Return the state, an empty one where no controller answers."""
        try:
            with ControlClient(self._control) as client:
                return client.status()
        except ControllerError:
            return control_pb2.GetStatusResponse()

    def is_ready(self) -> bool:
        """Whether a controller answers, and all that it has serves."""
        status = self.status()
        return bool(status.models) and is_ready(status)

    def pids(self) -> dict[str, int]:
        """Return who serves: each rank, the router and the controller."""
        status = self.status()
        (group,) = status.models[0].groups
        ranks = {f"{group.replica_id}/{rank.rank}": rank.pid for rank in group.ranks}
        return {**ranks, "router": status.routers[0].pid, "controller": status.controller.pid}

    def log(self) -> str:
        """Return what it has said."""
        return (self._folder / "log").read_text()


def run(keeper: Keeper, ray_address: str, told: dict[str, Any]) -> None:
    """Make Ray ready, start; kill the front, tell its successor to end in the middle of a request, and start anew.

    What Ray has ready is killed once, as by the kernel that is short of memory, and made ready again.
    """
    warm = [sys.executable, "-m", "cluster.cli", "warm", "--ray-address", ray_address]
    subprocess.run(warm, check=True)
    killed = _spares(ray_address)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(_runs(pid) for pid in killed), "nobody waits")
    subprocess.run(warm, check=True)
    told["num_killed"], told["num_waiting"] = len(killed), sum(_runs(pid) for pid in _spares(ray_address))
    begin_s = time.time()
    with keeper.running() as process:
        told["before"] = keeper.pids()
        told["waited_s"] = [begin_s - psutil.Process(pid).create_time() for pid in told["before"].values()]
        (front,) = psutil.Process(process.pid).children()
        front.kill()
        wait_until(lambda: "goes on as it is" in keeper.log(), "taken over")
        told["after"] = keeper.pids()
        with Client(keeper.status().routers[0].grpc_address) as client:
            client.wait_ready(30)
            stream = client.generate("Once upon a time", max_tokens=NUM_TOKENS, ignore_eos=True, timeout_s=60)
            tokens = list(next(stream).token_ids)
            process.send_signal(signal.SIGTERM)
            for delta in stream:
                tokens += delta.token_ids
        told |= {"num_tokens": len(tokens), "wanted_tokens": NUM_TOKENS}
        told["status"] = process.wait(60)
        wait_until(lambda: not any(_runs(pid) for pid in told["after"].values()), "everything ended")
    wait_until(lambda: len(_spares(ray_address)) == 3, "processes wait for controller, router and rank")
    begin_s = time.time()
    with keeper.running():
        told["anew"] = keeper.pids()
        told["waited_s"] += [begin_s - psutil.Process(pid).create_time() for pid in told["anew"].values()]
    wait_until(lambda: not any(_runs(pid) for pid in told["anew"].values()), "everything ended again")


def _spares(ray_address: str) -> list[int]:
    """The processes that are said to wait."""
    notes = GcsClient(address=ray_address).internal_kv_keys(b"spare/", b"weft")
    return [int(note.split(b"/")[-2]) for note in notes if note.endswith(b"/waits")]


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also when it ends meanwhile
        return False


def main(folder: Path, control: str) -> None:
    head = {"node_ip_address": "127.0.0.2", "num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = RayCluster(initialize_head=True, head_node_args=head)
    told: dict[str, Any] = {}
    try:
        keeper = Keeper(folder, cluster.address, control)
        try:
            run(keeper, cluster.address, told)
        except BaseException:
            print(keeper.log(), file=sys.stderr)
            raise
    finally:
        cluster.shutdown()
    print(json.dumps(told))
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
