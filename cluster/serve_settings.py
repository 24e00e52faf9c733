"""From the command line of `weft serve` to one mapping of settings, the same that a YAML file holds."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config import load_cluster_file
from cluster.errors import ClusterConfigError
from cluster.serve_flags import flag_of


def merge_settings(target: str | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model or YAML file, and the flags that were given, say together.

    Args:
        target: the positional argument: a model, or the name of a YAML file.
        flags: dotted path -> value. With a file, flags may only change what is not in a model's section.

    Raises:
        ClusterConfigError: the file cannot be read, or two places say different things.
    """
    if target is not None and Path(target).suffix in (".yaml", ".yml"):
        settings = load_cluster_file(Path(target))
        for path in flags:
            if path.startswith("models"):
                inside = path.replace("models[0]", "models[...]")
                raise ClusterConfigError(f"{flag_of(path)} cannot be given with {target}; set {inside} in it")
    else:
        settings = {}
        if target is not None:
            if "models[0].path" in flags and flags["models[0].path"] != target:
                raise ClusterConfigError(f"--model is {flags['models[0].path']!r}, but {target!r} was named too")
            flags = {**flags, "models[0].path": target}
    for path, value in flags.items():
        _set(settings, path, value)
    return settings


def _set(settings: dict[str, Any], path: str, value: object) -> None:
    section: Any = settings
    *parents, last = re.split(r"\.|(?=\[)", path)
    for parent in parents:
        if parent == "[0]":
            if not section:
                section.append({})
            section = section[0]
        else:
            section = section.setdefault(parent, [] if parent == "models" else {})
            if not isinstance(section, dict | list):
                return  # the file says something else than a section here, which build_spec refuses
    section[last] = value
