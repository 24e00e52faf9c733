"""Start time that needs no clock: what each process imports, and what it does not."""

import subprocess
import sys

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
