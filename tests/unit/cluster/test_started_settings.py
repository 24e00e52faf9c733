"""What a controller is given for all its lives, and what code that comes later makes of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterSpec, build_spec
from cluster.errors import ClusterConfigError
from cluster.preflight import check_spec
from cluster.started_settings import decode_spec, encode_spec


def without_keys(spec: ClusterSpec) -> ClusterSpec:
    return replace(spec, models=tuple(model.section.to_spec(b"") for model in spec.models))


def test_settings_come_back_as_they_were_checked_and_as_the_user_gave_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.yaml").write_text("keys: []")
    settings: dict[str, Any] = {
        "models": [
            {"path": "weft-tiny", "tensor_parallel": 2, "autoscaling": {"target_requests": 8}, "max_replicas": 3},
            {"path": "weft-tiny", "name": "b", "cache": {"block_size": 8}, "scheduler": {"policy": "mlfq"}},
        ],
        "router": {"api_keys": "keys.yaml", "policy": "round_robin", "link": {"backoff_s": 0.5}, "num_routers": 2},
        "controller": {"port": 0},
        "tracing": {"sample_ratio": 0.5},
        "recording": {"folder": str(tmp_path)},
        "ray": {"address": "auto", "spare_s": 60.0},
    }
    spec = check_spec(build_spec(settings))
    for each in (
        spec,
        replace(spec, spare_s=0.0),
        check_spec(build_spec({"controller": {"port": 0}, "ray": {"address": "auto"}})),
    ):
        assert without_keys(decode_spec(encode_spec(each))) == without_keys(each)
    assert decode_spec(encode_spec(spec)).router.api_keys == str(tmp_path / "keys.yaml")
    assert decode_spec(encode_spec(spec)).file.router.api_keys == "keys.yaml"


def test_settings_of_an_older_version_are_completed_by_defaults() -> None:
    data = b'{"file": {"host": "127.0.0.2"}, "checked": {"host": "127.0.0.2", "models": [{"path": "/m"}]}}'
    spec = decode_spec(data)
    assert (spec.host, spec.models[0].source, spec.router.host) == ("127.0.0.2", "/m", "127.0.0.2")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"file": {}, "checked": {"hosts": "127.0.0.2"}}', "hosts"),
        (b'{"file": {}}', "no settings that this version can read: .*checked"),
        (build_spec({}), "no settings that this version can read"),  # what earlier versions have given Ray
    ],
)
def test_settings_that_this_code_does_not_take_are_refused(data: Any, reason: str) -> None:
    with pytest.raises(ClusterConfigError, match=reason):
        decode_spec(data)
