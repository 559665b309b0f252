"""Digests of regions and payloads: ``xxh3_128`` over the digests of consecutive blocks.

The block size is a constant of the format. Buffers of any size may be fed to the hasher; the result depends on the
bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 8 << 20
"""Bytes of one digest block, 8 MiB."""

DIGEST_BYTES = 16


def block_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The ``xxh3_128`` of one block, 16 bytes big-endian (the canonical form of xxHash)."""
    return xxhash.xxh3_128_digest(data)


def combine(block_digests: Iterable[bytes]) -> bytes:
    """The digest of the whole from the digests of its blocks, in order."""
    return xxhash.xxh3_128_digest(b"".join(block_digests))


class BlockHasher:
    """Digest of a byte stream, fed in pieces of any size."""

    __slots__ = ("_block", "_digests", "_filled", "length")

    def __init__(self) -> None:
        self._block = xxhash.xxh3_128()
        self._digests: list[bytes] = []
        self._filled = 0
        self.length = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        self.length += len(view)
        while len(view):
            piece = view[: BLOCK_BYTES - self._filled]
            self._block.update(piece)
            self._filled += len(piece)
            view = view[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        self._digests.append(self._block.digest())
        self._block = xxhash.xxh3_128()
        self._filled = 0

    def digest(self) -> bytes:
        """The digest of everything fed so far; feeding may go on."""
        if self._filled:
            return combine([*self._digests, self._block.digest()])
        return combine(self._digests)


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """The digest of bytes that are at hand."""
    hasher = BlockHasher()
    hasher.update(data)
    return hasher.digest()
