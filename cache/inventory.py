"""A snapshot of everything that the cache holds, for pruning and statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ninferbuild.cache.builds import load_builds
from ninferbuild.cache.index import ACTIONS, BLOCKS, LEASES, RECENCY, Transaction
from ninferbuild.cache.liveness import IsLive
from ninferbuild.cache.records import BuildRecord, Recency, StoredAction, StoredBlock, StoredLease, unpack_keys
from ninferbuild.cache.store import Store


@dataclass(frozen=True)
class Inventory:
    """All rows that say what is stored and who needs it.

    Attributes:
        actions: key → record.
        recency: key → when it was last used (seconds since the epoch) and hits.
        blocks: digest → where it is.
        references: digest → number of actions that name it.
        leased: keys that builds in progress need.
        building: sessions with a build in progress.
        builds: builds of all targets, newest first.
    """

    actions: Mapping[bytes, StoredAction]
    recency: Mapping[bytes, Recency]
    blocks: Mapping[bytes, StoredBlock]
    references: Counter[bytes]
    leased: frozenset[bytes]
    building: frozenset[bytes]
    builds: tuple[BuildRecord, ...]

    def used(self, key: bytes) -> float:
        """When an action was last a hit, or else made."""
        recency = self.recency.get(key)
        made = self.actions[key].made
        return max(made, recency.used) if recency is not None else made

    def keys_of_target(self, target: str) -> set[bytes]:
        """Actions that a target made, or used in a build that is remembered."""
        keys = {key for key, action in self.actions.items() if action.made_by == target}
        for build in self.builds:
            if build.target == target:
                keys.update(build.keys)
        return keys & self.actions.keys()

    def last_builds(self, count: int, is_live: IsLive) -> dict[str, set[bytes]]:
        """Live target → keys of its last ``count`` builds."""
        seen: Counter[str] = Counter()
        live: dict[str, bool] = {}
        keys: dict[str, set[bytes]] = {}
        for build in self.builds:
            if build.target not in live:  # the newest build decides, it knows where the output is now
                live[build.target] = is_live(build)
            seen[build.target] += 1
            if live[build.target] and seen[build.target] <= count:
                keys.setdefault(build.target, set()).update(build.keys)
        return keys

    def unreferenced(self) -> set[bytes]:
        """Blocks that no action names and no build in progress may still need."""
        return {
            digest
            for digest, row in self.blocks.items()
            if not self.references[digest] and row.session not in self.building
        }

    def released_by(self, victims: Iterable[bytes]) -> set[bytes]:
        """Blocks that nobody needs any more once the actions ``victims`` are gone."""
        counts: Counter[bytes] = Counter()
        for key in victims:
            counts.update({digest for digest, _ in self.actions[key].blocks})
        return {
            digest
            for digest, count in counts.items()
            if count == self.references[digest]
            and (row := self.blocks.get(digest)) is not None
            and row.session not in self.building
        }


def take_inventory(store: Store, transaction: Transaction) -> Inventory:
    """Read all tables that count; records that fail their check are left out."""
    actions = {key: row for key, row in transaction.items(ACTIONS, StoredAction) if row is not None}
    references: Counter[bytes] = Counter()
    for action in actions.values():
        references.update({digest for digest, _ in action.blocks})
    leased, building = _leases(store, transaction, actions)
    return Inventory(
        actions,
        {key: row for key, row in transaction.items(RECENCY, Recency) if row is not None},
        {key: row for key, row in transaction.items(BLOCKS, StoredBlock) if row is not None},
        references,
        frozenset(leased),
        frozenset(building),
        tuple(load_builds(transaction, None)),
    )


def _leases(
    store: Store, transaction: Transaction, actions: Mapping[bytes, StoredAction]
) -> tuple[set[bytes], set[bytes]]:
    """(keys under a lease, sessions that hold one)."""
    live = store.live_sessions()
    leased = set(store.leased)
    since: dict[bytes, float] = {}
    for _, lease in transaction.items(LEASES, StoredLease):
        if lease is not None and lease.session in live:
            since[lease.session] = min(lease.since, since.get(lease.session, lease.since))
            leased.update(unpack_keys(lease.keys))
    leased.update(key for key, action in actions.items() if action.made >= since.get(action.session, float("inf")))
    return leased, set(since)
