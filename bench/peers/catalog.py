"""The engines that are compared: where each one's environment is and how its worker is started."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchConfigError, BenchError

WEFT = "weft"
_ROOT = Path(__file__).parents[2]

_START = "import sys; sys.path.append(sys.argv[1]); from {module} import main; main()"
"""The checkout comes last on the path: an engine finds its own packages before anything of Weft's environment."""


def default_venvs() -> Path:
    """Return where the environments are unless a flag says otherwise."""
    return Path.home() / ".cache" / "weft" / "peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One engine."""

    module: str
    """Module whose `main` is the worker."""
    venv: str | None
    """Folder of its environment below the cache; None: the one that runs this."""
    environment: Callable[[Path], Mapping[str, str]] = lambda venv: {}
    """Variables it needs, given its environment's folder."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices on which its worker can run it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How to start a worker."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def check_peers(names: Iterable[str]) -> None:
    """Raise BenchConfigError for a name that is no peer's."""
    allowed = [each for each in PEERS if each != WEFT]
    for name in names:
        if name not in allowed:
            raise BenchConfigError(f"--peers has {name!r}; allowed: {', '.join(allowed)}")


def find_start(name: str, *, venvs: Path, num_threads: int, device: str) -> Start:
    """Return how to start an engine's worker.

    Raises BenchError where its environment has not been made or its worker does not run on the device.
    """
    peer = PEERS[name]
    if device not in peer.devices:
        raise BenchError(f"{name} on {device}; allowed for it: {', '.join(peer.devices)}")
    python, extra = sys.executable, {}
    if peer.venv is not None:
        venv = venvs / peer.venv
        python = str(venv / "bin" / "python")
        if not (venv / READY).exists():
            raise BenchError(f"{name}: no environment in {venv}; `python -m bench.peers.install {peer.venv}` makes it")
        extra = dict(peer.environment(venv))
    command = (python, "-P", "-c", _START.format(module=peer.module), str(_ROOT))
    return Start(command=command, environment={"OMP_NUM_THREADS": str(num_threads), **_OFFLINE, **extra})


READY = ".ready"
"""A file that the last step of an installation leaves in the environment's folder."""

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _llama_cpp(venv: Path) -> Mapping[str, str]:
    return {"LLAMA_CPP_LIB_PATH": str(venv / "build" / "bin")}


def _vllm(venv: Path) -> Mapping[str, str]:
    libraries = [*venv.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), *venv.glob("lib/libiomp5.so")]
    preload = [os.environ.get("LD_PRELOAD", ""), *map(str, libraries)]
    return {
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the worker: its CPU time is then not that of others
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


_ANY = ("cpu", "cuda")

PEERS: Mapping[str, Peer] = {
    WEFT: Peer(module="bench.peers.run_weft", venv=None, devices=_ANY),
    "transformers": Peer(module="bench.peers.run_transformers", venv="transformers", devices=_ANY),
    "transformers-cb": Peer(module="bench.peers.run_transformers_cb", venv="transformers", devices=_ANY),
    "llama.cpp": Peer(module="bench.peers.run_llama_cpp", venv="llama.cpp", environment=_llama_cpp),
    "openvino": Peer(module="bench.peers.run_openvino", venv="openvino"),
    "vllm": Peer(module="bench.peers.run_vllm", venv="vllm", environment=_vllm),
}
"""Peers by the name that `--peers` takes."""
