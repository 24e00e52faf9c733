import json
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from helpers.certificates import inner_tls
from helpers.cluster import LLAMA

from cluster.config import ClusterSpec, build_spec
from cluster.errors import ModelNotFoundError, StartError
from cluster.preflight import check_spec
from parallel.errors import ConfigError, UnsupportedModelError
from router.tls import TlsFiles
from workers.errors import EngineConfigError

ANY_PORTS = {"router": {"port": 0, "http_port": 0, "metrics_port": 0}, "controller": {"port": 0}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def spec(folder: Path, **model: object) -> ClusterSpec:
    return build_spec({"models": [{"path": str(folder), **model}], **ANY_PORTS})


def test_good_model_passes_and_its_folder_becomes_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    checked = check_spec(spec(Path(folder.name), tensor_parallel=4, pipeline_parallel=2))
    assert checked.models[0].source == checked.models[0].engine.model == str(folder)


def with_files(folder: Path, **files: object) -> ClusterSpec:
    return build_spec({"models": [{"path": str(folder)}], **ANY_PORTS, "router": {**ANY_PORTS["router"], **files}})


def test_files_of_the_router_are_those_of_this_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("keys.yaml").write_text("keys: []")
    key = inner_tls(trustme.CA(), folder).key_file
    router = check_spec(with_files(folder, api_keys="keys.yaml", tls={"cert_file": "tls.crt", "key_file": key})).router
    assert router.api_keys == f"{folder}/keys.yaml"
    assert router.tls == TlsFiles(cert_file=f"{folder}/tls.crt", key_file=key)


def test_the_routers_keys_are_read_before_anything_starts(folder: Path) -> None:
    with pytest.raises(StartError, match=r"the API keys in .*/keys\.yaml cannot be read: .*No such file"):
        check_spec(with_files(folder, api_keys=f"{folder}/keys.yaml"))


def test_the_routers_certificate_is_tried_before_anything_starts(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = inner_tls(trustme.CA(), folder, not_after=datetime.now(UTC) - timedelta(days=1))
    tls = {"cert_file": files.cert_file, "key_file": files.key_file}
    check_spec(with_files(folder, tls=tls))
    assert f"the router shows the certificate {files.cert_file}, which has expired on" in caplog.text
    Path(files.key_file).write_bytes(trustme.CA().issue_cert("weft").private_key_pem.bytes())
    with pytest.raises(StartError, match="key values mismatch"):
        check_spec(with_files(folder, tls=tls))


def test_inner_certificates_that_peers_would_refuse_are_refused_before_anything_starts(folder: Path) -> None:
    files = inner_tls(trustme.CA(), folder, trusts=trustme.CA())
    section = {"cert_file": files.cert_file, "key_file": files.key_file, "ca_file": files.ca_file}
    wanted = build_spec({"models": [{"path": str(folder)}], "inner_tls": section, **ANY_PORTS})
    with pytest.raises(StartError, match="certificate"):
        check_spec(wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 3}, "num_heads is 8, which does not divide over tensor_parallel 3"),
        ({"pipeline_parallel": 3}, "pipeline_parallel is 3; allowed: at most the number of layers, 2"),
        ({"pipeline_parallel": 2, "layer_partition": [2]}, r"layer_partition is \[2\]; allowed: a number of layers"),
        ({"expert_parallel": True}, "expert_parallel is asked for; allowed: for models with experts"),
    ],
)
def test_split_that_cannot_be_is_refused(folder: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(EngineConfigError, match=f"model 'm': {message}"):
        check_spec(spec(folder, name="m", **settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernels": "cuda"}, "kernels are 'cuda' on device cpu; allowed there: auto, reference, cpu, cpu-native"),
        ({"attention_backend": "triton"}, "attention backend is 'triton' with kernels 'auto' on cpu; allowed: auto"),
        ({"compile": True}, "compile with kernels 'auto' on cpu, .* allowed: kernels reference or cpu"),
    ],
)
def test_kernels_that_do_not_go_with_the_device_are_refused(
    folder: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(EngineConfigError, match=f"model 'm': {message}"):
        check_spec(spec(folder, name="m", device="cpu", **settings))
    check_spec(spec(folder, device="auto", **settings))  # a rank knows what it has
    check_spec(spec(folder, device="cpu", kernels="cpu", compile=True))


def test_context_beyond_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(
        EngineConfigError, match="model 'm': max_context is 257; allowed: at most that of the model, 256"
    ):
        check_spec(spec(folder, name="m", max_context=257))
    assert check_spec(spec(folder, max_context=256)).models


@pytest.mark.parametrize(("text", "error"), [("{", ConfigError), ('{"model_type": "mamba"}', UnsupportedModelError)])
def test_unreadable_config_is_refused(folder: Path, text: str, error: type[Exception]) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(error, match=r"config\.json"):
        check_spec(spec(folder))


def test_context_that_no_message_could_tell_is_refused(folder: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 40_000_000.0, "original_max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps({**LLAMA, "rope_scaling": scaling}))
    with pytest.raises(ConfigError, match="max_context is 10240000000; allowed: at most 2147483647"):
        check_spec(spec(folder))


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        check_spec(spec(tmp_path / "none"))


@pytest.mark.parametrize("section", [("router", "port"), ("router", "metrics_port"), ("controller", "port")])
def test_taken_port_is_named(folder: Path, section: tuple[str, str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        settings = {**ANY_PORTS, section[0]: {**ANY_PORTS[section[0]], section[1]: port}}
        wanted = build_spec({"models": [{"path": str(folder)}], **settings})
        with pytest.raises(StartError, match=rf"{section[0]}\.{section[1]}: {port} on 127\.0\.0\.1 is taken"):
            check_spec(wanted)


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_keys_and_values_in_8_bits_are_refused_where_the_device_is_said_and_has_none(folder: Path, device: str) -> None:
    wanted = spec(folder, name="m", device=device, cache={"dtype": "int8"})
    if device != "cuda":
        assert check_spec(wanted).models
        return
    with pytest.raises(EngineConfigError, match=r"^model 'm': the cache's dtype is 'int8' on cuda; allowed there"):
        check_spec(wanted)


def test_folder_of_recordings_that_cannot_be_made_is_refused(folder: Path) -> None:
    file = folder / "config.json"
    wanted = build_spec({"models": [{"path": str(folder)}], "recording": {"folder": str(file)}, **ANY_PORTS})
    with pytest.raises(StartError, match=rf"recording\.folder: {file} cannot be made: File exists; allowed: a folder"):
        check_spec(wanted)


def test_folder_of_recordings_is_made_where_it_is_not_there(folder: Path) -> None:
    recordings = folder / "a" / "b"
    wanted = build_spec({"models": [{"path": str(folder)}], "recording": {"folder": str(recordings)}, **ANY_PORTS})
    for _ in range(2):
        check_spec(wanted)
        assert recordings.is_dir()


@pytest.mark.parametrize("host", ["256.1.1.1", "no\nhost", "a" * 100])
def test_host_that_is_none_of_this_node_is_named(folder: Path, host: str) -> None:
    wanted = build_spec({"models": [{"path": str(folder)}], "host": host, **ANY_PORTS})
    with pytest.raises(StartError, match=r"^host: .* with router\.port 0: .*allowed: an address of this node"):
        check_spec(wanted)


def test_check_costs_no_torch_and_no_ray() -> None:
    code = "import sys, cluster.preflight, cluster.cli; print({'torch', 'ray'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "set()"
