"""Print the run-time dependencies of pyproject.toml and those of tracing, one a line, for a layer below the code.

python deploy/requirements.py [--router]      --router: without what a router and the command line do not import
"""

import re
import sys
import tomllib
from pathlib import Path

OF_REPLICAS = {"torch", "ray", "numpy", "safetensors", "pyzmq"}


def main(is_router: bool) -> None:
    """Print them."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["tracing"]]:
        name = re.split(r"[^A-Za-z0-9_-]", requirement)[0]
        if not (is_router and name in OF_REPLICAS):
            print(requirement)


if __name__ == "__main__":
    main("--router" in sys.argv[1:])
