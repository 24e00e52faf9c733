"""Compiles the C++ kernels for this machine, once: the library stays in the user's cache, keyed by what it depends on.

Knows compilers and files; where the cache is, is in cache.py, what the library offers in library.py.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel.errors import DeviceError
from parallel.kernels.native.cache import default_cache

SOURCES = Path(__file__).parent
NUMBERS = ("bfloat16", "float16", "float32")
"""What a library can be compiled for, in the order of `weft_number` of kernels.cpp."""
COMPILERS = ("c++", "g++", "clang++")
"""Commands of C++ compilers, in order of preference; where none is installed, the `ziglang` package is taken."""

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fopenmp-simd",
    "-fPIC",
    "-fvisibility=hidden",
)
_ARM = ("aarch64", "arm64")
"""Machines for which Clang up to 14 does not know `-march=native`."""
_TIMEOUT_S = 300.0
_MOST_KEPT = 16
"""Libraries that stay in a cache: of NUMBERS, of some kinds of CPU, of two versions. The tests make 9 of one."""
_LONGEST_BUILD_S = 3600.0
_DIGEST = hashlib.sha256
"""Digest of a library, which follows it in its file."""
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")

logger = logging.getLogger(__name__)


def build_library(cache: Path | None = None, *, numbers: str = "bfloat16") -> Path:
    """The compiled library; compiled now where the cache has none for these sources, this compiler and this CPU, or
    not the whole of it. `numbers`: what a model computes in that it serves, one of NUMBERS.

    Of several processes that want it at once, one compiles and the others wait for it, or for its failure. Raises
    DeviceError when there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = find_compiler()
    flags = _flags(numbers)
    name = f"weft_kernels_{_key(compiler, flags)}.so"
    library = (cache or default_cache(lambda folder: _is_whole(folder / name))) / name
    try:
        if _is_whole(library):
            return library
        with _locked(library.with_suffix(".lock")) as failure:
            if not _is_whole(library):
                if failure:
                    raise DeviceError(failure)
                if library.exists():
                    logger.warning("compiling the CPU kernels again: %s is damaged", library)
                _build(compiler, flags, library)
    except OSError as error:
        raise DeviceError(f"compiled kernels cannot be kept: {error}") from error
    return library


def _is_whole(library: Path) -> bool:
    """Return whether it is there as it was built. Of a part the loader may make nothing but a signal."""
    if not library.exists():
        return False
    content, size = library.read_bytes(), _DIGEST().digest_size
    return content[-size:] == _DIGEST(content[:-size]).digest()


def _build(compiler: Sequence[str], flags: Sequence[str], library: Path) -> None:
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        output = Path(folder) / library.name
        _run([*compiler, "-shared", *_compile(compiler, flags, Path(folder)), "-o", str(output)])
        with output.open("r+b") as file:
            file.write(_DIGEST(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())  # before its name says that it is there
        os.replace(output, library)
    _remove_old(library)
    logger.info("compiled the CPU kernels with %s in %.1f s: %s", compiler[0], time.monotonic() - started, library)


def _remove_old(added: Path) -> None:
    """Remove the oldest libraries, and what compilations left that were killed. Whoever has loaded one keeps it."""
    with suppress(OSError):  # others do it too
        for library in sorted(added.parent.glob("weft_kernels_*.so"), key=_written_s)[:-_MOST_KEPT]:
            library.unlink()
        for folder in added.parent.glob("build-*"):
            if _written_s(folder) < _written_s(added) - _LONGEST_BUILD_S:
                shutil.rmtree(folder)


def _written_s(path: Path) -> float:
    return path.stat().st_mtime


@contextmanager
def _locked(path: Path) -> Iterator[str]:
    """Alone among processes; not where the file system has no locks: there each puts its own file in place whole.

    Yields why the one failed that this one waited for; empty where there was none, or it did not.
    """
    with path.open("a+", encoding="utf-8") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        failure = file.read()
        try:
            yield failure
        except DeviceError as error:
            failure = str(error)
            raise
        finally:
            path.unlink(missing_ok=True)  # who comes later tries again
            with suppress(OSError):
                os.truncate(file.fileno(), 0)
                os.write(file.fileno(), failure.encode())


def find_compiler() -> list[str]:
    """The command of a C++ compiler. Raises DeviceError when there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "c++"]
    raise DeviceError(f"no C++ compiler; wanted: {', '.join(COMPILERS)} on the path, or the Python package ziglang")


def _compile(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> list[str]:
    """Compile the sources, all at once, and return the object files."""

    def compile_one(source: Path) -> str:
        output = str(folder / f"{source.stem}.o")
        _run([*compiler, *flags, "-c", str(source), "-o", output])
        return output

    sources = sorted(SOURCES.glob("*.cpp"))
    with ThreadPoolExecutor(len(sources)) as pool:
        return list(pool.map(compile_one, sources))


def _flags(numbers: str) -> tuple[str, ...]:
    """Those, how the compiler is asked for this CPU, and what it does not tell of it."""
    native = "-mcpu=native" if platform.machine() in _ARM else "-march=native"
    is_intel = _of_cpu("vendor_id").endswith("GenuineIntel")
    of_cpu = f"-DWEFT_FIRST_LEVEL_KB={_first_level_kb()}", f"-DWEFT_IS_INTEL={int(is_intel)}"
    of_numbers = (f"-DWEFT_IS_{name.upper()}={int(name == numbers)}" for name in NUMBERS[1:])
    return (native, *_FLAGS, *of_cpu, *of_numbers)


def _first_level_kb() -> int:
    """Return the size of the first-level cache for data; 0 where Linux does not tell."""
    for cache in _CACHES.glob("index*"):
        try:
            kind = (cache / "level").read_text() + (cache / "type").read_text()
            if kind == "1\nData\n":
                return int((cache / "size").read_text().removesuffix("K\n"))
        except (OSError, ValueError):
            continue
    return 0


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    for part in (*compiler, *flags, _run([*compiler, "--version"]), cpu_features()):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def cpu_features() -> str:
    """What tells this CPU's instructions from another's: a home folder may be shared by several kinds."""
    return _of_cpu("flags", "Features") or platform.processor()


def _of_cpu(*names: str) -> str:
    """The line of the first core that begins so; empty where Linux has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(names)), "")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{command[0]} did not run: {error}") from error
    if done.returncode != 0:
        raise DeviceError(f"{command[0]} failed with status {done.returncode}: {_most_telling(done.stderr)}")
    return done.stdout


def _most_telling(output: str) -> str:
    """Return the first lines of a compiler's output that speak of an error, else the last ones."""
    lines = output.strip().splitlines()
    return "\n".join([line for line in lines if "error" in line or "No space" in line][:5] or lines[-5:])
