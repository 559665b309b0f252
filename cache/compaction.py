"""Emptying and compacting the cache."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
import os
import shutil

from ninferbuild.cache import btree, filesystem
from ninferbuild.cache.environment import STAMP_FILE, OutOfSpaceError
from ninferbuild.cache.index import BUILDS, DIGESTS, PROBES
from ninferbuild.cache.inventory import take_inventory
from ninferbuild.cache.pruning import drop, sweep_rows
from ninferbuild.cache.reclaim import disk_bytes, reclaim
from ninferbuild.cache.store import Store
from ninferbuild.errors import CacheError

_COMPACT_SLACK = 1.02


@dataclass(frozen=True)
class SpaceResult:
    """What emptying or compacting did.

    Attributes:
        disk_before, disk_after: bytes that the cache occupies.
        kept: actions that stayed because builds in progress need them.
        obstacles: why space was not given back, a line each.
    """

    disk_before: int
    disk_after: int
    kept: int = 0
    obstacles: tuple[str, ...] = ()


def clear(store: Store) -> SpaceResult:
    """Remove everything. While others use the cache, everything but what their builds in progress need.

    Works on a full disk: when the cache is nobody else's, only names are removed; otherwise holes are made first.
    """
    before = disk_bytes(store)
    remove_set_aside(store)
    with store.alone() as alone:
        if alone:
            _remove_everything(store)
            return SpaceResult(before, disk_bytes(store))
    with store.write_lock:
        store.index.reader_check()
        with store.index.read() as transaction:
            inventory = take_inventory(store, transaction)
        victims = inventory.actions.keys() - inventory.leased
        drop(store, inventory, victims, inventory.released_by(victims) | inventory.unreferenced())
        for table in (PROBES, DIGESTS, BUILDS):
            with store.index.write() as transaction:
                transaction.clear(table)
        sweep_rows(store)
        done = reclaim(store)
    return SpaceResult(before, disk_bytes(store), len(inventory.actions) - len(victims), tuple(done.obstacles))


def _remove_everything(store: Store) -> None:
    store.close_environments()
    try:
        for folder in (store.index_folder, store.segments_folder):
            doomed = folder.with_name(folder.name + ".cleared")
            shutil.rmtree(doomed, ignore_errors=True)
            with suppress(FileNotFoundError):
                folder.rename(doomed)
                shutil.rmtree(doomed)
    finally:
        store.reopen_environments()


def remove_set_aside(store: Store) -> None:
    """Remove the damaged environments that were set aside."""
    for folder in (store.root, store.segments_folder):
        for broken in folder.glob("*.broken-*"):
            shutil.rmtree(broken, ignore_errors=True)


def compact(store: Store) -> SpaceResult:
    """Give back all space that nothing needs: rewrite segments one at a time, and the index.

    Raises:
        CacheError: another process uses the cache; the message names it.
    """
    before = disk_bytes(store)
    remove_set_aside(store)
    with store.alone() as alone:
        if not alone:
            raise store.in_use_error()
        with store.write_lock:
            with store.index.read() as transaction:
                inventory = take_inventory(store, transaction)
            drop(store, inventory, (), inventory.unreferenced())
            sweep_rows(store)
            done = reclaim(store, slack=_COMPACT_SLACK)
            obstacles = list(done.obstacles)
            try:
                _compact_index(store)
            except (OutOfSpaceError, OSError) as error:
                obstacles.append(f"the index was not rewritten: {error}")
    return SpaceResult(before, disk_bytes(store), obstacles=tuple(obstacles))


def _compact_index(store: Store) -> None:
    data = store.index_folder / btree.DATA_FILE
    if filesystem.free_bytes(store.root) < data.stat().st_size + store.limits.margin_bytes:
        raise OutOfSpaceError("no free space for a second copy of it")
    copy = store.root / "index.compact"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    try:
        store.index.copy_compact(copy)
        fresh = copy / btree.DATA_FILE
        descriptor = os.open(fresh, os.O_RDWR | os.O_CLOEXEC)
        try:
            btree.read_meta(descriptor)
            os.fsync(descriptor)
        except btree.DamagedError as error:
            raise CacheError(f"the copy of the index is damaged: {error}") from error
        finally:
            os.close(descriptor)
        store.close_environments()
        try:
            (store.index_folder / STAMP_FILE).unlink(missing_ok=True)
            fresh.replace(data)
            filesystem.sync_directory(store.index_folder)
        finally:
            store.reopen_environments()
    finally:
        shutil.rmtree(copy, ignore_errors=True)
