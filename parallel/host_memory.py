"""Memory of the process that its allocator keeps although it is free."""

import ctypes


def release_free_memory() -> None:
    """Give it back to the system, where the C library can: glibc keeps what lies between blocks that are in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
