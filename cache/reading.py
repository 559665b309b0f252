"""Reading payloads: views of the mapped segments, every block checked before it is handed out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import TracebackType

import lmdb

from ninferbuild.cache import pages
from ninferbuild.cache.environment import engine_error
from ninferbuild.cache.index import BLOCKS
from ninferbuild.cache.locks import FileLock
from ninferbuild.cache.records import ActionRecord, StoredBlock
from ninferbuild.cache.store import Store
from ninferbuild.digest import block_digest
from ninferbuild.errors import CacheError, PayloadLostError


class View:
    """Payloads as of now. Not for use by several threads at once; open one view in each.

    While a view is open, space that it may be looking at is not given back.
    """

    def __init__(self, store: Store):
        self._store = store
        self._stack = ExitStack()
        self._snapshots: dict[int, lmdb.Transaction[memoryview]] = {}
        self._current: memoryview | None = None
        self._holds_unleased = False

    def __enter__(self) -> View:
        self._hold("readers")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        self._snapshots.clear()
        self._stack.close()

    def _hold(self, name: str) -> None:
        try:
            lock = FileLock(self._store.lock_path(name), read_only=self._store.read_only)
        except OSError:
            if self._store.read_only:
                return  # no writer has ever been here
            raise
        self._stack.callback(lock.close)
        lock.shared()

    def blocks(self, record: ActionRecord, begin: int = 0, end: int | None = None) -> Iterator[memoryview]:
        """The payload in pieces, in order. A piece is valid until the next one is asked for or the view closes.

        Args:
            begin, end: only blocks ``[begin, end)`` of the record; all of them unless said otherwise.

        Raises:
            PayloadLostError: a block is missing or differs from its digest. It has been dropped, with the record and
                whatever other blocks of the record are no better.
        """
        if not self._holds_unleased and record.key not in self._store.leased:
            self._hold("readers-unleased")
            self._holds_unleased = True
        for digest, length in record.blocks[begin:end]:
            self._current = self._read(record, digest, length)
            yield self._current
            self._let_go()

    def _let_go(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            # The caller may have released the piece, or keep a view of it, which it must not use any more.
            with suppress(ValueError, BufferError):
                pages.drop(current)
                current.release()

    def _read(self, record: ActionRecord, digest: bytes, length: int) -> memoryview:
        reason, data = self._checked(digest, length)
        if data is not None:
            return data
        self._store.drop_damaged(record.key, [digest, *self._damaged(record, digest)], reason)
        raise PayloadLostError(record.key, reason)

    def _damaged(self, record: ActionRecord, known: bytes) -> Iterator[bytes]:
        """Digests of the damaged blocks of a record besides ``known``.

        Making the action again stores only blocks that are not there, so all that are damaged have to go.
        """
        for digest, length in dict(record.blocks).items():
            if digest == known:
                continue
            _, data = self._checked(digest, length)
            if data is None:
                yield digest
            else:
                pages.drop(data)
                data.release()

    def _checked(self, digest: bytes, length: int) -> tuple[str, memoryview | None]:
        """A block, or None and why it cannot be had."""
        try:
            reason, data = self._find(digest)
        except CacheError as error:
            return f"its segment cannot be read: {error}", None
        if data is None or (len(data) == length and block_digest(data) == digest):
            return reason, data
        return "a block differs from its digest", None

    def _find(self, digest: bytes) -> tuple[str, memoryview | None]:
        with self._store.index.read() as transaction:
            row = transaction.get(BLOCKS, digest, StoredBlock)
        if row is None:
            return "a block is missing", None
        if not self._store.segments.exists(row.segment):
            return f"segment {row.segment:04d} is missing", None
        try:
            snapshot = self._snapshots.get(row.segment)
            found = None if snapshot is None else snapshot.get(digest)
            if found is None:  # first use of the segment, or the block is newer than the snapshot
                snapshot = self._stack.enter_context(self._store.segments.reader(row.segment))
                self._snapshots[row.segment] = snapshot
                found = snapshot.get(digest)
        except lmdb.Error as error:
            raise engine_error(self._store.segments.path(row.segment), error) from error
        return "a block is missing from its segment", found
