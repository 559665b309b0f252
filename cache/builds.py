"""The last builds of each target: what explain compares with and what pruning protects."""

from __future__ import annotations

import xxhash

from ninferbuild.cache.index import BUILDS, KEYSETS, Transaction
from ninferbuild.cache.records import BuildRecord, Raw, StoredBuild, pack_keys, unpack_keys

KEPT_BUILDS = 10
"""Builds remembered for each target."""

_NUMBER_BYTES = 4


def _prefix(target: str) -> bytes:
    return xxhash.xxh3_128_digest(target.encode())


def load_builds(transaction: Transaction, target: str | None) -> list[BuildRecord]:
    """Builds of one target, or of all, newest first. One whose key list fails its check is left out."""
    found = []
    keysets: dict[bytes, tuple[bytes, ...]] = {}
    for _, stored in transaction.items(BUILDS, StoredBuild, b"" if target is None else _prefix(target)):
        if stored is None or (target is not None and stored.target != target):
            continue
        if stored.keys not in keysets:
            raw = transaction.get(KEYSETS, stored.keys, Raw)
            if raw is None:
                continue
            keysets[stored.keys] = unpack_keys(raw.data)
        keys = keysets[stored.keys]
        found.append(
            BuildRecord(stored.target, keys, stored.artifact_id, stored.time, stored.out, stored.files, stored.extra)
        )
    return sorted(found, key=lambda build: build.time, reverse=True)


def store_build(transaction: Transaction, build: BuildRecord) -> None:
    """Add a build to its target. One with the keys and the artifact of the last one takes its place."""
    packed = pack_keys(build.keys)
    keyset = xxhash.xxh3_128_digest(packed)
    prefix = _prefix(build.target)
    rows = transaction.keys(BUILDS, prefix)
    number = 0
    if rows:
        number = int.from_bytes(rows[-1][len(prefix) :], "big")
        last = transaction.get(BUILDS, rows[-1], StoredBuild)
        if last is not None and (last.keys, last.artifact_id, last.out) != (keyset, build.artifact_id, build.out):
            number += 1
    if not transaction.has(KEYSETS, keyset):
        transaction.put(KEYSETS, keyset, Raw(packed))
    stored = StoredBuild(build.target, keyset, build.artifact_id, build.time, build.out, build.files, build.extra)
    transaction.put(BUILDS, prefix + number.to_bytes(_NUMBER_BYTES, "big"), stored)
    for row in rows[: max(0, len(rows) + 1 - KEPT_BUILDS)]:
        if row != prefix + number.to_bytes(_NUMBER_BYTES, "big"):
            transaction.delete(BUILDS, row)


def used_keysets(transaction: Transaction) -> set[bytes]:
    """Digests of the key lists that some build still names."""
    return {stored.keys for _, stored in transaction.items(BUILDS, StoredBuild) if stored is not None}
