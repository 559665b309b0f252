"""Pages that belong to one buffer alone and go back to the system with it."""

from __future__ import annotations

import mmap
import sys


def private_memory(size: int) -> mmap.mmap:
    """Zeroed memory of ``size`` bytes and more, up to whole pages, for as long as the object or a view of it lives."""
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if sys.platform == "win32":
        return mmap.mmap(-1, whole)
    return mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
