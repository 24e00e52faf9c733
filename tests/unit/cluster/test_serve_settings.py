from pathlib import Path

import pytest

from cluster.config import build_spec
from cluster.errors import ClusterConfigError
from cluster.serve_settings import merge_settings


def test_no_target_and_no_flags_mean_the_defaults() -> None:
    assert merge_settings(None, {}) == {}


def test_positional_model_and_flags_make_one_model() -> None:
    settings = merge_settings("/m", {"models[0].tensor_parallel": 2, "models[0].cache.block_size": 8, "router.port": 0})
    assert settings == {
        "models": [{"tensor_parallel": 2, "cache": {"block_size": 8}, "path": "/m"}],
        "router": {"port": 0},
    }
    assert build_spec(settings).models[0].engine.cache.block_size == 8


def test_model_named_twice_alike_is_fine_and_otherwise_refused() -> None:
    assert merge_settings("/m", {"models[0].path": "/m"})["models"][0]["path"] == "/m"
    with pytest.raises(ClusterConfigError, match="--model is '/n', but '/m' was named too"):
        merge_settings("/m", {"models[0].path": "/n"})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text("models:\n  - {name: a, replicas: 2}\nrouter: {port: 1234}\n")
    return path


def test_file_is_read_and_flags_change_the_network(file: Path) -> None:
    spec = build_spec(merge_settings(str(file), {"router.port": 0, "ray.address": "auto"}))
    assert (spec.models[0].name, spec.models[0].replicas) == ("a", 2)
    assert (spec.router.grpc_port, spec.ray_address) == (0, "auto")


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("models[0].tensor_parallel", "--tensor-parallel"),
        ("models[0].path", "--model"),
        ("models[0].scheduler.policy", "--scheduling-policy"),
        ("models[0].cache.dtype", "--kv-cache-dtype"),
    ],
)
def test_model_flag_beside_a_file_is_refused(file: Path, path: str, flag: str) -> None:
    with pytest.raises(ClusterConfigError, match=f"{flag} cannot be given with .*cluster.yaml; set models"):
        merge_settings(str(file), {path: 1})


def test_broken_section_in_a_file_is_left_to_the_check(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text("router: fast\n")
    with pytest.raises(ClusterConfigError, match='router: "fast"'):
        build_spec(merge_settings(str(path), {"router.port": 0}))
