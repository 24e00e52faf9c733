"""The chart's NetworkPolicies, evaluated: who reaches which port of which Pod."""

from typing import Any

import pytest
from helpers.chart import find, pod_templates, render

from cluster.defaults import RANK_METRICS_PORTS

ANY_PORT = (32768, 60999)
"""Where Linux takes a free port from, unless somebody has set another range."""
RAYS_OWN = ("node-manager-port", "object-manager-port", "runtime-env-agent-port", "dashboard-agent-grpc-port")
RAYS_AGENT = "dashboard-agent-listen-port"
NEIGHBOUR = {"app": "another"}


def labels_of(objects: list[Any], component: str) -> dict[str, str]:
    """The labels of a Pod, with those that KubeRay adds."""
    labels: dict[str, str]
    (labels,) = [
        template["metadata"]["labels"]
        for template in pod_templates(objects)
        if template["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]
    rays = {"ray.io/cluster": "demo-weft", "ray.io/node-type": component}
    return labels | rays if component in ("head", "worker") else labels


def reaches(objects: list[Any], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether a Pod of the same namespace may connect; policies add up."""
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    rules = [rule for spec in policies if _selects(spec, target) for rule in spec["ingress"]]
    return any(_takes(rule, port) and any(_selects(peer, source) for peer in rule["from"]) for rule in rules)


def _selects(owner: dict[str, Any], labels: dict[str, str]) -> bool:
    if "podSelector" not in owner:
        return False  # other namespaces, or addresses
    wanted: dict[str, str] = owner["podSelector"].get("matchLabels", {})
    return wanted.items() <= labels.items()


def _takes(rule: dict[str, Any], port: int) -> bool:
    return any(each["port"] <= port <= each.get("endPort", each["port"]) for each in rule.get("ports", ())) or (
        "ports" not in rule
    )


@pytest.fixture(name="objects")
def fixture_objects() -> list[Any]:
    """Where everybody in the namespace may send requests and read metrics."""
    return render("models[0].device=cpu")


def ray_parameters(objects: list[Any]) -> dict[str, dict[str, str]]:
    spec = find(objects, "RayCluster")["spec"]
    (workers,) = spec["workerGroupSpecs"]
    return {"head": spec["headGroupSpec"]["rayStartParams"], "worker": workers["rayStartParams"]}


@pytest.mark.parametrize("component", ["head", "worker"])
def test_nobody_outside_reaches_what_ray_runs_commands_from(objects: list[Any], component: str) -> None:
    # What Ray would take by itself: free ports, and 52365 for the agent, to which anybody may send a job.
    parameters = ray_parameters(objects)[component]
    ports = [int(parameters[name]) for name in (*RAYS_OWN, RAYS_AGENT)]
    ports += [6379, 8265, 10001, 10002, 19999]
    target, ray = labels_of(objects, component), labels_of(objects, "worker")
    for port in ports:
        assert reaches(objects, ray, target, port), "Ray's nodes reach each other"
        for source in (NEIGHBOUR, labels_of(objects, "router"), labels_of(objects, "test")):
            assert not reaches(objects, source, target, port), f"{source} reaches {port}"


def test_workers_are_asked_for_their_health_where_their_agent_listens(objects: list[Any]) -> None:
    port = int(ray_parameters(objects)["worker"][RAYS_AGENT])
    (group,) = find(objects, "RayCluster")["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] == port


@pytest.mark.parametrize("control", [50050, 32768, 60999, 7000])
def test_only_routers_and_the_cluster_command_the_controller(control: int) -> None:
    objects = render("models[0].device=cpu", f"controller.port={control}")
    head = labels_of(objects, "head")
    assert reaches(objects, labels_of(objects, "router"), head, control)
    assert reaches(objects, labels_of(objects, "worker"), head, control), "its preStop hook drains"
    assert not reaches(objects, NEIGHBOUR, head, control), "reading metrics is not commanding"


def test_routers_reach_replicas_and_prometheus_reaches_metrics(objects: list[Any]) -> None:
    head, worker, router = (labels_of(objects, each) for each in ("head", "worker", "router"))
    for port in ANY_PORT:
        assert reaches(objects, router, worker, port)
        assert not reaches(objects, NEIGHBOUR, worker, port), "replicas serve whoever reaches them"
    for port in (RANK_METRICS_PORTS[0], RANK_METRICS_PORTS[-1]):
        assert reaches(objects, NEIGHBOUR, worker, port)
        assert not reaches(objects, NEIGHBOUR, head, port), "no rank is on the head"
    for port in (RANK_METRICS_PORTS[0] - 1, RANK_METRICS_PORTS[-1] + 1):
        assert not reaches(objects, NEIGHBOUR, worker, port)
    for target, port in ((head, 9465), (head, 8080), (worker, 8080), (router, 9464)):
        assert reaches(objects, NEIGHBOUR, target, port)


def test_clients_reach_routers_only(objects: list[Any]) -> None:
    for port in (50051, 8000):
        assert reaches(objects, NEIGHBOUR, labels_of(objects, "router"), port)
        assert reaches(objects, labels_of(objects, "test"), labels_of(objects, "router"), port)
        assert not reaches(objects, NEIGHBOUR, labels_of(objects, "head"), port), "the head's own router is for `weft`"


def test_who_may_read_metrics_are_those_that_are_named() -> None:
    objects = render(example="multi-node-pipeline")
    for component, port in (("head", 9465), ("head", 8080), ("worker", RANK_METRICS_PORTS[0]), ("router", 9464)):
        assert not reaches(objects, NEIGHBOUR, labels_of(objects, component), port)
    named = {"kubernetes.io/metadata.name": "monitoring"}
    for name in ("head", "worker", "router"):
        rules = find(objects, "NetworkPolicy", f"demo-weft-{name}")["spec"]["ingress"]
        assert {"namespaceSelector": {"matchLabels": named}} in rules[-1]["from"]
    assert reaches(objects, labels_of(objects, "head"), labels_of(objects, "router"), 9464), "for `weft top`"


def test_the_controller_reaches_the_metrics_of_routers() -> None:
    objects = render(example="multi-node-pipeline")
    (_, metrics) = find(objects, "NetworkPolicy", "demo-weft-router")["spec"]["ingress"]
    (pod,) = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert [port["port"] for port in metrics["ports"]] == [
        port["containerPort"] for port in pod["ports"] if port["name"] == "metrics"
    ]
    controller = {"ray.io/cluster": "demo-weft", "ray.io/node-type": "head"}
    assert {"podSelector": {"matchLabels": controller}} in metrics["from"]
