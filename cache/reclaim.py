"""Giving disk space back: holes in place of dead blocks, whole segments, and segments rewritten without the dead.

Holes come first. They need no free space, so they work on a full disk, and they take effect at once even while other
processes have the file mapped; an unlinked segment lives on until the last of them lets go of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
import os

import lmdb

from ninferbuild.cache import btree, filesystem
from ninferbuild.cache.index import ACTIVE_SEGMENT, BLOCKS, LIVE_BYTES, NUMBERS
from ninferbuild.cache.locks import momentarily_exclusive
from ninferbuild.cache.records import Number, StoredBlock
from ninferbuild.cache.store import Store
from ninferbuild.digest import block_digest
from ninferbuild.errors import CacheError

READER_PATIENCE = 2.0
"""Seconds to wait for views that may look at what is given back."""

SLACK = 1.2
"""Segments are rewritten when they occupy more than this multiple of the live bytes in them."""


@dataclass
class Reclaimed:
    """What was done, and why not more."""

    dropped_segments: int = 0
    rewritten_segments: int = 0
    obstacles: list[str] = field(default_factory=list)


def reclaim(store: Store, *, rewrite: bool = True, slack: float = SLACK) -> Reclaimed:
    """Give back the space of every block that the index does not name. The caller holds the write lock.

    Args:
        rewrite: also rewrite segments in which holes do not help enough: many small blocks, or no holes at all.
    """
    done = Reclaimed()
    store.segments.forget_dropped()
    live = _live_blocks(store)
    anywhere = {digest for digests in live.values() for digest in digests}
    for number in store.segments.ids():
        _punch_dead(store, number, live.get(number, {}), anywhere, done)
        if not live.get(number):
            store.segments.drop(number)
            done.dropped_segments += 1
    if rewrite:
        _rewrite_wasteful(store, live, slack, done)
    return done


def _live_blocks(store: Store) -> dict[int, dict[bytes, int]]:
    """segment → digest → length, of what the index names."""
    live: dict[int, dict[bytes, int]] = defaultdict(dict)
    with store.index.read() as transaction:
        for digest, row in transaction.items(BLOCKS, StoredBlock):
            if row is not None:
                live[row.segment][digest] = row.length
    return live


def _punch_dead(store: Store, number: int, here: Mapping[bytes, int], anywhere: set[bytes], done: Reclaimed) -> None:
    try:
        dead = [value for value in store.segments.values(number) if value.key not in here]
    except (OSError, btree.DamagedError) as error:
        done.obstacles.append(f"segment {number:04d} cannot be read: {error}")
        return
    if dead:
        punch(store, number, dead, done, moved=any(value.key in anywhere for value in dead))


def punch(store: Store, number: int, dead: Iterable[btree.Value], done: Reclaimed, *, moved: bool) -> bool:
    """Make holes of dead blocks unless somebody may be looking at them; whether they are holes now.

    Args:
        moved: copies of some are live elsewhere, so that a build with a lease may be looking at them too.
    """
    with ExitStack() as stack:
        for name in ("readers-unleased", "readers") if moved else ("readers-unleased",):
            if not stack.enter_context(momentarily_exclusive(store.lock_path(name), READER_PATIENCE)):
                done.obstacles.append(f"payloads are being read; space in segment {number:04d} is given back later")
                return False
        return store.segments.punch(number, dead)


def release_blocks(store: Store, digests: set[bytes]) -> bool:
    """Make holes of blocks that are about to be dropped, so that a full disk has room for dropping them.

    If the process dies before the index has forgotten them they are found damaged on the next read, and made again.
    Whether any space was given back.
    """
    with store.index.read() as transaction:
        rows = {digest: transaction.get(BLOCKS, digest, StoredBlock) for digest in digests}
    before = filesystem.free_bytes(store.root)
    for number in {row.segment for row in rows.values() if row is not None}:
        try:
            values = store.segments.values(number)
        except (OSError, btree.DamagedError):
            continue
        dead = [v for v in values if v.key in rows and (row := rows[v.key]) is not None and row.segment == number]
        punch(store, number, dead, Reclaimed(), moved=False)
    return filesystem.free_bytes(store.root) > before


def _rewrite_wasteful(store: Store, live: Mapping[int, Mapping[bytes, int]], slack: float, done: Reclaimed) -> None:
    sizes = {number: store.segments.allocated_bytes(number) for number in store.segments.ids()}
    needed = {number: sum(live.get(number, {}).values()) for number in sizes}
    if sum(sizes.values()) <= slack * sum(needed.values()):
        return
    for number in sorted(sizes, key=lambda one: sizes[one] - needed[one], reverse=True):
        if sizes[number] > slack * needed[number] and not rewrite_segment(store, number, done):
            return


def rewrite_segment(store: Store, number: int, done: Reclaimed) -> bool:
    """Copy the live blocks of a segment to others and drop it. The caller holds the write lock.

    Needs free space for the live bytes of this one segment; False, with an obstacle noted, when that is not there.
    Blocks that turn out damaged are forgotten; the actions that name them are then incomplete and run again.
    """
    with store.index.read() as transaction:
        rows = {
            digest: row
            for digest, row in transaction.items(BLOCKS, StoredBlock)
            if row is not None and row.segment == number
        }
        active = int(transaction.number(ACTIVE_SEGMENT))
    size = sum(row.length for row in rows.values())
    if filesystem.free_bytes(store.root) < size + store.limits.margin_bytes:
        done.obstacles.append(f"no room to rewrite segment {number:04d}: {size} bytes are needed")
        return False
    target = active
    if target == number or not store.segments.on_disk(target):
        target = max([active, *store.segments.ids()]) + 1
    digests = sorted(rows)
    while digests:
        if store.segments.used_bytes(target) >= store.limits.segment_bytes:
            target = max([target, *store.segments.ids()]) + 1
        batch: list[bytes] = []
        total = 0
        while digests and (not batch or total + rows[digests[-1]].length <= store.limits.transaction_bytes):
            digest = digests.pop()
            batch.append(digest)
            total += rows[digest].length
        _move(store, number, target, {digest: rows[digest] for digest in batch})
    with momentarily_exclusive(store.lock_path("readers"), READER_PATIENCE) as nobody_reads:
        if nobody_reads:
            try:
                store.segments.punch(number, store.segments.values(number))
            except (OSError, btree.DamagedError) as error:
                done.obstacles.append(f"segment {number:04d} cannot be read: {error}")
        store.segments.drop(number)  # who is looking at it still can
    done.rewritten_segments += 1
    return True


def _move(store: Store, source: int, target: int, rows: Mapping[bytes, StoredBlock]) -> None:
    good: list[bytes] = []
    try:
        with store.segments.reader(source) as snapshot:
            blocks: list[tuple[bytes, memoryview]] = []
            for digest in rows:
                data = snapshot.get(digest)
                if data is not None and block_digest(data) == digest:
                    blocks.append((digest, data))
                    good.append(digest)
            store.segments.put(target, blocks)
            for _, data in blocks:
                data.release()
    except lmdb.Error as error:
        raise CacheError(f"segment {source:04d} cannot be read: {error}; run `ninferbuild cache verify`") from error
    with store.index.write() as transaction:
        for digest in good:
            transaction.put(BLOCKS, digest, StoredBlock(target, rows[digest].length, rows[digest].session))
        for digest in rows.keys() - set(good):
            transaction.delete(BLOCKS, digest)
            transaction.add(LIVE_BYTES, -rows[digest].length)
        transaction.put(NUMBERS, ACTIVE_SEGMENT, Number(target))


def disk_bytes(store: Store) -> int:
    """Bytes that index and segments occupy; holes do not count."""
    total = 0
    for folder in (store.index_folder, store.segments_folder):
        if os.path.isdir(folder):
            total += filesystem.allocated_bytes(folder)
    return total
