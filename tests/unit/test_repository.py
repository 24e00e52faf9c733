"""The repository's own promises: stubs are fresh, the protocol breaks no release, the wall clock is for dates; what the
documentation names is there.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
RELEASES = sorted((REPOSITORY / "proto/released").glob("*.binpb"))
FOLDERS = ("bench", "cluster", "deploy", "docs", "parallel", "proto", "router", "tests", "workers")
FILES = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.*")]
PAGES = [REPOSITORY / "README.md", *(path for path in FILES if path.suffix == ".md")]


WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|today|utcnow)\b")
READ_THE_WALL_CLOCK = {
    "router/openai.py",  # `created` of an answer
    "router/tls.py",  # the dates of a certificate
    "router/tokenizer.py",  # the date that chat templates write
    "cluster/reconciler.py",  # how long ago a router's failure was saved, on another machine
    "cluster/replica_spans.py",  # the beginning of a span
    "cluster/service.py",  # the start of a service, which files of code are compared with
    "cluster/spares.py",  # an end that other machines read
    "cluster/status_view.py",  # the time in front of a line
    "cluster/top.py",  # the time of a line of JSON
    "cluster/wanted_state.py",  # when the time that a drain or a stop had left was saved, for another machine
}
"""Whatever else reads it computes a duration or a deadline, which is wrong when the clock is set."""


def test_only_dates_come_from_the_wall_clock() -> None:
    files = [
        path
        for folder in ("proto/weft", "router", "cluster", "workers", "parallel")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    found = {path.relative_to(REPOSITORY).as_posix() for path in files if WALL_CLOCK.search(path.read_text())}
    assert found == READ_THE_WALL_CLOCK


def test_development_takes_the_triton_that_comes_with_the_oldest_torch() -> None:
    """2.10, which comes with Triton 3.6."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert "torch>=2.10,<3" in project["dependencies"]
    of_triton = [Requirement(each) for each in project["optional-dependencies"]["dev"] if each.startswith("triton")]
    assert [each.specifier.contains("3.6.0") for each in of_triton] == [True]


def test_generated_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        [sys.executable, REPOSITORY / "proto/generate.py", tmp_path],
        check=True,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    fresh = {path.name: path.read_text() for path in tmp_path.glob("weft/*/*_pb2*")}
    committed = {path.name: path.read_text() for path in REPOSITORY.glob("proto/weft/*/*_pb2*")}
    assert committed == fresh, "run `make proto` and commit the result"


def test_a_users_type_checker_sees_the_types_of_the_sdk() -> None:
    """PEP 561: it looks into no installed package without the mark."""
    assert all((REPOSITORY / folder / "py.typed").is_file() for folder in ("router", "proto/weft"))


def run_buf(*arguments: str, folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    buf = shutil.which("buf") or shutil.which("buf", path=REPOSITORY / "node_modules/.bin")
    if buf is None:
        pytest.skip("needs buf, which `make test` installs where npm is present")
    return subprocess.run([buf, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("arguments", [["lint"], ["format", "--diff", "--exit-code"]], ids=["lint", "format"])
def test_protos_pass_buf(arguments: list[str]) -> None:
    result = run_buf(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.stem)
def test_protos_break_no_release(release: Path) -> None:
    result = run_buf("breaking", "--against", str(release))
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_field_that_means_something_else_breaks_a_release(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "buf.yaml", tmp_path)
    shutil.copytree(REPOSITORY / "proto/weft", tmp_path / "proto/weft")
    file = tmp_path / "proto/weft/v1/replica.proto"
    file.write_text(file.read_text().replace("string cache_salt = 6;", "bytes cache_salt = 6;"))
    result = run_buf("breaking", "--against", str(RELEASES[-1]), folder=tmp_path)
    assert 'Field "6" with name "cache_salt" on message "Submit" changed type' in result.stdout


def test_every_dependency_has_a_line_that_says_why() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    rows = re.findall(r"^\| ([^|]+) \|", (REPOSITORY / "docs/dependencies.md").read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.sub(r" \(.*?\)", "", row).split(", ")}
    assert {Requirement(each).name for each in chain(project["dependencies"], *extras)} <= told


def test_links_of_the_documentation_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(REPOSITORY)}: {link}"
        for page in PAGES
        for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))
        if "://" not in link and not leads_somewhere(link, page)
    ]
    assert not broken


def leads_somewhere(link: str, page: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_blocks(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_files_that_the_documentation_names_are_there() -> None:
    """Told by the last parts of their paths, as `native/threads.h` is."""
    paths = [f"/{path.relative_to(REPOSITORY).as_posix()}" for path in FILES]
    gone = [
        f"{page.relative_to(REPOSITORY)}: {name}"
        for page in PAGES
        for code in re.findall(r"`([^`]+)`", without_blocks(page))
        for name in re.findall(r"(?<![\w/.<>-])[\w/.-]+\.(?:py|h|proto|sh)\b", code)
        if not any(path.endswith(f"/{name}") for path in paths)
    ]
    assert not gone
