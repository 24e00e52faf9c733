"""The compiled kernels are built once, by one of those who want them, and old ones do not pile up."""

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Semaphore
from typing import TextIO

import pytest

from parallel.errors import DeviceError
from parallel.kernels.native import build
from parallel.kernels.native.library import Operations


def test_library_is_compiled_once_and_again_when_the_compiler_changes(
    tmp_path: Path, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Path(shutil.copy2(build.build_library(), tmp_path))  # the name is the key
    written_ns = built.stat().st_mtime_ns
    assert build.build_library(tmp_path) == built
    assert built.stat().st_mtime_ns == written_ns
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-DOTHER"))
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "kernels.cpp").write_text("#error not this one\n")
    with pytest.raises(DeviceError, match="not this one"):
        build.build_library(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("machine", "flag"), [("aarch64", "-mcpu=native"), ("arm64", "-mcpu=native"), ("x86_64", "-march=native")]
)
def test_compiler_is_asked_for_this_cpu_in_the_words_that_it_knows_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flag: str
) -> None:
    commands: list[list[str]] = []

    def compile_(command: list[str]) -> str:
        commands.append(command)
        Path(command[-1]).touch()
        return ""

    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "_run", compile_)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    build.build_library(tmp_path)
    asked = [part for command in commands if "-c" in command for part in command if part.endswith("=native")]
    assert asked == [flag] * len(list(build.SOURCES.glob("*.cpp")))


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\0" * 100], ids=["empty", "short", "other"])
def test_a_library_that_is_damaged_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    library = tmp_path / "weft_kernels_key.so"
    library.write_bytes(content)

    def compile_(command: list[str]) -> str:
        Path(command[-1]).write_bytes(b"compiled")
        return ""

    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "_run", compile_)
    for _ in range(2):
        assert build.build_library(tmp_path) == library
        assert library.read_bytes().startswith(b"compiled")
    assert caplog.text.count("is damaged") == 1


def test_who_wants_the_library_at_once_waits_for_the_one_that_compiles_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[Path] = []
    lock, asked, may_end = build.fcntl.flock, Semaphore(0), Event()

    def compile_slowly(command: list[str]) -> str:
        outputs.append(Path(command[-1]))
        outputs[-1].touch()
        assert may_end.wait(30)
        return ""

    def ask(file: TextIO, operation: int) -> None:
        asked.release()
        lock(file, operation)

    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "_run", compile_slowly)
    monkeypatch.setattr(build.fcntl, "flock", ask)
    with ThreadPoolExecutor() as pool:
        built = [pool.submit(build.build_library, tmp_path) for _ in range(2)]
        assert all(asked.acquire(timeout=30) for _ in built)
        may_end.set()
        assert {each.result(30) for each in built} == {tmp_path / "weft_kernels_key.so"}
    assert sorted(output.name for output in outputs) == ["attention.o", "kernels.o", "weft_kernels_key.so"]
    assert [path.name for path in tmp_path.iterdir()] == ["weft_kernels_key.so"]


def test_old_libraries_and_what_killed_compilations_left_are_removed_when_one_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [tmp_path / f"weft_kernels_{number}.so" for number in range(20)]
    folders = [tmp_path / "build-left", tmp_path / "build-under-way"]
    for age, library in enumerate(reversed(others)):
        library.touch()
        os.utime(library, (1e9, time.time() - 60 * age))
    for folder in folders:
        folder.mkdir()
        (folder / "kernels.o").touch()
    os.utime(folders[0], (1e9, 1e9))
    (tmp_path / "models").mkdir()
    os.utime(tmp_path / "models", (1e9, 1e9))
    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "_run", lambda command: str(Path(command[-1]).write_bytes(b"compiled")))
    added = build.build_library(tmp_path)
    assert {*tmp_path.iterdir()} == {added, *others[5:], folders[1], tmp_path / "models"}


def test_who_waits_for_a_compilation_that_fails_does_not_begin_it_again_but_who_comes_later_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    lock, asked, may_end = build.fcntl.flock, Semaphore(0), Event()

    def fail_slowly(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
        starts.append(len(starts))
        assert may_end.wait(30)
        raise DeviceError(f"no space, start {len(starts)}")

    def ask(file: TextIO, operation: int) -> None:
        asked.release()
        lock(file, operation)

    monkeypatch.setattr(build, "find_compiler", lambda: ["c++"])
    monkeypatch.setattr(build, "_key", lambda compiler, flags: "key")
    monkeypatch.setattr(build, "_build", fail_slowly)
    monkeypatch.setattr(build.fcntl, "flock", ask)
    with ThreadPoolExecutor() as pool:
        built = [pool.submit(build.build_library, tmp_path) for _ in range(3)]
        assert all(asked.acquire(timeout=30) for _ in built)
        may_end.set()
        assert {str(each.exception(30)) for each in built} == {"no space, start 1"}
    with pytest.raises(DeviceError, match="no space, start 2"):
        build.build_library(tmp_path)
    assert [*tmp_path.iterdir()] == []
