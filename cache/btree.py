"""The file format of LMDB 0.9 (64-bit, little-endian), as far as the cache has to know it without the engine.

Three things need it. The engine maps a file that misses its tail and dies of SIGBUS, so the size is compared with the
meta page first. Bits that flipped in a tree page can crash the engine, so a digest of what it will walk is compared
before it does. And the place of a value in its file is needed to give the space of a dead one back.

Layout (``mdb.c`` of LMDB 0.9): a page starts with a 16-byte header ``pgno u64, pad u16, flags u16, lower u16,
upper u16``; pages 0 and 1 hold the meta record; branch and leaf pages hold an array of u16 offsets of their nodes; a
node is ``lo u16, hi u16, flags u16, ksize u16``, key, data. Large values are in runs of overflow pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
import os
from pathlib import Path
import struct

import xxhash

DATA_FILE = "data.mdb"
PAGE_HEADER = 16

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_BRANCH, _LEAF, _META = 0x01, 0x02, 0x08
_BIG_DATA = 0x01
_NO_PAGE = (1 << 64) - 1
_MAX_DEPTH = 32

_HEADER = struct.Struct("<QHHHH")
_NODE = struct.Struct("<HHHH")
_META_HEAD = struct.Struct("<IIQQ")  # magic, version, address, map size
_DATABASE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf, overflow pages, entries, root
_META_TAIL = struct.Struct("<QQ")  # last page, transaction
_META_BYTES = PAGE_HEADER + _META_HEAD.size + 2 * _DATABASE.size + _META_TAIL.size


class DamagedError(Exception):
    """The file is not what the engine wrote."""


@dataclass(frozen=True, slots=True)
class Meta:
    """The newest committed state of a file."""

    page_size: int
    last_page: int
    transaction: int
    main_root: int | None

    @property
    def size(self) -> int:
        """Bytes that the file must have at least."""
        return (self.last_page + 1) * self.page_size


@dataclass(frozen=True, slots=True)
class Value:
    """A value of the main database: its key, and where it is in the file when it has pages of its own.

    Attributes:
        begin: offset of the value's first byte; 0 for a value inside a leaf page.
        length: bytes of the value.
        pages: bytes of its overflow pages, header included; 0 for a value inside a leaf page.
    """

    key: bytes
    begin: int
    length: int
    pages: int


def read_meta(descriptor: int) -> Meta:
    """The newest meta record. Raises :class:`DamagedError` unless both are well formed and the file is long enough."""
    first, page_size = _parse_meta(os.pread(descriptor, _META_BYTES, 0), 0)
    second, other_size = _parse_meta(os.pread(descriptor, _META_BYTES, page_size), 1)
    if page_size != other_size:
        raise DamagedError("meta pages disagree about the page size")
    meta = second if second.transaction > first.transaction else first
    size = os.fstat(descriptor).st_size
    if size < meta.size:
        raise DamagedError(f"file has {size} bytes, its meta page says {meta.size}")
    return meta


def _parse_meta(data: bytes, number: int) -> tuple[Meta, int]:
    if len(data) < _META_BYTES:
        raise DamagedError(f"meta page {number} is cut off")
    page, _, flags, _, _ = _HEADER.unpack_from(data)
    magic, version, _, _ = _META_HEAD.unpack_from(data, PAGE_HEADER)
    if page != number or not flags & _META or magic != _MAGIC or version != _VERSION:
        raise DamagedError(f"meta page {number} is not one of LMDB 0.9")
    offset = PAGE_HEADER + _META_HEAD.size
    page_size = _DATABASE.unpack_from(data, offset)[0]  # the free list's pad field holds it
    if page_size & (page_size - 1) or not 256 <= page_size <= 32768:
        raise DamagedError(f"meta page {number} has page size {page_size}")
    root = _DATABASE.unpack_from(data, offset + _DATABASE.size)[-1]
    last_page, transaction = _META_TAIL.unpack_from(data, offset + 2 * _DATABASE.size)
    return Meta(page_size, last_page, transaction, None if root == _NO_PAGE else root), page_size


class _Pages:
    """Checked access to the tree pages of one file."""

    def __init__(self, descriptor: int, meta: Meta):
        self._descriptor = descriptor
        self._meta = meta

    def read(self, number: int) -> tuple[bytes, bool, tuple[int, ...]]:
        """(page, whether it is a leaf, offsets of its nodes)."""
        size = self._meta.page_size
        if not 2 <= number <= self._meta.last_page:
            raise DamagedError(f"page {number} is outside the file")
        page = os.pread(self._descriptor, size, number * size)
        if len(page) < size:
            raise DamagedError(f"page {number} is cut off")
        own, _, flags, lower, upper = _HEADER.unpack_from(page)
        if own != number or flags not in (_BRANCH, _LEAF) or not PAGE_HEADER <= lower <= upper <= size:
            raise DamagedError(f"page {number} is not a tree page")
        offsets = struct.unpack_from(f"<{(lower - PAGE_HEADER) // 2}H", page, PAGE_HEADER)
        if any(not upper <= offset <= size - _NODE.size for offset in offsets):
            raise DamagedError(f"page {number} has a node outside itself")
        return page, flags == _LEAF, offsets

    def walk(self, root: int | None) -> Iterator[tuple[bytes, bool, tuple[int, ...]]]:
        """All pages of a tree, depth first, in key order."""
        stack = [] if root is None else [(root, 1)]
        budget = self._meta.last_page
        while stack:
            number, depth = stack.pop()
            budget -= 1
            if depth > _MAX_DEPTH or budget < 0:
                raise DamagedError("the tree has a cycle")
            page, leaf, offsets = self.read(number)
            yield page, leaf, offsets
            if not leaf:
                for offset in reversed(offsets):
                    low, high, flags, _ = _NODE.unpack_from(page, offset)
                    stack.append((low | high << 16 | flags << 32, depth + 1))


def values(descriptor: int) -> Iterator[Value]:
    """Every value of the main database in key order. Nobody may write the file meanwhile."""
    meta = read_meta(descriptor)
    for page, leaf, offsets in _Pages(descriptor, meta).walk(meta.main_root):
        if not leaf:
            continue
        for offset in offsets:
            low, high, flags, key_bytes = _NODE.unpack_from(page, offset)
            start = offset + _NODE.size
            length = low | high << 16
            key = page[start : start + key_bytes]
            if not flags & _BIG_DATA:
                yield Value(key, 0, length, 0)
                continue
            first = int.from_bytes(page[start + key_bytes : start + key_bytes + 8], "little")
            count = -(-(PAGE_HEADER + length) // meta.page_size)
            if not 2 <= first <= first + count - 1 <= meta.last_page:
                raise DamagedError("a value is outside the file")
            yield Value(key, first * meta.page_size + PAGE_HEADER, length, count * meta.page_size)


def tree_digest(descriptor: int) -> bytes:
    """``xxh3_128`` over meta record and tree pages of the main database: all that finding a value walks."""
    meta = read_meta(descriptor)
    state = xxhash.xxh3_128(repr(meta).encode())
    for page, _, _ in _Pages(descriptor, meta).walk(meta.main_root):
        state.update(page)
    return state.digest()


def file_digest(descriptor: int) -> bytes:
    """``xxh3_128`` over all pages that the newest state can refer to."""
    meta = read_meta(descriptor)
    state = xxhash.xxh3_128()
    buffer = bytearray(1 << 20)
    view, offset = memoryview(buffer), 0
    while offset < meta.size:
        count = os.preadv(descriptor, [view[: meta.size - offset]], offset)
        if count == 0:
            raise DamagedError("file shrank while it was read")
        state.update(view[:count])
        offset += count
    return state.digest()


def leaf_entries(page: bytes, number: int) -> Iterator[tuple[bytes, bytes | tuple[int, int]]]:
    """(key, value, or (offset, length) of a large value) of a page that may or may not be a sound leaf."""
    size = len(page)
    own, _, flags, lower, upper = _HEADER.unpack_from(page)
    if own != number or flags != _LEAF or not PAGE_HEADER <= lower <= upper <= size:
        return
    for offset in struct.unpack_from(f"<{(lower - PAGE_HEADER) // 2}H", page, PAGE_HEADER):
        if not upper <= offset <= size - _NODE.size:
            continue
        low, high, node_flags, key_bytes = _NODE.unpack_from(page, offset)
        start, length = offset + _NODE.size, low | high << 16
        key, data = page[start : start + key_bytes], start + key_bytes
        if node_flags & _BIG_DATA:
            if data + 8 <= size:
                first = int.from_bytes(page[data : data + 8], "little")
                yield key, (first * size + PAGE_HEADER, length)
        elif data + length <= size:
            yield key, page[data : data + length]


def open_data(folder: Path) -> int:
    """A descriptor of the data file of the environment in ``folder``, for reading."""
    return os.open(folder / DATA_FILE, os.O_RDONLY | os.O_CLOEXEC)
