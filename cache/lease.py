"""Leases: the keys that a build needs, which pruning leaves alone while the build's process lives."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from ninferbuild.cache.index import LEASES
from ninferbuild.cache.records import StoredLease, pack_keys
from ninferbuild.cache.store import Store


class Lease:
    """Use as a context manager around a build. What the process makes itself is protected without a lease."""

    def __init__(self, store: Store, target: str):
        self._store = store
        self._target = target
        self._rows: list[bytes] = []
        self._keys: set[bytes] = set()

    def __enter__(self) -> Lease:
        return self

    def add(self, keys: Iterable[bytes]) -> None:
        """Protect ``keys`` from now on: one transaction a call, so pass many at once. Add them before looking them up.

        Raises:
            CacheError: the lease could not be written.
        """
        store = self._store
        new = sorted(set(keys) - self._keys)
        if not new or store.read_only:
            return
        with store.write_lock, store.index.write() as transaction:
            row = store.session + store.next_number().to_bytes(4, "big")
            transaction.put(LEASES, row, StoredLease(store.session, self._target, pack_keys(new)))
        self._rows.append(row)
        self._keys.update(new)
        store.hold(new)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        store = self._store
        store.let_go(self._keys)
        self._keys = set()
        if not self._rows:
            return
        with store.write_lock, store.index.write() as transaction:
            for row in self._rows:
                transaction.delete(LEASES, row)
            store.write_hits(transaction)
        self._rows = []
