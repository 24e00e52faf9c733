"""The folder of this user's own where compiled code is kept: what lies there is loaded.

Knows folders; what is kept in them is in build.py and inductor.py, or Triton's own.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from parallel.errors import DeviceError

_ROOM_BYTES = 16 * 1024**2
"""Several times what the kernels take while they are compiled."""

logger = logging.getLogger(__name__)


def default_cache(holds: Callable[[Path], bool] = lambda _: False) -> Path:
    """`~/.cache/weft`; where that cannot be written a folder among temporary files, which is logged when it is made.

    Args:
        holds: tells of a folder that all that is wanted is there: in that one nothing need be written.

    Raises DeviceError when there is neither.
    """
    try:
        return _usable(_home_cache(), holds)
    except DeviceError as error:
        reason = str(error)
    try:
        return _usable(_temporary_cache(reason), holds)
    except DeviceError as error:
        raise DeviceError(
            f"compiled kernels cannot be kept: {reason}, and {error}; allowed: a home folder, or one for temporary "
            "files (TMPDIR), that can be written"
        ) from error


def choose_triton_cache(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return what to add to the environment so that Triton keeps its code in `default_cache`, where it cannot at home.

    Left to itself it then fails at the first kernel. What the environment says is kept.
    Raises as `default_cache`.
    """
    if "TRITON_CACHE_DIR" in environment:
        return {}
    try:
        home = environment.get("TRITON_HOME") or Path.home()
        _usable(Path(home) / ".triton" / "cache", lambda _: False)
    except (DeviceError, RuntimeError):  # RuntimeError: this user has no home
        return {"TRITON_CACHE_DIR": str(default_cache() / "triton")}
    return {}


def _home_cache() -> Path:
    try:
        return Path.home() / ".cache" / "weft"
    except RuntimeError as error:
        raise DeviceError("this user has no home folder") from error


def _temporary_cache(reason: str) -> Path:
    """Return a folder that only this user writes to, in one that all may."""
    user = os.geteuid()
    try:
        folder = Path(tempfile.gettempdir()) / f"weft-{user}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            logger.warning("compiled kernels are kept in %s: %s", folder, reason)
        found = folder.lstat()  # of a link, not of what it leads to
    except OSError as error:
        raise DeviceError(str(error)) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise DeviceError(f"{folder} is not a folder of this user's that no other can write to")
    return folder


def _usable(folder: Path, holds: Callable[[Path], bool]) -> Path:
    try:
        if not holds(folder):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(_ROOM_BYTES))  # a quota shows only so
    except OSError as error:
        raise DeviceError(f"{folder} cannot be written to: {error.strerror}") from error
    return folder
