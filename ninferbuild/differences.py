"""What distinguishes two descriptions of an artifact: the facts that decide, each with what explains it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ninferbuild import explain
from ninferbuild.errors import DiffersError
from ninferbuild.lock import LockedAction, LockedFile, LockedObject, LockedTarget

Because = Callable[[str], Sequence[str]]
"""Label of an object → lines that explain why its payload differs."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact that differs.

    Attributes:
        subject: label of an object, ``file NAME``, ``source NAME``, ``directory`` or ``artifact``.
        fact: what about it.
        wanted, found: its values; None where one side has no such fact.
        because: lines that explain it.
    """

    subject: str
    fact: str
    wanted: str | None
    found: str | None
    because: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.wanted is None or self.found is None:
            return f"{self.subject}: {'is new' if self.wanted is None else 'is missing'}"
        return f"{self.subject}: {self.fact} {self.wanted} → {self.found}"

    def lines(self) -> list[str]:
        """The difference, and below it what explains it."""
        return [str(self), *(f"  {line}" for line in self.because)]

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


class BytesDifferError(DiffersError):
    """Something would be, or is, not what it has to be.

    ``differences`` says in what.
    """

    def __init__(self, message: str, differences: Sequence[Difference]):
        super().__init__(message)
        self.differences = tuple(differences)


def compare(
    wanted: LockedTarget, found: LockedTarget, *, because: Because | None = None, partial: bool = False
) -> list[Difference]:
    """Every decisive fact that differs: causes first, sums last.

    Facts that are None on one side are not known yet and are passed over. Files are compared by position: what they
    are called does not change their bytes.

    Args:
        because: explains payloads that differ.
        partial: ``found`` lacks the files and some objects, because what they depend on is not known yet.
    """
    because = because or (lambda label: ())
    objects = list(_objects(wanted.objects, found.objects, because, partial))
    # Auxiliary tensors stand among the objects and in the uses. What objects differ in says more than that they do.
    passed_over = {name for name, skip in (("objects", objects or partial), ("uses", partial)) if skip}
    differences = [*_sources(wanted.sources, found.sources), *_directory(wanted, found, passed_over), *objects]
    if not partial:
        differences += _files(wanted.files, found.files)
    if _differ(wanted.artifact_id, found.artifact_id):
        differences.append(Difference("artifact", "id", wanted.artifact_id, found.artifact_id))
    return differences


def _differ(wanted: object, found: object) -> bool:
    return wanted is not None and found is not None and wanted != found


def _sources(wanted: Mapping[str, str | None], found: Mapping[str, str | None]) -> Iterator[Difference]:
    for name in {**wanted, **found}:
        if name not in found:
            yield Difference(f"source {name}", "digest", wanted[name], None)
        elif name not in wanted:
            yield Difference(f"source {name}", "digest", None, found[name])
        elif _differ(wanted[name], found[name]):
            yield Difference(f"source {name}", "digest", wanted[name], found[name])


def _directory(wanted: LockedTarget, found: LockedTarget, passed_over: Collection[str]) -> Iterator[Difference]:
    members = [name for name in wanted.directory if name not in passed_over]
    ours, theirs = wanted.information, found.information
    because = [
        explain.change(name, *map(_shown, values))
        for name, values in (
            ("recipe", (ours.recipe, theirs.recipe)),
            ("overrides", (ours.overrides, theirs.overrides)),
        )
        if values[0] != values[1]
    ]
    for name in members:
        if wanted.directory[name] != found.directory.get(name):
            reasons = tuple(because) if name == "provenance" else ()
            yield Difference("directory", name, wanted.directory[name], found.directory.get(name), reasons)


def _shown(value: str | Sequence[str] | None) -> str:
    if isinstance(value, str):
        return value
    return ", ".join(value) if value else "none"


def _objects(
    wanted: Mapping[str, LockedObject], found: Mapping[str, LockedObject], because: Because, partial: bool
) -> Iterator[Difference]:
    for label, theirs in found.items():
        ours = wanted.get(label)
        if ours is None:
            yield Difference(label, "object", None, "present")
        elif ours != theirs:
            yield from _object(label, ours, theirs, because)
    if partial:
        return
    for label in wanted:
        if label not in found:
            yield Difference(label, "object", "present", None)


def _object(label: str, wanted: LockedObject, found: LockedObject, because: Because) -> Iterator[Difference]:
    facts = [
        (fact, _text(getattr(wanted, fact)), _text(getattr(found, fact)))
        for fact in ("format", "layout", "shape", "divisors", "parameters", "bytes")
        if getattr(wanted, fact) != getattr(found, fact)
    ]
    if _differ(wanted.digest, found.digest):
        facts.insert(0, ("payload", str(wanted.digest), str(found.digest)))
    if facts:
        (fact, ours, theirs), *more = facts
        told = explain.change(fact, ours, theirs)
        lines = dict.fromkeys([*(explain.change(*other) for other in more), *because(label)])
        yield Difference(label, fact, ours, theirs, tuple(line for line in lines if line != told))


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return str(value) if value is not None else "none"


def _files(wanted: Mapping[str, LockedFile], found: Mapping[str, LockedFile]) -> Iterator[Difference]:
    ours, theirs = list(wanted.items()), list(found.items())
    for (_, before), (name, after) in zip(ours, theirs, strict=False):
        if before.bytes != after.bytes:
            yield Difference(f"file {name}", "bytes", str(before.bytes), str(after.bytes))
        elif _differ(before.sha256, after.sha256):
            yield Difference(f"file {name}", "SHA-256", before.sha256, after.sha256)
    for name, _ in ours[len(theirs) :]:
        yield Difference(f"file {name}", "file", "present", None)
    for name, _ in theirs[len(ours) :]:
        yield Difference(f"file {name}", "file", None, "present")


def reasons(
    wanted: Mapping[str, LockedAction],
    found: Callable[[str], tuple[str, str, Sequence[str]] | None],
    manifest_of: Callable[[bytes], str | None],
) -> Because:
    """What explains payloads that differ: the difference between the manifests of the actions that made them.

    Args:
        wanted: actions of the one side, by label of their object.
        found: label → method, manifest and input names of the other side's action; None where there is none.
        manifest_of: key of an action → its manifest, as far as it is remembered.
    """

    def because(label: str) -> list[str]:
        action, made = wanted.get(label), found(label)
        if action is None or made is None:
            return []
        method, manifest, names = made
        remembered = manifest_of(bytes.fromhex(action.key))
        if remembered is None:  # the lock itself knows the method
            return explain.changes(f"method: {action.method}\n", f"method: {method}\n", names)
        return explain.changes(remembered, manifest, names) or [
            f"the same action gave other bytes: {method} is not deterministic, or its result was damaged"
        ]

    return because
