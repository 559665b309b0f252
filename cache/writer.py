"""The writer: one thread that stores blocks, records and memo rows in the order in which they were given.

A batch is one transaction of blocks for each segment it goes to, all synced, followed by one transaction of the index
that names them. So a
record never names a block that is not on the disk, and a process killed at any moment leaves at worst blocks that
nothing names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import os
import threading
import time
from types import TracebackType

import xxhash

from ninferbuild.cache import filesystem
from ninferbuild.cache.environment import OutOfSpaceError
from ninferbuild.cache.index import (
    ACTIONS,
    ACTIVE_SEGMENT,
    BLOCKS,
    DIGESTS,
    LIVE_BYTES,
    MANIFESTS,
    NUMBERS,
    PROBES,
    Transaction,
)
from ninferbuild.cache.pruning import make_room
from ninferbuild.cache.records import ActionRecord, Number, Raw, StoredAction, StoredBlock, StoredDigest
from ninferbuild.cache.store import Store
from ninferbuild.digest import block_digest
from ninferbuild.errors import CacheError

LANES = 4 if (os.cpu_count() or 1) >= 8 else 2
"""Segments that take the blocks of one large batch at the same time: each keeps a core busy."""

BATCH = 2
"""Full transactions in one batch, whatever the number of segments that share it."""

PARALLEL_BYTES = 16 << 20
"""Batches below this stay in one segment."""

_LINGER = 0.05  # seconds that a batch waits for company: each costs two syncs


@dataclass(frozen=True, slots=True)
class _Block:
    digest: bytes
    data: bytes | memoryview


@dataclass(frozen=True, slots=True)
class _Action:
    record: ActionRecord
    probe: bytes


@dataclass(frozen=True, slots=True)
class _Memo:
    items: tuple[tuple[bytes, bytes], ...]


_Item = _Block | _Action | _Memo


def memo_key(key: bytes) -> bytes:
    """LMDB keys have at most 511 bytes; longer memo keys are stored by their hash."""
    return key if len(key) <= 64 else xxhash.xxh3_128_digest(key)


def _active(lane: int) -> bytes:
    """The row that holds the number of the segment which takes the new blocks of one lane."""
    return ACTIVE_SEGMENT if lane == 0 else ACTIVE_SEGMENT + b".%d" % lane


def _divided(blocks: dict[bytes, bytes | memoryview]) -> list[list[tuple[bytes, bytes | memoryview]]]:
    """Blocks in up to :data:`LANES` groups of about equal size; small batches stay together."""
    items = sorted(blocks.items(), key=lambda item: len(item[1]), reverse=True)
    if not items:
        return []
    lanes = min(LANES, len(items))
    if sum(len(data) for _, data in items) < PARALLEL_BYTES:
        lanes = 1
    groups: list[list[tuple[bytes, bytes | memoryview]]] = [[] for _ in range(lanes)]
    sizes = [0] * lanes
    for digest, data in items:
        lane = sizes.index(min(sizes))
        groups[lane].append((digest, data))
        sizes[lane] += len(data)
    return groups


class Writer:
    """Use as a context manager; leaving it without an error flushes. All methods may be called from any thread.

    Raises:
        CacheError: from any method, once a write has failed. What was stored before stays.
    """

    def __init__(self, store: Store, max_size: int | None):
        self._store = store
        self._max_size = max_size
        self._queue: deque[_Item] = deque()
        self._queued_bytes = 0  # in the queue and in the batch that is being written
        self._accepted = 0
        self._finished = 0
        self._urgent = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(max_workers=max(1, LANES - 1), thread_name_prefix="ninferbuild-cache-lane")
        self._thread = threading.Thread(target=self._run, name="ninferbuild-cache-writer", daemon=True)
        self._thread.start()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def block(self, data: bytes | memoryview) -> bytes:
        """Queue one block of a payload; returns its digest, computed in the calling thread.

        ``bytes`` and read-only views are kept by reference and must not change before the next :meth:`flush`; a
        writable view is copied. Waits while too many bytes are in flight.
        """
        if isinstance(data, memoryview):
            data = data.cast("B") if data.readonly else bytes(data)
        digest = block_digest(data)
        self._append(_Block(digest, data), len(data))
        return digest

    def action(self, record: ActionRecord, probe: bytes) -> None:
        """Queue the record of an action whose blocks were all queued before."""
        self._append(_Action(record, probe), 0)

    def remember(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        """Queue rows of the memo: (memo key, digest)."""
        if items:
            self._append(_Memo(tuple(items)), 0)

    def flush(self) -> None:
        """Wait until everything queued so far is on the disk."""
        with self._changed:
            target = self._accepted
            self._urgent = max(self._urgent, target)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._finished >= target or self._failure is not None)
            self._raise_failure()

    def close(self) -> None:
        """End the thread after what is queued has been written. Raises nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._pool.shutdown()

    def _raise_failure(self) -> None:
        failure = self._failure
        if isinstance(failure, CacheError):
            raise type(failure)(str(failure)) from failure
        if failure is not None:
            raise CacheError(str(failure)) from failure

    def _append(self, item: _Item, size: int) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._queued_bytes == 0
                    or self._queued_bytes + size <= self._store.limits.queue_bytes
                    or self._failure is not None
                )
            )
            self._raise_failure()
            if self._closing:
                raise CacheError("the cache writer is closed")
            self._queue.append(item)
            self._queued_bytes += size
            self._accepted += 1
            self._changed.notify_all()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            batch = self._next_batch()
            if not batch:
                return
            try:
                self._write_if_room(batch)
            except BaseException as error:  # handed to whoever calls next
                with self._changed:
                    self._failure = error
                    self._queue.clear()
                    self._queued_bytes = 0
                    self._changed.notify_all()
                return
            with self._changed:
                self._finished += len(batch)
                self._queued_bytes -= sum(len(item.data) for item in batch if isinstance(item, _Block))
                self._changed.notify_all()

    def _next_batch(self) -> list[_Item]:
        """As much of the queue as one transaction may hold; nothing when the writer is closed and the queue empty."""
        limit = BATCH * self._store.limits.transaction_bytes
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            self._changed.wait_for(
                lambda: self._closing or self._urgent > self._finished or self._queued_bytes >= limit, timeout=_LINGER
            )
            batch: list[_Item] = []
            size = 0
            while self._queue:
                item = self._queue[0]
                if isinstance(item, _Block):
                    if batch and size + len(item.data) > limit:
                        break
                    size += len(item.data)
                batch.append(self._queue.popleft())
            return batch

    def _write_if_room(self, batch: list[_Item]) -> None:
        """Write the batch. Without room for them memo rows alone are left out: what they say is then read again."""
        try:
            self._write(batch)
        except OutOfSpaceError:
            if not all(isinstance(item, _Memo) for item in batch):
                raise

    def _write(self, batch: list[_Item]) -> None:
        store = self._store
        given = {item.digest: item.data for item in batch if isinstance(item, _Block)}
        with store.write_lock:
            store.segments.forget_dropped()
            missing = self._missing(given)
            size = sum(len(data) for data in missing.values())
            if self._max_size is not None and size:
                make_room(store, size, self._max_size)
                missing = self._missing(given)  # what was there may have gone with the actions that made room
                size = sum(len(data) for data in missing.values())
            self._require_space(size)
            stored = self._store_blocks(missing)
            with store.index.write() as transaction:
                store.write_leases(transaction)
                for digest, data in given.items():
                    if digest in missing:
                        stale = transaction.get(BLOCKS, digest, StoredBlock)
                        transaction.add(LIVE_BYTES, -stale.length if stale is not None else 0)
                        transaction.put(BLOCKS, digest, StoredBlock(stored[digest], len(data), store.session))
                    else:
                        self._adopt(transaction, digest)
                transaction.add(LIVE_BYTES, size)
                for item in batch:
                    if isinstance(item, _Action):
                        self._put_action(transaction, item)
                    elif isinstance(item, _Memo):
                        day = int(time.time() // 86400)
                        for key, digest in item.items:
                            transaction.put(DIGESTS, memo_key(key), StoredDigest(digest, day))
                for lane, segment in enumerate(dict.fromkeys(stored.values())):
                    transaction.put(NUMBERS, _active(lane), Number(segment))
        store.found_again(item.record.key for item in batch if isinstance(item, _Action))

    def _missing(self, given: dict[bytes, bytes | memoryview]) -> dict[bytes, bytes | memoryview]:
        store = self._store
        missing = {}
        with store.index.read() as transaction:
            for digest, data in given.items():
                row = transaction.get(BLOCKS, digest, StoredBlock)
                if row is None or row.length != len(data) or not store.segments.exists(row.segment):
                    missing[digest] = data
        return missing

    def _require_space(self, size: int) -> None:
        free = filesystem.free_bytes(self._store.root)
        if size + self._store.limits.margin_bytes > free:
            raise OutOfSpaceError(
                f"no space left for the cache {self._store.root}: {free} bytes are free, {size} are to be stored "
                f"with a reserve of {self._store.limits.margin_bytes}; "
                "make room (`ninferbuild cache prune --max-size SIZE` may), or choose another disk with "
                "NINFERBUILD_CACHE or [cache] dir"
            )

    def _store_blocks(self, missing: dict[bytes, bytes | memoryview]) -> dict[bytes, int]:
        """Store blocks; the segment of each. Large batches go to several segments at once: copying into one
        environment keeps one core busy, which is slower than the disks that caches are put on."""
        groups = _divided(missing)
        with self._store.index.read() as transaction:
            segments = [int(transaction.number(_active(lane))) for lane in range(len(groups))]
        taken = max([0, *segments, *self._store.segments.ids()])
        for lane, segment in enumerate(segments):
            if self._is_full(segment) or segment in segments[:lane]:
                taken += 1
                segments[lane] = taken
        writes = [
            self._pool.submit(self._store.segments.put, segment, group)
            for segment, group in zip(segments[1:], groups[1:], strict=True)
        ]
        try:
            if groups:
                self._store.segments.put(segments[0], groups[0])
        finally:
            for write in writes:
                write.exception()  # wait: nothing may still be writing when the lock is released
        for write in writes:
            write.result()
        return {digest: segment for segment, group in zip(segments, groups, strict=True) for digest, _ in group}

    def _is_full(self, segment: int) -> bool:
        segments = self._store.segments
        return not segments.on_disk(segment) or segments.used_bytes(segment) >= self._store.limits.segment_bytes

    def _adopt(self, transaction: Transaction, digest: bytes) -> None:
        """Mark a block that is there already as needed by this process, until a record names it."""
        row = transaction.get(BLOCKS, digest, StoredBlock)
        if row is not None and row.session != self._store.session:
            transaction.put(BLOCKS, digest, StoredBlock(row.segment, row.length, self._store.session))

    def _put_action(self, transaction: Transaction, item: _Action) -> None:
        store, record = self._store, item.record
        for digest, length in record.blocks:
            if not transaction.has(BLOCKS, digest):
                raise CacheError(
                    f"a block of {length} bytes of action {record.key.hex()} was never stored, or was lost meanwhile"
                )
        stored = StoredAction(
            record.kind,
            record.method,
            record.format,
            record.blocks,
            record.length,
            record.digest,
            record.auxiliaries,
            record.seconds,
            record.source_bytes,
            record.made_by,
            record.deps,
            store.session,
            time.time(),
        )
        transaction.put(ACTIONS, record.key, stored)
        transaction.put(MANIFESTS, record.key, Raw(record.manifest.encode()))
        if item.probe:
            transaction.put(PROBES, item.probe, Number(time.time()))
