"""Pruning: which actions go, and how their rows and blocks go.

Least recently used first. What a build in progress needs never goes. What the last build of a live target uses goes
only when told to: with ``keep_builds=0``, with ``target`` alone, or, after everything else, when ``max_size`` cannot
be kept otherwise. Manifests stay as long as a remembered build names their key, so that explain still works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
import time

from ninferbuild.cache.builds import used_keysets
from ninferbuild.cache.environment import OutOfSpaceError
from ninferbuild.cache.index import (
    ACTIONS,
    BLOCKS,
    DIGESTS,
    KEYSETS,
    LEASES,
    LIVE_BYTES,
    MANIFESTS,
    PROBES,
    RECENCY,
    Transaction,
)
from ninferbuild.cache.inventory import Inventory, take_inventory
from ninferbuild.cache.liveness import IsLive
from ninferbuild.cache.liveness import is_live as default_is_live
from ninferbuild.cache.reclaim import Reclaimed, disk_bytes, reclaim, release_blocks
from ninferbuild.cache.records import Number, Raw, StoredBlock, StoredDigest, unpack_keys
from ninferbuild.cache.store import Store
from ninferbuild.errors import CacheError

_BATCH = 512
"""Rows deleted in one transaction: bounds the pages that it needs."""

_LOW_WATER = 0.9
"""Keeping ``max_size`` during a build frees down to this fraction, so that it is rarely needed."""

MEMO_DAYS = 180
"""Age at which pruning drops rows of the memo and probes."""


@dataclass(frozen=True)
class PruneResult:
    """What a pruning did, or with ``dry_run`` would do.

    Attributes:
        keys: the actions that went.
        freed_bytes: payload bytes that they alone needed, and garbage.
        live_bytes: payload bytes left.
        leased: actions that were kept because a build in progress needs them.
        protected: actions that were kept because the last build of a live target uses them.
        disk_before, disk_after: bytes that the cache occupies.
        obstacles: why space was not given back, a line each.
    """

    keys: tuple[bytes, ...]
    freed_bytes: int
    live_bytes: int
    leased: int
    protected: int
    disk_before: int
    disk_after: int
    obstacles: tuple[str, ...] = ()


def prune(
    store: Store,
    *,
    max_size: int | None = None,
    older_than: float | None = None,
    keep_builds: int | None = None,
    target: str | None = None,
    dry_run: bool = False,
    is_live: IsLive = default_is_live,
) -> PruneResult:
    """Drop actions; without any criterion only what nothing needs.

    Args:
        max_size: keep at most these bytes of payload.
        older_than: drop what was last used more than these seconds ago.
        keep_builds: what the last so many builds of live targets use stays, whatever the other criteria say; alone,
            or with ``target`` only, nothing else stays.
        target: only what this target made or used; alone: all of that.
        is_live: whether the target of a build is live.
    """
    before = disk_bytes(store)
    with store.write_lock:
        store.index.reader_check()
        with suppress(OutOfSpaceError), store.index.write() as transaction:
            store.lookups.write(transaction)
        with store.index.read() as transaction:
            inventory = take_inventory(store, transaction)
        kept = inventory.last_builds(1 if keep_builds is None else keep_builds, is_live)
        alone = target is not None and max_size is None and older_than is None and keep_builds is None
        if alone:
            kept.pop(str(target), None)
        protected = {key for keys in kept.values() for key in keys}
        scope = inventory.actions.keys() if target is None else inventory.keys_of_target(target)
        free = [key for key in scope if key not in inventory.leased]
        free.sort(key=inventory.used)
        victims = set()
        if older_than is not None:
            limit = time.time() - older_than
            victims = {key for key in free if inventory.used(key) < limit} - protected
        elif alone or (keep_builds is not None and max_size is None):
            victims = set(free) - protected
        garbage = inventory.unreferenced()
        if max_size is not None:
            ordered = [key for key in free if key not in protected]
            if keep_builds is None:
                ordered += [key for key in free if key in protected]
            victims |= _to_fit(inventory, ordered, victims, garbage, max_size)
        released = inventory.released_by(victims) | garbage
        stored = sum(row.length for row in inventory.blocks.values())
        freed = sum(inventory.blocks[digest].length for digest in released)
        done = Reclaimed()
        if not dry_run:
            drop(store, inventory, victims, released)
            sweep_rows(store)
            done = reclaim(store)
    return PruneResult(
        tuple(sorted(victims, key=inventory.used)),
        freed,
        stored - freed,
        len(inventory.leased & set(scope)),
        len((protected & inventory.actions.keys()) - victims),
        before,
        before if dry_run else disk_bytes(store),
        tuple(done.obstacles),
    )


def _to_fit(
    inventory: Inventory, ordered: Sequence[bytes], gone: set[bytes], garbage: set[bytes], max_size: int
) -> set[bytes]:
    """The first of ``ordered`` that have to go, besides ``gone``, until at most ``max_size`` bytes are left."""
    size = sum(row.length for digest, row in inventory.blocks.items() if digest not in garbage)
    counts = inventory.references.copy()
    victims: set[bytes] = set()

    def take(key: bytes) -> int:
        freed = 0
        for digest in {digest for digest, _ in inventory.actions[key].blocks}:
            counts[digest] -= 1
            row = inventory.blocks.get(digest)
            if counts[digest] == 0 and row is not None and row.session not in inventory.building:
                freed += row.length
        return freed

    for key in gone:
        size -= take(key)
    for key in ordered:
        if size <= max_size:
            break
        if key not in gone:
            size -= take(key)
            victims.add(key)
    return victims


def make_room(store: Store, incoming: int, max_size: int) -> None:
    """Keep ``max_size`` before ``incoming`` bytes are written. The caller holds the write lock.

    What builds in progress need stays; if that alone is too much the bound is exceeded, which a notice says.
    """
    with store.index.read() as transaction:
        size = int(transaction.number(LIVE_BYTES))
        if size + incoming <= max_size or size < store.crowded:
            return
        inventory = take_inventory(store, transaction)
    garbage = inventory.unreferenced()
    protected = {key for keys in inventory.last_builds(1, default_is_live).values() for key in keys}
    free = sorted((key for key in inventory.actions if key not in inventory.leased), key=inventory.used)
    ordered = [key for key in free if key not in protected] + [key for key in free if key in protected]
    victims = _to_fit(inventory, ordered, set(), garbage, max(0, int(max_size * _LOW_WATER) - incoming))
    drop(store, inventory, victims, inventory.released_by(victims) | garbage)
    if victims or garbage:
        reclaim(store, rewrite=False)
    with store.index.read() as transaction:
        size = int(transaction.number(LIVE_BYTES))
    if size + incoming > max_size:
        if not store.crowded:
            store.notices.append(f"the build in progress needs more than the cache's max_size of {max_size} bytes")
        store.crowded = int(size * 1.05) + 1
    else:
        store.crowded = 0


def remove(store: Store, key: bytes) -> bool:
    """Drop one action. Raises :class:`CacheError` when a build in progress needs it."""
    with store.write_lock:
        with store.index.read() as transaction:
            inventory = take_inventory(store, transaction)
        if key not in inventory.actions:
            return False
        if key in inventory.leased:
            raise CacheError(f"action {key.hex()} is needed by a build in progress")
        drop(store, inventory, [key], inventory.released_by([key]))
        reclaim(store, rewrite=False)
    return True


def drop(store: Store, inventory: Inventory, victims: Iterable[bytes], released: set[bytes]) -> None:
    """Delete the rows of actions and blocks. On a full disk the space of the blocks is given back first."""
    keys = list(victims)
    blocks = list(released)
    sessions = store.live_sessions()

    def delete(transaction: Transaction, some_keys: list[bytes], some_blocks: list[bytes]) -> None:
        for key in some_keys:
            transaction.delete(ACTIONS, key)
            transaction.delete(RECENCY, key)
        freed = 0
        for digest in some_blocks:
            row = transaction.get(BLOCKS, digest, StoredBlock)
            freed += row.length if row is not None else 0
            transaction.delete(BLOCKS, digest)
        transaction.add(LIVE_BYTES, -freed)

    def delete_dead_leases(transaction: Transaction) -> None:
        for row in transaction.keys(LEASES):
            if row[: len(store.session)] not in sessions:
                transaction.delete(LEASES, row)

    work = [(keys[start : start + _BATCH], list[bytes]()) for start in range(0, len(keys), _BATCH)]
    work += [(list[bytes](), blocks[start : start + _BATCH]) for start in range(0, len(blocks), _BATCH)]
    released_space = False
    for some_keys, some_blocks in work:
        while True:
            try:
                with store.index.write() as transaction:
                    delete(transaction, some_keys, some_blocks)
                break
            except OutOfSpaceError:
                if released_space or not release_blocks(store, released):
                    raise
                released_space = True
    with store.index.write() as transaction:
        delete_dead_leases(transaction)
        transaction.recount_blocks()


def sweep_rows(store: Store) -> None:
    """Drop rows that serve nothing: manifests that neither an action nor a build names, old rows of the memo."""
    today = int(time.time() // 86400)
    with store.index.read() as transaction:
        used = used_keysets(transaction)
        needed: set[bytes] = set(transaction.keys(ACTIONS))
        for keyset in used:
            raw = transaction.get(KEYSETS, keyset, Raw)
            if raw is not None:
                needed.update(unpack_keys(raw.data))
        doomed = [(KEYSETS, key) for key in transaction.keys(KEYSETS) if key not in used]
        doomed += [(MANIFESTS, key) for key in transaction.keys(MANIFESTS) if key not in needed]
        doomed += [
            (DIGESTS, key)
            for key, row in transaction.items(DIGESTS, StoredDigest)
            if row is None or row.day < today - MEMO_DAYS
        ]
        doomed += [
            (PROBES, key)
            for key, row in transaction.items(PROBES, Number)
            if row is None or row.value < (today - MEMO_DAYS) * 86400
        ]
    for start in range(0, len(doomed), _BATCH):
        with store.index.write() as transaction:
            for table, key in doomed[start : start + _BATCH]:
                transaction.delete(table, key)
