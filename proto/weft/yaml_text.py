"""YAML as people and Helm write it: with the floats of YAML 1.2, and no key twice in a mapping."""

import re
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.1 with the floats of YAML 1.2: 1e-05, as Helm writes it, would be a string."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Refuse a key that comes again, of which only the last one would be heard."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else key
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} comes twice", problem_mark=key.start_mark)
            seen.add(name)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str | bytes) -> Any:
    """Return what a YAML text says. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:  # a day that no month has, thousands of digits or of brackets
        raise yaml.YAMLError(str(error)) from error
