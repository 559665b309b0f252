"""What the index stores, and how a record proves that it is itself.

A record is the msgpack of one of the structures below followed by an ``xxh3_64`` over table, key and body. Flipped
bits in a B-tree page can make the engine return another entry without an error; because table and key are hashed
too, such an entry is recognised and treated as absent.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import xxhash

SEAL_BYTES = 8

R = TypeVar("R", bound="Record")


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of everything stored: positional msgpack, so new fields go last and need a default.

    Plain data cannot form cycles, so the garbage collector need not look at it.
    """


class AuxiliaryRow(Record, array_like=True, frozen=True, gc=False):
    """One auxiliary tensor that a user's method returned, named by the position of its input in the action.

    Attributes:
        input: index of the action's input.
        use: index of the use within that input.
        role: role of the auxiliary, e.g. ``activation_input_divisor``.
        format: numeric format of ``data``.
        shape: logical shape.
        data: bytes in the default layout of ``format``.
    """

    input: int
    use: int
    role: str
    format: str
    shape: tuple[int, ...]
    data: bytes


class Dep(Record, array_like=True, frozen=True, gc=False):
    """A file that a user's function read while it ran; a later hit needs it unchanged."""

    path: str
    digest: bytes


class ActionRecord(Record, array_like=True, frozen=True, gc=False):
    """The result of one action.

    Attributes:
        key: ``xxh3_128`` of ``manifest``.
        manifest: canonical text of everything that the bytes depend on.
        kind: kind of the action, e.g. ``encode``.
        method: name of the method, for statistics.
        format: numeric format of the payload, for statistics.
        blocks: (digest, bytes) of the payload's blocks, in order.
        length: bytes of the payload.
        digest: digest of the payload.
        auxiliaries: what a user's method computed besides the payload.
        seconds: time that running the action took, in seconds of its device.
        source_bytes: bytes of source that it read.
        made_by: identity of the target that made it.
        deps: files that the method read while it ran.
    """

    key: bytes
    manifest: str
    kind: str
    method: str
    format: str
    blocks: tuple[tuple[bytes, int], ...]
    length: int
    digest: bytes
    auxiliaries: tuple[AuxiliaryRow, ...] = ()
    seconds: float = 0.0
    source_bytes: int = 0
    made_by: str = ""
    deps: tuple[Dep, ...] = ()


class BuildRecord(Record, array_like=True, frozen=True, gc=False):
    """One finished build of a target.

    Attributes:
        target: identity of the target: ``real path of its toml#name``, or the real path of an ad-hoc output.
        keys: keys of all its actions, in plan order.
        artifact_id: hexadecimal id of the artifact that was linked; empty when none was.
        time: seconds since the epoch.
        out: real path of the artifact's entry file; empty when none was linked.
        files: (path, bytes, mtime_ns) of each file as it was published.
        extra: whatever the engine wants to find again; plain msgpack types.
    """

    target: str
    keys: tuple[bytes, ...]
    artifact_id: str
    time: float
    out: str = ""
    files: tuple[tuple[str, int, int], ...] = ()
    extra: dict[str, Any] = {}


class StoredAction(Record, array_like=True, frozen=True, gc=False):
    """:class:`ActionRecord` as stored: the manifest has a row of its own, which outlives this one."""

    kind: str
    method: str
    format: str
    blocks: tuple[tuple[bytes, int], ...]
    length: int
    digest: bytes
    auxiliaries: tuple[AuxiliaryRow, ...]
    seconds: float
    source_bytes: int
    made_by: str
    deps: tuple[Dep, ...]
    session: bytes
    made: float


class StoredBuild(Record, array_like=True, frozen=True, gc=False):
    """:class:`BuildRecord` as stored: equal key lists of successive builds share one row."""

    target: str
    keys: bytes  # digest of the key list
    artifact_id: str
    time: float
    out: str
    files: tuple[tuple[str, int, int], ...]
    extra: dict[str, Any]


class StoredBlock(Record, array_like=True, frozen=True, gc=False):
    """Where a block is. ``session`` wrote it, or needed it last."""

    segment: int
    length: int
    session: bytes


class StoredDigest(Record, array_like=True, frozen=True, gc=False):
    """A row of the memo: the digest of a region, and the day (since the epoch) on which it was last written."""

    digest: bytes
    day: int


class StoredLease(Record, array_like=True, frozen=True, gc=False):
    """Keys that a live session needs: those listed, and what it has made since ``since``."""

    session: bytes
    target: str
    since: float
    keys: bytes  # concatenated


class Recency(Record, array_like=True, frozen=True, gc=False):
    """When an action was last a hit, and how often it was one."""

    used: float
    hits: int


class Raw(Record, array_like=True, frozen=True, gc=False):
    """Bytes that need no structure: a manifest, a list of keys."""

    data: bytes


class Number(Record, array_like=True, frozen=True, gc=False):
    """One counter."""

    value: float


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type[Record], msgspec.msgpack.Decoder[Any]] = {}


_seeds: dict[bytes, int] = {}


def _seal(table: bytes, key: bytes, body: bytes) -> bytes:
    """``xxh3_64`` of key and body, seeded with the table and the length of the key."""
    seed = _seeds.get(table)
    if seed is None:
        seed = _seeds[table] = xxhash.xxh3_64_intdigest(table) >> 16
    return xxhash.xxh3_64_digest(key + body, seed + len(key))


def encode(table: bytes, key: bytes, record: Record) -> bytes:
    """The stored bytes of ``record`` under ``key`` of ``table``."""
    body = _encoder.encode(record)
    return body + _seal(table, key, body)


def decode(table: bytes, key: bytes, stored: bytes, kind: type[R]) -> R | None:
    """The record, or None when the bytes are not what was stored under this key of this table."""
    body = stored[:-SEAL_BYTES]
    if len(stored) <= SEAL_BYTES or _seal(table, key, body) != stored[-SEAL_BYTES:]:
        return None
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        record: R = decoder.decode(body)
    except msgspec.MsgspecError:  # another version of the program wrote it
        return None
    return record


def pack_keys(keys: tuple[bytes, ...] | list[bytes] | set[bytes]) -> bytes:
    """Keys of 16 bytes as one string."""
    return b"".join(keys)


def unpack_keys(data: bytes) -> tuple[bytes, ...]:
    return tuple(data[start : start + 16] for start in range(0, len(data), 16))
