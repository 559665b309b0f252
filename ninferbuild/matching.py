"""Matching of parameter names: exact names by dictionary, wildcards by sorted literal prefix and suffix."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
import fnmatch
import re

_SPECIAL = re.compile(r"[*?\[\]]")


class NameIndex:
    """An immutable, ordered set of names that shell patterns are matched against.

    A pattern such as ``text/layers/*/mlp/down`` is tried only on the names that share its literal beginning or its
    literal end, whichever are fewer; models have tens of thousands of names and recipes tens of patterns.
    """

    def __init__(self, names: Iterable[str]):
        self._position = {name: index for index, name in enumerate(names)}
        self._forward: list[str] = []
        self._backward: list[str] = []

    def __len__(self) -> int:
        return len(self._position)

    def find(self, selector: str) -> tuple[str, ...]:
        """The names that ``selector`` selects, in the order of the index; empty when there are none.

        A selector that equals a name selects that name alone, even if it holds wildcard characters. Otherwise it is a
        case-sensitive pattern as in :func:`fnmatch.fnmatchcase`: ``*`` crosses ``/``.
        """
        if selector in self._position:
            return (selector,)
        special = list(_SPECIAL.finditer(selector))
        if not special:
            return ()
        prefix, suffix = selector[: special[0].start()], selector[special[-1].end() :]
        matches = re.compile(fnmatch.translate(selector)).match
        candidates = self._candidates(prefix, suffix)
        found = [name for name in candidates if matches(name)]
        if candidates is not self._position:
            found.sort(key=self._position.__getitem__)
        return tuple(found)

    def _candidates(self, prefix: str, suffix: str) -> Collection[str]:
        """Names among which are all those with this beginning and end: all names, or markedly fewer in any order."""
        if not prefix and not suffix:
            return self._position
        if not self._forward:
            self._forward = sorted(self._position)
            self._backward = sorted([name[::-1] for name in self._position])
        begin, end = _starting_with(self._forward, prefix)
        first, last = _starting_with(self._backward, suffix[::-1])
        if min(end - begin, last - first) > len(self) // 2:
            return self._position
        if end - begin <= last - first:
            return self._forward[begin:end]
        return [name[::-1] for name in self._backward[first:last]]


def _starting_with(ordered: Sequence[str], prefix: str) -> tuple[int, int]:
    """Bounds of the strings of a sorted sequence that start with ``prefix``."""
    begin = bisect_left(ordered, prefix)
    return begin, bisect_right(ordered, prefix, lo=begin, key=lambda text: text[: len(prefix)])
