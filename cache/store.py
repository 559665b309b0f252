"""One open cache directory of this process: locks, index, segments, and what has to happen at open and close."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
import os
from pathlib import Path
import shutil
import threading

from ninferbuild.cache import btree
from ninferbuild.cache import index as tables
from ninferbuild.cache.environment import STAMP_FILE, OutOfSpaceError, examine, set_aside, stamp
from ninferbuild.cache.index import ACTIONS, LEASES, Index
from ninferbuild.cache.locks import SESSION_BYTES, FileLock, Session, WriteLock, in_use, live_sessions
from ninferbuild.cache.recency import Lookups
from ninferbuild.cache.records import StoredBlock, StoredLease
from ninferbuild.cache.salvage import salvage
from ninferbuild.cache.segments import DROPPED_SUFFIX, Segments
from ninferbuild.errors import CacheError

MIB = 1 << 20
GIB = 1 << 30

_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# This file marks a cache directory (https://bford.info/cachedir/). ninferbuild makes its content again.\n"
)


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes. The defaults are what was measured to work best; tests use smaller ones.

    Attributes:
        index_map: address space of the index.
        segment_map: address space of a segment.
        segment_bytes: a segment is sealed when it has grown to this.
        transaction_bytes: blocks written in one transaction of one segment; dirty pages are heap.
        queue_bytes: blocks that wait for the writer.
        margin_bytes: free space that a write leaves on the disk.
    """

    index_map: int = 64 * GIB
    segment_map: int = 16 * GIB
    segment_bytes: int = 8 * GIB
    transaction_bytes: int = 32 * MIB
    queue_bytes: int = 128 * MIB
    margin_bytes: int = 2 * MIB


class Store:
    """Everything that is open once for a process. Handles (:class:`Cache`) share it.

    Attributes:
        after_crash: whether a process was killed while it had the cache open, and nobody has tidied up since.
        notices: lines for the user about what was found damaged and what became of it.
    """

    def __init__(self, root: Path, *, read_only: bool, limits: Limits):
        self.root = root
        self.limits = limits
        self.read_only = read_only
        self.notices: list[str] = []
        self.mutex = threading.RLock()
        self.handles = 0
        self.leased: dict[bytes, int] = {}  # key → leases of this process
        self.crowded = 0  # live bytes below which looking for something to evict again is pointless
        self._number = 0
        self._pending_leases: dict[bytes, tuple[str, float]] = {}
        self.lost: set[bytes] = set()  # keys found damaged that a read-only cache cannot drop
        self.lookups = Lookups()
        self._use: FileLock | None = None
        self._session: Session | None = None
        self._missing_segments: set[int] = set()
        self.after_crash = False
        self._set_aside: Path | None = None  # a damaged index whose records are still to be recovered
        self._altered = False  # the index, since it was closed
        try:
            self._open()
        except BaseException:
            try:
                self.close_environments()
            finally:
                self._release()
            raise

    # -- paths -----------------------------------------------------------------------------------------------------

    @property
    def index_folder(self) -> Path:
        return self.root / "index"

    @property
    def segments_folder(self) -> Path:
        return self.root / "segments"

    @property
    def sessions_folder(self) -> Path:
        return self.root / "sessions"

    def lock_path(self, name: str) -> Path:
        return self.root / "locks" / name

    @property
    def session(self) -> bytes:
        """Id of this process in the cache; empty when it only reads."""
        return self._session.id if self._session is not None else b""

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self.read_only:
            self._open_read_only()
            return
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.lock_path("").mkdir(exist_ok=True)
            tag = self.root / "CACHEDIR.TAG"
            if not tag.exists():
                tag.write_text(_TAG)
            self._use = FileLock(self.lock_path("use"))
            if self._use.exclusive(timeout=0):
                self._tidy()
            self._use.shared()
            self.write_lock = WriteLock(self.lock_path("write"))
            self._session = Session(self.sessions_folder)
        except OSError as error:
            raise CacheError(f"cache directory {self.root} cannot be written: {error.strerror}") from error
        with self.write_lock:  # two processes must not create the environments at once
            self._open_environments()

    def _open_read_only(self) -> None:
        if not self.index_folder.is_dir():
            raise CacheError(f"there is no cache in {self.root}")
        try:
            self._use = FileLock(self.lock_path("use"), read_only=True)
        except OSError:
            self._use = None  # nobody who writes here has ever been here
        if self._use is not None:
            if self._use.exclusive(timeout=0):
                health = examine(self.index_folder, btree.file_digest)
                if health.damage is not None:
                    raise CacheError(f"cache index {self.index_folder} is damaged ({health.damage}); it cannot be read")
            self._use.shared()
        self._open_environments()

    def _open_environments(self) -> None:
        self.index = Index(self.index_folder, self.limits.index_map, read_only=self.read_only)
        self.segments = Segments(self.segments_folder, self.limits.segment_map, read_only=self.read_only)
        if self._set_aside is not None:
            self._salvage(self._set_aside)
            self._set_aside = None
        if self._altered:
            self._altered = False
            self._drop_altered_rows()
        if self.after_crash:
            self._drop_dead_leases()

    def _tidy(self) -> None:
        """Check what the last process left and remove its leftovers. Nobody else has the cache open."""
        self.after_crash = self.sessions_folder.exists() and any(self.sessions_folder.iterdir())
        live_sessions(self.sessions_folder)  # removes the entries of dead processes
        for pattern in (f"segments/*{DROPPED_SUFFIX}", "*.compact", "*.cleared"):
            for leftover in self.root.glob(pattern):
                shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.root.glob("**/stamp.*.tmp"):
            leftover.unlink(missing_ok=True)
        self._tidy_index()
        for segment in sorted(self.segments_folder.glob("*[0-9]")):
            if segment.name.isdigit():
                self._tidy_segment(segment)

    def _tidy_index(self) -> None:
        health = examine(self.index_folder, btree.file_digest, after_crash=self.after_crash)
        self._altered = health.altered
        if health.damage is not None:
            self._set_aside = set_aside(self.index_folder)
            self.notices.append(f"cache index was damaged ({health.damage}): set aside as {self._set_aside}")
        elif health.altered:
            (self.index_folder / STAMP_FILE).unlink(missing_ok=True)

    def _tidy_segment(self, segment: Path) -> None:
        data = segment / btree.DATA_FILE
        if not data.exists() or data.stat().st_size == 0:  # its creation was interrupted, or somebody emptied it
            shutil.rmtree(segment, ignore_errors=True)
            return
        health = examine(segment, btree.tree_digest, after_crash=self.after_crash)
        if health.damage is not None:
            aside = set_aside(segment)
            self.notices.append(
                f"cache segment {segment.name} was damaged ({health.damage}): set aside as {aside}, "
                "actions with payload in it run again"
            )
        elif health.altered:  # the digests of its blocks tell what is wrong
            (segment / STAMP_FILE).unlink(missing_ok=True)

    def _salvage(self, damaged: Path) -> None:
        recovered = salvage(damaged, self.index, self.segments)
        if not recovered:  # nothing knows any more what the blocks are
            for number in self.segments.ids():
                self.segments.drop(number)
        self.after_crash = True  # there are blocks that nothing names
        self.notices.append(f"{recovered} actions were recovered from the damaged cache index")

    def _drop_altered_rows(self) -> None:
        with self.write_lock:
            with self.index.read() as transaction:
                bad = list(transaction.bad_rows())
            # On a full disk they stay, recognised and absent.
            with suppress(OutOfSpaceError), self.index.write() as transaction:
                for table, key in bad:
                    transaction.delete(table, key)
                transaction.recount_blocks()
        if bad:
            self.notices.append(
                f"{len(bad)} damaged records of the cache index were dropped; what they held is made again"
            )

    def _drop_dead_leases(self) -> None:
        with suppress(OutOfSpaceError), self.write_lock, self.index.write() as transaction:
            live = self.live_sessions()
            for key in transaction.keys(LEASES):
                if key[:SESSION_BYTES] not in live:
                    transaction.delete(LEASES, key)

    # -- protection ------------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        """A number that this process has not used before."""
        with self.mutex:
            self._number += 1
            return self._number

    def hold(self, keys: Iterable[bytes]) -> None:
        """Protect keys from pruning, in this process."""
        with self.mutex:
            for key in keys:
                self.leased[key] = self.leased.get(key, 0) + 1

    def let_go(self, keys: Iterable[bytes]) -> None:
        """End the protection of keys; other leases of them go on."""
        with self.mutex:
            for key in keys:
                self.leased[key] -= 1
                if not self.leased[key]:
                    del self.leased[key]

    def live_sessions(self) -> dict[bytes, str]:
        return live_sessions(self.sessions_folder)

    def write_leases(self, transaction: tables.Transaction) -> None:
        """Write the leases that have not been written yet: what makes others see that this process is building."""
        with self.mutex:
            pending, self._pending_leases = self._pending_leases, {}
        for row, (target, since) in pending.items():
            transaction.put(LEASES, row, StoredLease(self.session, target, since, b""))

    def add_pending_lease(self, row: bytes, target: str, since: float) -> None:
        with self.mutex:
            self._pending_leases[row] = (target, since)

    def remove_pending_lease(self, row: bytes) -> bool:
        """Whether the lease had not been written."""
        with self.mutex:
            return self._pending_leases.pop(row, None) is not None

    def write_lock_if_any(self) -> AbstractContextManager[None]:
        """The write lock; a read-only cache has none."""
        return nullcontext() if self.read_only else self.write_lock

    # -- damage ----------------------------------------------------------------------------------------------------

    def note_missing_segment(self, number: int) -> None:
        """Tell, once, that blocks are gone with their segment."""
        with self.mutex:
            if number not in self._missing_segments:
                self._missing_segments.add(number)
                self.notices.append(f"cache segment {number:04d} is gone; actions with payload in it run again")

    def drop_record(self, key: bytes) -> None:
        """Forget the record of an action that fails its check."""
        with self.mutex:
            self.notices.append(f"the record of cached payload {key.hex()} is damaged; it is made again")
        if not self.read_only:
            with suppress(CacheError), self.write_lock, self.index.write() as transaction:
                transaction.delete(ACTIONS, key)

    def drop_damaged(self, key: bytes, digests: Iterable[bytes], reason: str) -> None:
        """Forget blocks that are not what they should be, and the action that needed them."""
        dropped = list(digests)
        with self.mutex:
            self.lost.add(key)  # holds also where the rows cannot be removed now
            self.notices.append(f"cached payload {key.hex()} is damaged ({reason}); it is made again")
        if self.read_only:
            return
        with suppress(CacheError), self.write_lock, self.index.write() as transaction:
            for digest in dropped:
                block = transaction.get(tables.BLOCKS, digest, StoredBlock)
                if transaction.delete(tables.BLOCKS, digest) and block is not None:
                    transaction.add(tables.LIVE_BYTES, -block.length)
            transaction.delete(ACTIONS, key)

    def found_again(self, keys: Iterable[bytes]) -> None:
        """These actions have been made again."""
        with self.mutex:
            self.lost.difference_update(keys)

    # -- closing ---------------------------------------------------------------------------------------------------

    def close_environments(self) -> None:
        for name in ("segments", "index"):  # opening may have failed before one of them was there
            environment: Segments | Index | None = getattr(self, name, None)
            if environment is not None:
                environment.close()

    def reopen_environments(self) -> None:
        """Open again what :meth:`close_environments` closed. The caller holds the cache exclusively."""
        self._open_environments()

    def close(self) -> None:
        """Write what is pending, close everything, and stamp the environments when nobody else uses them.

        Whatever interrupts it, the locks are given back: this process may go on and open the cache again.
        """
        with ExitStack() as stack:
            stack.callback(self._release)
            if not self.read_only:
                stack.callback(self._stamp_if_alone)
            stack.callback(self.close_environments)
            if not self.read_only and self.lookups:
                with suppress(CacheError), self.write_lock, self.index.write() as transaction:
                    self.lookups.write(transaction)

    def _stamp_if_alone(self) -> None:
        assert self._use is not None
        self._end_session()
        if self._use.exclusive(timeout=0):
            stamp(self.index_folder, btree.file_digest)
            for number in self.segments.ids():
                stamp(self.segments.path(number), btree.tree_digest)

    def _end_session(self) -> None:
        session, self._session = self._session, None  # whatever happens, it is closed once: its descriptor is reused
        if session is not None:
            session.close()

    def _release(self) -> None:
        use, self._use = self._use, None
        with ExitStack() as stack:
            if use is not None:
                stack.callback(use.close)
            if getattr(self, "write_lock", None) is not None:
                stack.callback(self.write_lock.close)
            self._end_session()

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Hold the cache exclusively; yields False when somebody else uses it."""
        assert self._use is not None
        with self.mutex:
            if self.handles > 1 or not self.segments.idle():
                yield False
                return
            if not self._use.exclusive(timeout=0):
                self._use.shared()  # a refused conversion loses the lock
                yield False
                return
            try:
                yield True
            finally:
                self._use.shared()

    def in_use_error(self) -> CacheError:
        return in_use(self.root, self.sessions_folder, self.session)


_OPEN: dict[str, Store] = {}
_OPEN_LOCK = threading.RLock()


def acquire(root: Path, *, read_only: bool, limits: Limits) -> Store:
    """The store of ``root``: opened now, or shared with other handles of this process."""
    real = os.path.realpath(root)
    with _OPEN_LOCK:
        store = _OPEN.get(real)
        if store is None:
            store = _OPEN[real] = Store(Path(real), read_only=read_only, limits=limits)
        elif store.read_only and not read_only:
            raise CacheError(f"cache {root} is already open for reading only in this process")
        store.handles += 1
        return store


def release(store: Store) -> None:
    """Give a handle back; the last one closes the store."""
    with _OPEN_LOCK:
        store.handles -= 1
        if store.handles == 0:
            _OPEN.pop(str(store.root), None)
            store.close()
