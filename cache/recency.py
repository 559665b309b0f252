"""Hits and misses of one process, remembered until a transaction has to happen anyway.

A build without work looks thousands of actions up and writes nothing; what it looked up is written by the next one
that does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
import threading
import time

from ninferbuild.cache.index import RECENCY, Transaction
from ninferbuild.cache.records import ActionRecord, Recency


class Lookups:
    """What was looked up and has not been written yet. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._touched: dict[bytes, tuple[float, int]] = {}  # key → when it was last a hit, hits
        self._counts: defaultdict[bytes, float] = defaultdict(float)

    def __bool__(self) -> bool:
        return bool(self._touched or self._counts)

    def note(self, found: Iterable[ActionRecord | None]) -> None:
        """Count hits and, for each None, a miss."""
        now = time.time()
        with self._lock:
            counts = self._counts
            for record in found:
                if record is None:
                    counts[b"misses"] += 1
                    continue
                _, hits = self._touched.get(record.key, (0.0, 0))
                self._touched[record.key] = (now, hits + 1)
                if not hits:
                    counts[b"hits"] += 1
                    counts[b"saved_bytes"] += record.length
                    counts[b"saved_seconds"] += record.seconds

    def pending(self, name: bytes) -> float:
        """What is to be added to a counter with the next transaction."""
        with self._lock:
            return self._counts.get(name, 0.0)

    def write(self, transaction: Transaction) -> None:
        """Write what was remembered. If the transaction fails, so much is lost."""
        with self._lock:
            touched, self._touched = self._touched, {}
            counts, self._counts = self._counts, defaultdict(float)
        for key, (used, hits) in touched.items():
            old = transaction.get(RECENCY, key, Recency)
            transaction.put(RECENCY, key, Recency(used, hits + (old.hits if old else 0)))
        for name, amount in counts.items():
            transaction.add(name, amount)
