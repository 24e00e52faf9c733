"""The repository's own promises: generated stubs are fresh and the protocol passes its linter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("arguments", [["lint"], ["format", "--diff", "--exit-code"]], ids=["lint", "format"])
def test_protos_pass_buf(arguments: list[str]) -> None:
    buf = shutil.which("buf") or shutil.which("buf", path=REPOSITORY / "node_modules/.bin")
    if buf is None:
        pytest.skip("needs buf, which `make test` installs where npm is present")
    result = subprocess.run([buf, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
