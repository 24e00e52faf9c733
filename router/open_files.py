"""How many files a process may have open, connections among them. The router and the load generator share it."""

import resource
from contextlib import suppress


def allow_connections() -> None:
    """Raise the limit of open files to what the system allows: most begin with 1,024, and fail beyond."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # of macOS, where "without limit" is too many
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
