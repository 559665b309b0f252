"""Regions: the byte ranges of stored tensors that one input consumes, in consumption order.

Nothing here imports torch or reads weight payloads on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

from ninferbuild.sources.ranges import Concatenation, Range


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What the digest memo trusts about a file: see ``docs/caching.md``."""

    path: str  # real path
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    header: bytes  # digest of the parsed header; empty for a file without one


@runtime_checkable
class SourceFile(Protocol):
    """Bytes that regions refer to: a checkpoint file, or an array in memory."""

    @property
    def path(self) -> Path | None:
        """The path as it was given; None for bytes in memory."""

    def identity(self) -> FileIdentity | None:
        """The file as it is on disk now (one ``stat``); None for bytes in memory."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Thread-safe. Raises ``ValueError`` naming the file when it is too short."""


class Span(msgspec.Struct, frozen=True):  # made in a tenth of the time of a frozen dataclass, once a parameter and more
    """Consecutive bytes ``[begin, end)`` of one file."""

    file: SourceFile
    begin: int
    end: int


class Region(msgspec.Struct, frozen=True, eq=False):
    """Spans in consumption order; neighbours that join up are one span. Regions of equal spans are equal."""

    spans: tuple[Span, ...]
    _index: Concatenation | None = None  # the positions of several spans, made when they are first asked for

    def __eq__(self, other: object) -> bool:
        return self.spans == other.spans if isinstance(other, Region) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spans)

    def __repr__(self) -> str:
        return f"Region(spans={self.spans!r})"

    @staticmethod
    def of(spans: Iterable[Span]) -> Region:
        """The region of ``spans``, joined where one ends where the next begins."""
        joined: list[Span] = []
        for span in spans:
            if span.begin == span.end:
                continue
            last = joined[-1] if joined else None
            if last is not None and last.file is span.file and last.end == span.begin:
                joined[-1] = Span(span.file, last.begin, span.end)
            else:
                joined.append(span)
        return Region(tuple(joined))

    @property
    def files(self) -> tuple[SourceFile, ...]:
        """The files of the spans, each once, in order."""
        if len(self.spans) == 1:
            return (self.spans[0].file,)
        return tuple({id(span.file): span.file for span in self.spans}.values())

    @property
    def length(self) -> int:
        """Bytes of the region."""
        if len(self.spans) == 1:
            return self.spans[0].end - self.spans[0].begin
        return self._positions().length

    def _positions(self) -> Concatenation:
        index = self._index
        if index is None:
            index = Concatenation((span.begin, span.end) for span in self.spans)
            msgspec.structs.force_setattr(self, "_index", index)
        return index

    def select(self, ranges: Sequence[Range]) -> Region:
        """The sub-region of the byte ranges ``ranges`` of this region, in their order; repeats are allowed.

        Raises:
            ValueError: a range lies outside the region.
        """
        if len(self.spans) != 1:
            pieces = self._positions().pieces
            return Region.of(
                Span(self.spans[index].file, first, last)
                for begin, end in ranges
                for index, first, last in pieces(begin, end)
            )
        span = self.spans[0]  # by far the commonest: rows of one tensor
        base, length = span.begin, span.end - span.begin
        for begin, end in ranges:
            if not 0 <= begin <= end <= length:
                raise ValueError(f"bytes [{begin}, {end}) lie outside a region of {length} bytes")
        if len(ranges) == 1:
            begin, end = ranges[0]
            return Region((Span(span.file, base + begin, base + end),) if begin < end else ())
        return Region.of([Span(span.file, base + begin, base + end) for begin, end in ranges])


class RegionReader:
    """Sequential reading of one region. ``observe`` sees every byte, in order, before the caller does."""

    def __init__(self, region: Region, observe: Observer | None = None):
        self._spans = region.spans
        self._observe = observe
        self._index = 0
        self._offset = region.spans[0].begin if region.spans else 0

    def read_into(self, buffer: memoryview) -> None:
        """Fill ``buffer`` (bytes, contiguous) with the next ``len(buffer)`` bytes of the region."""
        filled = 0
        while filled < len(buffer):
            if self._index >= len(self._spans):
                raise ValueError("read past the end of a region")
            span = self._spans[self._index]
            count = min(len(buffer) - filled, span.end - self._offset)
            span.file.read_into(self._offset, buffer[filled : filled + count])
            filled += count
            self._offset += count
            if self._offset == span.end:
                self._index += 1
                if self._index < len(self._spans):
                    self._offset = self._spans[self._index].begin
        if self._observe is not None:
            self._observe(buffer)


class Observer(Protocol):
    """Called with each buffer that was read."""

    def __call__(self, data: memoryview, /) -> None: ...
