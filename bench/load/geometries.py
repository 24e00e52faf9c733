"""Models for benchmarks: well-known sizes with random weights, written once into the user's cache."""

import fcntl
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path

from bench.errors import BenchError
from cluster.make_model import make_model
from cluster.models import resolve_model

GEOMETRIES: Mapping[str, str] = {
    "llama-110m": "110m",
    "qwen2.5-0.5b": "qwen2.5-0.5b",
    "qwen3-moe-0.5b": "qwen3-moe-0.5b",
    "llama3-8b": "8b",
}
"""Names that `--model` takes, and their presets of `weft make-model`."""

STORED_DTYPE = "bfloat16"

_SCRATCH = "make-"


def find_model(name: str, *, cache: Path | None = None) -> Path:
    """The folder of a geometry, written now where the cache has none; else of a model as `weft serve` finds it.

    Raises ModelNotFoundError when it is neither, BenchError when the cache cannot be written.
    """
    if name not in GEOMETRIES:
        return resolve_model(name)
    folder = (cache or _default_cache()) / name
    try:
        if not (folder / "config.json").is_file():
            _write(folder, GEOMETRIES[name])
    except OSError as error:
        raise BenchError(f"{folder} cannot be written: {error.strerror}; allowed: a home folder that can") from error
    return folder


def _write(folder: Path, preset: str) -> None:
    """Put the model in place whole: another process may write the same one, or this one be interrupted."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_what_is_left(folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=_SCRATCH) as scratch, ExitStack() as held:
        with suppress(OSError):  # a file system without locks, where nobody removes it either
            held.enter_context(_locked(Path(scratch)))
        new = Path(scratch) / folder.name
        with redirect_stdout(io.StringIO()):  # it tells where it wrote, which is not where the model will be
            make_model(new, preset=preset, sizes={}, dtype=STORED_DTYPE, seed=0, tokenizer=None)
        try:
            os.rename(new, folder)
        except OSError:  # not empty: somebody else was faster
            if not (folder / "config.json").is_file():
                raise


def _remove_what_is_left(cache: Path) -> None:
    """Remove what processes that were killed while they wrote a model have left of it."""
    for scratch in cache.glob(f"{_SCRATCH}*"):
        with suppress(OSError), _locked(scratch):
            if any(scratch.iterdir()):  # an empty one may be so new that it is not locked yet
                shutil.rmtree(scratch)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among processes, until this one ends. Raises OSError when another one is, or folders have no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _default_cache() -> Path:
    return Path.home() / ".cache" / "weft" / "models"
