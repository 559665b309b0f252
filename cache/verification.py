"""Checking everything that the cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import lmdb

from ninferbuild.cache import pages
from ninferbuild.cache.environment import suspect, walk
from ninferbuild.cache.index import (
    ACTIONS,
    BLOCKS,
    LIVE_BYTES,
)
from ninferbuild.cache.records import (
    StoredAction,
    StoredBlock,
)
from ninferbuild.cache.store import Store
from ninferbuild.digest import block_digest
from ninferbuild.errors import CacheDamagedError, CacheError


@dataclass(frozen=True)
class VerifyResult:
    """What was checked and found.

    Attributes:
        actions, blocks, stored_bytes: what was checked.
        problems: a line each; empty when all is well.
        damaged_keys: actions that cannot be served.
        repaired: whether what was found has been dropped.
    """

    actions: int
    blocks: int
    stored_bytes: int
    problems: tuple[str, ...]
    damaged_keys: tuple[bytes, ...]
    repaired: bool


def verify(store: Store, *, repair: bool = False, progress: Callable[[int], None] | None = None) -> VerifyResult:
    """Check the trees, every record and every block.

    Args:
        repair: drop what is damaged; the actions run again when they are needed.
        progress: called with the bytes checked since the last call.

    A damaged tree cannot be repaired while it is open: the next process that opens the cache alone sets it aside.
    """
    problems = list(_damaged_trees(store, repair=repair))
    try:
        with store.index.read() as transaction:
            bad_rows = list(transaction.bad_rows())
            problems += [f"a record of table {table.decode()} is damaged: {key.hex()}" for table, key in bad_rows]
            blocks = {key: row for key, row in transaction.items(BLOCKS, StoredBlock) if row is not None}
            actions = {key: row for key, row in transaction.items(ACTIONS, StoredAction) if row is not None}
            size = int(transaction.number(LIVE_BYTES))
    except CacheDamagedError as error:
        return VerifyResult(0, 0, 0, (*problems, str(error)), (), repaired=False)
    bad_blocks = _bad_blocks(store, blocks, progress)
    problems += [f"block {digest.hex()}: {reason}" for digest, reason in bad_blocks.items()]
    damaged = []
    for key, action in actions.items():
        if any(digest not in blocks or digest in bad_blocks for digest, _ in action.blocks):
            damaged.append(key)
            problems.append(f"action {key.hex()} ({action.method}, {action.format}) misses a part of its payload")
    stored = sum(row.length for row in blocks.values())
    if size != stored:
        problems.append(f"the index counts {size} bytes of blocks, there are {stored}")
    if repair and problems:
        _repair(store, bad_rows, bad_blocks, damaged)
    return VerifyResult(len(actions), len(blocks), stored, tuple(problems), tuple(damaged), repair and bool(problems))


def _damaged_trees(store: Store, *, repair: bool) -> Iterator[str]:
    """The faults of the environments' pages. To repair them is to note them: the next open sets the environment aside
    and keeps what can be read of it.
    """
    with store.write_lock_if_any():
        folders = [store.index_folder, *(store.segments.path(number) for number in store.segments.ids())]
        for folder in folders:
            reason = walk(folder)
            if reason is not None:
                if repair:
                    suspect(folder)
                yield f"{folder.relative_to(store.root)}: {reason}"


def _bad_blocks(
    store: Store, blocks: dict[bytes, StoredBlock], progress: Callable[[int], None] | None
) -> dict[bytes, str]:
    bad: dict[bytes, str] = {}
    by_segment: dict[int, list[bytes]] = {}
    for digest, row in blocks.items():
        by_segment.setdefault(row.segment, []).append(digest)
    for number, digests in by_segment.items():
        if not store.segments.exists(number):
            bad.update(dict.fromkeys(digests, f"segment {number:04d} is missing"))
            continue
        try:
            with store.segments.reader(number) as snapshot:
                for digest in digests:
                    data = snapshot.get(digest)
                    if data is None:
                        bad[digest] = f"not in segment {number:04d}"
                        continue
                    if len(data) != blocks[digest].length or block_digest(data) != digest:
                        bad[digest] = f"its bytes in segment {number:04d} differ from its digest"
                    if progress is not None:
                        progress(len(data))
                    pages.drop(data)
                    data.release()
        except (lmdb.Error, CacheError) as error:
            for digest in digests:
                bad.setdefault(digest, f"segment {number:04d} cannot be read: {error}")
    return bad


def _repair(store: Store, rows: list[tuple[bytes, bytes]], bad_blocks: dict[bytes, str], damaged: list[bytes]) -> None:
    with store.write_lock, store.index.write() as transaction:
        for table, key in rows:
            transaction.delete(table, key)
        for digest in bad_blocks:
            transaction.delete(BLOCKS, digest)
        for key in damaged:
            transaction.delete(ACTIONS, key)
        transaction.recount_blocks()
