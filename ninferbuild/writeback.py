"""Writing to the disk behind the writers, so that little is left to do when the files are synced.

Written ranges go to the disk as soon as there are enough of them for one large request. The kernel alone would let
gigabytes pile up first, and then stall whoever writes next.
"""

from __future__ import annotations

from collections import deque
import threading

from ninferbuild import platform_io
from ninferbuild.publish import StagedFile

STEP = 8 << 20
"""Bytes that are sent to the disk together."""

WINDOW = 256 << 20
"""Bytes that may be on their way to the disk; whoever writes more waits."""

CACHED_SHARE = 0.5
"""Files of at most this part of the physical memory stay in the page cache, where whoever loads them finds them."""

Range = tuple[StagedFile, int, int]
"""A file, and the position and the number of bytes in it."""


def stays_cached(length: int) -> bool:
    """Whether files of ``length`` bytes altogether may stay in the page cache without driving out all else."""
    memory = platform_io.memory_bytes()
    return memory is None or length <= memory * CACHED_SHARE


class WriteBehind:
    """Write-back of the files of one output. Safe from several threads.

    Args:
        keep: leave what was written in the page cache.
        window: most bytes on their way to the disk.
    """

    def __init__(self, *, keep: bool, window: int = WINDOW):
        self._keep = keep
        self._window = window
        self._lock = threading.Lock()
        self._fresh: list[Range] = []
        self._fresh_bytes = 0
        self._started: deque[list[Range]] = deque()
        self._started_bytes = 0

    def wrote(self, file: StagedFile, position: int, length: int) -> None:
        """Take note that these bytes of ``file`` were written. May wait for the disk.

        Raises:
            OSError: bytes could not be stored, these or others.
        """
        with self._lock:
            self._fresh.append((file, position, length))
            self._fresh_bytes += length
            if self._fresh_bytes < STEP:
                return
            batch, self._fresh = joined(self._fresh), []
            self._started.append(batch)
            self._started_bytes += self._fresh_bytes
            self._fresh_bytes = 0
            overdue = self._overdue()
        for started, start, size in batch:
            started.start_writeback(start, size)
        for ranges in overdue:
            self._finish(ranges)

    def _overdue(self) -> list[list[Range]]:
        """Batches that make the window too full, oldest first; they leave it. The caller holds the lock."""
        found = []
        while self._started_bytes > self._window and len(self._started) > 1:
            found.append(self._started.popleft())
            self._started_bytes -= sum(length for _, _, length in found[-1])
        return found

    def read(self, file: StagedFile, position: int, length: int) -> None:
        """Take note that these bytes of ``file`` were read and will not be read again soon."""
        if not self._keep:
            platform_io.advise_unneeded(file.descriptor, position, length)

    def finish(self) -> None:
        """Let go of pages that are still held. The bytes need not have reached the disk afterwards: sync the files.

        Raises:
            OSError: bytes could not be stored.
        """
        with self._lock:
            left = [*self._started, self._fresh]
            self._started, self._fresh = deque(), []
            self._started_bytes = self._fresh_bytes = 0
        if not self._keep:
            for ranges in left:
                self._finish(ranges)

    def _finish(self, ranges: list[Range]) -> None:
        for file, position, length in ranges:
            file.finish_writeback(position, length)
            self.read(file, position, length)


def joined(ranges: list[Range]) -> list[Range]:
    """The same bytes in as few ranges as possible, in file order."""
    found: list[Range] = []
    for file, position, length in sorted(ranges, key=lambda item: (id(item[0]), item[1])):
        if found and found[-1][0] is file and found[-1][1] + found[-1][2] == position:
            found[-1] = (file, found[-1][1], found[-1][2] + length)
        else:
            found.append((file, position, length))
    return found
