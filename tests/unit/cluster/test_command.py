"""The entry of the `weft` command."""

import importlib
import os
import signal
import subprocess
import sys

import pytest

from cluster.command import main

_INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
{then}
"""


@pytest.mark.parametrize(
    ("module", "then"),
    [
        ("cluster.cli", "from cluster.command import main; main()"),
        ("torch", "from cluster.imports import import_for_good; import_for_good('torch')"),
    ],
)
def test_interrupt_while_modules_are_imported_ends_it_without_a_word(module: str, then: str) -> None:
    interrupted = _INTERRUPTED.format(module=module, then=then)
    done = subprocess.run([sys.executable, "-c", interrupted], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_command_itself_is_interrupted_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []
    monkeypatch.setattr("cluster.cli.main", lambda: handlers.append(signal.getsignal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # an event loop of the tests may have its own
    try:
        main()
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (handlers, after) == ([signal.default_int_handler], signal.SIG_DFL)


@pytest.mark.parametrize(
    ("missing", "arguments"), [("typer", ["status"]), ("ray", ["serve"]), ("torch", ["make-model", "/dev/null/model"])]
)
def test_package_that_is_not_installed_is_named_in_one_line(missing: str, arguments: list[str]) -> None:
    weft = f"import sys; sys.modules['{missing}'] = None; from cluster.command import main; main()"
    command = [sys.executable, "-c", weft, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told = f"Error: this command needs the Python package '{missing}', which is not installed here\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", told)


def test_module_that_an_installed_package_lacks_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.main", lambda: importlib.import_module("cluster.missing"))
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ModuleNotFoundError, match=r"cluster\.missing"):
            main()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("variables", "argument", "why"),
    [
        ({"PYTHONUTF8": "1"}, b"m\xff", r"b'm\xff' is no UTF-8; allowed: names and paths that are"),
        (
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "mod\xe8le".encode(),
            r"b'mod\xc3\xa8le' is no text in this locale's encoding, ascii; allowed: a locale of UTF-8, such as "
            "LC_ALL=C.UTF-8",
        ),
    ],
)
def test_argument_that_is_no_text_is_refused_in_one_line(variables: dict[str, str], argument: bytes, why: str) -> None:
    weft = "from cluster.command import main; main()"
    command = [sys.executable, "-c", weft, "scale", argument, "2", "--control", "127.0.0.1:1"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: the argument {why}\n")


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", b"\\xe9 \\u2192\n"), ("latin-1", b"\xe9 \\u2192\n")])
def test_text_that_the_terminal_cannot_show_is_escaped(encoding: str, shown: bytes) -> None:
    weft = "from cluster import cli; cli._run = lambda: print('\\xe9 \\u2192'); cli.main()"
    variables = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", weft], env=variables, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, b"")


@pytest.mark.parametrize(
    ("closed", "seen"),
    [("<&-", (b"''\n", b"told\n")), (">&-", (b"", b"told\n")), ("2>&-", (b"'typed'\n", b""))],
)
def test_stream_that_the_shell_has_closed_is_empty_and_takes_what_is_written(
    closed: str, seen: tuple[bytes, bytes]
) -> None:
    ran = "print(repr(sys.stdin.read())); print('told', file=sys.stderr); sys.stdout.flush()"
    weft = f"import sys; from cluster import cli; cli._run = lambda: exec({ran!r}); cli.main()"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", weft]
    done = subprocess.run(command, input=b"typed", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, *seen)
