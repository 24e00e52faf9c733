"""What a model's folder held when a revision was wanted, and whether it still does: one revision, one model.

Read by the controller once for each revision, and by each rank before it loads, on its own node.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.errors import ModelFilesChangedError
from cluster.models import resolve_model
from parallel.errors import CheckpointError
from parallel.weight_index import find_weights, read_index

_DIGEST_VERSION = "1"
"""To be changed with the way the digest is made: a rank of another version then cannot compare it."""
_NUM_SAMPLES, _SAMPLE_BYTES = 256, 4096
"""Samples of the weights: read in milliseconds from a local disk, in a quarter of a second at a millisecond a read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionText:
    """What routers and ranks must know of a model's folder, as it was when a revision was wanted."""

    path: str
    """Absolute path of the folder."""
    max_context: int
    """Longest prompt plus output, by the folder and the settings."""
    digest: str = ""
    """Digest of what makes tokens of text (router/tokenizer.py); empty: saved by a version that kept none."""
    files: str = ""
    """Digest of what a replica reads (`digest_files`); empty: the controller had no weights to look at, or as above."""

    @property
    def commit(self) -> str:
        """Commit of the hub's repository, where the model comes from there: the folder is called so."""
        return Path(self.path).name


def digest_files(folder: Path) -> str:
    """Hash what a replica reads of a model: config and tokenizer, and samples of its weights; empty without weights.

    The samples are spread evenly over all bytes. Weights that were trained further differ in most of them, so that as
    good as every other checkpoint is told apart; one that differs in a small tensor alone may not be.
    """
    from weft.tokenizer.load import DECLARING_FILES, TOKENIZER_FILES  # every rank imports this file

    digest = hashlib.sha256()
    try:
        patterns = ("config.json", *TOKENIZER_FILES, *DECLARING_FILES)
        for file in sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}):
            digest.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
        weights = find_weights(folder)
        names = sorted(set(read_index(weights).values())) if weights.suffix == ".json" else [weights.name]
        for sample in _samples([folder / name for name in names]):
            digest.update(sample)
    except (CheckpointError, OSError):
        return ""  # who loads them says what is wrong
    return f"{_DIGEST_VERSION}-{digest.hexdigest()[:32]}"


def find_files(source: str, text: RevisionText | None) -> Path:
    """Return the folder of a model, fetched where it comes from the hub and this machine has not all that is known of.

    Args:
        source: what the user named.
        text: of a revision that was wanted before; None: of the last commit.

    Raises:
        ModelNotFoundError: as `resolve_model`.
    """
    if text is None:
        return resolve_model(source)
    return resolve_model(source, commit=text.commit, is_whole=lambda folder: digest_files(folder) == text.files != "")


def check_files(folder: Path, text: RevisionText, *, node: str) -> None:
    """Raise ModelFilesChangedError when a folder on this node has other files than the revision was wanted with."""
    if text.files.startswith(f"{_DIGEST_VERSION}-") and digest_files(folder) not in (text.files, ""):
        raise ModelFilesChangedError(
            f"{folder} on {node} has another config, tokenizer or weights than when the revision was wanted; "
            f"allowed: the same, or a rollout, which reads them anew"
        )


def is_alike(text: RevisionText, other: RevisionText) -> bool:
    """Return whether no difference between the files is known."""
    pairs = ((text.digest, other.digest), (text.files, other.files))
    return all(one == two for one, two in pairs if one and two)


def _samples(files: list[Path]) -> Iterator[bytes]:
    """Yield each file's size, its beginning, where safetensors say what is in it, and some of the rest."""
    sizes = [file.stat().st_size for file in files]
    step = max(_SAMPLE_BYTES, sum(sizes) // _NUM_SAMPLES)
    for file, size in zip(files, sizes, strict=True):
        yield f"{file.name} {size}\n".encode()
        with file.open("rb", buffering=0) as opened:
            for offset in range(0, size, step):
                yield os.pread(opened.fileno(), _SAMPLE_BYTES, offset)
