"""Groups of flags as parameters of a command."""

import errno
import os
import re
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from cluster.cli import app as weft
from cluster.cli import run_and_report
from cluster.cli_flags import given, with_flags
from cluster.errors import ClusterConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    width: Annotated[int, typer.Option("--width", "-w", min=1, help="How wide.")] = 3
    height: Annotated[float | None, typer.Option()] = None


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
    command: Any = get_command(weft)
    for each in name.split():
        command = command.commands[each]
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(weft, [*name.split(), "--help"]).output
    names = [each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)]
    assert len(names) > 10
    missing = [each for each in names if each.startswith("-") and not re.search(rf"{each}(?![\w-])", shown)]
    assert missing == []
    assert max(map(len, shown.splitlines())) <= 80


def test_help_of_serve_has_its_flags_by_what_they_are_about() -> None:
    shown = CliRunner().invoke(weft, ["serve", "--help"]).output
    marks = ("Arguments:", "Model:", "--dtype", "Cache and batches:", "--block-size", "Network:", "--port", "Options:")
    assert [shown.index(mark) for mark in marks] == sorted(shown.index(mark) for mark in marks)


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


def test_more_of_a_log_than_a_message_can_ask_for_is_refused() -> None:
    refused = CliRunner().invoke(weft, ["logs", "--tail-kb", str(2**54), "--control", "127.0.0.1:1"])
    assert (refused.exit_code, "--tail-kb" in refused.output) == (2, True)


def test_given_flags_are_those_that_differ_from_their_defaults() -> None:
    assert given(Size()) == {}
    assert given(Size(width=3, height=0.0)) == {"height": 0.0}


def test_full_disk_under_the_output_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SystemExit, match="1"):
        run_and_report(write)
    assert capsys.readouterr().err == "Error: [Errno 28] No space left on device\n"
