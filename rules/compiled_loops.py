"""Grouped absmax quantisation as compiled loops; :mod:`ninferbuild.rules.compiled` imports this module to compile them.

What :mod:`ninferbuild.rules.groupwise` does in several passes is done for some groups at a time, while they are in the
first cache: maxima, scales and reciprocals, codes, packing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from numba import types
import numpy as np

from ninferbuild.rules.compiled_numbers import half_value, half_word, helper, pointer_to, seen_as, single_of, stack

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS = 64
"""Groups that are taken through one step before the next: 8 KiB of weights."""

MAGNITUDE = np.uint16(0x7FFF)
INFINITY = np.uint32(0x7F80)
"""Infinity among the words of bfloat16; NaN is above."""

SINGLE = np.int32(16)
"""What a word of bfloat16 is shifted by to become that number in binary32."""

NIBBLE, LOW, HIGH = np.uint16(4), np.uint16(0x0F), np.uint16(0xF0)

maxima_room = stack(types.uint16, GROUPS)
reciprocals_room = stack(types.float32, GROUPS)
codes_room = stack(types.uint8, 64 * GROUPS)
as_pairs, as_fours, as_eights = seen_as(types.uint16), seen_as(types.uint32), seen_as(types.uint64)

BYTES, WORDS = pointer_to(types.uint8), pointer_to(types.uint16)
SIGNATURE = types.uint32(WORDS, types.int64, BYTES, BYTES, WORDS)


@helper  # type: ignore[untyped-decorator]
def code(word: np.uint16, reciprocal: np.float32, qmin: np.float32, qmax: np.float32) -> np.uint8:
    """The code of a word of bfloat16, as a byte of two's complement."""
    product = single_of(np.int32(word) << SINGLE) * reciprocal
    return np.uint8(np.int8(np.int32(max(min(np.rint(product), qmax), qmin))))


def _encoder(bits: int, size: int, low: int, high: int) -> Callable[..., Any]:
    """A loop for codes of ``bits`` bits from ``low`` to ``high`` in groups of ``size``."""
    qmin, qmax, divisor = np.float32(low), np.float32(high), float(high)

    def encode(words: Any, groups: int, base: Any, upper: Any, scales: Any) -> np.uint32:
        """Fill the planes of ``groups`` groups of bfloat16 ``words``; ``upper`` is the high plane.

        Returns:
            the largest word without its sign. From infinity up, not all planes are filled.
        """
        maxima, reciprocals, codes = maxima_room(), reciprocals_room(), codes_room()
        pairs, fours, eights = as_pairs(codes), as_fours(codes), as_eights(codes)
        largest = np.uint32(0)
        for first in range(0, groups, GROUPS):
            count = min(GROUPS, groups - first)
            for group in range(count):
                start, most = (first + group) * size, np.uint16(0)
                for i in range(size):
                    most = max(most, np.uint16(words[start + i] & MAGNITUDE))
                maxima[group] = most
            for group in range(count):
                largest = max(largest, np.uint32(maxima[group]))
            if largest >= INFINITY:
                return largest
            for group in range(count):
                bits_of_maximum = np.int32(maxima[group]) << SINGLE
                word = half_word(np.float32(np.float64(single_of(bits_of_maximum)) / divisor))
                scales[first + group] = np.uint16(min(word, bits_of_maximum))  # 0 where the maximum is
                reciprocals[group] = np.float32(1.0 / np.float64(half_value(word)))
            done, fresh = first * size, count * size
            if bits == 8:
                for group in range(count):
                    start, reciprocal = done + group * size, reciprocals[group]
                    for i in range(size):
                        base[start + i] = code(words[start + i], reciprocal, qmin, qmax)
                continue
            for group in range(count):
                start, reciprocal = group * size, reciprocals[group]
                for i in range(size):
                    codes[start + i] = code(words[done + start + i], reciprocal, qmin, qmax)
            # Whole loops of their own: a group at a time, packing would be unrolled and not vectorised.
            for i in range(fresh // 2):  # the low nibbles of pairs of codes, the first of a pair lowest
                base[done // 2 + i] = np.uint8((pairs[i] & LOW) | ((pairs[i] >> NIBBLE) & HIGH))
            if bits == 5:  # bit 4 of eight codes moves to bit 56 and up, the first lowest
                for i in range(fresh // 8):
                    ones = (eights[i] >> np.uint64(4)) & np.uint64(0x0101010101010101)
                    upper[done // 8 + i] = np.uint8((ones * np.uint64(0x0102040810204080)) >> np.uint64(56))
            if bits == 6:  # bits 4 and 5 of four codes move to bit 24 and up
                for i in range(fresh // 4):
                    twos = np.uint32((fours[i] >> np.uint32(4)) & np.uint32(0x03030303))
                    upper[done // 4 + i] = np.uint8(np.uint32(twos * np.uint32(0x01041040)) >> np.uint32(24))
        return largest

    return encode


def compile_encoder(bits: int) -> tuple[str, str]:
    """The name of a loop and LLVM's text of it: ``int name(uint32 *largest, void *, ...)``, see :data:`SIGNATURE`."""
    settings: Any = dict(error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
    loop: Any = numba.njit(SIGNATURE, **settings)(ENCODERS[bits])
    (made,) = loop.overloads.values()
    return made.fndesc.llvm_func_name, made.library.get_llvm_str()


ENCODERS = {
    4: _encoder(4, 64, -8, 7),
    5: _encoder(5, 64, -16, 15),
    6: _encoder(6, 64, -32, 31),
    8: _encoder(8, 32, -127, 127),
}
