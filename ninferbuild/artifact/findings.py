"""What is wrong with an artifact: findings with their place, a bounded number for each object or file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_LIMIT = 10
"""Findings that are kept for one object or file; the others are counted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        problem: what is wrong.
        file: name of the file of the set, for findings about framing.
        object: object id.
        plane: plane of the object's layout.
        row, column: element of the matrix ``[N, K]``.
        offset: first byte concerned, relative to the object if there is one, else to the file, else to the payload.
        differs: the artifact may be sound by itself, but is not what it was compared with.
    """

    problem: str
    file: str | None = None
    object: str | None = None
    plane: str | None = None
    row: int | None = None
    column: int | None = None
    offset: int | None = None
    differs: bool = False

    @property
    def subject(self) -> tuple[str | None, str | None]:
        """What the finding is about; the number of findings is bounded for each subject."""
        return self.file, self.object

    def __str__(self) -> str:
        place = [] if self.file is None else [self.file]
        if self.object is not None:
            place.append(f"object {self.object!r}")
        if self.plane is not None:
            place.append(self.plane)
        place += [
            f"{name} {value}"
            for name, value in (("row", self.row), ("column", self.column), ("byte", self.offset))
            if value is not None
        ]
        return f"{', '.join(place)}: {self.problem}" if place else self.problem

    def to_json(self) -> dict[str, Any]:
        """The finding as a JSON object; places that it does not have are null."""
        return asdict(self)


class Findings:
    """Collects findings, ``limit`` for each subject, and counts them all.

    Attributes:
        invalid: how many findings say that the artifact breaks a rule.
        different: how many say that it is not what it was compared with.
    """

    def __init__(self, limit: int = DEFAULT_LIMIT):
        self.limit = limit
        self.invalid = 0
        self.different = 0
        self._kept: list[Finding] = []
        self._counts: Counter[tuple[str | None, str | None]] = Counter()

    def add(self, finding: Finding) -> None:
        """Add one finding."""
        self._count(finding, 1)
        if self._counts[finding.subject] <= self.limit:
            self._kept.append(finding)

    def add_each(self, positions: Sequence[int] | NDArray[np.int64], describe: Callable[[int], Finding]) -> None:
        """Add ``describe(position)`` for each position, all of one subject; only those that are kept are described."""
        if not len(positions):
            return
        first = describe(int(positions[0]))
        room = max(0, self.limit - self._counts[first.subject])
        self._count(first, len(positions))
        if room:
            self._kept.append(first)
            self._kept += [describe(int(position)) for position in positions[1:room]]

    def _count(self, finding: Finding, count: int) -> None:
        self._counts[finding.subject] += count
        if finding.differs:
            self.different += count
        else:
            self.invalid += count

    def kept(self) -> tuple[Finding, ...]:
        """The findings that were kept: subjects in the order in which they appeared, each by offset."""
        order = {subject: index for index, subject in enumerate(self._counts)}
        return tuple(sorted(self._kept, key=lambda item: (order[item.subject], item.offset or 0)))

    def more(self) -> dict[str, int]:
        """Object id or file name → number of findings that were not kept."""
        return {
            file or item or "artifact": count - self.limit
            for (file, item), count in self._counts.items()
            if count > self.limit
        }
