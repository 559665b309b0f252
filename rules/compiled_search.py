"""The search of :mod:`ninferbuild.rules.scale_search` as a compiled loop; :mod:`ninferbuild.rules.compiled` imports it.

One group is taken through all its candidates while it is in the first cache. Whatever decides a byte is computed as the
torch code does it, each step rounded once and sums in the same order. Most candidates are never evaluated exactly:

* One lane's term never exceeds the error that it is a part of, since rounding is monotonic and no term is negative.
  Where the term of the lane of largest magnitude alone exceeds the error of the canonical scale, the candidate loses.
* The errors of the rest are bounded from below in binary32, by the argument of :mod:`ninferbuild.rules.scale_bounds`.
  What exceeds the exact error of another candidate loses as well.

Of the others the least error wins, and the first in the order of candidates where several have it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from ninferbuild.rules.scale_bounds import LANE, SUM, USUAL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]
    Singles = NDArray[np.float32]
    Words = NDArray[np.int32]

compiled = numba.njit(nogil=True, cache=True, error_model="numpy")
inlined = numba.njit(inline="always", error_model="numpy")
helper = numba.njit(error_model="numpy")
"""Inlined by the back end: the front end would take twice as long to compile it at every place it is called from."""

RATIOS = np.array([round(0.70 + 0.02 * step, 2) for step in range(25)])

FIXED = 66
"""Candidates that do not depend on the winner so far."""

BLOCK = 8
"""Candidates whose bounds are computed side by side."""

ROOM = -(-FIXED // BLOCK) * BLOCK

FEW, MANY = USUAL
EXACT = 1 - 2.0**-40
"""Covers the rounding of binary64 sums and of a bound itself."""

SIGN, MAGNITUDE = np.int32(0x8000), np.int32(0x7FFF)
INFINITE, NAN = np.int32(0x7C00), np.int32(0x7E00)
INFINITY_BITS = np.int32(0x7F800000)
"""Infinity in binary32."""

FRACTION = np.int32(13)
"""Bits of a binary32 fraction beyond those of binary16."""

REBIASED = np.int32(112 << 23)
"""What exponents differ by, in place in binary32."""

NORMAL = np.int32(113 << 23)
"""2^-14, the least normal binary16 number, in binary32."""

HALF, HALF_BITS = np.float32(0.5), np.int32(0x3F000000)


@helper
def round_one(target: float, c: int, singles: Singles, bits: Words, raised: Singles, counts: Words) -> int:
    """The word of binary16 of a number, by way of binary32; what underflows becomes the least number of its sign.

    Works in place ``c`` of its arrays: ``bits`` are those of ``singles``, ``counts`` those of ``raised``. Adding one
    half to a number below 2^-14 rounds it to a multiple of 2^-24, which the fraction of the sum then counts.
    """
    singles[c] = np.float32(abs(target))
    raised[c] = singles[c] + HALF
    magnitude = bits[c]
    normal = (magnitude - REBIASED + np.int32(0xFFF) + ((magnitude >> FRACTION) & np.int32(1))) >> FRACTION
    least = np.int32(1) if target != 0 else np.int32(0)
    word = max(counts[c] - HALF_BITS, least) if magnitude < NORMAL else min(normal, INFINITE)
    word = NAN if magnitude > INFINITY_BITS else word
    return int((word | SIGN) if target < 0 else word)


@helper
def decode_one(word: int, c: int, singles: Singles, bits: Words) -> float:
    """The value of a word of binary16, infinity for NaN. Works in place ``c``; ``bits`` are those of ``singles``."""
    magnitude = np.int32(word) & MAGNITUDE
    bits[c] = (magnitude << FRACTION) + REBIASED
    scale: float = np.float64(singles[c]) if magnitude >= np.int32(0x400) else np.float64(magnitude) * 2.0**-24
    scale = np.inf if magnitude >= INFINITE else scale
    return -scale if word & SIGN else scale


@helper
def step(word: int, by: int) -> int:
    """A word of binary16 moved by words of magnitude; 0 where that leaves the finite numbers."""
    magnitude = word & 0x7FFF
    moved = magnitude + by
    return (word & 0x8000) | moved if magnitude != 0 and 1 <= moved <= 0x7BFF else 0


@helper
def tree(terms: Doubles, size: int) -> float:
    """The sum of ``terms``, which it overwrites: lane ``i`` and lane ``i + size / 2``, then halves again."""
    if size == 64:
        for i in range(32):
            terms[i] += terms[i + 32]
    for i in range(16):
        terms[i] += terms[i + 16]
    for i in range(8):
        terms[i] += terms[i + 8]
    for i in range(4):
        terms[i] += terms[i + 4]
    return float((terms[0] + terms[2]) + (terms[1] + terms[3]))


@helper
def error_of(
    values: Singles,
    wide: Doubles,
    weights: Doubles,
    scale: float,
    qmin: np.float32,
    qmax: np.float32,
    terms: Doubles,
    size: int,
) -> float:
    """The weighted squared error of a scale."""
    reciprocal = np.float32(1.0 / scale)
    for i in range(size):
        code = np.float64(max(min(np.rint(values[i] * reciprocal), qmax), qmin))
        residual = wide[i] - scale * code
        terms[i] = weights[i] * residual * residual
    return tree(terms, size)


@helper
def least_squares(
    values: Singles,
    wide: Doubles,
    weights: Doubles,
    scale: float,
    qmin: np.float32,
    qmax: np.float32,
    terms: Doubles,
    others: Doubles,
    size: int,
) -> float:
    """The scale that suits the codes of ``scale`` best; 0 where all codes are 0."""
    reciprocal = np.float32(1.0 / scale)
    for i in range(size):
        code = np.float64(max(min(np.rint(values[i] * reciprocal), qmax), qmin))
        terms[i] = weights[i] * wide[i] * code
        others[i] = weights[i] * code * code
    numerator, denominator = tree(terms, size), tree(others, size)
    return numerator / max(denominator, 1e-300) if denominator > 0 else 0.0


@helper
def norms(
    values: Singles,
    weights: Singles,
    reciprocals: Singles,
    sums: Singles,
    qmin: np.float32,
    qmax: np.float32,
    size: int,
) -> None:
    """The sums of ``h (w/s - q)²`` in binary32 for several scales at once."""
    sums[:] = 0
    for i in range(0, size, 4):
        w0, w1, w2, w3 = values[i], values[i + 1], values[i + 2], values[i + 3]
        h0, h1, h2, h3 = weights[i], weights[i + 1], weights[i + 2], weights[i + 3]
        for c in range(reciprocals.size):  # were it a constant, the compiler would unroll and not vectorise
            factor = reciprocals[c]
            y0, y1, y2, y3 = w0 * factor, w1 * factor, w2 * factor, w3 * factor
            r0, r1 = max(min(np.rint(y0), qmax), qmin) - y0, max(min(np.rint(y1), qmax), qmin) - y1
            r2, r3 = max(min(np.rint(y2), qmax), qmin) - y2, max(min(np.rint(y3), qmax), qmin) - y3
            sums[c] += (h0 * (r0 * r0) + h1 * (r1 * r1)) + (h2 * (r2 * r2) + h3 * (r3 * r3))


@inlined
def search(
    values: Singles,
    maxima: Singles,
    canonical: Singles,
    weights: Doubles,
    negative: bool,
    low: float,
    high: float,
    codes: NDArray[np.int8],
    chosen: NDArray[np.uint16],
    size: int,
) -> None:
    """Fill ``codes [n, size]`` and ``chosen [n]``, words of binary16, of the groups ``values [n, size]``, all flat.

    Args:
        maxima: ``[n]`` largest magnitudes, finite.
        canonical: ``[n]`` positive scales of binary16, anything where the maximum is 0.
        weights: importance of one row of groups, which the next rows share.
        low, high: least and largest code.
    """
    per_row = weights.size // size
    relative = np.empty(weights.size, np.float32)
    masses, heaviest = np.empty(per_row), np.empty(per_row)
    for column in range(per_row):
        most, mass = 0.0, 0.0
        for i in range(column * size, (column + 1) * size):
            most = max(most, weights[i])
        for i in range(column * size, (column + 1) * size):
            relative[i] = np.float32(weights[i] / max(most, FEW))
            mass += np.float64(relative[i])
        masses[column], heaviest[column] = math.sqrt(mass), most

    wide, terms, others = np.empty(size), np.empty(size), np.empty(size)
    singles, raised = np.empty(FIXED, np.float32), np.empty(FIXED, np.float32)
    bits, counts = singles.view(np.int32), raised.view(np.int32)
    targets, scales, alone = np.empty(FIXED), np.empty(FIXED), np.empty(FIXED)
    words, reciprocals = np.empty(FIXED, np.int32), np.empty(FIXED, np.float32)
    kept, factors, sums = np.empty(ROOM, np.int32), np.empty(ROOM, np.float32), np.empty(ROOM, np.float32)
    bounds = np.empty(ROOM)
    qmin, qmax = np.float32(low), np.float32(high)

    for group in range(maxima.size):
        found = codes[group * size : (group + 1) * size]
        largest = maxima[group]
        if largest == 0:
            found[:] = 0
            chosen[group] = 0
            continue
        lanes = values[group * size : (group + 1) * size]
        column = group % per_row
        importance = weights[column * size : (column + 1) * size]
        light = relative[column * size : (column + 1) * size]
        for i in range(size):
            wide[i] = np.float64(lanes[i])
        at = 0
        for i in range(size):
            if abs(lanes[i]) == largest:
                at = i
                break
        extreme, its_value, its_weight = lanes[at], wide[at], importance[at]

        base: float = np.float64(canonical[group])
        fit_target = least_squares(lanes, wide, importance, base, qmin, qmax, terms, others, size)
        fit = round_one(fit_target, 0, singles, bits, raised, counts)
        fitted = decode_one(fit, 0, singles, bits)
        # Candidates in the order of the search; those that are steps of another are filled in as words.
        upper, full = np.float64(largest) / high, its_value / low
        for j in range(25):
            targets[1 + j] = upper * RATIOS[j]
            targets[26 + j] = full * RATIOS[j]
        targets[0] = base
        targets[51], targets[52], targets[53], targets[54] = base * 0.25, base * 0.5, base * 2.0, base * 4.0
        targets[59], targets[60], targets[61] = fitted, fitted * 0.5, fitted * 2.0
        for c in range(55, 59):
            targets[c], targets[7 + c] = 0.0, 0.0
        for c in range(FIXED):
            words[c] = round_one(targets[c], c, singles, bits, raised, counts)
        words[59] = fit
        words[55], words[56] = step(words[0], -2), step(words[0], -1)
        words[57], words[58] = step(words[0], 1), step(words[0], 2)
        words[62], words[63], words[64], words[65] = step(fit, -2), step(fit, -1), step(fit, 1), step(fit, 2)
        for c in range(FIXED):
            scales[c] = decode_one(words[c], c, singles, bits)
        for c in range(FIXED):
            reciprocals[c] = np.float32(1.0 / scales[c])
            residual = its_value - scales[c] * np.float64(max(min(np.rint(extreme * reciprocals[c]), qmax), qmin))
            alone[c] = its_weight * residual * residual

        # What is left of them: not the scale just before or the canonical one again, and not worse by one lane alone.
        best = error_of(lanes, wide, importance, base, qmin, qmax, terms, size)
        winner, scale, count = 0, base, 0
        for c in range(1, FIXED):
            magnitude = words[c] & MAGNITUDE
            usable = (magnitude != 0) & (magnitude < INFINITE) & (negative | (words[c] < SIGN))
            fresh = (words[c] != words[0]) & (words[c] != words[c - 1])
            kept[count] = c
            factors[count] = reciprocals[c]
            count += usable & fresh & (alone[c] < best)
        padded = (count + BLOCK - 1) // BLOCK * BLOCK
        for c in range(count, padded):
            factors[c] = 0
        norms(lanes, light, factors[:padded], sums[:padded], qmin, qmax, size)
        # Lower bounds of their errors; the most promising one is evaluated first, so that others need not be.
        most, mass = heaviest[column], masses[column]
        bounded = (most >= FEW) & (most <= MANY)
        first, least = 0, np.inf
        for c in range(count):
            norm, absolute = math.sqrt(np.float64(sums[c])), abs(scales[kept[c]])
            if norm * absolute < least:
                first, least = c, norm * absolute
            slack = LANE * mass * (np.float64(largest) * abs(np.float64(factors[c])) + 1)
            bound = (norm * (1 - SUM) - slack) * absolute
            bounds[c] = bound * bound * most * EXACT if bounded & (bound > 0) else 0.0
        for turn in range(count + 1):
            c = first if turn == 0 else turn - 1
            if c >= count or (turn > 0 and c == first) or bounds[c] > best:
                continue
            candidate = kept[c]
            error = error_of(lanes, wide, importance, scales[candidate], qmin, qmax, terms, size)
            if error < best or (error == best and candidate < winner):
                best, winner, scale = error, candidate, scales[candidate]

        word = words[winner]
        if best > 0:
            refit_target = least_squares(lanes, wide, importance, scale, qmin, qmax, terms, others, size)
            refit = round_one(refit_target, 0, singles, bits, raised, counts)
            before = word
            for by in range(3):
                tried = refit if by == 0 else step(refit, 2 * by - 3)
                magnitude = tried & 0x7FFF
                if magnitude == 0 or magnitude >= 0x7C00 or (tried >= 0x8000 and not negative) or tried == before:
                    continue
                value = decode_one(tried, 0, singles, bits)
                error = error_of(lanes, wide, importance, value, qmin, qmax, terms, size)
                if error < best:
                    best, word, scale = error, tried, value
        chosen[group] = word
        reciprocal = np.float32(1.0 / scale)
        for i in range(size):
            found[i] = np.int8(max(min(np.rint(lanes[i] * reciprocal), qmax), qmin))


@compiled
def search64(
    values: Singles,
    maxima: Singles,
    canonical: Singles,
    weights: Doubles,
    negative: bool,
    low: float,
    high: float,
    codes: NDArray[np.int8],
    chosen: NDArray[np.uint16],
) -> None:
    search(values, maxima, canonical, weights, negative, low, high, codes, chosen, 64)


@compiled
def search32(
    values: Singles,
    maxima: Singles,
    canonical: Singles,
    weights: Doubles,
    negative: bool,
    low: float,
    high: float,
    codes: NDArray[np.int8],
    chosen: NDArray[np.uint16],
) -> None:
    search(values, maxima, canonical, weights, negative, low, high, codes, chosen, 32)


SEARCH: dict[int, Any] = {4: search64, 5: search64, 6: search64, 8: search32}
"""Bits of a code → loop."""
