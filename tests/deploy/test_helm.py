"""The Helm chart: valid for Kubernetes and KubeRay, made of what the program takes; the rest is refused."""

import base64
import importlib.util
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from helpers.chart import (
    CHART,
    EXAMPLES,
    KUBERNETES_VERSIONS,
    REPOSITORY,
    RefusedError,
    find,
    helm,
    pod_templates,
    raycluster_schema,
    render,
)
from helpers.kube_api import KubeApi, kube_api
from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec
from ray.scripts.scripts import start
from weft.yaml_text import read_yaml

from cluster.cli import app
from cluster.config import ClusterSpec, build_spec
from cluster.errors import ClusterConfigError
from cluster.placement import Placement
from router.config import RouterConfig, TraceProtocol, TracingConfig
from router.errors import RouterConfigError
from router.flags import parse_flags, to_config
from router.keys import KeyRing, hash_key
from router.server import READINESS_SERVICE
from router.tls import TlsFiles

CUSTOM_KINDS = ("RayCluster", "ServiceMonitor", "ScrapeConfig", "PrometheusRule")


def cluster_spec(objects: list[Any]) -> ClusterSpec:
    """What the head would serve."""
    return build_spec(read_yaml(find(objects, "ConfigMap", "demo-weft")["data"]["cluster.yaml"]))


def router_config(objects: list[Any]) -> RouterConfig:
    """What a router would make of its arguments."""
    (container,) = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "-m", "router"]
    return to_config(parse_flags(container["args"]))


@pytest.mark.parametrize("example", [None, *EXAMPLES])
def test_chart_passes_lint(example: str | None) -> None:
    values = [] if example is None else ["--values", f"examples/{example}.yaml"]
    result = subprocess.run([helm(), "lint", "--strict", ".", *values], cwd=CHART, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("kubernetes", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("example", EXAMPLES)
def test_objects_are_valid_in_every_kubernetes_version(example: str, kubernetes: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    objects = render(example=example, kubernetes=kubernetes)
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}
        for template in pod_templates(objects)
    ]
    checked = set()
    for item in [*objects, *pods]:
        try:
            kubernetes_validate.validate(item, kubernetes, strict=True)
        except kubernetes_validate.utils.SchemaNotFoundError:
            assert item["kind"] in CUSTOM_KINDS, "only custom kinds are unknown to Kubernetes"
        else:
            checked.add(item["kind"])
    assert {"ConfigMap", "Deployment", "Service", "Pod"} <= checked


@pytest.mark.parametrize("example", EXAMPLES)
def test_cluster_is_valid_for_kuberay(example: str, shared: Path) -> None:
    cluster = find(render(example=example), "RayCluster")
    raycluster_schema(shared / "deploy-schemas").validate(cluster)


def test_kuberay_schema_refuses_a_misspelt_field(shared: Path) -> None:
    cluster = json.loads(json.dumps(find(render(example="one-gpu"), "RayCluster")))
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    errors = list(raycluster_schema(shared / "deploy-schemas").iter_errors(cluster))
    assert "livenesProbe" in str(errors)


@pytest.mark.parametrize("example", EXAMPLES)
def test_program_takes_what_the_chart_sets(example: str) -> None:
    objects = render(example=example)
    spec, router = cluster_spec(objects), router_config(objects)
    values = yaml.safe_load((CHART / f"examples/{example}.yaml").read_text())
    assert [model.source for model in spec.models] == [model["path"] for model in values["models"]]
    assert spec.host == router.host == "0.0.0.0"
    assert spec.ray_address == "auto"
    assert router.control == f"demo-weft-control:{spec.control_port}"
    service = find(objects, "Service", "demo-weft")
    assert {port["port"] for port in service["spec"]["ports"]} == {router.grpc_port, router.http_port}


@pytest.mark.parametrize(("family", "every"), [("IPv4", "0.0.0.0"), ("IPv6", "::")])
def test_listeners_bind_addresses_of_the_clusters_family(family: str, every: str) -> None:
    objects = render("models[0].device=cpu", f"ipFamily={family}")
    assert cluster_spec(objects).host == router_config(objects).host == every
    assert find(objects, "RayCluster")["spec"]["headGroupSpec"]["rayStartParams"]["dashboard-host"] == every


def test_large_numbers_reach_the_program_unchanged() -> None:
    objects = render("models[0].device=cpu", "models[0].cache.cpu_cache_bytes=34359738368")
    assert cluster_spec(objects).models[0].engine.cache.cpu_cache_bytes == 34359738368


def test_every_pod_runs_without_root_and_without_capabilities() -> None:
    for example in EXAMPLES:
        for template in pod_templates(render(example=example)):
            assert template["spec"]["securityContext"]["runAsNonRoot"] is True
            for container in template["spec"]["containers"]:
                context = container["securityContext"]
                assert context["allowPrivilegeEscalation"] is False
                assert context["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["requests"]


def test_router_probes_name_the_health_services_of_the_router() -> None:
    objects = render(example="one-gpu")
    (container,) = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["spec"]["containers"]
    port = router_config(objects).grpc_port
    assert container["readinessProbe"]["grpc"] == {"port": port, "service": READINESS_SERVICE}
    assert container["livenessProbe"]["grpc"] == {"port": port}


def test_probes_of_a_router_with_tls_speak_it() -> None:
    objects = render(example="multi-node-pipeline")
    (container,) = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http", "scheme": "HTTPS"}


def test_tls_and_keys_hold_for_every_router_also_the_heads_own() -> None:
    objects = render(example="multi-node-pipeline")
    outside, head = router_config(objects), cluster_spec(objects).router
    assert outside.tls == head.tls == TlsFiles(cert_file="/etc/weft-tls/tls.crt", key_file="/etc/weft-tls/tls.key")
    assert outside.api_keys == head.api_keys == "/etc/weft-keys/keys.yaml"
    deployment = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["spec"]
    ray_head = find(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]
    for spec in (deployment, ray_head):
        assert {"name": "tls", "secret": {"secretName": "weft-tls"}} in spec["volumes"]
        assert {"name": "api-keys", "secret": {"secretName": "weft-api-keys"}} in spec["volumes"]
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert (mounts["tls"], mounts["api-keys"]) == ("/etc/weft-tls", "/etc/weft-keys")


@pytest.mark.parametrize("is_on", [False, True])
def test_requests_are_logged_and_decisions_recorded_where_wanted(is_on: bool) -> None:
    objects = render(f"router.logRequests={str(is_on).lower()}", f"recordDecisions={str(is_on).lower()}")
    router, spec = router_config(objects), cluster_spec(objects)
    folder = "/tmp/weft-decisions" if is_on else None
    assert router.recording.folder == spec.router.recording.folder == folder
    assert router.metrics.log_requests is spec.router.metrics.log_requests is is_on


def test_spans_of_routers_and_replicas_go_to_one_collector() -> None:
    assert router_config(render()).tracing == cluster_spec(render()).router.tracing == TracingConfig()
    values = ("endpoint=http://collector.tracing:4318/v1/traces", "protocol=http", "sampleRatio=0")
    objects = render(*(f"tracing.{value}" for value in values))
    wanted = TracingConfig(
        endpoint="http://collector.tracing:4318/v1/traces", protocol=TraceProtocol.HTTP, sample_ratio=0.0
    )
    assert router_config(objects).tracing == cluster_spec(objects).router.tracing == wanted


def test_further_settings_reach_routers_beside_ray_and_in_the_cluster_file() -> None:
    values = ("admission.max_queued=7", "clients.write_timeout_s=5", "metrics.slo_ttft_s=3")
    objects = render("router.logRequests=true", *(f"router.settings.{value}" for value in values))
    for router in (router_config(objects), cluster_spec(objects).router):
        assert (router.admission.max_queued, router.clients.write_timeout_s) == (7, 5.0)
        assert (router.metrics.slo_ttft_s, router.metrics.log_requests) == (3.0, True)


def test_settings_of_routers_may_be_taken_away() -> None:
    assert router_config(render("router.settings=null")) == router_config(render())


def test_inner_tls_is_the_same_for_all_who_speak_inside_the_cluster() -> None:
    objects = render(example="multi-node-pipeline")
    tls = cluster_spec(objects).inner_tls
    assert tls is not None
    assert router_config(objects).link.tls == tls
    variables = {"CERT": tls.cert_file, "KEY": tls.key_file, "CA": tls.ca_file, "NAME": tls.server_name}
    for template in pod_templates(objects):
        spec = template["spec"]
        (container,) = spec["containers"]
        if container["name"] == "request":
            continue  # a client
        assert {"name": "inner-tls", "secret": {"secretName": "weft-inner"}} in spec["volumes"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert {Path(file).parent for file in (tls.cert_file, tls.key_file, tls.ca_file)} == {Path(mounts["inner-tls"])}
        if container["name"] != "router":
            environment = {each["name"]: each.get("value") for each in container["env"]}
            assert {name: environment[f"WEFT_CONTROL_TLS_{name}"] for name in variables} == variables
    assert cluster_spec(render("innerTls.existingSecret=s", "innerTls.serverName=n")).inner_tls.server_name == "n"


def test_client_certificates_are_asked_for_and_do_not_stop_probes_and_hook() -> None:
    secured = ("router.tls.existingSecret=weft-tls", "router.tls.requireClientCertificate=true")
    objects = render(*secured)
    assert router_config(objects).tls == cluster_spec(objects).router.tls
    assert cluster_spec(objects).router.tls is not None
    assert cluster_spec(objects).router.tls.ca_file == "/etc/weft-tls/ca.crt"
    (container,) = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["spec"]["containers"]
    assert container["readinessProbe"]["tcpSocket"] == {"port": "grpc"}
    assert not [item for item in objects if item["kind"] == "Pod"]
    pod = find(render(*secured, "test.clientSecret=alice"), "Pod")["spec"]
    (container,) = pod["containers"]
    assert {"--tls-cert=/etc/weft-client/tls.crt", "--tls-key=/etc/weft-client/tls.key"} <= set(container["args"])
    assert {"name": "client", "secret": {"secretName": "alice"}} in pod["volumes"]
    assert {"name": "client", "mountPath": "/etc/weft-client", "readOnly": True} in container["volumeMounts"]


def test_secrets_are_made_of_what_is_given(tmp_path: Path) -> None:
    key_hash = hash_key("wk-1")
    key = (f"router.apiKeys.keys[0].sha256={key_hash}", "router.apiKeys.keys[0].requests_per_minute=60")
    tls = ("router.tls.certificate=CERT", "router.tls.key=KEY")
    objects = render("router.apiKeys.keys[0].name=alice", *key, *tls)
    file = tmp_path / "keys.yaml"
    file.write_bytes(base64.b64decode(find(objects, "Secret", "demo-weft-api-keys")["data"]["keys.yaml"]))
    assert KeyRing(file, time.monotonic).identify("Bearer wk-1").name == "alice"
    secret = find(objects, "Secret", "demo-weft-tls")
    assert secret["type"] == "kubernetes.io/tls"
    assert base64.b64decode(secret["data"]["tls.crt"]) == b"CERT"
    assert not [item for item in objects if item["kind"] == "Pod"], "nobody gave the test a key"


def test_a_router_says_that_it_is_not_ready_and_has_time_to_finish_its_requests() -> None:
    objects = render(example="multi-node-pipeline")
    spec = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    probe, router = container["readinessProbe"], router_config(objects)
    assert probe["failureThreshold"] > 1, "a busy router may answer late once"
    assert router.unready_s >= probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"]
    assert spec["terminationGracePeriodSeconds"] > router.unready_s + router.grace_s
    assert spec["shareProcessNamespace"], "else the kernel keeps a SIGTERM that comes early from it"


def test_a_worker_drains_its_node_before_ray_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr("cluster.operate.this_node", lambda client: "10.0.0.7")
    monkeypatch.setattr(
        "cluster.operate.drain_target", lambda client, *args, **kwargs: told.update(kwargs, node=args[0])
    )
    objects = render(example="multi-node-pipeline")
    spec = find(objects, "RayCluster")["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    (container,) = spec["containers"]
    weft, *arguments = container["lifecycle"]["preStop"]["exec"]["command"]
    assert weft == "weft"
    app(arguments, standalone_mode=False)
    assert (told["node"], told["grace_s"], told["undo"]) == ("10.0.0.7", 120.0, False)
    assert told["grace_s"] < told["wait_s"] < spec["terminationGracePeriodSeconds"]
    control = find(objects, "Service", "demo-weft-control")
    (variable,) = [each for each in container["env"] if each["name"] == "WEFT_CONTROL"]
    assert variable["value"] == f"{control['metadata']['name']}:{cluster_spec(objects).control_port}"


def test_a_command_inside_the_head_finds_the_controller_and_the_file() -> None:
    objects = render("controller.port=50061")
    (head,) = find(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    (control,) = [each["value"] for each in head["env"] if each["name"] == "WEFT_CONTROL"]
    assert control == f"127.0.0.1:{cluster_spec(objects).control_port}"
    manual = (REPOSITORY / "docs/install.md").read_text()
    assert f"-c {head['name']} -- weft apply {head['args'][0]} --wait" in manual


def test_the_head_has_time_to_finish_requests_and_with_a_redis_leaves_them_alone() -> None:
    for example, arguments in (("one-gpu", []), ("multi-node-pipeline", ["outlived"])):
        objects = render(example=example)
        spec = find(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]
        assert spec["containers"][0]["args"] == ["/etc/weft/cluster.yaml", "warning", *arguments]
        assert spec["terminationGracePeriodSeconds"] > cluster_spec(objects).router.grace_s


def test_workers_have_their_gpus_and_the_head_takes_no_rank() -> None:
    cluster = find(render(example="eight-gpu-node"), "RayCluster")["spec"]
    (worker,) = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
    assert worker["resources"]["limits"] == {"cpu": "96", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "autoscalerOptions" not in cluster


def test_autoscaling_gives_worker_groups_their_bounds() -> None:
    (group,) = find(render(example="multi-node-pipeline"), "RayCluster")["spec"]["workerGroupSpecs"]
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (2, 2, 4)


def test_rays_autoscaler_knows_which_workers_have_the_accelerator() -> None:
    wanted = (*EIGHT_GPUS, "autoscaling.enabled=true", "models[0].accelerator=H100")
    objects = render(*wanted, "workerGroups[0].accelerator=H100")
    (model,) = cluster_spec(objects).models
    placement = Placement(
        parallel=model.engine.parallel, gpus_per_rank=1, cpus_per_rank=1.0, accelerator=model.accelerator
    )
    types = _generate_available_node_types_from_ray_cr_spec(find(objects, "RayCluster")["spec"])
    assert placement.bundle.keys() <= types["gpu4"]["resources"].keys(), "else it never asks for such a worker"
    with pytest.raises(RefusedError, match=r"models\[0\]\.accelerator is H100; no worker group has it"):
        render(*wanted)


def test_ray_takes_the_flags_of_its_nodes() -> None:
    spec = find(render(example="multi-node-pipeline"), "RayCluster")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        flags = [f"--{name}={value}" for name, value in group["rayStartParams"].items()]
        assert start.make_context("start", flags).params["dashboard_agent_listen_port"] == 6384


def test_ray_asks_for_a_token_where_wanted() -> None:
    assert find(render(example="multi-node-pipeline"), "RayCluster")["spec"]["authOptions"] == {"mode": "token"}
    assert "authOptions" not in find(render(example="one-gpu"), "RayCluster")["spec"]


def test_autoscaled_routers_leave_their_number_to_the_autoscaler() -> None:
    with_hpa, without = render(example="multi-node-pipeline"), render(example="kind-cpu")
    assert "replicas" not in find(with_hpa, "Deployment", "demo-weft-router")["spec"]
    target = find(with_hpa, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["name"] == find(with_hpa, "Deployment", "demo-weft-router")["metadata"]["name"]
    assert find(without, "Deployment")["spec"]["replicas"] == 1
    assert not [item for item in without if item["kind"] in ("HorizontalPodAutoscaler", "PodDisruptionBudget")]


def run_helm(api: KubeApi, home: Path, *command: str) -> str:
    """What Helm prints; it installs and upgrades in a cluster without Pods."""
    whole = [helm(), *command, "--namespace", "llm", "--kube-apiserver", api.url]
    result = subprocess.run(whole, env={"HOME": str(home)}, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def release(api: KubeApi, home: Path, verb: str, *settings: str) -> Any:
    """Install or upgrade `demo`; return the spec of the routers' Deployment."""
    run_helm(api, home, verb, "demo", str(CHART), "--disable-openapi-validation", "--set", ",".join(settings))
    return api.find("Deployment", "demo-weft-router")["spec"]


def test_autoscaling_that_is_turned_on_later_goes_on_from_the_routers_that_run(tmp_path: Path) -> None:
    off, on = "router.autoscaling.enabled=false", "router.autoscaling.enabled=true"
    with kube_api() as api:
        assert release(api, tmp_path, "install", off, "router.replicas=3")["replicas"] == 3
        assert release(api, tmp_path, "upgrade", on)["replicas"] == 3
        api.find("Deployment", "demo-weft-router")["spec"]["replicas"] = 7  # the autoscaler's work
        assert release(api, tmp_path, "upgrade", on, "router.logLevel=debug")["replicas"] == 7
        assert release(api, tmp_path, "upgrade", off, "router.replicas=4")["replicas"] == 4
        assert release(api, tmp_path, "upgrade", on)["replicas"] == 4


def test_autoscaling_from_the_start_writes_no_number_that_a_rollback_would_bring_back(tmp_path: Path) -> None:
    with kube_api() as api:
        for verb in ("install", "upgrade"):
            release(api, tmp_path, verb, "router.autoscaling.enabled=true")
            manifest = list(yaml.safe_load_all(run_helm(api, tmp_path, "get", "manifest", "demo")))
            assert "replicas" not in find([item for item in manifest if item], "Deployment")["spec"]


def test_service_monitor_selects_services_that_have_its_ports() -> None:
    objects = render(example="eight-gpu-node")
    monitor = find(objects, "ServiceMonitor")["spec"]
    for endpoint in monitor["endpoints"]:
        owners = [
            item
            for item in objects
            if item["kind"] == "Service"
            and monitor["selector"]["matchLabels"].items() <= item["metadata"]["labels"].items()
            and endpoint["port"] in [port["name"] for port in item["spec"]["ports"]]
        ]
        assert len(owners) == 1, endpoint["port"]


def test_prometheus_is_told_where_ranks_are() -> None:
    objects = render(example="eight-gpu-node")
    port = cluster_spec(objects).control_metrics_port
    (discovery,) = find(objects, "ScrapeConfig")["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://demo-weft-control.llm.svc:{port}/targets"
    (head,) = find(objects, "RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "control-metrics", "containerPort": port} in head["ports"]


@pytest.mark.parametrize("kind", ["LoadBalancer", "NodePort"])
def test_a_service_for_the_outside_needs_clients_that_are_no_pods(kind: str) -> None:
    service = f"router.service.type={kind}"
    with pytest.raises(RefusedError, match=f"router.service.type is {kind}, and networkPolicy.clients has no ipBlock"):
        render(service, "networkPolicy.clients[0].namespaceSelector.matchLabels.team=products")
    opened = "networkPolicy.clients[0].ipBlock.cidr=10.0.0.0/8"
    (clients, _) = find(render(service, opened), "NetworkPolicy", "demo-weft-router")["spec"]["ingress"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in clients["from"]
    assert render(service, "networkPolicy.enabled=false")


def test_whatever_is_scraped_says_of_which_release_it_is() -> None:
    objects = render(example="eight-gpu-node")
    scraped = [*find(objects, "ServiceMonitor")["spec"]["endpoints"], find(objects, "ScrapeConfig")["spec"]]
    label = {"targetLabel": "installation", "replacement": "llm/demo-weft"}
    assert [each for each in scraped if label not in each.get("relabelings", [])] == [], "else rules mix releases up"


def test_routers_are_scraped_once() -> None:
    """By the ServiceMonitor; the controller lists them too, for they report to it."""
    (drop, _) = find(render(example="eight-gpu-node"), "ScrapeConfig")["spec"]["relabelings"]
    assert drop == {"sourceLabels": ["__meta_weft_outside"], "regex": "true", "action": "drop"}


def test_images_by_digest_have_no_tag() -> None:
    digest, other = "r/weft@sha256:" + "0" * 64, "r/weft@sha256:" + "1" * 64
    objects = render(f"image.repository={digest}", "router.image.repository=r/router", "router.image.tag=t")
    ray = find(objects, "RayCluster")["spec"]
    groups = [ray["headGroupSpec"], *ray["workerGroupSpecs"]]
    assert [each["template"]["spec"]["containers"][0]["image"] for each in groups] == [digest, digest]
    assert _router_image(objects) == "r/router:t"
    assert _router_image(render(f"router.image.repository={other}")) == other


def _router_image(objects: list[Any]) -> str:
    (container,) = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


@pytest.mark.parametrize("address", ["redis:6379", "[fd00::1]:6379"])
def test_redis_may_have_any_address(address: str) -> None:
    options = find(render(f"gcsFaultTolerance.redisAddress={address}"), "RayCluster")["spec"]
    assert options["gcsFaultToleranceOptions"]["redisAddress"] == address


def test_chart_carries_the_repositorys_rules() -> None:
    objects = render(example="eight-gpu-node")
    for name in ("recording", "alerts"):
        rules = yaml.safe_load((REPOSITORY / f"deploy/prometheus/{name}.yml").read_text())
        assert rules["groups"]
        assert find(objects, "PrometheusRule", f"demo-weft-{name}")["spec"] == rules


def test_notes_say_what_works_with_these_values(tmp_path: Path) -> None:
    chart = tmp_path / "weft"
    shutil.copytree(CHART, chart)
    text = (CHART / "templates/NOTES.txt").read_text()  # which Helm renders only where there is a cluster
    shown = 'apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata: {notes: {{ include "notes" . | quote }}}\n'
    (chart / "templates/notes.yaml").write_text(f'{{{{ define "notes" }}}}{text}{{{{ end }}}}\n{shown}')

    def notes(*settings: str) -> str:
        return str(find(render(*settings, chart=chart), "ConfigMap", "notes")["data"]["notes"])

    plain = notes("controller.port=50061")
    assert "weft status --control 127.0.0.1:50061\n" in plain
    assert "http://demo-weft.llm:8000/v1" in plain
    assert "helm test demo -n llm" in plain
    secured = ("router.tls.existingSecret=t", "router.apiKeys.existingSecret=k", "innerTls.existingSecret=i")
    locked = notes(*secured, "innerTls.serverName=n")
    assert "https://demo-weft.llm:8000/v1" in locked
    assert "helm test" not in locked, "it has no key"
    assert "--tls-ca ca.crt --tls-name n" in locked
    assert "helm test" in notes(*secured, "test.apiKeySecret=s")


def test_services_say_what_their_ports_speak() -> None:
    def spoken(*settings: str) -> dict[str, str]:
        objects = render(*settings)
        ports = [
            port
            for name in ("demo-weft", "demo-weft-control")
            for port in find(objects, "Service", name)["spec"]["ports"]
        ]
        return {port["name"]: port["appProtocol"] for port in ports if "appProtocol" in port}

    assert spoken() == {"grpc": "grpc", "http": "http", "control": "grpc"}
    secured = spoken("router.tls.existingSecret=t", "innerTls.existingSecret=i")
    assert secured == {"grpc": "https", "http": "https", "control": "https"}, "or a mesh looks for plain HTTP"


def test_services_select_the_pods_they_mean() -> None:
    objects = render(example="one-gpu")
    labels = find(objects, "Deployment", "demo-weft-router")["spec"]["template"]["metadata"]["labels"]
    for name in ("demo-weft", "demo-weft-router-metrics"):
        assert find(objects, "Service", name)["spec"]["selector"].items() <= labels.items()
    assert find(objects, "Service", "demo-weft-control")["spec"]["selector"] == {
        "ray.io/cluster": find(objects, "RayCluster")["metadata"]["name"],
        "ray.io/node-type": "head",
    }


def test_models_lie_at_one_path_everywhere() -> None:
    for template in pod_templates(render(example="one-gpu")):
        if template["spec"]["containers"][0]["name"] not in ("ray-head", "ray-worker"):
            continue  # routers ask the controller, the test hook needs none
        claims = [volume for volume in template["spec"]["volumes"] if volume["name"] == "models"]
        assert claims == [{"name": "models", "persistentVolumeClaim": {"claimName": "demo-weft-models"}}]
        (mount,) = [m for m in template["spec"]["containers"][0]["volumeMounts"] if m["name"] == "models"]
        assert mount["mountPath"] == "/models"
    assert find(render(example="one-gpu"), "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_hub_token_goes_through_a_secret() -> None:
    objects = render("huggingface.token=hf_abc")
    assert find(objects, "Secret")["data"] == {"token": "aGZfYWJj"}
    rest = json.dumps([item for item in objects if item["kind"] != "Secret"])
    assert "hf_abc" not in rest
    assert '{"name": "demo-weft-huggingface", "key": "token"}' in rest


def test_dashboards_become_config_maps(tmp_path: Path) -> None:
    chart = tmp_path / "weft"
    shutil.copytree(CHART, chart, symlinks=True)
    for folder in ("grafana", "prometheus"):
        (chart / folder).unlink()
    (chart / "grafana/per").mkdir(parents=True)
    text = '{"title": "Overview", "legendFormat": "{{replica}}"}'
    (chart / "grafana/over_view.json").write_text(text)
    (chart / "grafana/per/model.json").write_text("{}")
    objects = render("dashboards.enabled=true", chart=chart)
    assert find(objects, "ConfigMap", "demo-weft-dashboard-over-view")["data"] == {"over_view.json": text}
    labels = find(objects, "ConfigMap", "demo-weft-dashboard-model")["metadata"]["labels"]
    assert labels["grafana_dashboard"] == "1"


def test_dashboards_need_no_label_of_their_own() -> None:
    maps = [
        item
        for item in render("dashboards.enabled=true", "dashboards.labels.grafana_dashboard=null")
        if "-dashboard-" in item["metadata"]["name"]
    ]
    assert [item for item in maps if "grafana_dashboard" in item["metadata"]["labels"]] == []
    assert maps


def test_chart_carries_the_repositorys_dashboards() -> None:
    wanted = {path.name for path in (REPOSITORY / "deploy/grafana").rglob("*.json")}
    maps = [item for item in render("dashboards.enabled=true") if "-dashboard-" in item["metadata"]["name"]]
    assert {name for item in maps for name in item["data"]} == wanted


def test_helm_test_sends_a_request_to_the_first_model() -> None:
    objects = render(example="eight-gpu-node")
    pod = find(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["weft", "generate"]
    assert "--router=demo-weft.llm:50051" in container["args"]
    assert container["args"][-2] == "--", "a prompt may begin like an option"
    assert "--model=llama-70b" in container["args"]


def test_helm_test_shows_its_key_and_knows_the_routers_authority() -> None:
    pod = find(render(example="multi-node-pipeline"), "Pod")["spec"]
    (container,) = pod["containers"]
    assert "--tls-ca=/etc/weft-tls/ca.crt" in container["args"]
    assert "--tls-name=weft.example.org" in container["args"]
    assert pod["volumes"][0]["secret"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}], "it needs no private key"
    (variable,) = container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "weft-test-key", "key": "key"}
    assert variable["name"] == "WEFT_API_KEY"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("models[0].tensor_paralel=2", "Additional property tensor_paralel is not allowed"),
        ("models[0].tensor_parallel=0", "models.0.tensor_parallel: Must be greater than or equal to 1"),
        ("models[0].cache.block_sise=16", "Additional property block_sise is not allowed"),
        ("models=null", "models is required"),
        ("routers.replicas=3", "Additional property routers is not allowed"),
        ("router.policy=random", "router.policy must be one of"),
        ("router.ports.grpc=70000", "Must be less than or equal to 65535"),
        ("workerGroups[0].name=GPU", "Does not match pattern"),
        ("workerGroups[0].gpu=2", "Additional property gpu is not allowed"),
        ("modelStorage.kind=nfs", "modelStorage.kind must be one of"),
        ("gcsFaultTolerance.redisAddress=redis", "Does not match pattern"),
        ("models[0].tensor_parallel=2", "models[0] needs 2 GPUs on one worker; the largest worker group has 1"),
        ("models[0].replicas=2", "models[0].replicas is 2, of 1 GPUs each; the worker groups have room for 1 at most"),
        ("models[0].device=auto", "models[0].device is auto; allowed: cuda or cpu"),
        (
            "models[0].path=Qwen/Qwen3-8B",
            '"Qwen/Qwen3-8B", and modelStorage.kind is none; allowed: a storage that head and workers share',
        ),
        ("modelStorage.kind=claim", "modelStorage.claimName is missing"),
        ("modelStorage.kind=hostPath", "modelStorage.hostPath is missing"),
        ("router.autoscaling.maxReplicas=1", "allowed: at least minReplicas, 2"),
        ("router.tls.certificate=CERT", "router.tls has a certificate or a key only"),
        ("router.tls.requireClientCertificate=true", "needs router.tls.existingSecret"),
        ("router.apiKeys.keys[0].key=wk-1", "Additional property key is not allowed"),
        ("fullnameOverride=Weft", 'the name of the objects is "Weft"; allowed: lower-case letters, digits and -'),
        ("fullnameOverride=7-weft", 'the name of the objects is "7-weft"; allowed:'),
        ("fullnameOverride=llm.weft", 'the name of the objects is "llm.weft"; allowed:'),
        ("fullnameOverride=on", 'the name of the objects is "on", which YAML takes for no name'),
        ("nameOverride=my weft", 'nameOverride is "my weft"; allowed:'),
        ("controller.port=50051", "router.ports.grpc is 50051, which controller.port is already"),
        ("controller.metricsPort=8080", "controller.metricsPort is 8080, which Ray's metrics is already"),
        ("router.ports.grpc=8265", "router.ports.grpc is 8265, which Ray's dashboard is already"),
        ("router.ports.http=443", "router.ports.http: Must be greater than or equal to 1024"),
        ("router.podDisruptionBudget.maxUnavailable=null", "maxUnavailable is required"),
        ("router.podDisruptionBudget.maxUnavailable=101%", "maxUnavailable: Must validate at least one schema"),
        ("modelStorage.mountPath=/tmp/ray/", "mountPath is /tmp/ray/, where a Pod has something else; allowed:"),
        ("modelStorage.mountPath=/etc/weft-tls", "allowed: a folder of its own"),
        ("router.resources.requests.cpu=null", "router.resources has no cpu; allowed: a request or a limit"),
        ("router.ports.http=9464", "router.ports.metrics is 9464, which router.ports.http is already"),
        ("models[0].autoscaling.target_requests=8", "models[0].autoscaling needs max_replicas"),
        ("router.settings.policy=round_robin", "Additional property policy is not allowed"),
        ("router.settings.link.tls.cert_file=c", "Additional property tls is not allowed"),
    ],
)
def test_wrong_values_are_refused_with_their_reason(setting: str, reason: str) -> None:
    settings = [setting] if setting == "models=null" else ["models[0].device=cuda", setting]
    with pytest.raises(RefusedError) as refused:
        render(*settings)
    assert reason in str(refused.value)


MODEL_FAULTS = {
    "device": "gpu",
    "dtype": "bf16",
    "quantization": "fp8",
    "kernels": "rocm",
    "attention_backend": "sdpa",
    "max_cudagraph_capture_size": 257,
    "cache": {"block_size": 0, "num_blocks": 1, "memory_fraction": 2, "dtype": "fp8", "host_cache_bytes": -1},
    "scheduler": {"max_num_seqs": 0, "policy": "lifo", "prefill_chunk_tokens": 0, "promote_after_s": -1},
    "autoscaling": {"target_requests": -1, "target_kv_usage": 0, "target_goodput": 2, "idle_s": -1},
}
ROUTER_FAULTS = {
    "admission": {"max_in_flight": 0},
    "clients": {"keep_alive_s": 0},
    "prefix": {"load_factor": 0.5},
    "link": {"stall_timeout_s": 0},
    "failover": {"max_attempts": 0},
    "metrics": {"slo_ttft_s": -1},
}


def test_chart_refuses_what_the_program_would_refuse() -> None:
    with pytest.raises(ClusterConfigError) as at_start:
        build_spec({"models": [MODEL_FAULTS], "router": ROUTER_FAULTS})
    places = [line.partition(":")[0] for line in str(at_start.value).splitlines()]
    models = [f"models[0].{path}" for path in flat(MODEL_FAULTS)]
    routers = [f"router.{path}" for path in flat(ROUTER_FAULTS)]
    assert sorted(places) == sorted([*models, *routers])
    with pytest.raises(RefusedError) as refused:
        render(
            *(f"models[0].{path}={value}" for path, value in flat(MODEL_FAULTS).items()),
            *(f"router.settings.{path}={value}" for path, value in flat(ROUTER_FAULTS).items()),
        )
    wanted = [f"models.0.{path}" for path in flat(MODEL_FAULTS)]
    wanted += [f"router.settings.{path}" for path in flat(ROUTER_FAULTS)]
    assert [path for path in wanted if f"- {path}: " not in str(refused.value)] == []


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by their dotted paths."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"sha256": "zz"}, "keys.0.sha256: Does not match pattern"),
        ({"requests_per_minute": 0}, "keys.0.requests_per_minute: Must be greater than or equal to 0.001"),
        ({"name": "b"}, "keys[1].name is b as another one's is"),
        ({"sha256": hash_key("b")}, "as another one's is; allowed: one of its own"),
    ],
)
def test_chart_refuses_keys_that_a_router_would_refuse(entry: dict[str, Any], reason: str, tmp_path: Path) -> None:
    keys = [{"name": "a", "sha256": hash_key("a"), **entry}, {"name": "b", "sha256": hash_key("b")}]
    path = tmp_path / "keys.yaml"
    path.write_text(yaml.safe_dump({"keys": keys}))
    with pytest.raises(RouterConfigError):
        KeyRing(path, time.monotonic)
    settings = [f"router.apiKeys.keys[{i}].{name}={value}" for i, key in enumerate(keys) for name, value in key.items()]
    with pytest.raises(RefusedError) as refused:
        render(*settings)
    assert reason in str(refused.value)


EIGHT_GPUS = (
    "models[0].device=cuda",
    "workerGroups[0].name=gpu4",
    "workerGroups[0].gpus=4",
    "workerGroups[0].replicas=2",
    "workerGroups[0].resources.requests.cpu=4",
)
OTHER = ("models[1].path=weft-tiny", "models[1].name=other", "models[1].device=cuda")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            ("models[0].path=/models/llama", "models[1].path=/other/llama", "models[1].device=cuda"),
            'models[1] is called "llama" as another one is; allowed: a name of its own',
        ),
        (
            ("workerGroups[1].name=gpu4", "workerGroups[1].replicas=1", "workerGroups[1].resources.requests.cpu=4"),
            "workerGroups[1].name is gpu4 as another one's is; allowed: a name of its own",
        ),
        (
            ("autoscaling.enabled=true", "workerGroups[0].minReplicas=3"),
            "workerGroups: gpu4 has minReplicas 3; allowed: at most its replicas, 2",
        ),
        (
            ("autoscaling.enabled=true", "workerGroups[0].resources.requests.cpu=null"),
            "workerGroups: gpu4 has no cpu in its resources; allowed: a request or a limit",
        ),
        (("models[0].min_replicas=2",), "models[0].replicas is 1; allowed: at least min_replicas, 2"),
        (
            ("models[0].replicas=3", "models[0].max_replicas=2"),
            "models[0].replicas is 3; allowed: at most max_replicas, 2",
        ),
        (
            ("models[0].tensor_parallel=3", "models[0].replicas=3"),
            "models[0].replicas is 3, of 3 GPUs each; the worker groups have room for 2 at most",
        ),
        (
            ("models[0].tensor_parallel=2", "models[0].max_replicas=5"),
            "models[0].max_replicas is 5, of 2 GPUs each; the worker groups have room for 4 at most",
        ),
        (
            ("models[0].tensor_parallel=4", "models[0].pipeline_parallel=2", "models[0].max_replicas=2"),
            "models[0].max_replicas is 2, of 8 GPUs each; the worker groups have room for 1 at most",
        ),
        (
            ("models[0].replicas=4", *OTHER, "models[1].replicas=5"),
            "the models need 9 GPUs; the worker groups have at most 8",
        ),
    ],
)
def test_models_that_do_not_fit_the_workers_are_refused(settings: tuple[str, ...], reason: str) -> None:
    with pytest.raises(RefusedError) as refused:
        render(*EIGHT_GPUS, *settings)
    assert reason in str(refused.value)


def test_names_that_yaml_takes_for_something_else_stay_names(shared: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    secrets = ("huggingface", "gcsFaultTolerance", "innerTls", "router.tls", "router.apiKeys")
    objects = render(
        *EIGHT_GPUS,
        "workerGroups[0].name=on",
        "workerGroups[0].priorityClassName=on",
        *(f"{each}.existingSecret=on" for each in secrets),
        "gcsFaultTolerance.redisAddress=redis:6379",
        "innerTls.serverName=on",
        "image.pullSecrets[0]=on",
        "modelStorage.kind=claim",
        "modelStorage.claimName=on",
        "nameOverride=on",
        "router.topologySpreadKeys[0]=on",
        "test.apiKeySecret=on",
        "test.model=on",
    )
    for item in objects:
        if item["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(item, "1.30", strict=True)
    (cluster,) = [item for item in objects if item["kind"] == "RayCluster"]
    raycluster_schema(shared / "deploy-schemas").validate(cluster)
    assert cluster["metadata"]["labels"]["app.kubernetes.io/name"] == "on"
    config = yaml.safe_load(find(objects, "ConfigMap")["data"]["cluster.yaml"])
    assert build_spec(config).inner_tls.server_name == "on"
    claim = find(render("modelStorage.kind=create", "modelStorage.storageClassName=on"), "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "on"


def test_models_may_have_the_same_gpus_one_after_the_other() -> None:
    bounds = ("models[0].max_replicas=8", "models[0].replicas=0", *OTHER, "models[1].max_replicas=8")
    specs = cluster_spec(render(*EIGHT_GPUS, *bounds)).models
    assert [spec.section.max_replicas for spec in specs] == [8, 8]


def test_workers_that_may_come_count_as_room() -> None:
    wanted = (*EIGHT_GPUS, "workerGroups[0].maxReplicas=3", "models[0].max_replicas=12")
    assert render(*wanted, "autoscaling.enabled=true")
    with pytest.raises(RefusedError, match="room for 8 at most"):
        render(*wanted)


def test_old_kubernetes_is_refused() -> None:
    with pytest.raises(RefusedError, match="incompatible with Kubernetes"):
        render(kubernetes="1.27")


def test_commands_of_the_manual_touch_only_the_pods_of_one_release() -> None:
    manual = "".join((REPOSITORY / "docs" / page).read_text() for page in ("install.md", "operations.md"))
    selectors = re.findall(r"kubectl delete pod -l (\S+?)(?:`|\s)", manual)
    assert len(selectors) == 2
    for selector in selectors:
        assert "ray.io/cluster=weft" in selector.split(","), "there may be other Ray clusters in the namespace"


def test_versions_agree() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert f'version = "{chart["appVersion"]}"' in project


def test_readme_and_schema_are_those_of_the_values(tmp_path: Path) -> None:
    generate = _load(REPOSITORY / "deploy/helm/generate.py")
    generate.main(tmp_path)
    for name in ("README.md", "values.schema.json"):
        message = "run `PYTHONPATH=.:proto python deploy/helm/generate.py` and commit the result"
        assert (CHART / name).read_text() == (tmp_path / name).read_text(), message


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
