"""What the cache holds and what it has saved."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from ninferbuild.cache import filesystem
from ninferbuild.cache.index import Transaction
from ninferbuild.cache.inventory import Inventory, take_inventory
from ninferbuild.cache.reclaim import disk_bytes
from ninferbuild.cache.records import StoredAction
from ninferbuild.cache.store import Store

_PAGE = 4096


@dataclass(frozen=True)
class Group:
    """Actions that have something in common.

    Attributes:
        actions: their number.
        live_bytes: bytes of their distinct blocks; a block that several groups share counts in each by its share.
        file_bytes: what these blocks occupy in segment files.
    """

    actions: int
    live_bytes: int
    file_bytes: int


@dataclass(frozen=True)
class Statistics:
    """Numbers of one cache.

    Attributes:
        actions, blocks: rows.
        live_bytes: bytes of the distinct blocks that actions name.
        garbage_bytes: bytes of blocks that no action names, until the next pruning.
        file_bytes: bytes that index and segments occupy on the disk.
        index_bytes: the index's part of it.
        segments: number of segment files.
        max_size: the bound, if there is one.
        hits, misses: lookups of builds so far.
        saved_bytes, saved_seconds: payload and device time that hits made unnecessary.
        methods, formats, targets: the same by method, by format and by the target that made them.
    """

    actions: int
    blocks: int
    live_bytes: int
    garbage_bytes: int
    file_bytes: int
    index_bytes: int
    segments: int
    max_size: int | None
    hits: int
    misses: int
    saved_bytes: int
    saved_seconds: float
    methods: dict[str, Group]
    formats: dict[str, Group]
    targets: dict[str, Group]

    @property
    def hit_rate(self) -> float | None:
        """Hits by lookups; None before the first."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


@dataclass(frozen=True)
class Entry:
    """One action, for a listing. ``used`` and ``made`` are seconds since the epoch."""

    key: bytes
    kind: str
    method: str
    format: str
    target: str
    length: int
    seconds: float
    made: float
    used: float
    hits: int
    leased: bool


def statistics(store: Store, max_size: int | None) -> Statistics:
    with store.index.read() as transaction:
        inventory = take_inventory(store, transaction)
        counters = {name: _number(store, transaction, name) for name in ("hits", "misses", "saved_bytes")}
        seconds = _number(store, transaction, "saved_seconds")
    named = [row.length for digest, row in inventory.blocks.items() if inventory.references[digest]]
    stored = sum(row.length for row in inventory.blocks.values())
    return Statistics(
        len(inventory.actions),
        len(inventory.blocks),
        sum(named),
        stored - sum(named),
        disk_bytes(store),
        filesystem.allocated_bytes(store.index_folder),
        len(store.segments.ids()),
        max_size,
        int(counters["hits"]),
        int(counters["misses"]),
        int(counters["saved_bytes"]),
        seconds,
        _grouped(inventory, "method"),
        _grouped(inventory, "format"),
        _grouped(inventory, "made_by"),
    )


def _number(store: Store, transaction: Transaction, name: str) -> float:
    return transaction.number(name.encode()) + store.lookups.pending(name.encode())


def _grouped(inventory: Inventory, field: Literal["method", "format", "made_by"]) -> dict[str, Group]:
    actions: dict[str, int] = defaultdict(int)
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for action in inventory.actions.values():
        name: str = getattr(action, field)
        actions[name] += 1
        for digest in {digest for digest, _ in action.blocks}:
            row = inventory.blocks.get(digest)
            if row is not None:
                share = 1 / inventory.references[digest]
                shares[name][0] += row.length * share
                shares[name][1] += _file_bytes(row.length) * share
    return {
        name: Group(count, round(shares[name][0]), round(shares[name][1]))
        for name, count in sorted(actions.items(), key=lambda item: (-shares[item[0]][0], item[0]))
    }


def _file_bytes(length: int) -> int:
    """Bytes of whole pages that a block occupies with its page header."""
    return -(-(length + 16) // _PAGE) * _PAGE


def entries(store: Store, target: str | None) -> list[Entry]:
    """The stored actions, or those that a target made or used, most recently used first."""
    with store.index.read() as transaction:
        inventory = take_inventory(store, transaction)
    keys = inventory.actions.keys() if target is None else inventory.keys_of_target(target)
    return [_entry(inventory, key, inventory.actions[key]) for key in sorted(keys, key=inventory.used, reverse=True)]


def _entry(inventory: Inventory, key: bytes, action: StoredAction) -> Entry:
    recency = inventory.recency.get(key)
    return Entry(
        key,
        action.kind,
        action.method,
        action.format,
        action.made_by,
        action.length,
        action.seconds,
        action.made,
        inventory.used(key),
        recency.hits if recency is not None else 0,
        key in inventory.leased,
    )
