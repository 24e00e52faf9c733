"""Hosts for the tests that bring the service up as an operator would."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from helpers.namespaces import Bridge, Host, Hosts, require_namespaces


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    """Switched off and gone at the end, with everything that runs on them."""
    if "rayup" not in request.config.option.markexpr:
        pytest.skip("opt-in: run with -m rayup")
    require_namespaces()
    with ExitStack() as stack:
        bridge = stack.enter_context(closing(Bridge(tmp_path)))
        *machines, operator = [stack.enter_context(closing(Host(bridge, number))) for number in (1, 2, 3, 9)]
        yield Hosts(machines=machines, operator=operator, private_key=bridge.private_key)
