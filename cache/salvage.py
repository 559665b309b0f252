"""Recovering actions from an index that the engine must not open any more.

Every record carries a hash of its table, its key and itself, so records can be picked out of the pages of a damaged
file one by one, without following its trees. What a page that is no longer in use still says about an action was true
once and, keys being hashes of content, is true now. The memo is not recovered: a row of it that has been forgotten
since could be wrong. Where blocks are is read from the segments.
"""

from __future__ import annotations

from collections.abc import Iterator
import os
from pathlib import Path

from ninferbuild.cache import btree, records
from ninferbuild.cache.index import (
    ACTIONS,
    ACTIVE_SEGMENT,
    BLOCKS,
    BUILDS,
    KEYSETS,
    KINDS,
    MANIFESTS,
    NUMBERS,
    RECENCY,
    Index,
)
from ninferbuild.cache.records import Number, Recency, Record, StoredBlock, StoredBuild
from ninferbuild.cache.segments import Segments

_TABLES = (ACTIONS, MANIFESTS, RECENCY, KEYSETS, BUILDS)
_PAGE = 4096
_BATCH = 1000


def salvage(folder: Path, index: Index, segments: Segments) -> int:
    """Fill the fresh ``index`` from the damaged one in ``folder`` and from the segments.

    Returns:
        the number of actions recovered.
    """
    found: dict[tuple[bytes, bytes], Record] = {}
    try:
        for table, key, record in _records(folder / btree.DATA_FILE):
            if _newer(record, found.get((table, key))):
                found[table, key] = record
    except OSError:
        return 0
    manifests = {key for table, key in found if table == MANIFESTS}
    rows = [
        (table, key, record)
        for (table, key), record in found.items()
        if table not in (ACTIONS, RECENCY) or key in manifests
    ]
    actions = sum(table == ACTIONS for table, _, _ in rows)
    if not actions:
        return 0
    rows += [(BLOCKS, digest, row) for digest, row in _blocks(segments)]
    for start in range(0, len(rows), _BATCH):
        with index.write() as transaction:
            for table, key, record in rows[start : start + _BATCH]:
                transaction.put(table, key, record)
    with index.write() as transaction:
        transaction.put(NUMBERS, ACTIVE_SEGMENT, Number(max(segments.ids(), default=0)))
        transaction.recount_blocks()
    return actions


def _records(data: Path) -> Iterator[tuple[bytes, bytes, Record]]:
    """Every record that passes its check, wherever in the file it is."""
    with open(data, "rb") as file:
        descriptor = file.fileno()
        size = os.fstat(descriptor).st_size
        for number in range(2, size // _PAGE):
            page = os.pread(descriptor, _PAGE, number * _PAGE)
            for key, value in btree.leaf_entries(page, number):
                if isinstance(value, tuple):
                    offset, length = value
                    if offset + length > size:
                        continue
                    value = os.pread(descriptor, length, offset)
                for table in _TABLES:
                    record = records.decode(table, key, value, KINDS[table])
                    if record is not None:
                        yield table, key, record
                        break


def _newer(record: Record, other: Record | None) -> bool:
    """Whether a record replaces another of the same key that an older page still holds."""
    if isinstance(record, StoredBuild) and isinstance(other, StoredBuild):
        return record.time > other.time
    if isinstance(record, Recency) and isinstance(other, Recency):
        return record.used > other.used
    return True


def _blocks(segments: Segments) -> Iterator[tuple[bytes, StoredBlock]]:
    for number in segments.ids():
        try:
            for value in segments.values(number):
                yield value.key, StoredBlock(number, value.length, b"")
        except (OSError, btree.DamagedError):
            continue
