"""The files for `ray up`: Ray's own validation takes them, and they serve what the program takes."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.chart import REPOSITORY
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start

from cluster.config import build_spec, load_cluster_file

FOLDER = REPOSITORY / "deploy/ray"
PROVIDERS = ("aws", "gcp", "local")


def load(provider: str) -> Any:
    return yaml.safe_load((FOLDER / f"{provider}.yaml").read_text())


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ray_takes_the_file(provider: str) -> None:
    config = load(provider)
    assert config["provider"]["type"] == provider
    validate_config(prepare_config(config))


def test_ray_refuses_a_misspelt_key() -> None:
    with pytest.raises(Exception, match="worker_start_ray_command"):
        validate_config(prepare_config(load("aws") | {"worker_start_ray_command": []}))


def commands(provider: str) -> list[str]:
    return [command for key, part in load(provider).items() if key.endswith("_commands") for command in part]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_ray_and_the_shell_take_the_commands(provider: str) -> None:
    for command in commands(provider):
        subprocess.run(["bash", "-n", "-c", f"({command})"], check=True, timeout=60)
    flags = [
        part.split("ray start")[1] for each in commands(provider) for part in each.split(";") if "ray start" in part
    ]
    is_head = [start.make_context("start", shlex.split(each)).params["head"] for each in flags]
    assert is_head == [True, False]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_commands_of_the_environment_come_before_others(provider: str, tmp_path: Path) -> None:
    (set_path,) = (command for command in commands(provider) if ".bashrc" in command)
    before = "[[ $- == *i* ]] || return\nexport PATH=$HOME/myvenv/bin:$PATH\n"  # as Debian's begins
    (tmp_path / ".bashrc").write_text(before)
    for _ in range(2):
        subprocess.run(
            ["bash", "-c", set_path], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True, timeout=60
        )
    assert (tmp_path / ".bashrc").read_text() == f"export PATH=$HOME/venv/bin:$PATH\n{before}"


@pytest.mark.parametrize("provider", ["aws", "gcp"])
def test_workers_have_gpus_and_the_head_takes_no_rank(provider: str) -> None:
    config = prepare_config(load(provider))
    types = config["available_node_types"]
    assert types["gpu"]["resources"]["GPU"] > 0
    assert types[config["head_node_type"]]["resources"] == {"CPU": 0}
    assert any("--head" in command and "--num-cpus=0" in command for command in config["head_start_ray_commands"])


@pytest.mark.parametrize("provider", PROVIDERS)
def test_head_starts_the_service_from_what_is_copied_there(provider: str) -> None:
    config = load(provider)
    (remote,) = (Path(path) for path, source in config["file_mounts"].items() if source == ".")
    (serve,) = (command for command in config["head_start_ray_commands"] if "serve.sh" in command)
    home = f"/home/{config['auth']['ssh_user']}"
    paths = [Path(path.replace("~", home)) for path in re.findall(r"~/weft/\S+", serve)]
    assert [REPOSITORY / path.relative_to(remote) for path in paths] == [FOLDER / "serve.sh", FOLDER / "cluster.yaml"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_versions_are_those_of_the_image(provider: str) -> None:
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", (REPOSITORY / "deploy/Dockerfile").read_text(), re.MULTILINE))
    (install,) = (command for command in load(provider)["setup_commands"] if "torch==" in command)
    assert f"torch=={arguments['TORCH']} " in install
    assert f"'ray[default]=={arguments['RAY']}'" in install


def test_program_takes_what_is_served() -> None:
    spec = build_spec(load_cluster_file(FOLDER / "cluster.yaml"))
    assert spec.ray_address == "auto"
    groups = spec.models[0].replicas * spec.models[0].engine.parallel.world_size
    for provider in ("aws", "gcp"):
        worker = load(provider)["available_node_types"]["gpu"]
        assert worker["resources"]["GPU"] >= spec.models[0].engine.parallel.tensor_parallel
        assert worker["resources"]["GPU"] * worker["max_workers"] >= groups
