"""Taking the pages of new files on a RAM disk ahead of those who write into them.

A write there first finds a page for every 4 KiB, under the file's lock, which is most of its time. Taking pages alone
is several times as fast, and goes on while sources are still being opened and kernels loaded; writes into pages that
are there then run at nearly the rate of the memory. On disks this gains nothing: their writes wait for other things.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import threading
from typing import TYPE_CHECKING

from ninferbuild.cache.filesystem import kind_of

if TYPE_CHECKING:
    from ninferbuild.publish import StagedFile

STEP = 64 << 20
"""Bytes that are reserved at a time: writes wait for the lock no longer than that takes."""


class Reservation:
    """Reserves files in a thread of its own until it is done or told to end; nothing where that gains nothing.

    A failure is left to those who write, who meet it themselves.

    Args:
        files: open files with their lengths, all in one directory.
    """

    def __init__(self, files: Sequence[tuple[StagedFile, int]]):
        self._files = list(files)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if sum(length for _, length in self._files) < STEP or not hasattr(os, "posix_fallocate"):
            return
        if kind_of(self._files[0][0].path.parent) in ("tmpfs", "ramfs"):
            self._thread = threading.Thread(target=self._run, name="reserve", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        for file, length in self._files:
            for begin in range(0, length, STEP):
                if self._ended.is_set():
                    return
                try:
                    os.posix_fallocate(file.descriptor, begin, min(STEP, length - begin))
                except OSError:
                    return

    def stop(self) -> None:
        """Reserve no more, without waiting."""
        self._ended.set()

    def end(self) -> None:
        """Stop, and wait until no file is used any more."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
