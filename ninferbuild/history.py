"""The last build of a target: which of its actions made what a parent holds now, and why that has to run again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from ninferbuild import explain

if TYPE_CHECKING:
    from ninferbuild.cache import ActionRecord, BuildRecord, Cache
    from ninferbuild.plan import Parent
    from ninferbuild.resolve import Action, State

DIGEST_BYTES = 8

FIRST_BUILD = "first build of this target"
PRUNED = "no cached payload any more (pruned)"
RERUN = "asked for with --rerun"
FORGOTTEN = "nothing is remembered of its last build"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one action runs, or may run.

    Attributes:
        name: its first parameter, and how many more there are.
        parameters: in parent order; of the first parent when the action makes several.
        lines: what changed since the last build.
    """

    name: str
    parameters: tuple[str, ...]
    state: State
    lines: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON values."""
        return {name: getattr(self, name) for name in self.__slots__}


def parents_table(parents: Sequence[Parent]) -> dict[str, Any]:
    """What a build record keeps of its parents, so that a later build finds them again.

    ``fragments``: a digest of name and element range of each parameter of each parent, 8 bytes each, in order;
    ``counts``: parameters of each parent.
    """
    return {
        "fragments": b"".join(digest for parent in parents for digest in _fragments(parent)),
        "counts": [len(parent.fragments) for parent in parents],
    }


def _fragments(parent: Parent) -> list[bytes]:
    return [
        xxhash.xxh3_64_digest(f"{part.parameter}\0{part.begin}\0{part.last - part.first}".encode())
        for part in parent.fragments
    ]


Match = Literal["same", "reordered", "smaller", "apart", "new"]


class History:
    """Parents of the last build by what they held.

    Args:
        builds: of the target, newest first. One whose table of parents does not fit its keys is passed over.
    """

    def __init__(self, builds: Iterable[BuildRecord]):
        self.build = next((build for build in builds if _has_table(build)), None)
        extra: Mapping[str, Any] = self.build.extra if self.build is not None else {"fragments": b"", "counts": []}
        packed: bytes = extra["fragments"]
        self._digests = [packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES)]
        self._starts = [0, *accumulate(extra["counts"])]
        self._owner: dict[bytes, int] = {}
        for index, count in enumerate(extra["counts"]):
            start = self._starts[index]
            for digest in self._digests[start : start + count]:
                self._owner[digest] = index

    def match(self, parent: Parent) -> tuple[Match, bytes | None]:
        """How the last build stored what ``parent`` holds, and the key of the action that made just that."""
        wanted = _fragments(parent)
        owners = list(dict.fromkeys(self._owner[digest] for digest in wanted if digest in self._owner))
        if not owners or self.build is None:
            return "new", None
        if len(owners) > 1:
            return "apart", None
        stored = self._digests[self._starts[owners[0]] : self._starts[owners[0] + 1]]
        if stored == wanted:
            return "same", self.build.keys[owners[0]]
        if sorted(stored) == sorted(wanted):
            return "reordered", None
        return ("smaller" if set(wanted) < set(stored) else "apart"), None


def _has_table(build: BuildRecord) -> bool:
    fragments, counts = build.extra.get("fragments"), build.extra.get("counts")
    return (
        isinstance(fragments, bytes)
        and isinstance(counts, list)
        and len(counts) == len(build.keys)
        and sum(counts) * DIGEST_BYTES == len(fragments)
    )


_NOT_SAME = {
    "new": "new parent",
    "smaller": "new parent, whose parameters were stored together with others",
    "reordered": "new parent, whose parameters were stored in another order",
    "apart": "new parent, whose parameters were not stored together",
}


class Explainer:
    """Says why the actions of one session run, as seen from the last build of its target.

    Made before the build is recorded, it goes on comparing with the build before.
    """

    def __init__(self, cache: Cache | None, target: str, *, rerun: bool = False):
        self._cache = cache
        self._rerun = rerun
        self._history = History(cache.builds(target) if cache is not None else ())

    @property
    def first_build(self) -> bool:
        """Whether nothing is known of an earlier build."""
        return self._history.build is None

    def explain(self, actions: Iterable[Action]) -> list[Explanation]:
        """One explanation for each of ``actions``, none of which has a cached result."""
        return [
            Explanation(_name(action.parent.names), action.parent.names, action.state, tuple(self._lines(action)))
            for action in actions
        ]

    def settled(self, before: Iterable[Explanation], actions: Iterable[Action]) -> list[Explanation]:
        """What :meth:`explain` said of ``actions``, with what running them has shown about bytes unknown until then."""
        found = []
        for item, action in zip(before, actions, strict=True):
            if any(line.startswith(explain.NOT_HASHED) for line in item.lines) and action.is_known():
                changed = [line for line in self._lines(action) if line not in item.lines and line != PRUNED]
                kept = [line for line in item.lines if not line.startswith(explain.NOT_HASHED)]
                item = Explanation(item.name, item.parameters, item.state, tuple(kept + changed))
            found.append(item)
        return found

    def _lines(self, action: Action) -> list[str]:
        lines = [RERUN] if self._rerun else []
        lines += [f"uncacheable: {reason}" for reason in action.uncacheable]
        if self._cache is None or self._history.build is None:
            return [*lines, FIRST_BUILD]
        match, key, parent = self._closest(action)
        if key is None:
            return [*lines, f"not built before in this target: {_NOT_SAME[match]} of {explain.listed(parent.names)}"]
        old = self._cache.manifest(key)
        if old is None:
            return [*lines, FORGOTTEN]
        changed = explain.changes(old, action.template.fill_known(action.digests), parent.names)
        lines += changed
        if not action.uncacheable and all(line.startswith(explain.NOT_HASHED) for line in changed):
            lines += self._of_payload(self._cache.find(key, old, peek=True), action)
        return lines

    def _closest(self, action: Action) -> tuple[Match, bytes | None, Parent]:
        found: tuple[Match, bytes | None, Parent] | None = None
        for parent in action.parents:
            match, key = self._history.match(parent)
            if key is not None:
                return match, key, parent
            found = found or (match, key, parent)
        assert found is not None
        return found

    def _of_payload(self, record: ActionRecord | None, action: Action) -> list[str]:
        """Reasons beyond the manifest: the payload is gone, or something that a function looked at has changed."""
        if record is None:
            return [PRUNED]
        if not record.deps:
            return []
        from ninferbuild.user_actions import changed_deps

        return [f"{what} changed" for what in changed_deps(record.deps, action.parent)]


def _name(parameters: Sequence[str]) -> str:
    return parameters[0] + (f" (+{len(parameters) - 1})" if len(parameters) > 1 else "")


def text_lines(explanations: Sequence[Explanation]) -> list[str]:
    """Explanations for people: the actions, and below those that have the same reasons, the reasons."""
    if len(explanations) > 1 and all(item.lines == (FIRST_BUILD,) for item in explanations):
        return [f"{len(explanations)} actions: {FIRST_BUILD}"]
    lines: list[str] = []
    for index, item in enumerate(explanations):
        lines.append(item.name)
        following = explanations[index + 1] if index + 1 < len(explanations) else None
        if following is None or following.lines != item.lines:
            lines += [f"  {line}" for line in item.lines]
    return lines
