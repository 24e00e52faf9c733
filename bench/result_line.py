"""The line of JSON that ends a benchmark: what was measured, on which machine and by which commit."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.machine import describe_machine, describe_torch


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Let a script take `--json FILE`; one that cannot be written is refused before hours of measuring."""
    parser.add_argument("--json", type=_line_file, help="a file that the line of JSON is added to")


def end_with_line(
    benchmark: str, fields: Mapping[str, Any], *, has_torch: bool = False, file: Path | None = None
) -> None:
    """Add the line to the file, and print it. Raises BenchError when the file cannot be written.

    `has_torch`: what torch computes with in this process belongs to it.
    """
    line = make_line(benchmark, fields, has_torch=has_torch)
    if file is not None:
        append_line(line, file)
    print(line)


def make_line(benchmark: str, fields: Mapping[str, Any], *, has_torch: bool = False) -> str:
    """Return the line; arguments as for `end_with_line`."""
    torch = describe_torch() if has_torch else {}
    return json.dumps({"benchmark": benchmark, **fields, **describe_machine(), **torch}, allow_nan=False)


def check_line_file(file: Path) -> None:
    """Check that a line can be added to a file. Raises BenchError."""
    _append("", file)


def append_line(line: str, file: Path) -> None:
    """Add a line to a file. Raises BenchError when it cannot be written."""
    _append(line + "\n", file)


def _append(text: str, file: Path) -> None:
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise BenchError(f"{file} cannot be written: {error.strerror}") from error


def _line_file(text: str) -> Path:
    check_line_file(file := Path(text))
    return file
