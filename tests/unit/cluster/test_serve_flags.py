"""The flags of `weft serve` become the settings of a cluster file."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command
from typer.testing import CliRunner
from weft.recording import RecordingConfig

from cluster.cli import app
from cluster.config import build_spec
from cluster.errors import ClusterConfigError
from cluster.serve_flags import CacheFlags, ModelFlags, NetworkFlags, Setting, settings_of
from cluster.serve_settings import merge_settings

GROUPS = (ModelFlags, CacheFlags, NetworkFlags)


def setting_paths(*groups: type) -> dict[str, list[str]]:
    """By the names of the fields."""
    paths = {}
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        for field in fields(group):
            paths[field.name] = [each.path for each in hints[field.name].__metadata__ if isinstance(each, Setting)]
    return paths


def test_every_flag_changes_a_setting_of_its_own() -> None:
    paths = setting_paths(*GROUPS)
    assert paths.pop("take_over") == [], "what is done with what runs already is no setting"
    assert all(len(each) == 1 for each in paths.values())
    assert len({each[0] for each in paths.values()}) == len(paths)


def test_flag_that_a_file_refuses_is_told_by_a_name_that_it_has(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{}]\n")
    commands: Any = get_command(app)
    options = {name for each in commands.commands["serve"].params for name in each.opts}
    for (path,) in setting_paths(ModelFlags, CacheFlags).values():
        with pytest.raises(ClusterConfigError) as refused:
            merge_settings(str(file), {path: 1})
        assert str(refused.value).split()[0] in options


def test_only_flags_that_are_given_count() -> None:
    assert settings_of(*(group() for group in GROUPS)) == {}
    given = settings_of(
        ModelFlags(replicas=3),
        CacheFlags(prefix_caching=False, cpu_cache_gb=0.5),
        NetworkFlags(port=0, record_decisions=Path("/var/decisions")),
    )
    assert given == {
        "models[0].replicas": 3,
        "models[0].cache.enable_prefix_caching": False,
        "models[0].cache.cpu_cache_bytes": 2**29,
        "router.port": 0,
        "recording.folder": "/var/decisions",
    }


def test_settings_of_flags_are_those_of_a_cluster_file() -> None:
    model = ModelFlags(
        name="m",
        tensor_parallel=2,
        pipeline_parallel=1,
        expert_parallel=False,
        replicas=3,
        dtype="float32",
        quantization="int8",
        device="cpu",
        kernels="cpu",
        attention_backend="auto",
        compile=True,
        max_cudagraph_capture_size=64,
        max_context=256,
        num_threads=1,
    )
    cache = CacheFlags(
        max_num_seqs=7,
        max_num_batched_tokens=128,
        prefill_chunk_tokens=64,
        async_scheduling=True,
        scheduling_policy="mlfq",
        block_size=8,
        kv_cache_dtype="auto",
        num_blocks=99,
        memory_fraction=0.5,
        cpu_cache_gb=0.25,
        prefix_caching=True,
        host_cache_gb=0.5,
    )
    network = NetworkFlags(
        policy="round_robin",
        host="127.0.0.1",
        routers=2,
        port=1,
        http_port=2,
        metrics_port=3,
        control_port=4,
        ray_address="auto",
        record_decisions=Path("/var/decisions"),
    )
    spec = build_spec(merge_settings("weft-tiny", settings_of(model, cache, network)))
    (served,) = spec.models
    assert (served.name, served.replicas, spec.num_routers, spec.ray_address) == ("m", 3, 2, "auto")
    assert spec.router.recording == RecordingConfig(folder="/var/decisions")
    assert served.engine.parallel.tensor_parallel == 2
    assert served.engine.scheduler.max_num_seqs == 7
    assert served.engine.cache.host_cache_bytes == 2**29


@pytest.mark.parametrize("flag", ["--host-cache-gb", "--cpu-cache-gb"])
def test_size_below_zero_is_refused_at_its_flag(flag: str) -> None:
    result = CliRunner().invoke(app, ["serve", "/none", flag, "-1"])
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}'" in result.output


@pytest.mark.parametrize("size_gb", [float("nan"), float("inf")])
def test_size_that_is_no_number_is_told(size_gb: float) -> None:
    with pytest.raises(ClusterConfigError, match=r"models\[0\]\.cache\.host_cache_bytes: (nan|inf); allowed: a finite"):
        settings_of(CacheFlags(host_cache_gb=size_gb))


@pytest.mark.parametrize("flags", [[], ["--detach", "--ray-address", "auto"]])
def test_log_file_that_nobody_would_write_is_refused(flags: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", "--log-file", "x", "--model", "/none", *flags])
    assert "--log-file: nothing would be written there" in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--take-over"], "--take-over: a local Ray has no service to take over; allowed: with --ray-address"),
        (["--log-level", "loud"], "--log-level is 'loud'; allowed: debug"),
    ],
)
def test_what_serve_cannot_do_is_refused(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", "--model", "/none", *flags])
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "done"),
    [
        ([], ("here", {"log_level": "warning", "stays": True, "takes_over": False})),
        (["--ray-address", "auto", "-d"], ("here", {"log_level": "warning", "stays": False, "takes_over": False})),
        (
            ["--ray-address", "auto", "--take-over"],
            ("here", {"log_level": "warning", "stays": True, "takes_over": True}),
        ),
        (["-d", "--log-level", "info"], ("behind", {"log_level": "info", "log_file": None})),
        (["-d", "--log-file", "x"], ("behind", {"log_level": "warning", "log_file": Path("x")})),
    ],
)
def test_serve_stays_where_it_is_asked_to(
    flags: list[str], done: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr("cluster.serve.serve", lambda spec, console, **how: seen.append(("here", how)))
    monkeypatch.setattr(
        "cluster.detach.serve_in_background", lambda settings, console, **how: seen.append(("behind", how))
    )
    result = CliRunner().invoke(app, ["serve", "--model", "/none", *flags])
    assert (result.exception, seen) == (None, [done])
