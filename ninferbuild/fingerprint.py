"""Fingerprints of a user's functions: everything that the code and what it reaches can make of its arguments.

A fingerprint is a list of facts, one a line: the code of every function that can be reached through user modules, the
values of constants, defaults, closures and attributes, and by name and version what belongs to somebody else. Editing a
comment, an unrelated function or the order of definitions changes no line; editing anything that is reached changes
exactly the lines that say so.

What cannot be seen through is refused with a :class:`Reason`. In doubt it is refused: a function that is run once too
often costs time, a stale result is wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ninferbuild.findings import MUTATES, shown
from ninferbuild.reach import Reach
from ninferbuild.reason import Reason
from ninferbuild.recipe_file import user_code
from ninferbuild.recording import Recording, digest_dep, watching

__all__ = ["Fingerprint", "Fingerprints", "Reason", "Recording", "digest_dep", "fingerprint", "recording"]

VERSION = 1
"""Raised when the same code gets other lines."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a function depends on.

    Attributes:
        lines: facts, sorted; equal lines mean equal behaviour, unless ``uncacheable`` says otherwise.
        uncacheable: what cannot be seen through; empty for a function whose results can be kept.
        subject: the function.
    """

    lines: tuple[str, ...]
    uncacheable: tuple[Reason, ...]
    subject: object = field(compare=False, repr=False)


def fingerprint(subject: object) -> Fingerprint:
    """The fingerprint of a callable: a function, method, partial, class, or an instance with ``__call__``.

    The same in every process for the same code and values. Modules that the function imports when it runs are imported
    now if they are a user's. Never imports torch.
    """
    with user_code():
        reach = Reach()
        text = reach.value(subject, "the function")
        reach.finish()
    lines = {f"fingerprint {VERSION}", f"subject = {shown(text)}", *reach.findings.lines}
    return Fingerprint(tuple(sorted(lines)), tuple(reach.findings.reasons.values()), subject)


class Fingerprints:
    """Fingerprints taken once for each object: one function often serves thousands of parents.

    Use one for what is taken at one time; what an object depends on is not looked at again.
    """

    def __init__(self) -> None:
        self._taken: dict[int, Fingerprint] = {}  # each keeps its subject alive, and so its id

    def of(self, subject: object) -> Fingerprint:
        """:func:`fingerprint` of ``subject``."""
        found = self._taken.get(id(subject))
        if found is None:
            found = self._taken[id(subject)] = fingerprint(subject)
        return found


@contextmanager
def recording(fingerprints: Iterable[Fingerprint] = (), *, accounted: Collection[object] = ()) -> Iterator[Recording]:
    """The context in which a user's function runs: its imports resolve, and what it does is recorded.

    Args:
        fingerprints: taken when the key was made. A function that is different after the run than it was then changes
            what it depends on; the recording says so in its reasons.
        accounted: source files whose bytes enter the key through regions; opening them is not noted. Every other file
            that is opened for reading is in :attr:`Recording.paths`.
    """
    before = tuple(fingerprints)
    with user_code(), watching(accounted) as found:
        yield found
    for taken in before:
        changed = set(fingerprint(taken.subject).lines) ^ set(taken.lines)
        if changed:
            found.refuse(min(changed).partition(" = ")[0], MUTATES)
