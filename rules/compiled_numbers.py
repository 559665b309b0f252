"""Numbers and memory for compiled loops: bits of numbers, rounding to binary16, and arrays on the stack.

Everything is strict IEEE arithmetic: nothing is contracted or reordered, which numba does only with ``fastmath``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
import numba
from numba import types
from numba.extending import intrinsic
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Intrinsic = Callable[..., Any]

pointer_to: Any = types.CPointer

helper: Any = numba.njit(error_model="numpy")
"""Inlined by the back end: the front end would take twice as long to compile it at every place it is called from."""

FRACTION = np.int32(13)
"""Bits of a binary32 fraction beyond those of binary16."""

REBIASED = 112 << 23
"""What exponents of binary32 and binary16 differ by, in place in binary32."""

INFINITE = np.int32(0x7C00)
"""The word of infinity in binary16."""

LEAST_NORMAL = np.float32(2.0**-14)
"""The least normal number of binary16."""

HALF, HALF_BITS = np.float32(0.5), np.int32(0x3F000000)


def _bits(into: Any, out_of: Any, kind: ir.Type) -> Intrinsic:
    @intrinsic
    def same_bits(typing: Any, number: Any) -> Any:
        return into(out_of), lambda context, builder, signature, given: builder.bitcast(given[0], kind)

    return same_bits


single_of = _bits(types.float32, types.int32, ir.FloatType())
"""The binary32 number with the bits of an int32."""

bits_of = _bits(types.int32, types.float32, ir.IntType(32))
"""The bits of a binary32 number as int32."""


def stack(dtype: Any, count: int) -> Intrinsic:
    """What makes room for ``count`` elements for as long as the calling function runs; a pointer to the first."""
    pointer = pointer_to(dtype)

    @intrinsic
    def room(typing: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(context.get_value_type(dtype), count))
            memory.align = 32
            return builder.bitcast(memory, context.get_value_type(pointer))

        return pointer(), code

    return room


def seen_as(dtype: Any) -> Intrinsic:
    """What makes a pointer to ``dtype`` of a pointer to bytes."""
    pointer = pointer_to(dtype)

    @intrinsic
    def seen(typing: Any, memory: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            return builder.bitcast(given[0], context.get_value_type(pointer))

        return pointer(pointer_to(types.uint8)), code

    return seen


@helper  # type: ignore[untyped-decorator]
def half_word(number: np.float32) -> np.int32:
    """The word of binary16 nearest to a number that is not negative, ties to even; at least 1.

    Below 2^-14 numbers are multiples of 2^-24, which the fraction of their sum with one half counts once it is rounded.
    Beside that number the other word is the smaller one: no branch is needed, so that several are made side by side.
    """
    bits = bits_of(number)
    small = np.int32(bits_of(min(number, LEAST_NORMAL) + HALF) - HALF_BITS)
    odd = (bits >> FRACTION) & np.int32(1)
    normal = np.int32(np.int32(bits - np.int32(REBIASED - 0xFFF) + odd) >> FRACTION)
    return np.int32(max(max(small, np.int32(1)), min(normal, INFINITE)))


@helper  # type: ignore[untyped-decorator]
def half_value(word: np.int32) -> np.float32:
    """The number of a finite positive word of binary16.

    Read as a normal number, a word below 2^-14 means ``2^-15 (1 + f)`` instead of ``2^-14 f``.
    """
    number = single_of(np.int32((word << FRACTION) + np.int32(REBIASED)))
    return min(number, np.float32(number + number) - LEAST_NORMAL)
