"""Recording rules and alerts: what promtool says of them, and the runbook."""

import subprocess

import yaml
from helpers.prometheus import find_tool
from helpers.promql import PROMETHEUS, REPOSITORY, rules


def test_rules_and_alerts_pass_promtool() -> None:
    promtool = find_tool("promtool")
    for arguments in (
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yml", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ):
        done = subprocess.run([promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_proved_and_has_its_line_in_the_runbook() -> None:
    alerts = {rule["alert"] for rule in rules("alerts.yml")}
    cases = [
        case
        for test in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    fires = {case["alertname"] for case in cases if case.get("exp_alerts")}
    stays_quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert fires == stays_quiet == alerts
    runbook = (REPOSITORY / "docs/monitoring.md").read_text()
    assert {alert for alert in alerts if f"| {alert} |" not in runbook} == set()
