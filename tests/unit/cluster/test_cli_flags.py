"""Groups of flags as parameters of a command."""

import errno
import os
import re
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from bench.errors import BenchConfigError, BenchError
from bench.load.flag_groups import SimulateFlags
from cluster.cli import app as weft
from cluster.cli import run_and_report
from cluster.cli_flags import given, with_flags
from cluster.errors import ClusterConfigError, ClusterError, ServiceStoppedError
from parallel.errors import ModelError
from router.errors import RouterError
from workers.errors import EngineError

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option("--width", "-w", min=1, help="How wide.")] = 3
    height: Annotated[float | None, typer.Option()] = None


def options_of(line: str) -> list[Any]:
    """Return the options of the command with which a line begins."""
    command: Any = get_command(weft)
    for word in line.split():
        command = getattr(command, "commands", {}).get(word, command)
    return [each for each in command.params if each.param_type_name == "option" and each.name != "help"]


def names_of(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def test_fields_of_a_group_are_options_in_their_place() -> None:
    app, seen = typer.Typer(), []

    @app.command()
    @with_flags
    def draw(*, name: str = "x", size: Size, is_round: bool = False) -> None:
        """Draw it."""
        seen.append((name, size, is_round))

    runner = CliRunner()
    assert runner.invoke(app, ["-w", "7", "--height", "2.5", "--is-round"]).exit_code == 0
    assert runner.invoke(app, []).exit_code == 0
    assert seen == [("x", Size(width=7, height=2.5), True), ("x", Size(), False)]
    assert runner.invoke(app, ["-w", "0"]).exit_code == 2
    shown = runner.invoke(app, ["--help"]).output
    assert [shown.index(flag) for flag in ("--name", "--width", "--height", "--is-round")] == sorted(
        shown.index(flag) for flag in ("--name", "--width", "--height", "--is-round")
    )
    assert "Draw it." in shown


@pytest.mark.parametrize("name", ["serve", "generate", "simulate", "bench serve", "bench offline"])
def test_help_shows_the_names_of_options_whole_in_80_columns(name: str) -> None:
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(weft, [*name.split(), "--help"]).output
    names = [each for option in options_of(name) for each in names_of(option)]
    assert len(names) > 10
    missing = [each for each in names if each.startswith("-") and not re.search(rf"{each}(?![\w-])", shown)]
    assert missing == []
    assert max(map(len, shown.splitlines())) <= 80


def test_help_of_serve_has_its_flags_by_what_they_are_about() -> None:
    shown = CliRunner().invoke(weft, ["serve", "--help"]).output
    marks = ["Usage:", "Serve a model", "Arguments:", "Model:", "--dtype", "Cache and batches:", "--block-size"]
    marks += ["Network:", "--port", "Options:"]
    assert [shown.index(mark) for mark in marks] == sorted(shown.index(mark) for mark in marks)


def test_help_tells_what_arguments_are_and_defaults_in_plain_brackets() -> None:
    """Typer before 0.26 loses the first where click is new, and before 0.22 writes a backslash before the second."""
    shown = CliRunner().invoke(weft, ["generate", "--help"]).output
    assert re.search(r'prompt\b.*The prompt; "-" reads it from stdin\.', shown, re.IGNORECASE)
    assert re.search(r" \[default: 127\.0\.0\.1:50051\]", shown)


def test_commands_that_the_documentation_shows_have_these_flags() -> None:
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md"), *REPOSITORY.glob("deploy/**/*.md")]
    told = "\n".join(page.read_text() for page in pages)
    shown = {
        (name, flag)
        for name, rest in re.findall(r"\bweft ((?:bench )?[a-z-]+)([^`\n#|;&]*)", told)
        for flag in re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)
    }
    assert len(shown) > 50
    root: Any = get_command(weft)
    commands = root.commands | {f"bench {name}": each for name, each in root.commands["bench"].commands.items()}
    known = {name: {*chain(*map(names_of, each.params), ["--help"])} for name, each in commands.items()}
    unknown = [f"weft {name} {flag}" for name, flag in shown if name in known and flag not in known[name]]
    assert unknown == []


@pytest.mark.parametrize("command", [["drain", "m-0"], ["stop"]])
def test_grace_without_an_end_is_refused(command: list[str]) -> None:
    result = CliRunner().invoke(weft, [*command, "--control", "127.0.0.1:1", "--grace", "inf"])
    assert result.exit_code == 2
    assert "Invalid value for '--grace'" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "hi", "--router", "a:65537"],  # of which gRPC makes port 1
        ["chat", "--router", "http://a:1"],
        ["status", "--control", ""],
        ["top", "--control", "http://a:1"],
    ],
)
def test_what_is_no_address_is_refused(arguments: list[str]) -> None:
    refused = CliRunner().invoke(weft, arguments).exception
    assert isinstance(refused, ClusterConfigError)
    assert f"{arguments[-2]}: {arguments[-1]!r} is no address; allowed: host:port" in str(refused)


@pytest.mark.parametrize("arguments", [["scale", "", "2"], ["rollout", "", "--undo"]])
def test_name_that_no_variable_of_the_shell_held_is_refused(arguments: list[str]) -> None:
    refused = CliRunner().invoke(weft, [*arguments, "--control", "127.0.0.1:1"])
    assert (refused.exit_code, "it is empty; allowed: a name" in refused.output) == (2, True)


def test_more_of_a_log_than_a_message_can_ask_for_is_refused() -> None:
    refused = CliRunner().invoke(weft, ["logs", "--tail-kb", str(2**54), "--control", "127.0.0.1:1"])
    assert (refused.exit_code, "--tail-kb" in refused.output) == (2, True)


def test_given_flags_are_those_that_differ_from_their_defaults() -> None:
    assert given(Size()) == {}
    assert given(Size(width=3, height=0.0)) == {"height": 0.0}


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_output_that_takes_no_more_is_told_in_one_line(reason: int, capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(reason, os.strerror(reason))

    with pytest.raises(SystemExit, match="1"):
        run_and_report(write)
    assert capsys.readouterr().err == f"Error: [Errno {reason}] {os.strerror(reason)}\n"


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ClusterConfigError("a flag"), 2, "Error: a flag\n"),
        (BenchConfigError("a flag"), 2, "Error: a flag\n"),
        (ClusterError("a group"), 1, "Error: a group\n"),
        (BenchError("a service"), 1, "Error: a service\n"),
        (ModelError("a file"), 1, "Error: a file\n"),
        (EngineError("a step"), 1, "Error: a step\n"),
        (RouterError("a key"), 1, "Error: a key\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_told_in_one_line_and_by_the_exit_code(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run_and_report(fail)
    assert (ended.value.code, capsys.readouterr().err) == (code, told)


def test_the_end_of_what_is_watched_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    def end() -> None:
        raise ServiceStoppedError("the service has stopped")

    run_and_report(end)
    assert capsys.readouterr().err == "the service has stopped\n"


def test_errors_of_the_system_that_nobody_expects_are_told_whole() -> None:
    def fail() -> None:
        raise FileNotFoundError(errno.ENOENT, "gone")

    with pytest.raises(FileNotFoundError):
        run_and_report(fail)


SERVED = "bench.load.serve_command.run_serve"
REPLICA = "bench.simulation.scheduling_policies.simulate"
CLUSTER = "bench.simulation.routing_policies.simulate_cluster"
EXAMPLES = {
    "router": "a:1",
    "control": "a:1",
    "url": "http://a",
    "protocol": "http",
    "policy": "mlfq",
    "top_p": "0.5",
    "dataset": "sessions",
    "workload": "W4",
    "settings": "dtype=float16",
    "length_scale": "0.5",
    "fail": "1:2",
    "router_policy": "round_robin",
    "autoscale": "1:12",
    "chat_template_kwargs": "{}",
    "log_level": "error",
    "batched_tokens": "70",
    "keep": "70",
}
"""What is given to options that do not take a 7."""


@pytest.mark.parametrize(
    ("command", "function", "names"),
    [
        ("generate hi", "cluster.generate.generate", r"(?!tls_|system|chat_template|logprobs).*"),
        ("generate hi --chat --json", "cluster.generate.generate", "system|chat_template_kwargs|logprobs"),
        ("chat", "cluster.chat.chat", r"(?!tls_).*"),
        ("make-model out", "cluster.make_model.make_model", ".*"),
        ("demo", "cluster.demo.run_demo", ".*"),
        ("apply FILE", "cluster.operate.apply_file", "dry_run|wait"),
        ("apply FILE --wait", "cluster.operate.apply_file", "timeout"),
        ("scale m 2", "cluster.operate.scale_model", "wait"),
        ("scale m 2 --wait", "cluster.operate.scale_model", "timeout"),
        ("rollout m", "cluster.operate.roll_model", "settings|undo|wait"),
        ("rollout m --wait", "cluster.operate.roll_model", "timeout"),
        ("drain m-0", "cluster.operate.drain_target", "grace|undo|wait"),
        ("drain m-0 --wait", "cluster.operate.drain_target", "timeout"),
        ("top", "cluster.top.run_top", r"(?!tls_|control).*"),
        ("logs", "cluster.show_logs.show_logs", r"(?!tls_|control).*"),
        ("warm", "cluster.warm.warm", ".*"),
        ("bench serve", SERVED, r"(?!.*tls_|file|burstiness|replay|speed|send_targets).*"),
        ("bench serve --rate 1 --ttft-target 5", SERVED, "burstiness|send_targets"),
        ("bench serve --dataset trace --file FILE", SERVED, "replay"),
        ("bench serve --dataset trace --file FILE --replay", SERVED, "speed"),
        ("bench offline", "bench.load.offline_command.measure_offline", r"(?!file|json_file).*"),
        ("simulate", REPLICA, "|".join(each.name for each in fields(SimulateFlags) if each.name != "trace")),
        ("simulate --replicas 9", CLUSTER, r"(?!trace|deadlines|replicas|copies|length_scale|.*_delay|target_).*"),
        ("simulate --replicas 9 --trace FILE", CLUSTER, "copies|length_scale"),
        ("simulate --replicas 9 --autoscale 1:12", CLUSTER, ".*_delay|target_requests"),
    ],
)
def test_every_option_changes_what_is_asked_for(
    command: str, function: str, names: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(function, lambda *args, **kw: asked.append(re.sub("0x[0-9a-f]+", "", repr((args, kw)))))

    def ask(*more: str) -> str:
        arguments = command.replace("FILE", str(tmp_path / "file")).split()
        result = CliRunner().invoke(weft, [*arguments, *more])
        assert (result.exit_code, result.exception) == (0, None), (more, result.output)
        return asked.pop()

    (tmp_path / "file").write_text("{}")
    plain = ask()
    assert ask() == plain
    options = [each for each in options_of(command) if re.fullmatch(names, each.name)]
    assert options
    for each in options:
        flag = (each.secondary_opts if each.default is True else each.opts)[0]
        assert ask(flag, *([] if each.is_flag else [EXAMPLES.get(each.name, "7")])) != plain, flag
