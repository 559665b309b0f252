"""Memory for the blocks of payloads, used again as soon as nobody looks at a block any more.

The allocator keeps a reserve for each thread, and blocks are made by one thread and let go of by another: the reserves
together would grow to several times of what is in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np

from ninferbuild.digest import BLOCK_BYTES
from ninferbuild.private_memory import private_memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALLEST = 1 << 20
"""Smaller blocks are left to the allocator, bytes."""


class BlockMemory:
    """Arrays of at most a block. Safe from several threads."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """Unset memory: uint8 ``[size]``. It is taken back when the array and all views of it are gone."""
        if size < SMALLEST:
            return np.empty(size, np.uint8)
        try:
            whole = self._free.pop()
        except IndexError:
            whole = np.frombuffer(private_memory(BLOCK_BYTES), np.uint8)
        block = whole[:size]
        finalize(block, self._free.append, whole).atexit = False
        return block
