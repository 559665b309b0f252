"""Compiled loops of :mod:`ninferbuild.rules.compiled`, which imports this module where numba is installed.

Strict IEEE arithmetic: nothing is contracted or reordered (numba does so only with ``fastmath``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
inlined = numba.njit(inline="always", error_model="numpy")

HALF = np.uint32(16)
NIBBLE = np.uint8(4)
LOW = np.uint8(0x0F)


@inlined
def quantise(
    words: NDArray[np.uint16],
    start: int,
    size: int,
    reciprocal: np.float32,
    qmin: np.float32,
    qmax: np.float32,
    bits: NDArray[np.uint32],
    codes: Bytes,
    first: int,
) -> None:
    """Codes of one group from ``codes[first]``, as two's complement bytes."""
    for i in range(size):
        bits[i] = np.uint32(words[start + i]) << HALF
    values = bits.view(np.float32)
    for i in range(size):
        codes[first + i] = np.uint8(np.int8(max(min(np.rint(values[i] * reciprocal), qmax), qmin)))


@inlined
def pack_low(codes: Bytes, size: int, base: Bytes, start: int) -> None:
    """The low nibbles of pairs of codes, the first of a pair lowest."""
    for i in range(size // 2):
        base[start + i] = (codes[2 * i] & LOW) | np.uint8(codes[2 * i + 1] << NIBBLE)


@inlined
def pack_high(codes: Bytes, size: int, width: int, mask: np.uint8, high: Bytes, start: int) -> None:
    """Bits 4 and up of ``8 / width`` codes in one byte, the first lowest."""
    lanes = 8 // width
    for i in range(size // lanes):
        word = np.uint8(0)
        for k in range(lanes):
            word |= np.uint8(((codes[lanes * i + k] >> NIBBLE) & mask) << np.uint8(width * k))
        high[start + i] = word


@compiled
def pack4(words: NDArray[np.uint16], reciprocals: NDArray[np.float32], base: Bytes, high: Bytes) -> None:
    bits, codes = np.empty(64, np.uint32), np.empty(64, np.uint8)
    for group in range(reciprocals.size):
        quantise(words, 64 * group, 64, reciprocals[group], np.float32(-8), np.float32(7), bits, codes, 0)
        pack_low(codes, 64, base, 32 * group)


@compiled
def pack5(words: NDArray[np.uint16], reciprocals: NDArray[np.float32], base: Bytes, high: Bytes) -> None:
    bits, codes = np.empty(64, np.uint32), np.empty(64, np.uint8)
    for group in range(reciprocals.size):
        quantise(words, 64 * group, 64, reciprocals[group], np.float32(-16), np.float32(15), bits, codes, 0)
        pack_low(codes, 64, base, 32 * group)
        pack_high(codes, 64, 1, np.uint8(1), high, 8 * group)


@compiled
def pack6(words: NDArray[np.uint16], reciprocals: NDArray[np.float32], base: Bytes, high: Bytes) -> None:
    bits, codes = np.empty(64, np.uint32), np.empty(64, np.uint8)
    for group in range(reciprocals.size):
        quantise(words, 64 * group, 64, reciprocals[group], np.float32(-32), np.float32(31), bits, codes, 0)
        pack_low(codes, 64, base, 32 * group)
        pack_high(codes, 64, 2, np.uint8(3), high, 16 * group)


@compiled
def pack8(words: NDArray[np.uint16], reciprocals: NDArray[np.float32], base: Bytes, high: Bytes) -> None:
    bits = np.empty(32, np.uint32)
    for group in range(reciprocals.size):
        first = 32 * group
        quantise(words, first, 32, reciprocals[group], np.float32(-127), np.float32(127), bits, base, first)


PACK: dict[int, Any] = {4: pack4, 5: pack5, 6: pack6, 8: pack8}
