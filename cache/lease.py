"""Leases: what a build needs, which pruning leaves alone while the build's process lives."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
import time
from types import TracebackType

from ninferbuild.cache.environment import OutOfSpaceError
from ninferbuild.cache.index import LEASES
from ninferbuild.cache.records import StoredLease, pack_keys
from ninferbuild.cache.store import Store


class Lease:
    """Use as a context manager around a build.

    It protects the keys added to it, and the actions and blocks that this process stores while it lasts.
    """

    def __init__(self, store: Store, target: str):
        self._store = store
        self._target = target
        self._since = 0.0
        self._rows: list[bytes] = []
        self._keys: set[bytes] = set()

    def __enter__(self) -> Lease:
        if not self._store.read_only:
            self._since = time.time()
            row = self._new_row()
            self._store.add_pending_lease(row, self._target, self._since)
        return self

    def _new_row(self) -> bytes:
        row = self._store.session + self._store.next_number().to_bytes(4, "big")
        self._rows.append(row)
        return row

    def add(self, keys: Iterable[bytes]) -> None:
        """Protect ``keys`` from now on: one transaction a call, so pass many at once. Add them before looking them up.

        On a full disk only this process sees the protection: what another one prunes is then made again.

        Raises:
            CacheError: the lease could not be written.
        """
        store = self._store
        new = sorted(set(keys) - self._keys)
        if not new:
            return
        if not store.read_only:
            try:
                with store.write_lock, store.index.write() as transaction:
                    store.write_leases(transaction)
                    lease = StoredLease(store.session, self._target, self._since, pack_keys(new))
                    transaction.put(LEASES, self._new_row(), lease)
            except OutOfSpaceError:
                store.add_pending_lease(self._rows[0], self._target, self._since)
        self._keys.update(new)
        store.hold(new)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        store = self._store
        store.let_go(self._keys)
        self._keys = set()
        rows, self._rows = self._rows, []
        written = [row for row in rows if not store.remove_pending_lease(row)]
        if written:
            # What a full disk does not let go ends with the process.
            with suppress(OutOfSpaceError), store.write_lock, store.index.write() as transaction:
                for row in written:
                    transaction.delete(LEASES, row)
                store.lookups.write(transaction)
