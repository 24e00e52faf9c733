"""From what a user names - a folder, a packaged model, a hub id - to a folder on this machine."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from stat import S_ISDIR, S_ISREG

from cluster.errors import ModelNotFoundError
from parallel.weight_index import FORMATS, read_index

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "weft-tiny"
"""The model that is served when nobody names one."""

PACKAGED = {DEFAULT_MODEL: Path(__file__).parent / "default_model" / "weights"}
"""Models that come with the program."""

_HUB_ANSWERS_IN_S = 10.0
"""The hub's package itself waits for ever, or until the system gives a connection up, which takes two minutes."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(
    source: str, *, commit: str | None = None, is_whole: Callable[[Path], bool] = lambda _: False
) -> Path:
    """Return the model's folder, fetching it from the hub where `source` is a hub id.

    Args:
        source: what the user named.
        commit: of the hub's repository, the name of the folder that was fetched before; None: the last one there.
        is_whole: whether this machine's folder of the commit has all that is wanted, so that no hub need be asked.

    Raises:
        ModelNotFoundError: no such folder or packaged model, it may not be read, or the hub does not give it.
    """
    if source in PACKAGED:
        return _require_config(PACKAGED[source], source)
    folder = find_folder(source)
    if folder is not None:
        return _require_config(folder, source)
    if _HUB_ID.fullmatch(source) is None:
        raise ModelNotFoundError(f"model {source!r} is no folder here; allowed: {_ALLOWED}")
    return _fetch(source, commit, is_whole)


def find_folder(source: str) -> Path | None:
    """Return the folder of this machine that the user named, with no link in its path; None: a packaged model, or none.

    Raises:
        ModelNotFoundError: it is a file, or cannot be looked at.
    """
    if source in PACKAGED:
        return None
    with _readable(source):
        folder = Path(source).expanduser()
        mode = _mode_of(folder)
        if mode is not None and not S_ISDIR(mode):
            raise ModelNotFoundError(f"model {source!r} is a file; allowed: {_ALLOWED}")
        return None if mode is None else folder.resolve()


def absolute_source(source: str) -> str:
    """Return what names the same model in another working folder. Links stay links: who goes on resolves them.

    Raises ModelNotFoundError as `find_folder`.
    """
    return source if find_folder(source) is None else os.path.abspath(Path(source).expanduser())


def read_text_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of what a router reads of a model: tokenizer, chat template, configs. Not the weights.

    Raises:
        ModelNotFoundError: a file cannot be read.
    """
    try:
        for file in sorted({file for pattern in _small_files() for file in folder.glob(pattern)}):
            if file.is_file() and not file.name.endswith(".index.json"):
                yield file.name, file.read_bytes()
    except OSError as error:  # which knows no name where it comes of reading
        raise ModelNotFoundError(f"{error.filename or folder} cannot be read: {error.strerror}") from error


def _fetch(hub_id: str, commit: str | None, is_whole: Callable[[Path], bool]) -> Path:
    # every rank imports this file, and hardly any fetches
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        if commit is None:
            return _fetch_latest(hub_id)
        fetched = _find_fetched(hub_id, commit)
        if fetched is not None and is_whole(fetched):
            return fetched
        return _download(hub_id, commit)
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError, RuntimeError) as error:
        # RuntimeError: of a user without a home, where it would be kept
        raise _not_given(hub_id, error) from error


def _fetch_latest(hub_id: str) -> Path:
    """Fetch the last commit; while the hub does not answer, return what was the last one when it did."""
    from huggingface_hub import model_info
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        latest = model_info(hub_id, timeout=_HUB_ANSWERS_IN_S).sha
    except Exception as error:  # of the HTTP library, which is another one with each version of the hub's package
        try:
            folder = _download(hub_id, None, is_offline=True)
        except LocalEntryNotFoundError:
            raise _not_given(hub_id, error) from error
        if not isinstance(error, OfflineModeIsEnabled):  # which HF_HUB_OFFLINE asks for
            reason = _reason(error)
            logger.warning(
                "model %r: the hub did not say its last commit (%s); served as fetched before", hub_id, reason
            )
        return folder
    fetched = _find_fetched(hub_id)
    # named, nobody asks for the last commit again; not named, it is noted for the time when the hub does not answer
    return _download(hub_id, latest if fetched is not None and fetched.name == latest else None)


def _find_fetched(hub_id: str, commit: str | None = None) -> Path | None:
    """Return this machine's folder of a commit, which may not be whole; without one of that which was the last."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json", revision=commit)
    return Path(config).parent if isinstance(config, str) else None


def _download(hub_id: str, commit: str | None, *, is_offline: bool = False) -> Path:
    """Fetch the small files, which say what the weights are called; then the weights, in the first format there is.

    Repositories often have them twice and more: in other formats, in one file, in folders for other programs. Weights
    that are here are not asked for: without a network the hub's package tries that for 23 seconds.
    """
    from huggingface_hub import snapshot_download

    fetch = partial(snapshot_download, hub_id, local_files_only=is_offline)
    folder = Path(fetch(revision=commit, allow_patterns=_small_files(), ignore_patterns="*/*"))
    _require_config(folder, hub_id)
    for weights in FORMATS:
        index = folder / weights.index
        names = sorted(set(read_index(index).values())) if index.is_file() else [weights.single]
        if not _has_all(folder, names):
            fetch(revision=folder.name, allow_patterns=names)  # the commit of the small files
        if _has_all(folder, names):
            break
    return folder


def _not_given(hub_id: str, error: Exception) -> ModelNotFoundError:
    return ModelNotFoundError(f"model {hub_id!r} is no folder here, and the hub did not give it: {_reason(error)}")


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _has_all(folder: Path, names: list[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _small_files() -> list[str]:
    """Return patterns for every file that serving needs, but for weights."""
    from weft.tokenizer.load import TOKENIZER_FILES

    return ["*.json", "*.jinja", *TOKENIZER_FILES]


@contextmanager
def _readable(source: str) -> Iterator[None]:
    """Tell what is wrong with a name that the system does not take, or with a folder that may not be entered."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # the latter two of the user in ~user
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelNotFoundError(f"model {source!r} cannot be read: {reason}; allowed: {_ALLOWED}") from error


def _require_config(folder: Path, source: str) -> Path:
    with _readable(source):
        _check_links(folder, source)
        mode = _mode_of(folder / "config.json")
    if mode is None or not S_ISREG(mode):
        raise ModelNotFoundError(f"model {source!r}: {folder} has no config.json; allowed: {_ALLOWED}")
    return folder


def _check_links(folder: Path, source: str) -> None:
    """Refuse links that lead nowhere, as a copy of a folder of the hub's cache has them: their files would be taken for
    such as this model has not, and it would be served without its chat template, say."""
    for file in folder.iterdir():
        if file.is_symlink() and any(map(file.match, _small_files())) and _mode_of(file) is None:
            raise ModelNotFoundError(
                f"model {source!r}: {file} is a link to {file.readlink()}, which is not there; allowed: the file itself"
            )


def _mode_of(path: Path) -> int | None:
    """Return what kind of file it is, None where there is none. Raises what keeps it from being looked at.

    `Path.is_dir` and `is_file` say False for all of that since Python 3.14.
    """
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


_ALLOWED = f"a folder in Hugging Face layout, {', '.join(repr(name) for name in PACKAGED)}, or a hub id 'owner/name'"
