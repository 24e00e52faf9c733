"""The Helm chart, rendered by the real Helm, and the schemas of what it renders."""

import copy
import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "deploy/helm/weft"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
KUBERNETES_VERSIONS = ("1.28", "1.29", "1.30", "1.31", "1.32")


class RefusedError(Exception):
    """Helm refused to render; the message says why."""


def helm() -> str:
    """Return the path of Helm; the test is skipped where it is absent."""
    path = shutil.which("helm", path=str(REPOSITORY / "node_modules/.bin")) or shutil.which("helm")
    if path is None:
        pytest.skip("needs helm, which `make test` installs where npm is present")
    return path


@functools.cache
def render(
    *settings: str,
    example: str | None = None,
    values: Path | None = None,
    kubernetes: str = "1.30",
    chart: Path = CHART,
) -> list[Any]:
    """Return the objects of the chart, as release `demo`.

    Args:
        settings: arguments of --set.
        example: the name of a file in examples.
        values: another file of values.
        kubernetes: the version to render for.
        chart: another folder than the repository's.
    """
    command = [helm(), "template", "demo", str(chart), "--namespace", "llm", "--kube-version", kubernetes]
    if example is not None:
        command += ["--values", str(chart / f"examples/{example}.yaml")]
    if values is not None:
        command += ["--values", str(values)]
    for setting in settings:
        command += ["--set", setting]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if result.returncode != 0:
        raise RefusedError(result.stderr)
    return [item for item in yaml.load_all(result.stdout, yaml.CSafeLoader) if item]  # in C: a tenth of the time


def find(objects: list[Any], kind: str, name: str | None = None) -> Any:
    """Return the only object of a kind, or the one of a name."""
    found = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def pod_templates(objects: list[Any]) -> Iterator[Any]:
    """Yield the template of every Pod, those inside the RayCluster as well."""
    for item in objects:
        match item["kind"]:
            case "Deployment":
                yield item["spec"]["template"]
            case "Pod":
                yield item
            case "RayCluster":
                yield item["spec"]["headGroupSpec"]["template"]
                for group in item["spec"]["workerGroupSpecs"]:
                    yield group["template"]


def closed_schema(schema: Any) -> Any:
    """Return a CRD's schema such that unknown fields fail, and with Kubernetes' own words turned into JSON schema."""
    if isinstance(schema, list):
        return [closed_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = copy.copy(schema)
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {key: value if key in ("default", "enum") else closed_schema(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: closed_schema(item) for name, item in schema["properties"].items()}
        closed.setdefault("additionalProperties", False)
    if closed.pop("nullable", False):
        return {"anyOf": [closed, {"type": "null"}]}
    return closed


@functools.cache
def raycluster_schema(folder: Path) -> jsonschema.Draft202012Validator:
    """Return a validator of RayCluster v1 from KubeRay's CRD."""
    versions = json.loads((folder / "kuberay-rayclusters.v1.7.0.json").read_text())["spec"]["versions"]
    (version,) = (version for version in versions if version["name"] == "v1")
    schema = closed_schema(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # of every object, and not said in a CRD
    return jsonschema.Draft202012Validator(schema)
