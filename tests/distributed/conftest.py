"""One pool of gloo workers for all distributed tests of a session."""

from collections.abc import Iterator

import pytest
from helpers.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Up to four ranks; see helpers/gloo_pool.py."""
    with GlooPool() as pool:
        yield pool
