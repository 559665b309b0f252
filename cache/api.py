"""The cache as the rest of the program sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
import os
from pathlib import Path
import time
from types import TracebackType

from ninferbuild.cache import compaction, filesystem, liveness, pruning, verification
from ninferbuild.cache import store as stores
from ninferbuild.cache.builds import load_builds, store_build
from ninferbuild.cache.compaction import SpaceResult
from ninferbuild.cache.index import ACTIONS, BLOCKS, DIGESTS, MANIFESTS, PROBES, Transaction
from ninferbuild.cache.lease import Lease
from ninferbuild.cache.liveness import IsLive
from ninferbuild.cache.pruning import PruneResult
from ninferbuild.cache.reading import View
from ninferbuild.cache.records import (
    ActionRecord,
    BuildRecord,
    Number,
    Raw,
    StoredAction,
    StoredBlock,
    StoredDigest,
)
from ninferbuild.cache.statistics import Entry, Statistics, entries, statistics
from ninferbuild.cache.store import Limits
from ninferbuild.cache.verification import VerifyResult
from ninferbuild.cache.writer import Writer, memo_key
from ninferbuild.errors import CacheDamagedError, CacheError

ELSEWHERE = "choose another with NINFERBUILD_CACHE or [cache] dir"


class Cache:
    """A handle on one cache directory. Handles of one process share what is open; all methods are thread-safe.

    Open one for each build: :meth:`known_probe` tells what was stored before the handle was opened.
    """

    def __init__(self, store: stores.Store, *, read_only: bool, max_size: int | None):
        self._store: stores.Store | None = store
        self._max_size = max_size
        self._opened = time.time()
        self.path = store.root
        self.read_only = read_only or store.read_only

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        read_only: bool = False,
        max_size: int | None = None,
        create: bool = True,
        allow_foreign_fs: bool = False,
        limits: Limits | None = None,
    ) -> Cache:
        """Open the cache in ``path``.

        A cache that this user cannot write is opened for reading: see :attr:`read_only`. Damaged environments are set
        aside, which :attr:`notices` reports.

        Args:
            max_size: bytes of payload to keep at most; what was used longest ago goes first.
            create: make the directory when there is none.
            allow_foreign_fs: do not refuse network file systems.
            limits: sizes for tests.

        Raises:
            CacheError: it cannot be used; the message says what to do.
        """
        path = Path(path).expanduser()
        if not path.exists():
            if read_only or not create:
                raise CacheError(f"there is no cache in {path}")
        elif not path.is_dir():
            raise CacheError(f"cache directory {path} is not a directory; remove it, or {ELSEWHERE}")
        if not allow_foreign_fs:
            filesystem.refuse_network(path)
        if not read_only and not _writable(path):
            if not (path / "index").is_dir():
                raise CacheError(f"cache directory {path} cannot be written; {ELSEWHERE}")
            read_only = True
        store = stores.acquire(path, read_only=read_only, limits=limits or Limits())
        return cls(store, read_only=read_only, max_size=max_size)

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the handle; the last one of the process closes the cache. Closing twice is harmless."""
        store, self._store = self._store, None
        if store is not None:
            try:
                if store.after_crash and not self.read_only:
                    store.after_crash = False
                    with suppress(CacheError):  # blocks that a killed build left behind and this one did not use
                        pruning.prune(store)
            finally:
                stores.release(store)

    @property
    def _open_store(self) -> stores.Store:
        if self._store is None:
            raise CacheError(f"cache {self.path} is closed")
        return self._store

    @property
    def _writable_store(self) -> stores.Store:
        store = self._open_store
        if self.read_only:
            raise CacheError(f"cache {self.path} is read-only; make it writable, or {ELSEWHERE}")
        return store

    @property
    def notices(self) -> list[str]:
        """Lines for the user: what was found damaged, and what became of it."""
        return self._open_store.notices

    def free_bytes(self) -> int:
        """Bytes that may still be written to the cache's file system."""
        return filesystem.free_bytes(self.path)

    # -- looking up ------------------------------------------------------------------------------------------------

    def find(self, key: bytes, manifest: str, *, peek: bool = False) -> ActionRecord | None:
        """The record of an action, if its manifest is the same text and every block of its payload is there.

        Args:
            peek: do not count the lookup as a hit or a miss.
        """
        return self.find_all([(key, manifest)], peek=peek)[0]

    def find_all(self, wanted: Sequence[tuple[bytes, str]], *, peek: bool = False) -> list[ActionRecord | None]:
        """:meth:`find` for many pairs of key and manifest, within one snapshot."""
        store = self._open_store
        found: list[ActionRecord | None] = []
        damaged: list[bytes] = []
        try:
            with store.index.read() as transaction:
                for key, manifest in wanted:
                    stored = transaction.get(ACTIONS, key, StoredAction)
                    if stored is None and transaction.has(ACTIONS, key):
                        damaged.append(key)
                    whole = (
                        stored is not None
                        and key not in store.lost
                        and _manifest(transaction, key) == manifest
                        and self._complete(transaction, stored.blocks)
                    )
                    found.append(_public(key, manifest, stored) if stored is not None and whole else None)
        except CacheDamagedError as error:
            if not self.read_only:
                raise
            store.notices.append(f"the cache cannot be used: {error}")
            found += [None] * (len(wanted) - len(found))
        for key in damaged:
            store.drop_record(key)
        if not peek:
            store.lookups.note(found)
        return found

    def _complete(self, transaction: Transaction, blocks: Iterable[tuple[bytes, int]]) -> bool:
        store = self._open_store
        for digest, length in blocks:
            row = transaction.get(BLOCKS, digest, StoredBlock)
            if row is None or row.length != length:
                return False
            if not store.segments.exists(row.segment):
                store.note_missing_segment(row.segment)
                return False
        return True

    def manifest(self, key: bytes) -> str | None:
        """The manifest of an action, also when its payload has been pruned."""
        with self._open_store.index.read() as transaction:
            return _manifest(transaction, key)

    def known_probe(self, probe: bytes) -> bool:
        """Whether an action with this probe was stored before this handle was opened."""
        with self._open_store.index.read() as transaction:
            row = transaction.get(PROBES, probe, Number)
        return row is not None and row.value < self._opened

    def remembered(self, memo_keys: Sequence[bytes]) -> list[bytes | None]:
        """The digest that the memo has for each key, or None."""
        with self._open_store.index.read() as transaction:
            rows = [transaction.get(DIGESTS, memo_key(key), StoredDigest) for key in memo_keys]
        return [None if row is None else row.digest for row in rows]

    def forget(self, memo_keys: Sequence[bytes]) -> None:
        """Remove rows of the memo."""
        if self.read_only or not memo_keys:
            return
        store = self._writable_store
        with store.write_lock, store.index.write() as transaction:
            for key in memo_keys:
                transaction.delete(DIGESTS, memo_key(key))

    # -- builds ----------------------------------------------------------------------------------------------------

    def builds(self, target_id: str | None = None, limit: int | None = None) -> list[BuildRecord]:
        """The builds of a target, or of all targets, newest first."""
        with self._open_store.index.read() as transaction:
            found = load_builds(transaction, target_id)
        return found if limit is None else found[:limit]

    def last_linked(self, target_id: str) -> BuildRecord | None:
        """The newest build of a target that published files."""
        return next((build for build in self.builds(target_id) if build.files), None)

    def record_build(self, record: BuildRecord) -> None:
        """Add a finished build; a repetition of the last one replaces it. Writes the hits noted so far too."""
        store = self._writable_store
        with store.write_lock, store.index.write() as transaction:
            store_build(transaction, record)
            store.lookups.write(transaction)

    # -- writing and reading ---------------------------------------------------------------------------------------

    def writer(self) -> Writer:
        """The writer thread. One at a time is enough for a build. Raises :class:`CacheError` on a read-only cache."""
        return Writer(self._writable_store, self._max_size)

    def reading(self) -> View:
        """A view of payloads, for one thread."""
        return View(self._open_store)

    def lease(self, target_id: str) -> Lease:
        """Protection from pruning for the keys that a build adds to it."""
        return Lease(self._open_store, target_id)

    # -- housekeeping ----------------------------------------------------------------------------------------------

    def stats(self) -> Statistics:
        """What the cache holds and has saved."""
        return statistics(self._open_store, self._max_size)

    def ls(self, target: str | None = None) -> list[Entry]:
        """The stored actions, or those that ``target`` made or used, most recently used first."""
        return entries(self._open_store, target)

    def prune(
        self,
        *,
        max_size: int | None = None,
        older_than: float | None = None,
        keep_builds: int | None = None,
        target: str | None = None,
        dry_run: bool = False,
        is_live: IsLive | None = None,
    ) -> PruneResult:
        """Drop actions, least recently used first, and give their space back; see :mod:`ninferbuild.cache.pruning`.

        Args:
            max_size: keep at most these bytes of payload.
            older_than: drop what was last used more than these seconds ago.
            keep_builds: keep what the last so many builds of live targets use.
            target: only what this target made or used.
            dry_run: change nothing, only say what would go.
            is_live: whether the target of a build is live; by default its file defines it or its output exists.

        Raises:
            CacheError: the cache is read-only or cannot be changed.
        """
        return pruning.prune(
            self._writable_store,
            max_size=max_size,
            older_than=older_than,
            keep_builds=keep_builds,
            target=target,
            dry_run=dry_run,
            is_live=is_live or liveness.is_live,
        )

    def compact(self) -> SpaceResult:
        """Rewrite what has gaps. Raises :class:`CacheError` naming who else uses the cache."""
        return compaction.compact(self._writable_store)

    def clear(self) -> SpaceResult:
        """Remove everything; while others use the cache, all but what their builds in progress need."""
        return compaction.clear(self._writable_store)

    def matching(self, prefix: str) -> list[bytes]:
        """Keys of stored actions whose hexadecimal form starts with ``prefix``."""
        with self._open_store.index.read() as transaction:
            return [key for key in transaction.keys(ACTIONS) if key.hex().startswith(prefix.lower())]

    def remove(self, key: bytes) -> bool:
        """Remove one action and the space that it alone needs; False when there is no such action.

        Raises:
            CacheError: a build in progress needs it.
        """
        return pruning.remove(self._writable_store, key)

    def verify(self, *, repair: bool = False, progress: Callable[[int], None] | None = None) -> VerifyResult:
        """Check every record and every block; ``repair`` drops what is damaged. ``progress`` is told bytes."""
        store = self._writable_store if repair else self._open_store
        return verification.verify(store, repair=repair, progress=progress)


def _writable(path: Path) -> bool:
    folder = filesystem.existing_parent(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        return False
    data = path / "index" / "data.mdb"
    return not data.exists() or os.access(data, os.W_OK)


def _manifest(transaction: Transaction, key: bytes) -> str | None:
    row = transaction.get(MANIFESTS, key, Raw)
    return None if row is None else row.data.decode()


def _public(key: bytes, manifest: str, stored: StoredAction) -> ActionRecord:
    return ActionRecord(
        key,
        manifest,
        stored.kind,
        stored.method,
        stored.format,
        stored.blocks,
        stored.length,
        stored.digest,
        stored.auxiliaries,
        stored.seconds,
        stored.source_bytes,
        stored.made_by,
        stored.deps,
    )
