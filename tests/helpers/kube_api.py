"""As much of Kubernetes' API as Helm needs to install and upgrade: objects are kept, and none of them does anything."""

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

_KINDS = {
    "v1": ["ConfigMap", "PersistentVolumeClaim", "Pod", "Secret", "Service"],
    "apps/v1": ["Deployment"],
    "autoscaling/v2": ["HorizontalPodAutoscaler"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
    "ray.io/v1": ["RayCluster"],
}
_VERSION = {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}


class KubeApi:
    """A cluster that can be reached at `url`. Patches are merged, lists in them replaced."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.objects: dict[str, dict[str, Any]] = {}
        """By path."""

    def find(self, kind: str, name: str) -> dict[str, Any]:
        """Return the only object of this kind and name."""
        (found,) = (each for each in self.objects.values() if (each["kind"], each["metadata"]["name"]) == (kind, name))
        return found

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, dict[str, Any]]:
        """Return status and body of the answer."""
        if method == "GET" and (known := _discovery(path)) is not None:
            return 200, known
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
            if path in self.objects:
                return 409, _failure(409, "AlreadyExists")
            body["metadata"] |= {"namespace": "llm", "uid": str(uuid.uuid4())}
            self.objects[path] = _with_defaults(body)
            return 201, body
        if method == "GET" and path.endswith("/secrets"):  # of nothing else Helm asks for a list
            selector = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
            items = [
                each for at, each in self.objects.items() if at.startswith(f"{path}/") and _matches(each, selector)
            ]
            return 200, {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": items}
        if path not in self.objects:
            return 404, _failure(404, "NotFound")
        match method:
            case "PATCH":
                _merge(self.objects[path], body)
                _with_defaults(self.objects[path])
            case "PUT":
                self.objects[path] = _with_defaults(body)
            case "DELETE":
                return 200, self.objects.pop(path)
        return 200, self.objects[path]


@contextmanager
def kube_api() -> Iterator[KubeApi]:
    """An empty cluster that lasts as long as the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            parts = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = api.answer(
                self.command, parts.path, parse_qs(parts.query), json.loads(data) if data else None
            )
            encoded = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - the names in http.server

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        api = KubeApi(f"http://127.0.0.1:{server.server_address[1]}")
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield api
        finally:
            server.shutdown()
            thread.join()


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/version":
        return _VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {
                    "name": version.split("/")[0],
                    "versions": [{"groupVersion": version, "version": version.split("/")[1]}],
                }
                for version in _KINDS
                if "/" in version
            ],
        }
    version = path.removeprefix("/api/").removeprefix("/apis/")
    if version not in _KINDS:
        return None
    resources = [
        {"name": _plural(kind), "kind": kind, "namespaced": True, "verbs": ["get", "list", "create", "patch", "delete"]}
        for kind in _KINDS[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


def _with_defaults(item: dict[str, Any]) -> dict[str, Any]:
    if item["kind"] == "Deployment":
        item["spec"].setdefault("replicas", 1)
    return item


def _matches(item: dict[str, Any], selector: dict[str, str]) -> bool:
    labels: dict[str, str] = item["metadata"].get("labels", {})
    return selector.items() <= labels.items()


def _merge(item: dict[str, Any], patch: dict[str, Any]) -> None:
    for key, value in patch.items():
        if value is None:
            item.pop(key, None)
        elif isinstance(value, dict) and isinstance(item.get(key), dict):
            _merge(item[key], value)
        elif not key.startswith("$"):
            item[key] = value


def _failure(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
