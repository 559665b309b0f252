"""Which bytes of an object have been written."""

from __future__ import annotations

from bisect import bisect_right


class Coverage:
    """Disjoint half-open intervals, sorted; adjacent ones are merged."""

    __slots__ = ("_begins", "_ends")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """Add the non-empty interval ``[begin, end)``; False, with nothing changed, if it meets covered bytes."""
        index = bisect_right(self._begins, begin)
        if (index and self._ends[index - 1] > begin) or (index < len(self._begins) and self._begins[index] < end):
            return False
        joins_left = index > 0 and self._ends[index - 1] == begin
        joins_right = index < len(self._begins) and self._begins[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            del self._begins[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._begins[index] = begin
        else:
            self._begins.insert(index, begin)
            self._ends.insert(index, end)
        return True

    def first_gap(self, length: int) -> tuple[int, int] | None:
        """The first interval of ``[0, length)`` that is not covered."""
        if not self._begins:
            return (0, length)
        if self._begins[0] > 0:
            return (0, self._begins[0])
        if self._ends[0] < length:
            return (self._ends[0], self._begins[1] if len(self._begins) > 1 else length)
        return None
