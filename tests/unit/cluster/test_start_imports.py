"""Start time that needs no clock: what each process imports, and what it does not."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "ray", "transformers", "matplotlib", "pandas")


def imported(*modules: str) -> set[str]:
    """Which heavy packages a fresh process has after importing these modules."""
    probe = f"import sys, {', '.join(modules)}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240, check=True)
    return set(done.stdout.split())


def test_command_line_and_router_import_neither_torch_nor_ray() -> None:
    assert imported("cluster.cli", "cluster.serve", "cluster.preflight", "router.app") == set()


def test_what_is_created_on_ray_imports_no_torch() -> None:
    assert imported("cluster.service", "cluster.controller", "cluster.router_actor", "cluster.rank_actor") == {"ray"}


def test_leader_imports_torch_and_no_ray() -> None:
    assert imported("cluster.leader") == {"torch"}


_WITHOUT_OTHERS = """
import sys

class Missing:
    def find_spec(name, path, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names | {packages}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Missing)
import router.client
"""


def test_python_client_needs_no_more_than_the_manual_installs() -> None:
    (installed,) = re.findall(
        r"^pip install --no-deps \. && pip install (.*)$", (REPOSITORY / "docs/clients.md").read_text(), re.MULTILINE
    )
    modules = {"grpcio": "grpc", "protobuf": "google"}
    packages = {modules.get(name, name.replace("-", "_")) for name in installed.split()}
    packages |= {"router", "weft", "typing_extensions"}  # the last one comes with grpcio
    probe = _WITHOUT_OTHERS.format(packages=packages)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
