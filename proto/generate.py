"""Generates the Python stubs of the protos beside their sources: `python proto/generate.py [OUTPUT_FOLDER]`."""

import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

SOURCE_ROOT = Path(__file__).parent

STUBS = {"weft/v1": ("python", "grpc_python", "mypy", "mypy_grpc"), "weft/tokenizer": ("python", "mypy")}
"""The kinds of stubs by folder: only the first one has services."""


def generate(output: Path) -> None:
    """Write the stubs and their types below `output`. Raises RuntimeError when protoc refuses a source."""
    well_known = resources.files("grpc_tools") / "_proto"
    for folder, kinds in STUBS.items():
        sources = sorted(str(path) for path in SOURCE_ROOT.glob(f"{folder}/*.proto"))
        arguments = [f"-I{SOURCE_ROOT}", f"-I{well_known}", *(f"--{kind}_out={output}" for kind in kinds)]
        if protoc.main(["protoc", *arguments, *sources]) != 0:
            raise RuntimeError(f"protoc failed on {sources}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else SOURCE_ROOT)
