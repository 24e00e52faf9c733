"""What every test shares: a machine without network and where the shared data lies."""

import os
from pathlib import Path
from typing import Any

import pytest

# Before any test module imports torch, ray or huggingface_hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Threads of torch that wait for each other let go of their cores: there are more busy processes than these.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared test data beside the checkout; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared test data in ../shared")
    return SHARED


def pytest_addoption(parser: pytest.Parser) -> None:
    """See `make sanitize`."""
    parser.addoption("--sanitize", action="store_true", help="compile the CPU kernels with sanitizers")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the kernels so that an access or an operation which C++ does not define ends the process."""
    if not config.getoption("sanitize"):
        return
    from parallel.kernels.native import build

    os.environ.pop("LD_PRELOAD", None)  # it has this process, and the compiler goes without
    checks = "address,undefined,float-cast-overflow"
    build._FLAGS += ("-O2", f"-fsanitize={checks}", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS")
    build._TIMEOUT_S = 1800.0


LONGEST = ("tests/distributed/", "tests/unit/parallel/test_triton_kernels.py")
"""A minute or more each, as one: begun last by one of several processes, they would leave the others without work."""

OWN_RAYS = tuple(f"tests/e2e/test_{name}.py" for name in ("kept_service", "nodes", "serve"))
"""End-to-end tests that do without the one service of the others."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run quick tests first and end-to-end tests last, but the longest first of all where several processes share.

    GPU tests are skipped where there is no GPU.
    """
    order = {"unit": 0, "property": 1, "distributed": 2, "gpu": 3, "e2e": 4}
    items.sort(key=lambda item: order.get(item.path.relative_to(REPOSITORY / "tests").parts[0], 0))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile, files that share something go to one process: a pool of ranks, a service, an address.

    End-to-end tests wait for processes most of the time. Those of the one service run beside those that start Rays of
    their own, one after the other.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # by the number of tests, which says little about their time

    class LoadPoolScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/distributed/"):
                return "ranks"
            if nodeid.startswith("tests/e2e/"):
                return "Rays of their own" if nodeid.startswith(OWN_RAYS) else "service"
            return super()._split_scope(nodeid)

    return LoadPoolScheduling(config, log)
