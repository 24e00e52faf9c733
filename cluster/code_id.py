"""What tells the code that is here from any other, and where it lies."""

from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

_OWN_PACKAGES = ("cluster", "parallel", "router", "weft", "workers")
_FOREIGN_PACKAGES = ("grpcio", "msgspec", "numpy", "protobuf", "ray", "tokenizers", "torch", "triton")
"""Packages that a process should have in the installed version. Nodes may differ in others: a head has a cloud's."""


@cache
def code_id() -> str:
    """Return a text that differs for other code: other contents or places of our files, or versions of imports."""
    digest = sha256("\n".join(code_roots()).encode())
    for package in _OWN_PACKAGES:
        for folder in _folders(package):
            for file in sorted(folder.rglob("*.py")):
                digest.update(f"{package}/{file.relative_to(folder)}\n".encode() + file.read_bytes())
    for place in sorted({folder.parent for package in ("ray", "torch") for folder in _folders(package)}):
        installed = (info.name for package in _FOREIGN_PACKAGES for info in place.glob(f"{package}-*.dist-info"))
        digest.update("\n".join(sorted(installed)).encode())
    return digest.hexdigest()[:16]


def has_code_changed(since_s: float) -> bool:
    """Return whether a file of ours was written after a time, in seconds since 1970; one that is gone is not missed."""
    files = (file for package in _OWN_PACKAGES for folder in _folders(package) for file in folder.rglob("*.py"))
    return any(file.stat().st_ctime > since_s for file in files)


def code_roots() -> list[str]:
    """Return where our packages lie, unless Python finds them by itself; a checkout it does not."""
    roots = [folder.parent for package in _OWN_PACKAGES for folder in _folders(package)]
    return [str(root) for root in dict.fromkeys(roots) if root.name not in ("site-packages", "dist-packages")]


def _folders(package: str) -> list[Path]:
    spec = find_spec(package)
    return [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
