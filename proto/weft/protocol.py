"""The versions of replica.proto: which ones this program speaks, and which one a stream has.

A field more is no new version: whoever does not know it leaves it out of account. A new version says that something
means another thing than before, the hash of a block included. A router says the newest one that it speaks, and
the replica answers with the newest one that both do, so that either may be the older.
"""

VERSION = 1
"""The newest version."""
OLDEST = 1
"""The oldest that is still spoken: at least the newest one of the minor version of the program before this one."""


def agree(version: int) -> int | None:
    """Return the version of a stream whose router speaks up to `version`; None when that is too old."""
    return min(version, VERSION) if version >= OLDEST else None
