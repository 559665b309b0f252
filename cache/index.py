"""The index: small tables in one LMDB environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lmdb

from ninferbuild.cache import records
from ninferbuild.cache.environment import engine_error, open_environment
from ninferbuild.cache.records import Number, R, Record
from ninferbuild.errors import CacheError

VERSION = 1

ACTIONS = b"actions"  # key → StoredAction
MANIFESTS = b"manifests"  # key → Raw; outlives the action
PROBES = b"probes"  # probe → Number, the time at which it was stored
DIGESTS = b"digests"  # memo key → StoredDigest
BUILDS = b"builds"  # target, number → StoredBuild
KEYSETS = b"keysets"  # digest of a key list → Raw
BLOCKS = b"blocks"  # digest → StoredBlock
LEASES = b"leases"  # session, number → StoredLease
RECENCY = b"recency"  # key → Recency
NUMBERS = b"numbers"  # name → Number

KINDS: Mapping[bytes, type[Record]] = {
    ACTIONS: records.StoredAction,
    MANIFESTS: records.Raw,
    PROBES: Number,
    DIGESTS: records.StoredDigest,
    BUILDS: records.StoredBuild,
    KEYSETS: records.Raw,
    BLOCKS: records.StoredBlock,
    LEASES: records.StoredLease,
    RECENCY: records.Recency,
    NUMBERS: Number,
}
"""What each table holds."""

TABLES = tuple(KINDS)

LIVE_BYTES = b"live_bytes"
ACTIVE_SEGMENT = b"active_segment"


class Transaction:
    """Typed access to the tables within one transaction. A record that fails its check is absent."""

    __slots__ = ("_tables", "_transaction")

    def __init__(self, transaction: lmdb.Transaction[bytes], tables: dict[bytes, lmdb._Database]):
        self._transaction = transaction
        self._tables = tables

    def get(self, table: bytes, key: bytes, kind: type[R]) -> R | None:
        stored = self._transaction.get(key, db=self._tables[table])
        return None if stored is None else records.decode(table, key, stored, kind)

    def has(self, table: bytes, key: bytes) -> bool:
        return self._transaction.get(key, db=self._tables[table]) is not None

    def items(self, table: bytes, kind: type[R], prefix: bytes = b"") -> Iterator[tuple[bytes, R | None]]:
        """(key, record) in key order; None for a record that fails its check. The table may not change meanwhile."""
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            for key, stored in cursor:
                if not key.startswith(prefix):
                    return
                yield key, records.decode(table, key, stored, kind)

    def bad_rows(self) -> Iterator[tuple[bytes, bytes]]:
        """(table, key) of every record that fails its check."""
        for table, kind in KINDS.items():
            for key, row in self.items(table, kind):
                if row is None:
                    yield table, key

    def keys(self, table: bytes, prefix: bytes = b"") -> list[bytes]:
        with self._transaction.cursor(db=self._tables[table]) as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return []
            found = []
            for key in cursor.iternext(keys=True, values=False):
                if not key.startswith(prefix):
                    break
                found.append(key)
            return found

    def count(self, table: bytes) -> int:
        return int(self._transaction.stat(db=self._tables[table])["entries"])

    def put(self, table: bytes, key: bytes, record: Record) -> None:
        self._transaction.put(key, records.encode(table, key, record), db=self._tables[table])

    def delete(self, table: bytes, key: bytes) -> bool:
        return bool(self._transaction.delete(key, db=self._tables[table]))

    def clear(self, table: bytes) -> None:
        """Delete all rows of a table."""
        self._transaction.drop(self._tables[table], delete=False)

    def number(self, name: bytes) -> float:
        stored = self.get(NUMBERS, name, Number)
        return 0.0 if stored is None else stored.value

    def recount_blocks(self) -> None:
        """Set the counter of stored bytes to what the rows of blocks add up to."""
        rows = self.items(BLOCKS, records.StoredBlock)
        self.put(NUMBERS, LIVE_BYTES, Number(sum(row.length for _, row in rows if row is not None)))

    def add(self, name: bytes, amount: float) -> None:
        if amount:
            self.put(NUMBERS, name, Number(self.number(name) + amount))


class Index:
    """The environment of the tables. ``map_size`` as for :func:`open_environment`."""

    def __init__(self, folder: Path, map_size: int, *, read_only: bool):
        self.folder = folder
        self._environment = open_environment(folder, map_size, databases=len(TABLES), read_only=read_only)
        try:
            self._tables = {
                name: self._environment.open_db(name, create=not read_only)
                for name in TABLES
                if not read_only or self._holds(name)
            }
            if len(self._tables) < len(TABLES):
                raise CacheError(f"{folder} is not a complete cache index")
            self._check_version(read_only)
        except BaseException as error:  # Ctrl-C too: the engine opens an environment once in a process
            self._environment.close()
            if isinstance(error, lmdb.Error):
                raise engine_error(folder, error) from error
            raise

    def _holds(self, name: bytes) -> bool:
        with self._environment.begin() as transaction:
            return transaction.get(name) is not None

    def _check_version(self, read_only: bool) -> None:
        with self.read() as transaction:
            found = transaction.number(b"version")
        if found not in (0, VERSION) or (found == 0 and read_only):
            raise CacheError(
                f"{self.folder} was written by another version of ninferbuild (format {found:g}, this one writes "
                f"{VERSION}); remove the cache directory or choose another one"
            )
        if found == 0:
            with self.write() as transaction:
                transaction.put(NUMBERS, b"version", Number(VERSION))

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A snapshot.

        Raises:
            CacheError: it cannot be read.
        """
        try:
            with self._environment.begin() as transaction:
                yield Transaction(transaction, self._tables)
        except lmdb.Error as error:
            raise engine_error(self.folder, error) from error

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Changes that happen together or not at all.

        Raises:
            CacheError: they could not be written; nothing changed.
        """
        try:
            with self._environment.begin(write=True) as transaction:
                yield Transaction(transaction, self._tables)
        except lmdb.Error as error:
            raise engine_error(self.folder, error) from error

    def reader_check(self) -> None:
        """Free the reader slots of dead processes, which would keep old pages from being reused."""
        self._environment.reader_check()

    def copy_compact(self, folder: Path) -> None:
        """Write a compact copy of the index into the existing, empty ``folder``."""
        self._environment.copy(str(folder), compact=True)

    def close(self) -> None:
        self._environment.close()
