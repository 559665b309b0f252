"""Filling the output while its payloads are made.

Where every object will lie is known before anything is encoded. Each block therefore goes to the output's temporary
files as soon as it exists, beside going to the cache; linking afterwards writes only what came from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
import threading
from typing import TYPE_CHECKING

from ninferbuild.artifact.framing import SegmentMap
from ninferbuild.publish import StagedFile
from ninferbuild.reservation import Reservation
from ninferbuild.writeback import WriteBehind, stays_cached

if TYPE_CHECKING:
    from ninferbuild.link import Layout


class Staging:
    """Temporaries of one output, and which of its objects they hold already.

    Args:
        layout: the expected layout. Its text may still change; what matters is where the payload lies.

    Raises:
        OSError: the temporaries cannot be made.
    """

    def __init__(self, layout: Layout, entry: Path):
        entry.parent.mkdir(parents=True, exist_ok=True)
        self._geometry = _geometry(layout, entry)
        self._segments = SegmentMap(layout.directory.files, layout.payload_offset)
        self._offsets = {item.id: item.offset for item in layout.directory.objects}
        self._files: list[StagedFile] = []
        self._reservation = Reservation([])
        self.behind = WriteBehind(keep=stays_cached(sum(layout.lengths())))
        """Sends what is written to the disk."""
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="stage")
        self.complete: set[str] = set()
        """Ids of the objects whose bytes are all in place."""
        try:
            for path, length in zip(layout.paths(entry), layout.lengths(), strict=True):
                self._files.append(StagedFile(path, length))
            self._reservation = Reservation(list(zip(self._files, layout.lengths(), strict=True)))
        except BaseException:
            self.discard()
            raise

    def write(self, objects: Sequence[str], offset: int, data: memoryview) -> Future[None]:
        """Begin to put bytes at ``offset`` of each object; safe from several threads. ``data`` must not change.

        One thread writes: several writing into one file only wait for each other.
        """
        return self._writer.submit(self._write, objects, offset, data)

    def _write(self, objects: Sequence[str], offset: int, data: memoryview) -> None:
        self._reservation.stop()  # from here on it would only contend
        for identifier in objects:
            view = data
            begin = self._offsets[identifier] + offset
            for span in self._segments.spans(begin, begin + len(data)):
                self._files[span.file].write(span.position, view[: span.length])
                self.behind.wrote(self._files[span.file], span.position, span.length)
                view = view[span.length :]

    def mark(self, objects: Sequence[str]) -> None:
        """Say that all bytes of these objects were written."""
        with self._lock:
            self.complete.update(objects)

    def take(self, layout: Layout, entry: Path) -> tuple[list[StagedFile], frozenset[str]] | None:
        """The temporaries, entry first, and the objects in them, for a final layout; None if that lies elsewhere.

        The caller owns the files afterwards.
        """
        if not self._files or _geometry(layout, entry) != self._geometry:
            return None
        self._reservation.end()
        files, self._files = self._files, []
        return files, frozenset(self.complete)

    def discard(self) -> None:
        """End the thread and remove the temporaries, unless they were taken."""
        self._writer.shutdown()
        self._reservation.end()
        for file in self._files:
            file.discard()
        self._files = []


def _geometry(layout: Layout, entry: Path) -> tuple[object, ...]:
    """Everything that decides where a byte of an object lies."""
    objects = tuple((item.id, item.offset, item.bytes) for item in layout.directory.objects)
    return layout.payload_offset, tuple(layout.paths(entry)), tuple(layout.lengths()), objects
