"""What `python -m router --settings` takes: the same as a cluster file, and no more."""

import json

import pytest

from cluster.config import RouterSection, build_spec
from router.config import AdmissionConfig, RouterConfig
from router.errors import RouterConfigError
from router.flags import parse_flags, to_config
from router.settings import RouterSettings

SETTINGS = {
    "max_message_bytes": 1 << 20,
    "admission": {"max_queued": 3},
    "clients": {"write_timeout_s": 5.0, "allowed_origins": ["https://app.example", "http://localhost:3000"]},
    "metrics": {"slo_ttft_s": 0.2},
}


def config(*flags: str) -> RouterConfig:
    return to_config(parse_flags(["--control", "127.0.0.1:1", *flags]))


def test_settings_are_those_of_a_cluster_file() -> None:
    alone, in_cluster = config("--settings", json.dumps(SETTINGS)), build_spec({"router": SETTINGS}).router
    assert alone.admission == AdmissionConfig(max_queued=3)
    assert alone.clients.allowed_origins == ("https://app.example", "http://localhost:3000")
    for name in RouterSettings.model_fields:
        assert getattr(alone, name) == getattr(in_cluster, name)


def test_without_settings_everything_has_its_default_as_in_an_empty_cluster_file() -> None:
    default = RouterConfig(control="127.0.0.1:1")
    for name in RouterSettings.model_fields:
        assert getattr(config(), name) == getattr(RouterSection(), name) == getattr(default, name)


def test_flags_of_their_own_go_with_settings() -> None:
    made = config("--settings", json.dumps(SETTINGS), "--log-requests", "--grace", "2")
    assert (made.metrics.log_requests, made.metrics.slo_ttft_s, made.grace_s) == (True, 0.2, 2.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "'{' is not JSON: "),
        ("[]", "'[]' is a list; allowed: an object of settings"),
        ('{"port": 1}', "port: unknown key; allowed: max_message_bytes, "),
        ('{"admission": {"max_queue": 1}}', "admission.max_queue: unknown key; allowed: max_in_flight, max_queued"),
        ('{"admission": {"max_queued": "1"}}', 'admission.max_queued: "1"; allowed: a valid integer'),
        ('{"admission": {"max_queued": 1e308}}', "admission.max_queued: 1e+308; allowed: at most 1e+15"),
        ('{"clients": {"body_timeout_s": 0}}', "clients.body_timeout_s: 0; allowed: greater than or equal to 0.001"),
        (
            '{"clients": {"allowed_origins": ["*", "https://app.example/"]}}',
            "clients: allowed_origins has 'https://app.example/'; allowed: '*', or an origin as browsers tell it",
        ),
        ('{"clients": {"allowed_origins": ["app.example"]}}', "clients: allowed_origins has 'app.example'; allowed: "),
        ('{"clients": {"allowed_origins": "*"}}', 'clients.allowed_origins: "*"; allowed: '),
        (
            '{"link": {"tls": {"cert_file": "c", "key_file": "k", "ca_file": "a"}}}',
            "link.tls: given; allowed: --",
        ),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str) -> None:
    with pytest.raises(RouterConfigError) as caught:
        config("--settings", text)
    assert str(caught.value).startswith("--settings: ")
    assert told in str(caught.value)


@pytest.mark.parametrize("flag", ["grace", "unready"])
@pytest.mark.parametrize("time", ["inf", "-1", "2e15"])
def test_a_stop_takes_a_time_that_ends(flag: str, time: str) -> None:
    with pytest.raises(RouterConfigError, match=f"{flag}_s is .*; allowed: 0 to 1000000000000000"):
        config(f"--{flag}={time}")


def test_help_tells_the_default_of_each_number(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    options = " ".join(capsys.readouterr().out.split()).split(" --")
    defaults = parse_flags(["--control", "127.0.0.1:1"])
    numbers = {name: value for name, value in vars(defaults).items() if type(value) in (int, float)}
    assert {"port", "trace_ratio", "grace", "unready"} <= numbers.keys()
    for name, value in numbers.items():
        assert any(each.startswith(name.replace("_", "-")) and f"(default: {value})" in each for each in options), name
