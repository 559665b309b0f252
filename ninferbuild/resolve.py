"""From parents to actions with keys: which are cached, which must run, and which cannot be told without reading.

The steps are the first four of the one-read algorithm (``docs/caching.md``): actions that would do the same to the same
bytes are one; digests from the memo give a key and a lookup; where digests are missing, a *probe* made of lengths and
three samples of each region tells whether the cache can hold a result at all; only then is a region hashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
import os
import threading
from typing import TYPE_CHECKING, Literal

import xxhash

from ninferbuild import manifest
from ninferbuild.device import Device
from ninferbuild.hashing import hash_inputs, hash_region
from ninferbuild.memo import Memo
from ninferbuild.sources.regions import Region

if TYPE_CHECKING:
    from ninferbuild.cache import ActionRecord, Cache, Writer
    from ninferbuild.fingerprint import Fingerprint, Fingerprints, Reason
    from ninferbuild.plan import Parent
    from ninferbuild.user_actions import UserCode

HASHING_THREADS = min(8, os.cpu_count() or 1)
SAMPLE_BYTES = 4096
SAMPLES = 3

State = Literal["cached", "run", "unknown"]


@dataclass(eq=False, slots=True)
class Action:
    """One encode action: what is made once for every parent in ``parents``.

    Attributes:
        parents: parents with this payload; the first stands for all.
        template: the manifest with open digests.
        regions: one for each slot of the template; None where a function's values are hashed instead.
        digests: what is known of the slots.
        state: ``cached``: ``record`` holds the result; ``run``: it has to be made; ``unknown``: its
            source must be hashed.
        user: a user's function takes part.
        fingerprints: of the user's functions.
        uncacheable: why the result cannot be trusted a second time; empty for all others.
    """

    parents: list[Parent]
    template: manifest.Template
    regions: tuple[Region | None, ...]
    memo_keys: tuple[bytes | None, ...]
    digests: list[bytes | None]
    user: bool = False
    fingerprints: list[Fingerprint] = field(default_factory=list)
    uncacheable: list[Reason] = field(default_factory=list)
    state: State = "unknown"
    key: bytes | None = None
    record: ActionRecord | None = None
    probe: bytes | None = None

    @property
    def parent(self) -> Parent:
        return self.parents[0]

    @property
    def source_bytes(self) -> int:
        """Bytes of the stored regions that the action consumes."""
        return sum(region.length for region in self.regions if region is not None)

    @property
    def bytes_to_read(self) -> int:
        """Bytes that making the payload reads of the stored regions: twice those of a method that surveys them."""
        rule = self.parent.rule
        return self.source_bytes * (2 if rule is not None and rule.surveys else 1)

    def stored_regions(self) -> list[Region]:
        return [region for region in self.regions if region is not None]

    def is_known(self) -> bool:
        """Whether the digests of all slots are known."""
        return all(digest is not None for digest in self.digests)

    def refuse(self, reasons: Sequence[Reason]) -> None:
        """Let no later build take this action's result for its own."""
        if reasons:
            self.uncacheable += [reason for reason in reasons if reason not in self.uncacheable]
            unique = f"uncacheable: {os.urandom(16).hex()}"
            self.template = manifest.Template((*self.template.lines, unique), self.template.slots)

    def settle(self, digests: Sequence[bytes]) -> str:
        """Set the key from the digests of all slots; the manifest text."""
        self.digests = list(digests)
        text = self.template.fill(digests)
        self.key = manifest.key_of(text)
        return text

    def manifest(self) -> str:
        """The manifest text of a settled action."""
        assert all(digest is not None for digest in self.digests)
        return self.template.fill([digest for digest in self.digests if digest is not None])


class Resolver:
    """Finds keys and cached results of the actions of one build.

    Args:
        writer: remembers digests that had to be taken; None remembers nothing.
        rerun: take nothing from the cache.
        peek: look, but do not count hits and misses or call anything used.
    """

    def __init__(
        self,
        cache: Cache | None,
        memo: Memo,
        *,
        device: Device,
        writer: Writer | None = None,
        rerun: bool = False,
        peek: bool = False,
    ):
        self._cache = cache
        self._writer = writer
        self._memo = memo
        self._device = device
        self._rerun = rerun
        self._peek = peek
        self._fingerprints: Fingerprints | None = None
        self._lock = threading.Lock()
        self.hashed_bytes = 0

    def actions(self, parents: Iterable[Parent]) -> list[Action]:
        """Parents as actions: those that would do the same to the same bytes become one."""
        found: dict[bytes, Action] = {}
        for parent in parents:
            code = self._user_code(parent) if runs_user_code(parent) else None
            filled = manifest.template(parent, code.lines if code is not None else ())
            regions = _slot_regions(parent)
            keys = tuple(self._memo.key(region) if region is not None else None for region in regions)
            identity = xxhash.xxh3_128(filled.stem().encode())
            for index, key in enumerate(keys):
                identity.update(key if key is not None else _opaque_identity(parent, index))
            if parent.rule is None or (code is not None and code.reasons):
                identity.update(_opaque_identity(parent, -1))
            action = found.get(identity.digest())
            if action is None:
                action = Action([parent], filled, regions, keys, [None] * len(regions))
                found[identity.digest()] = action
                if code is not None:
                    action.user, action.fingerprints = True, code.fingerprints
                    action.refuse(code.reasons)
            else:
                action.parents.append(parent)
        return list(found.values())

    def _user_code(self, parent: Parent) -> UserCode:
        from ninferbuild.fingerprint import Fingerprints  # most builds run no user's function
        from ninferbuild.user_actions import user_code_of

        if self._fingerprints is None:
            self._fingerprints = Fingerprints()
        return user_code_of(parent, self._device, self._fingerprints)

    def look_up(self, actions: Sequence[Action], *, hash_sources: bool, cancel: threading.Event) -> None:
        """Give every action its state.

        Args:
            hash_sources: read sources where a cached result is possible but its key is not known; otherwise such an
                action stays ``unknown``.
        """
        self._recall(actions)
        known, unknown = [], []
        for action in actions:
            action.state = "run"
            if action.is_known():
                known.append(action)
            elif self._may_hit(action) and self._possible(action):
                if hash_sources:
                    unknown.append(action)
                else:
                    action.state = "unknown"
        self._find_all(known)
        if unknown:
            self._hash_all(unknown, cancel)
            self._find_all(unknown)

    def _may_hit(self, action: Action) -> bool:
        return self._cache is not None and not self._rerun and not action.uncacheable

    def _hash_all(self, actions: Sequence[Action], cancel: threading.Event) -> None:
        from concurrent.futures import ThreadPoolExecutor  # most plans hash nothing

        with ThreadPoolExecutor(max_workers=HASHING_THREADS, thread_name_prefix="hash") as pool:
            try:
                list(pool.map(lambda action: self.hash(action, cancel), actions))
            except BaseException:
                cancel.set()
                raise

    def _recall(self, actions: Sequence[Action]) -> None:
        if not self._memo.may_know:
            for action in actions:
                action.digests = [None] * len(action.regions)
            return
        wanted = [
            (action, slot, region, key)
            for action in actions
            for slot, (region, key) in enumerate(zip(action.regions, action.memo_keys, strict=True))
            if region is not None and key is not None
        ]
        known = self._memo.known([entry[2] for entry in wanted], [entry[3] for entry in wanted])
        for (action, slot, region, _), digest in zip(wanted, known, strict=True):
            action.digests[slot] = digest if digest is not None else self._in_memory(region)

    def _in_memory(self, region: Region) -> bytes | None:
        """The digest of a region that lies in memory; None for one that has to be read from a file."""
        return hash_region(region) if self._memo.lies_in_memory(region) else None

    def _find_all(self, actions: Sequence[Action]) -> None:
        """Look actions up whose digests are known; those with a result that still holds become ``cached``."""
        manifests = [action.settle([d for d in action.digests if d is not None]) for action in actions]
        wanted = [
            (action, action.key, text)
            for action, text in zip(actions, manifests, strict=True)
            if self._may_hit(action) and action.key is not None
        ]
        if self._cache is None or not wanted:
            return
        records = self._cache.find_all([(key, text) for _, key, text in wanted], peek=self._peek)
        for (action, _, _), record in zip(wanted, records, strict=True):
            if record is not None and _still_holds(record, action.parent):
                action.record, action.state = record, "cached"

    def _possible(self, action: Action) -> bool:
        assert self._cache is not None
        return self._cache.known_probe(self.probe(action))

    def probe(self, action: Action) -> bytes:
        """The probe of an action: equal for equal manifests over equal bytes, cheap, and proof of nothing."""
        if action.probe is None:
            hasher = xxhash.xxh3_128(action.template.stem().encode())
            for region in action.stored_regions():
                for sample in _samples(region):
                    hasher.update(sample)
            action.probe = hasher.digest()
        return action.probe

    def hash(self, action: Action, cancel: threading.Event) -> None:
        """Read an action's inputs, set its digests and remember them. Safe from several threads."""
        started = self._memo.now_ns()
        found = list(hash_inputs(action.parent, cancel))
        self._memo.check_unchanged(action.stored_regions())
        digests = [digest for digest, _ in found]
        action.digests = list(digests)
        with self._lock:
            self.hashed_bytes += sum(count for _, count in found)
        rows = self.keepable(action, digests, started)
        if rows and self._writer is not None:
            self._writer.remember(rows)

    def keepable(self, action: Action, digests: Sequence[bytes], started_ns: int) -> list[tuple[bytes, bytes]]:
        """Memo rows of digests taken since ``started_ns``, as far as the files behind them may be trusted."""
        return [
            (key, digest)
            for region, key, digest in zip(action.regions, action.memo_keys, digests, strict=True)
            if region is not None and key is not None and self._memo.keepable(region, started_ns)
        ]


def _still_holds(record: ActionRecord, parent: Parent) -> bool:
    if not record.deps:
        return True
    from ninferbuild.user_actions import still_holds  # most records depend on nothing but their manifest

    return still_holds(record.deps, parent)


def runs_user_code(parent: Parent) -> bool:
    """Whether a user's function decides the bytes: a method, or a reader whose values are not hashed."""
    return parent.rule is None or any(
        item.source.description is None and manifest.declares_content(item.source) for item in parent.request.inputs
    )


def _slot_regions(parent: Parent) -> tuple[Region | None, ...]:
    regions: list[Region | None] = []
    for item in parent.request.inputs:
        described = item.source.description
        if described is not None:
            regions += [part.region for part in described.parts]
        elif not manifest.declares_content(item.source):
            regions.append(None)
    return tuple(regions)


def _opaque_identity(parent: Parent, slot: int) -> bytes:
    # Two functions of a user are never known to do the same, least of all when something about them cannot be seen;
    # the parent's own object tells them apart.
    return b"opaque" + id(parent).to_bytes(8, "little") + slot.to_bytes(4, "little", signed=True)


def _samples(region: Region) -> Iterable[bytes]:
    """Three samples: begin, middle, end."""
    length = region.length
    size = min(SAMPLE_BYTES, length)
    for begin in sorted({0, (length - size) // 2, length - size}):
        buffer = bytearray()
        for span in region.select([(begin, begin + size)]).spans:
            piece = bytearray(span.end - span.begin)
            span.file.read_into(span.begin, memoryview(piece))
            buffer += piece
        yield bytes(buffer)
