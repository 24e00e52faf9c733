"""One pool of gloo workers for all distributed tests of a session, and torch on one thread."""

from collections.abc import Iterator

import pytest
import torch
from helpers.gloo_pool import GlooPool


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[GlooPool]:
    """Up to four ranks; see helpers/gloo_pool.py."""
    with GlooPool() as pool:
        yield pool


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For engines of this process: sums in the order of ranks that have one core."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
