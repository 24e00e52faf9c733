"""Write what follows from the chart's values: the table in its README, and in its schema settings of the program.

    PYTHONPATH=.:proto python deploy/helm/generate.py [OUT]      OUT: another folder than the chart's, for the test

A comment that begins with `# --` describes the value below it; other comments are for readers of values.yaml. What a
model, a router and an API key may set comes from the program's own types, so that the chart takes exactly what the
program takes.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cluster.config import ModelSection
from router.config_faults import LARGEST
from router.keys import KeyEntry
from router.settings import RouterSettings, Section

CHART = Path(__file__).parent / "weft"
BEGIN, END = "<!-- values: written by deploy/helm/generate.py -->", "<!-- end of values -->"


def main(out: Path) -> None:
    """Write README.md and values.schema.json into a folder."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "README.md").write_text(readme((CHART / "README.md").read_text(), (CHART / "values.yaml").read_text()))
    (out / "values.schema.json").write_text(schema(json.loads((CHART / "values.schema.json").read_text())))


def readme(text: str, values: str) -> str:
    """Return the README with a fresh table of values."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    rows = ["| value | default | |", "| --- | --- | --- |"]
    rows += [f"| `{path}` | `{default}` | {description} |" for path, default, description in described(values)]
    return "\n".join([before + BEGIN, *rows, END + after])


def described(values: str) -> Iterator[tuple[str, str, str]]:
    """Yield path, default and description of every value that is not a section of further values."""
    lines = values.splitlines()

    def walk(node: yaml.MappingNode, parents: tuple[str, ...]) -> Iterator[tuple[str, str, str]]:
        for key, value in node.value:
            path = (*parents, key.value)
            description = _comment_above(lines, key.start_mark.line)
            is_section = isinstance(value, yaml.MappingNode) and not value.flow_style and not description
            if is_section:
                yield from walk(value, path)
            else:
                default = yaml.safe_load(yaml.serialize(value))
                yield ".".join(path), json.dumps(default), description

    root = yaml.compose(values)
    assert isinstance(root, yaml.MappingNode)
    yield from walk(root, ())


def schema(committed: dict[str, Any]) -> str:
    """Return the schema with the settings of a model, a router and an API key as the program has them today."""
    committed["properties"]["models"]["items"] = _of(ModelSection)
    router = committed["properties"]["router"]["properties"]
    router["settings"] = _of(RouterSettings)
    del router["settings"]["properties"]["link"]["properties"]["tls"]  # routers have it from innerTls
    (keys,), entry = msgspec.json.schema_components([KeyEntry])
    router["apiKeys"]["properties"]["keys"]["items"] = _inlined(keys, entry)
    return json.dumps(committed, indent=2) + "\n"


def _of(section: type[Section]) -> Any:
    found = section.model_json_schema()
    return _inlined(found, found.pop("$defs"))


def _comment_above(lines: list[str], line: int) -> str:
    """Return the text of the comment that ends above a line, if it is a description."""
    first = line
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
    texts = [text.strip().removeprefix("#").strip() for text in lines[first:line]]
    return " ".join(texts).removeprefix("-- ") if texts and texts[0].startswith("-- ") else ""


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Follow references, leave out what says nothing about validity, and give every number its limit."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    kept = {key: value for key, value in node.items() if key not in ("title", "description", "default")}
    if kept.get("type") in ("integer", "number"):
        kept.setdefault("maximum", LARGEST)
    if "properties" in kept:  # here keys are names of settings, whatever they are called
        kept["properties"] = {name: _inlined(item, definitions) for name, item in node["properties"].items()}
    return {key: value if key == "properties" else _inlined(value, definitions) for key, value in kept.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHART)
