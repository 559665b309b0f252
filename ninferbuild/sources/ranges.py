"""Half-open integer ranges in order: joining neighbours and cutting pieces out of a concatenation.

A selection of 131,072 single rows is an ordinary input here, so nothing scans linearly for each piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

Range = tuple[int, int]
"""``(begin, end)``, half-open."""


def coalesce(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """``ranges`` with empty ones dropped and each joined to its predecessor where that ends at its begin."""
    joined: list[Range] = []
    first = last = 0
    for begin, end in ranges:
        if begin == end:
            continue
        if begin == last and first != last:
            last = end
            continue
        if first != last:
            joined.append((first, last))
        first, last = begin, end
    if first != last:
        joined.append((first, last))
    return tuple(joined)


class Concatenation:
    """The positions that ``ranges`` name, one after another, addressable by their index in that sequence."""

    __slots__ = ("_starts", "length", "ranges")

    def __init__(self, ranges: Iterable[Range]):
        self.ranges = tuple(ranges)
        ends = list(accumulate(end - begin for begin, end in self.ranges))
        self.length = ends[-1] if ends else 0
        self._starts = [0, *ends[:-1]] if ends else []

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """What lies behind indices ``[begin, end)``, in order: (number of the range, begin, end) of each piece.

        Raises:
            ValueError: the indices lie outside the concatenation.
        """
        if not 0 <= begin <= end <= self.length:
            raise ValueError(f"range [{begin}, {end}) lies outside {self.length} positions")
        index = bisect_right(self._starts, begin) - 1
        while begin < end:
            first, last = self.ranges[index]
            first += begin - self._starts[index]
            count = min(end - begin, last - first)
            if count:
                yield index, first, first + count
            begin += count
            index += 1
