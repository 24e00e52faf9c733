"""Compiled code is kept in the home, or else where no other user can put some."""

import os
import resource
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.triton_programs import run_with_triton

from parallel.errors import DeviceError
from parallel.kernels.native import build
from parallel.kernels.native.cache import choose_triton_cache, default_cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of this user."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def full_disk() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _leave_no_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def know_none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", know_none)


def _make_it_a_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.rmdir()
    home.touch()


def test_a_home_that_can_be_written_has_the_cache(home: Path, temporary: Path) -> None:
    assert default_cache() == home / ".cache" / "weft"
    assert stat.S_IMODE((home / ".cache" / "weft").stat().st_mode) == 0o700
    assert not [*(home / ".cache" / "weft").iterdir()]
    assert not [*temporary.iterdir()]


@pytest.mark.parametrize(
    ("spoil", "reason"), [(_leave_no_home, "has no home folder"), (_make_it_a_file, "home/.cache/weft cannot be writ")]
)
def test_where_the_home_cannot_be_written_the_cache_is_a_private_folder_which_is_told_once(
    home: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    spoil(home, monkeypatch)
    folder = temporary / f"weft-{os.geteuid()}"
    assert [default_cache(), default_cache()] == [folder, folder]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(caplog.records) == 1
    assert f"kept in {folder}: " in caplog.text
    assert reason in caplog.text


def test_a_full_disk_is_told_of_both_folders(home: Path, temporary: Path, full_disk: None) -> None:
    with pytest.raises(
        DeviceError, match=r"home/\.cache/weft cannot be .* and .*temporary/weft-\d+ cannot be .*TMPDIR"
    ):
        default_cache()
    assert not [*(home / ".cache" / "weft").iterdir()]


def test_what_is_in_a_home_that_cannot_be_written_serves(home: Path, temporary: Path, full_disk: None) -> None:
    assert default_cache(lambda folder: folder.parent.parent == home) == home / ".cache" / "weft"
    assert not [*temporary.iterdir()]


@pytest.mark.parametrize("kind", ["link", "file", "for all", "for a group", "another's"])
def test_a_folder_that_others_could_write_is_refused(
    home: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    _make_it_a_file(home, monkeypatch)
    folder = temporary / f"weft-{os.geteuid()}"
    match kind:
        case "link":
            (temporary / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(temporary / "elsewhere")
        case "file":
            folder.touch(mode=0o600)
        case "for all" | "for a group":
            folder.mkdir()
            folder.chmod(0o702 if kind == "for all" else 0o720)
        case _:
            user = os.geteuid() + 1
            (temporary / f"weft-{user}").mkdir(mode=0o700)
            monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(DeviceError, match=r"weft-\d+ is not a folder of this user's"):
        default_cache(lambda folder: "weft-" in folder.name)


def test_kernels_are_compiled_where_they_can_be_kept_and_found_where_they_are(
    home: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "_run", lambda command: str(Path(command[-1]).write_bytes(b"compiled")))
    in_home = build.build_library()
    assert in_home.parent == home / ".cache" / "weft"
    content = in_home.read_bytes()
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(in_home))
        elsewhere = build.build_library()
        assert elsewhere.parent.parent == temporary
        assert elsewhere.read_bytes() == content
        patch.delattr(build, "_build")
        assert build.build_library() == elsewhere
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    assert build.build_library() == in_home, "nothing need be written"


def test_triton_keeps_its_code_with_ours_where_it_cannot_in_the_home(
    home: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_triton_cache({}) == {}
    assert (home / ".triton" / "cache").is_dir()
    (temporary / "file").touch()
    with_ours = {"TRITON_CACHE_DIR": str(home / ".cache" / "weft" / "triton")}
    assert choose_triton_cache({"TRITON_HOME": str(temporary / "file")}) == with_ours
    _leave_no_home(home, monkeypatch)
    assert choose_triton_cache({}) == {"TRITON_CACHE_DIR": str(temporary / f"weft-{os.geteuid()}" / "triton")}
    assert choose_triton_cache({"TRITON_HOME": str(temporary)}) == {}
    assert choose_triton_cache({"TRITON_CACHE_DIR": "/elsewhere"}) == {}


_COMPILE = """
import os

import torch

from helpers.compiled_launches import compiling
from parallel.kernels import triton_elementwise
from parallel.kernels.native.cache import choose_triton_cache

os.environ.update(choose_triton_cache(os.environ))
with compiling(90, 227 << 10):
    triton_elementwise.silu_mul(torch.zeros(4, 64, dtype=torch.bfloat16))
"""


def test_triton_compiles_where_the_home_cannot_be_written(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    run_with_triton(_COMPILE, HOME=os.devnull, TMPDIR=str(temporary))
    assert [*temporary.glob("weft-*/triton/*/*.cubin")]
