"""The image: a clean Dockerfile that agrees with Makefile and chart; a slim target is built where buildah is."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.chart import CHART, REPOSITORY

DOCKERFILE = REPOSITORY / "deploy/Dockerfile"
TARGETS = ("router", "cpu", "cuda")
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
MAX_BYTES, MAX_CODE_BYTES = 200e6, 20e6
"""Of the router's layers over its base, and of the last one; docs/install.md tells what they are."""


def instructions() -> dict[str, list[str]]:
    """The instructions of each stage, continuation lines joined."""
    stages: dict[str, list[str]] = {}
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text())
    for line in text.splitlines():
        if match := re.fullmatch(r"FROM \S+ AS (\w+)", line):
            stages[match[1]] = []
        elif stages and line and not line.startswith("#"):
            stages[list(stages)[-1]].append(line)
    return stages


def test_dockerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint, which `make test` installs")
    result = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("target", TARGETS)
def test_image_does_not_run_as_root(target: str) -> None:
    users = [line for line in instructions()[target] if line.startswith("USER ")]
    assert users == ["USER 1000:1000"], "a number, or Kubernetes cannot check runAsNonRoot"


@pytest.mark.parametrize("target", TARGETS)
def test_code_is_the_last_layer(target: str) -> None:
    runs = [line for line in instructions()[target] if line.startswith("RUN ")]
    assert runs[-1].endswith("pip install --no-cache-dir --no-deps /wheel/*.whl")
    assert not [line for line in instructions()[target] if line.startswith(("COPY ", "ADD "))]


def test_versions_agree_with_makefile_and_chart() -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    assert f"TORCH ?= torch=={arguments['TORCH']}" in (REPOSITORY / "Makefile").read_text()
    assert yaml.safe_load((CHART / "values.yaml").read_text())["rayVersion"] == arguments["RAY"]
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert set(re.findall(r"-t weft:(\S+)", DOCKERFILE.read_text())) == {f"{version}-{target}" for target in TARGETS}


def image_version() -> str:
    return str(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"])


def test_router_image_leaves_out_only_what_replicas_need() -> None:
    everything, router = _requirements(), _requirements("--router")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert everything == project["dependencies"] + project["optional-dependencies"]["tracing"]
    left_out = {re.split(r"[\[><=]", line)[0] for line in everything if line not in router}
    assert left_out == {"torch", "ray", "numpy", "safetensors", "pyzmq"}


@pytest.mark.parametrize("command", [["-m", "router", "--help"], ["-m", "cluster.cli", "generate", "--help"]])
def test_router_and_client_run_without_what_is_left_out(command: list[str]) -> None:
    block = "import runpy, sys; sys.modules.update(dict.fromkeys(('torch', 'ray', 'numpy', 'safetensors', 'zmq')));"
    run = f"{block} sys.argv = {command[1:]!r}; runpy.run_module({command[1]!r}, run_name='__main__', alter_sys=True)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "proto")])}
    result = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout or "usage" in result.stdout


def test_context_holds_what_the_wheel_is_made_of_and_nothing_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {path.split("/")[0] for path in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    files = {"pyproject.toml", project["project"]["readme"], "deploy/requirements.py"}
    assert {line[1:] for line in lines if line.startswith("!")} == packages | files
    assert "*" in lines


def test_every_package_of_the_wheel_says_that_it_has_types() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [package for package in packages if not (REPOSITORY / package / "py.typed").is_file()] == []
    assert "Typing :: Typed" in project["project"]["classifiers"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_router_image_builds_and_runs(tmp_path: Path) -> None:
    for tool in ("buildah", "runc", "debootstrap"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} (Debian packages buildah, runc and debootstrap)")
    if os.geteuid() != 0:
        pytest.skip("needs root, for debootstrap and chroot")
    builder = _Buildah(tmp_path)
    rootfs = tmp_path / "rootfs"
    include = "--include=python3,python3-venv,ca-certificates"
    subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", rootfs], check=True, stdout=sys.stderr)
    if AUTHORITIES.is_file():  # the network may have some of its own, by which pip knows its index
        shutil.copy(AUTHORITIES, rootfs / AUTHORITIES.relative_to("/"))
    base = builder("from", "scratch")
    builder("add", base, str(rootfs), "/")
    builder("commit", base, "localhost/python")
    shutil.rmtree(rootfs)
    arguments = ["--build-arg", "BASE=localhost/python", "--target", "router", "--file", str(DOCKERFILE)]
    builder("bud", "--layers", "--isolation", "chroot", *arguments, "--tag", "localhost/weft", str(REPOSITORY))
    image: Any = json.loads(builder("inspect", "--type", "image", "localhost/weft"))
    assert image["OCIv1"]["config"]["User"] == "1000:1000"
    _, *sizes = [layer["size"] for layer in json.loads(image["Manifest"])["layers"]]
    print(f"layers over the base: {sizes}")
    assert (sum(sizes) < MAX_BYTES, sizes[-1] < MAX_CODE_BYTES) == (True, True), sizes
    container = builder("from", "localhost/weft")
    run = ("run", "--isolation", "chroot", container, "--")
    assert builder(*run, "id", "-u") == "1000"
    assert "usage: python -m router" in builder(*run, "python", "-m", "router", "--help")
    assert "Send a prompt" in builder(*run, "weft", "generate", "--help")
    assert builder(*run, "weft", "--version") == "weft " + image_version()
    assert builder(*run, "python", "-c", "import router.tracing; print('traces')") == "traces"


class _Buildah:
    """Runs buildah with a storage of its own, so that nothing is left behind on the machine."""

    def __init__(self, folder: Path) -> None:
        self._options = [
            "--root",
            str(folder / "root"),
            "--runroot",
            str(folder / "runroot"),
            "--storage-driver",
            "vfs",
        ]

    def __call__(self, command: str, *arguments: str) -> str:
        result = subprocess.run(
            ["buildah", *self._options, command, *arguments], stdout=subprocess.PIPE, text=True, timeout=600
        )
        assert result.returncode == 0, f"buildah {command} failed; its messages are above"
        return result.stdout.strip()


def _requirements(*flags: str) -> list[str]:
    command = [sys.executable, REPOSITORY / "deploy/requirements.py", *flags]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()
