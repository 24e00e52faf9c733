import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterFile, ModelSection, RouterSection, build_spec, load_cluster_file
from cluster.errors import ClusterConfigError
from router.config import PolicyName, RouterConfig, TraceProtocol
from workers.config import EngineConfig


def fault(data: dict[str, Any]) -> str:
    with pytest.raises(ClusterConfigError) as caught:
        build_spec(data)
    return str(caught.value)


def test_without_settings_the_default_model_is_served_on_loopback() -> None:
    spec = build_spec({})
    assert [model.name for model in spec.models] == ["weft-tiny"]
    assert spec.models[0].replicas == 1
    assert (spec.host, spec.control_port, spec.router.host) == ("127.0.0.1", 50050, "127.0.0.1")
    assert spec.router.control == "127.0.0.1:50050"
    assert (spec.ray_address, spec.spare_s) == (None, 0.0), "nothing is started ahead on a Ray of its own"


def test_settings_reach_the_engine_and_the_router() -> None:
    spec = build_spec(
        {
            "models": [
                {
                    "path": "/models/story",
                    "tensor_parallel": 2,
                    "pipeline_parallel": 3,
                    "layer_partition": [9, 8, 7],
                    "expert_parallel": True,
                    "one_shot_all_reduce": True,
                    "replicas": 4,
                    "dtype": "bfloat16",
                    "quantization": "int8",
                    "kernels": "cuda",
                    "attention_backend": "triton",
                    "max_cudagraph_capture_size": 32,
                    "cache": {"block_size": 32, "enable_prefix_caching": False, "dtype": "int8"},
                    "scheduler": {"max_num_seqs": 8, "policy": "priority"},
                }
            ],
            "host": "0.0.0.0",
            "router": {"port": 6000, "policy": "least_loaded", "admission": {"max_queued": 7}},
            "controller": {"port": 6001},
            "ray": {"address": "auto", "spare_s": 60.0},
        }
    )
    model = spec.models[0]
    assert (model.name, model.source, model.replicas) == ("story", "/models/story", 4)
    assert model.engine.parallel.world_size == 6
    assert model.engine.parallel.layer_partition == (9, 8, 7)
    assert model.engine.parallel.expert_parallel
    assert model.engine.parallel.one_shot_all_reduce
    assert model.engine.quantization == "int8"
    assert (model.engine.kernels, model.engine.attention_backend) == ("cuda", "triton")
    assert model.engine.max_cudagraph_capture_size == 32
    assert model.engine.cache.block_size == 32
    assert not model.engine.cache.enable_prefix_caching
    assert model.engine.cache.dtype == "int8"
    assert model.engine.scheduler.policy == "priority"
    assert spec.router.policy is PolicyName.LEAST_LOADED
    assert spec.router.grpc_port == 6000
    assert spec.router.admission.max_queued == 7
    assert (spec.ray_address, spec.spare_s) == ("auto", 60.0)


def test_tracing_is_one_section_for_routers_and_replicas() -> None:
    tracing = build_spec(
        {"tracing": {"endpoint": "http://otel:4318/v1/traces", "protocol": "http", "sample_ratio": 0.1}}
    ).router.tracing
    assert (tracing.endpoint, tracing.protocol, tracing.sample_ratio) == (
        "http://otel:4318/v1/traces",
        TraceProtocol.HTTP,
        0.1,
    )


def test_metrics_port_of_the_controller_follows_its_port() -> None:
    ports = [{}, {"port": 0}, {"port": 7000}, {"port": 0, "metrics_port": 9999}]
    assert [build_spec({"controller": port}).control_metrics_port for port in ports] == [9465, 0, 0, 9999]


def test_each_model_has_its_own_hash_key() -> None:
    spec = build_spec({"models": [{"name": "a"}, {"name": "b"}]})
    keys = {model.engine.hash_key for model in spec.models}
    assert len(keys) == 2
    assert all(0 < len(key) <= 64 for key in keys)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"modle": []},
            "modle: unknown key; allowed: models, host, router, controller, tracing, recording, inner_tls",
        ),
        (
            {"router": {"prot": 1}},
            "router.prot: unknown key; allowed: max_message_bytes, tokenizer_threads",
        ),
        ({"models": [{"tensor": 2}]}, "models[0].tensor: unknown key; allowed: path, name, replicas, tensor_parallel"),
        (
            {"models": [{}, {"cache": {"blocksize": 8}}]},
            "models[1].cache.blocksize: unknown key; allowed: block_size, num_blocks, memory_fraction",
        ),
        ({"models": [{"cache": {"dtype": "fp8"}}]}, "models[0].cache.dtype: \"fp8\"; allowed: 'auto' or 'int8'"),
        (
            {"models": [{"cache": {"block_size": 0}}]},
            "models[0].cache.block_size: 0; allowed: greater than",
        ),
        ({"models": [{"cache": {"block_size": "16"}}]}, 'models[0].cache.block_size: "16"; allowed: a valid integer'),
        ({"models": [{"replicas": True}]}, "models[0].replicas: true; allowed: a valid integer"),
        ({"models": [{"replicas": 2**31}]}, "models[0].replicas: 2147483648; allowed: less than or equal to 4096"),
        (
            {"models": [{"max_replicas": 2**31}]},
            "models[0].max_replicas: 2147483648; allowed: less than or equal to 4096",
        ),
        ({"models": [{"name": "a b"}]}, 'models[0].name: "a b"; allowed: no blanks or control characters'),
        ({"models": [{"path": "/m/a b"}]}, "models[0]: path ends in 'a b'; allowed: with a `name`"),
        ({"models": [{"path": "/m/" + "a" * 129}]}, f"models[0]: path ends in '{'a' * 129}'; allowed: with a `name`"),
        ({"models": [{"stream_interval_s": -0.1}]}, "models[0].stream_interval_s: -0.1; allowed: "),
        ({"models": [{"drain_timeout_s": float("inf")}]}, "models[0].drain_timeout_s: inf; allowed: a finite number"),
        ({"router": {"max_message_bytes": 2**31}}, "router.max_message_bytes: 2147483648; allowed: less than or equal"),
        (
            {"router": {"clients": {"body_timeout_s": 0}}},
            "router.clients.body_timeout_s: 0; allowed: greater than or equal to 0.001",
        ),
        ({"models": [{"tensor_parallel": 0}]}, "models[0].tensor_parallel: 0; allowed: greater than or equal to 1"),
        ({"models": [{"num_threads": 1025}]}, "models[0].num_threads: 1025; allowed: less than or equal to 1024"),
        (
            {"models": [{"scheduler": {"max_num_seqs": 2**40, "max_num_batched_tokens": 2**40}}]},
            "models[0].scheduler.max_num_seqs: 1099511627776; allowed: less than or equal to 65536",
        ),
        ({"models": [{"quantization": "int4"}]}, "models[0].quantization: \"int4\"; allowed: 'none' or 'int8'"),
        ({"models": [{"kernels": "rocm"}]}, "models[0].kernels: \"rocm\"; allowed: 'auto', 'reference', 'cpu', 'cpu-"),
        (
            {"models": [{"max_cudagraph_capture_size": 257}]},
            "models[0].max_cudagraph_capture_size: 257; allowed: less than or equal to 256",
        ),
        (
            {"models": [{"attention_backend": "sdpa"}]},
            "models[0].attention_backend: \"sdpa\"; allowed: 'auto', 'flash-attention', 'flashinfer' or 'triton'",
        ),
        ({"models": [{"dtype": "int3"}]}, "models[0].dtype: \"int3\"; allowed: 'auto', 'float32'"),
        (
            {"models": [{"scheduler": {"max_num_batched_tokens": 8}}]},
            "models[0].scheduler: max_num_batched_tokens is 8; allowed: at least max_num_seqs (256)",
        ),
        (
            {"models": [{"max_replicas": 2, "autoscaling": {"target": 2}}]},
            "models[0].autoscaling.target: unknown key; allowed: target_requests, target_kv_usage, target_goodput",
        ),
        (
            {"models": [{"max_replicas": 2, "autoscaling": {"target_kv_usage": 1.5}}]},
            "models[0].autoscaling.target_kv_usage: 1.5; allowed: less than or equal to 1",
        ),
        (
            {"models": [{"max_replicas": 2, "autoscaling": {"idle_s": "1 h"}}]},
            'models[0].autoscaling.idle_s: "1 h"; allowed: a valid number',
        ),
        (
            {"models": [{"autoscaling": {}}]},
            "models[0]: max_replicas is null; allowed: a number, where there is `autoscaling`",
        ),
        (
            {"models": [{"replicas": 3, "max_replicas": 2, "autoscaling": {}}]},
            "models[0]: replicas is 3; allowed: 0 to 2",
        ),
        (
            {"router": {"tls": {"cert_file": "c", "key_file": "k", "cert": "x"}}},
            "router.tls.cert: unknown key; allowed: cert_",
        ),
        ({"router": {"policy": "random"}}, "router.policy: \"random\"; allowed: 'round_robin', 'least_loaded'"),
        ({"recording": {"max_bytes": 5}}, "recording.max_bytes: 5; allowed: greater than or equal to 65536"),
        ({"router": {"num_routers": 0}}, "router.num_routers: 0; allowed: greater than or equal to 1"),
        (
            {"models": [{"path": "m", "name": "m" * 129}]},
            'models[0].name: "' + "m" * 56 + "...; allowed: at most 128 characters",
        ),
        ({"router": {"num_routers": 50051}}, "router.num_routers: 50051; allowed: less than or equal to 256"),
        ({"router": {"admission": {"max_queued": 10**30}}}, "router.admission.max_queued: 1000"),
        (
            {"router": {"clients": {"keep_alive_s": 1e308}}},
            "router.clients.keep_alive_s: 1e+308; allowed: at most 1e+15",
        ),
        ({"models": [{"path": "m", "port": 1}, {"num_blocks": -1e16}]}, "models[1].num_blocks: -1e+16; allowed: at"),
        ({"router": {"port": 70000}}, "router.port: 70000; allowed: less than or equal to 65535"),
        ({"models": []}, "models: []"),
        ({"models": "weft-tiny"}, 'models: "weft-tiny"; allowed: a valid array'),
        ({"models": [{}, {}]}, "models[1].name: 'weft-tiny' is the name of models[0]"),
        ({"router": {"port": 8000}}, "router.http_port: 8000 is router.port already"),
    ],
)
def test_fault_is_told_by_its_dotted_path(data: dict[str, Any], message: str) -> None:
    assert fault(data).startswith(message)


def test_all_faults_are_told_at_once() -> None:
    lines = fault({"hots": "x", "router": {"port": -1}}).splitlines()
    assert sorted(line.split(":")[0] for line in lines) == ["hots", "router.port"]


def test_ports_that_are_any_or_off_may_repeat() -> None:
    spec = build_spec({"router": {"port": 0, "http_port": 0, "metrics_port": None}, "controller": {"port": 0}})
    assert (spec.router.grpc_port, spec.router.http_port, spec.router.metrics_port) == (0, 0, None)


def test_every_engine_and_router_setting_can_be_written() -> None:
    """A setting added to the engine or the router must be reachable from YAML, or be named here."""
    engine_only = {"model", "hash_key", "parallel"}
    engine = {field.name for field in dataclasses.fields(EngineConfig)} - engine_only
    assert engine <= set(ModelSection.model_fields)
    sections = {"tracing", "recording"}  # of their own
    router_only = {"router_id", "control", "models", "host", "grpc_port", "shares_ports"} | sections
    router = {field.name for field in dataclasses.fields(RouterConfig)} - router_only
    assert router <= set(RouterSection.model_fields)


@pytest.mark.parametrize(("num_routers", "shares"), [(1, False), (2, True)])
def test_ports_are_shared_where_there_are_several_routers(num_routers: int, shares: bool) -> None:
    spec = build_spec({"router": {"num_routers": num_routers}})
    assert (spec.num_routers, spec.router.shares_ports) == (num_routers, shares)


def test_section_defaults_are_those_of_the_router() -> None:
    assert build_spec({}).router == RouterConfig(control="127.0.0.1:50050")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "a list; allowed: a mapping"),
        ("# models:\n", "an empty file; allowed: a mapping with the keys"),
        ("a: [1\n", "not YAML: while parsing a flow sequence at line 1, column 4"),
        ("a: 2024-99-99\n", "not YAML: month must be in"),
        (f"a: {'9' * 5000}\n", "not YAML: Exceeds the limit"),
        (f"a: {'[' * 5000}\n", "not YAML: maximum recursion depth"),
        ("\xff", "a str; allowed: a mapping"),
    ],
)
def test_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterConfigError, match=message):
        load_cluster_file(path)


@pytest.mark.parametrize("text", ["models: &a [*a]\n", "models: [{2024-01-01: 1}]\n"])
def test_what_json_cannot_say_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterConfigError, match="the settings cannot be written as JSON"):
        build_spec(load_cluster_file(path))


@pytest.mark.parametrize(
    ("path", "name"), [("owner/qwen", "qwen"), ("a/llama/", "llama"), (".", "here"), ("..", "up"), ("../x/..", "up")]
)
def test_model_without_a_name_is_called_as_its_folder(
    path: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "up" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert build_spec({"models": [{"path": path}]}).models[0].name == name


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterConfigError, match=r"none\.yaml: No such file"):
        load_cluster_file(tmp_path / "none.yaml")


def test_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("models:\n  - path: weft-tiny\n    replicas: 2\n")
    assert build_spec(load_cluster_file(path)).models[0].replicas == 2


@pytest.mark.parametrize("text", ["1e-05", "1e-5", "1.0E-5", ".1e-4", "+0.00001"])
def test_small_numbers_may_be_written_as_helm_and_people_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"tracing: {{endpoint: 'http://otel:4317', sample_ratio: {text}}}\nmodels: [{{name: 1e5m}}]\n")
    spec = build_spec(load_cluster_file(path))
    assert (spec.router.tracing.sample_ratio, spec.models[0].name) == (1e-5, "1e5m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models:\n- replicas: 1\n  replicas: 2\n", r"the key 'replicas' comes twice .*line 3, column 3"),
        ("models: [{}]\nrouter: {}\nmodels: []\n", "the key 'models' comes twice"),
    ],
)
def test_a_key_that_comes_twice_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(ClusterConfigError, match=rf"cluster\.yaml: not YAML: {said}"):
        load_cluster_file(path)


def test_what_is_merged_may_be_said_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("models:\n- &one {path: weft-tiny, name: a, replicas: 2}\n- {<<: *one, name: b}\n")
    assert [(model.name, model.replicas) for model in build_spec(load_cluster_file(path)).models] == [
        ("a", 2),
        ("b", 2),
    ]


MANUAL = Path(__file__).resolve().parents[3] / "docs/settings.md"
SHOWN_OTHERWISE = {
    *("name", "replicas", "tensor_parallel", "max_context", "num_threads", "stream_interval_s", "cache.num_blocks"),
    *("scheduler.prefill_chunk_tokens", "scheduler.async_scheduling", "controller.metrics_port"),
}
"""Settings of which the manual shows another value than the default, which it says in words where that is null."""


def leaves(section: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each setting below a section of the file, by dotted path; those of the first model without "models"."""
    if isinstance(section, dict):
        for name, value in section.items():
            yield from leaves(value[0] if name == "models" else value, f"{path}.{name}" if path else name)
    else:
        yield path.removeprefix("models."), section


def test_the_manual_has_every_setting_and_its_default() -> None:
    (example,) = re.findall(r"^```yaml\n(models:.*?)^```", MANUAL.read_text(), re.MULTILINE | re.DOTALL)
    shown = yaml.safe_load(example)
    build_spec(shown)
    told, there = dict(leaves(shown)), dict(leaves(ClusterFile().model_dump(mode="json")))
    assert there.keys() - told.keys() == {"router.link.tls"}, "which the section inner_tls sets"
    assert {path for path, value in told.items() if value != there[path]} == SHOWN_OTHERWISE
