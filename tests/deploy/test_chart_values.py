"""Values of the chart as a file has them, numbers as numbers: what becomes of them, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.chart import RefusedError, find, render
from weft.yaml_text import read_yaml

from cluster.config import build_spec
from cluster.errors import ClusterConfigError


def render_values(folder: Path, values: dict[str, Any]) -> list[Any]:
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    render.cache_clear()  # it goes by the path
    return render(values=path)


def test_parts_of_a_cpu_may_be_numbers(tmp_path: Path) -> None:
    # In a custom kind Kubernetes takes none but whole ones.
    resources = {"requests": {"cpu": 0.5, "memory": 2_000_000_000}, "limits": {"cpu": 1.5, "memory": "2Gi"}}
    group = {"name": "cpu", "replicas": 1, "resources": resources}
    values = {"models": [{"device": "cpu"}], "workerGroups": [group], "head": {"resources": resources}}
    cluster = find(render_values(tmp_path, values), "RayCluster")["spec"]
    for spec in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = spec["template"]["spec"]["containers"]
        assert container["resources"] == {
            "requests": {"cpu": "0.5", "memory": "2000000000"},
            "limits": {"cpu": "1.5", "memory": "2Gi"},
        }


CONTRADICTIONS = [
    ({"cpus_per_rank": 1.5}, {}),
    ({"scheduler": {"max_num_batched_tokens": 255}}, {}),
    ({"scheduler": {"max_num_seqs": 2049}}, {}),
    ({"scheduler": {"max_num_seqs": 64, "max_num_batched_tokens": 32}}, {}),
    ({"cache": {"host_cache_bytes": 1000, "enable_prefix_caching": False}}, {}),
    ({}, {"clients": {"allowed_origins": ["*", "app.example"]}}),
    ({}, {"clients": {"allowed_origins": ["https://app.example/"]}}),
    ({}, {"breaker": {"max_open_s": 0.9}}),
    ({}, {"breaker": {"open_s": 31}}),
    ({}, {"link": {"max_backoff_s": 0.04}}),
    ({}, {"link": {"backoff_s": 2.5}}),
]


@pytest.mark.parametrize(("model", "router"), CONTRADICTIONS, ids=str)
def test_contradictions_are_refused_as_the_program_refuses_them(
    model: dict[str, Any], router: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ClusterConfigError):
        build_spec({"models": [model], "router": router})
    with pytest.raises(RefusedError) as refused:
        render_values(tmp_path, {"models": [{"device": "cpu", **model}], "router": {"settings": router}})
    place = f"models[0].{next(iter(model))}" if model else f"router.settings.{next(iter(router))}"
    assert place in str(refused.value)


def test_what_is_just_within_is_taken(tmp_path: Path) -> None:
    model = {
        "device": "cpu",
        "cpus_per_rank": 2.0,
        "scheduler": {"max_num_seqs": 2048},
        "cache": {"host_cache_bytes": 1000, "enable_prefix_caching": True},
    }
    router = {
        "clients": {"allowed_origins": ["*", "https://app.example", "http://localhost:3000"]},
        "breaker": {"open_s": 30, "max_open_s": 30},
        "link": {"backoff_s": 0, "max_backoff_s": 0},
    }
    values = {"models": [model, {**model, "name": "b", "cpus_per_rank": 0.25}], "router": {"settings": router}}
    objects = render_values(tmp_path, values)
    spec = build_spec(read_yaml(find(objects, "ConfigMap", "demo-weft")["data"]["cluster.yaml"]))
    assert [each.cpus_per_rank for each in spec.models] == [2.0, 0.25]
    assert spec.router.link.max_backoff_s == 0


SIZES = [
    ({"replicas": 4097}, {}),
    ({"cache": {"num_blocks": 10**15 + 1}}, {}),
    ({}, {"clients": {"keep_alive_s": 1e16}}),
]


@pytest.mark.parametrize(("model", "router"), SIZES, ids=str)
def test_sizes_that_the_program_refuses_are_refused(
    model: dict[str, Any], router: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ClusterConfigError):
        build_spec({"models": [model], "router": router})
    with pytest.raises(RefusedError, match="Must be less than or equal to"):
        render_values(tmp_path, {"models": [{"device": "cpu", **model}], "router": {"settings": router}})


CIDR = {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}
LABELS = {"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "b", "operator": "Exists"}]}


@pytest.mark.parametrize("who", ["clients", "monitoring"])
@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        ({}, "[0] has nothing; allowed: podSelector, namespaceSelector or both, or ipBlock alone"),
        ({**CIDR, "podSelector": {}}, "[0] has ipBlock and podSelector; allowed:"),
        ({"podSelector": {"matchLabls": {"a": "b"}}}, "Additional property matchLabls is not allowed"),
        ({"namespaceSelector": {"team": "a"}}, "Additional property team is not allowed"),
        ({"ipBlock": {"cidr": "10.0.0.0"}}, ".0.ipBlock.cidr: Does not match pattern"),
        ({"ipBlock": {}}, ".0.ipBlock: cidr is required"),
    ],
    ids=str,
)
def test_peers_that_would_be_everybody_or_nobody_are_refused(
    who: str, peer: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError) as refused:
        render_values(tmp_path, {"models": [{"device": "cpu"}], "networkPolicy": {who: [peer]}})
    assert f"networkPolicy.{who}" in str(refused.value)
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "peer", [CIDR, {"podSelector": {}}, {"podSelector": LABELS, "namespaceSelector": LABELS}], ids=str
)
def test_peers_are_those_of_a_network_policy(peer: dict[str, Any], tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    values = {"models": [{"device": "cpu"}], "networkPolicy": {"clients": [peer], "monitoring": [peer]}}
    objects = render_values(tmp_path, values)
    for name in ("head", "worker", "router"):
        policy = find(objects, "NetworkPolicy", f"demo-weft-{name}")
        kubernetes_validate.validate(policy, "1.30", strict=True)
        assert any(peer in rule["from"] for rule in policy["spec"]["ingress"])
