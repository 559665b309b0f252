"""Writing cached payloads to their places in the output, by several threads.

The threads take batches from one queue in file order, so that together they write forwards. Every block is checked
before it is written: the cache does so for what it hands out, and what was cloned from an earlier artifact is read
back here and replaced where it differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
import threading
from typing import TYPE_CHECKING

from ninferbuild import platform_io
from ninferbuild.artifact.framing import SegmentMap, Span
from ninferbuild.digest import block_digest

if TYPE_CHECKING:
    from ninferbuild.cache import ActionRecord, Cache
    from ninferbuild.cache.reading import View
    from ninferbuild.publish import StagedFile
    from ninferbuild.writeback import WriteBehind

WRITERS = 2
"""Threads that write one output: while one copies, the other reads and checks. Writers of one file exclude each other
in the kernel, so more of them gain nothing, and write less in order."""

BATCH = 16 << 20
"""Bytes that a thread takes on at a time."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A cached payload and its place.

    Attributes:
        offset: of its first byte in the logical payload.
        cloned: its bytes lie there already, taken from an earlier artifact on trust.
        padding: bytes from its end to the next object, if they may be anything but the zeros that they have to be.
    """

    record: ActionRecord
    offset: int
    cloned: bool = False
    padding: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """Blocks ``[begin, end)`` of a payload; ``offset`` is where the first of them lies."""

    payload: Placed
    begin: int
    end: int
    offset: int

    @property
    def blocks(self) -> Sequence[tuple[bytes, int]]:
        """Digest and bytes of each."""
        return self.payload.record.blocks[self.begin : self.end]


class PayloadWriter:
    """Writes into the temporaries of one output.

    Args:
        segments: where logical bytes lie in ``staged``.
        behind: told what was written.
    """

    def __init__(self, segments: SegmentMap, staged: Sequence[StagedFile], behind: WriteBehind):
        self._segments = segments
        self._staged = staged
        self._behind = behind
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.refused = 0
        """Cloned blocks that were not what they should have been."""

    def put(self, offset: int, data: memoryview | bytes) -> None:
        """Write ``data`` at a logical offset. Safe from several threads."""
        view = memoryview(data)
        for file, span in self._spans(offset, len(view)):
            file.write(span.position, view[: span.length])
            self._behind.wrote(file, span.position, span.length)
            view = view[span.length :]

    def _spans(self, offset: int, length: int) -> Iterator[tuple[StagedFile, Span]]:
        for span in self._segments.spans(offset, offset + length):
            yield self._staged[span.file], span

    def write(self, payloads: Iterable[Placed], cache: Cache, writers: int | None = None) -> None:
        """Write payloads from the cache, and check the cloned ones.

        Args:
            payloads: in file order.
            writers: most threads; :data:`WRITERS` unless said otherwise.

        Raises:
            PayloadLostError: a cached payload is damaged.
            OSError: a file cannot be written or read.
        """
        batches = deque(_batches(payloads))
        writers = min(WRITERS if writers is None else writers, len(batches))
        if writers <= 1:
            self._work(batches, cache)
            return
        with ThreadPoolExecutor(writers, thread_name_prefix="link") as pool:
            try:
                for done in as_completed([pool.submit(self._work, batches, cache) for _ in range(writers)]):
                    done.result()
            except BaseException:
                self._stop.set()
                raise

    def _work(self, batches: deque[list[_Part]], cache: Cache) -> None:
        buffer = memoryview(bytearray())
        with cache.reading() as view:
            while not self._stop.is_set():
                try:
                    batch = batches.popleft()
                except IndexError:
                    return
                for part in batch:
                    if not part.payload.cloned:
                        self._copy(part, view)
                        continue
                    needed = max((length for _, length in part.blocks), default=0)
                    if len(buffer) < needed:
                        buffer = memoryview(bytearray(needed))
                    self._check(part, view, buffer)

    def _copy(self, part: _Part, view: View) -> None:
        offset = part.offset
        for block in view.blocks(part.payload.record, part.begin, part.end):
            self.put(offset, block)
            offset += len(block)
        self._pad(part, offset)

    def _check(self, part: _Part, view: View, buffer: memoryview) -> None:
        """Read cloned blocks, and write those that differ from the cache instead."""
        offset = part.offset
        for file, span in self._spans(offset, sum(length for _, length in part.blocks)):
            platform_io.advise_needed(file.descriptor, span.position, span.length)
        for index, (digest, length) in enumerate(part.blocks, part.begin):
            data = self._read(offset, buffer[:length])
            if data is None or block_digest(data) != digest:
                with self._lock:
                    self.refused += 1
                for block in view.blocks(part.payload.record, index, index + 1):
                    self.put(offset, block)
            offset += length
        self._pad(part, offset)

    def _pad(self, part: _Part, offset: int) -> None:
        """Make the padding behind a payload zero, if this is its last part and something may have been cloned there."""
        padding = part.payload.padding
        if padding and part.end == len(part.payload.record.blocks):
            data = self._read(offset, memoryview(bytearray(padding)))
            if data is None or any(data):
                self.put(offset, bytes(padding))

    def _read(self, offset: int, buffer: memoryview) -> memoryview | None:
        """Fill ``buffer`` from a logical offset; None if the file does not reach that far or the disk refuses."""
        filled = 0
        for file, span in self._spans(offset, len(buffer)):
            try:
                count = platform_io.read_into(file.descriptor, span.position, buffer[filled : filled + span.length])
            except OSError:
                return None
            if count < span.length:
                return None
            self._behind.read(file, span.position, span.length)
            filled += span.length
        return buffer


def _batches(payloads: Iterable[Placed]) -> Iterator[list[_Part]]:
    """Neighbours together until they fill a batch; payloads that are larger than one are divided."""
    batch: list[_Part] = []
    size = 0
    for payload in payloads:
        begin, offset = 0, payload.offset
        end = offset
        for index, (_, length) in enumerate(payload.record.blocks):
            if size and size + length > BATCH:
                if index > begin:
                    batch.append(_Part(payload, begin, index, offset))
                    begin, offset = index, end
                yield batch
                batch, size = [], 0
            size += length
            end += length
        batch.append(_Part(payload, begin, len(payload.record.blocks), offset))
    if batch:
        yield batch
