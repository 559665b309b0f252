"""The search of :mod:`ninferbuild.rules.scale_search` as one Triton kernel; :mod:`ninferbuild.rules.fused` imports it.

Weights are read once, and a group stays in registers for all its candidates. Its lanes are ``[16, N, G / 16]``, ``N``
groups side by side: a thread holds 16 lanes of one group, so that four of the halvings of a sum happen within threads
and only the rest between them, along axes of two elements, whose sum has one order.

Whatever decides a byte is computed as the torch code does it, each step rounded once, with these differences in form:

* Quotients are clamped before they are rounded. The bounds are integers, so that gives the same codes.
* Adding 1.5 · 2^23 rounds a number of small magnitude to an integer, ties to even, which the low bits of the sum then
  count. Those bits below the exponent of 2^52 are a binary64 number from which the code follows by one subtraction;
  conversions between 32 and 64 bits are four times as slow.
* A residual ``x - s * q`` is one fused operation: the product, of 11 and 8 bits, is exact either way.
* A reciprocal is formed in binary32. That of an 11-bit number is never so close to the middle between two binary32
  numbers that rounding it to binary64 first would matter.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ninferbuild.artifact.formats import QuantFormat
from ninferbuild.rules.scale_search import RATIOS, STEPS

FIRST_FACTORS = (1.0, *RATIOS, *RATIOS)
"""Of the first candidates: of the canonical scale, of the absmax quotient and of the full-range quotient."""

LATER_MOVES = (
    *((factor, 0) for factor in (0.25, 0.5, 2.0, 4.0)),
    *((1.0, step) for step in STEPS),
    *((factor, 0) for factor in (1.0, 0.5, 2.0)),
    *((1.0, step) for step in STEPS),
    *((1.0, step) for step in (0, -1, 1)),
)
"""Factors and steps of the others: of the canonical scale, then of its fit, then of the fit of the winner so far."""

FULL_RANGE = tl.constexpr(26)
"""The first candidate that is a multiple of the full-range quotient."""

FIT, REFIT = tl.constexpr(8), tl.constexpr(15)
"""The first of the later candidates that are made from a fit."""

LANES = 16
"""Lanes of a group that one thread holds."""

WARPS = 4

REGISTERS = 168
"""What a thread may use, so that three blocks of four warps run on a multiprocessor at a time."""

ADDRESSES = (
    "values_at",
    "maxima_at",
    "canonical_at",
    "importance_at",
    "factors_at",
    "steps_at",
    "codes_at",
    "scales_at",
)
NUMBERS = ("groups", "per_row", "negative")
"""Arguments whose values shall not make the compiler start again."""

ROUNDING = tl.constexpr(1.5 * 2.0**23)
"""Its sums with small numbers are integers in binary32."""

EXPONENT = tl.constexpr(0x4330000000000000)
"""2^52 in binary64, whose last bits count units."""

OFFSET = tl.constexpr(2.0**52 + 0x4B400000)
"""What a binary64 number of that exponent is whose last bits are those of ``ROUNDING`` in binary32."""


@triton.jit
def _codes(values, scales, low, high):
    """Codes, float64 like ``values [N, L, W]``, under float32 ``scales [N]`` that binary16 holds."""
    reciprocals = tl.div_rn(tl.full(scales.shape, 1.0, tl.float32), scales)
    clamped = tl.minimum(tl.maximum(values * reciprocals[:, None, None], low), high)
    counted = (clamped + ROUNDING).to(tl.uint32, bitcast=True).to(tl.uint64) | EXPONENT
    return counted.to(tl.float64, bitcast=True) - tl.full(values.shape, OFFSET, tl.float64)


@triton.jit
def _lane_sums(terms):
    """Sums ``[N]`` of ``[N, 16, W]``: lane ``i`` and lane ``i + 8 * W``, then halves again."""
    N: tl.constexpr = terms.shape[0]
    W: tl.constexpr = terms.shape[2]
    for halving in tl.static_range(4):
        terms = tl.sum(tl.reshape(terms, (N, 2, 8 >> halving, W)), axis=1)
    rows = tl.reshape(terms, (N, W))
    if W == 4:
        rows = tl.sum(tl.reshape(rows, (N, 2, 2)), axis=1)
    return tl.sum(rows, axis=1)


@triton.jit
def _rounded(scales):
    """Float64 scales in binary16, by way of binary32; what underflows becomes the smallest number of its sign."""
    words = scales.to(tl.float32).to(tl.float16).to(tl.float32)
    smallest = tl.where(scales < 0, -(2.0**-24), 2.0**-24)
    return tl.where((words == 0) & (scales != 0), smallest, words)


@triton.jit
def _stepped(scales, step):
    """Scales that binary16 holds, moved by words of magnitude; 0 where that leaves the finite numbers."""
    words = scales.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    magnitudes = words & 0x7FFF
    moved = magnitudes + step
    legal = (magnitudes != 0) & (moved >= 1) & (moved <= 0x7BFF)
    word = tl.where(legal, (words & 0x8000) | moved, 0)
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _least_squares(values, exact, weights, scales, low, high, WEIGHTED: tl.constexpr):
    """The scales, float64 ``[N]``, that suit the codes of ``scales`` best; 0 where all codes are 0."""
    codes = _codes(values, scales, low, high)
    above, below = exact, codes
    if WEIGHTED:
        above, below = weights * exact, weights * codes
    numerator, denominator = _lane_sums(above * codes), _lane_sums(below * codes)
    quotient = numerator / tl.maximum(denominator, tl.full(denominator.shape, 1e-300, tl.float64))
    return tl.where(denominator > 0, quotient, 0.0)


@triton.jit
def _consider(scales, best, winners, values, exact, weights, negative, low, high, WEIGHTED: tl.constexpr):
    """The least error so far and its scale, after float32 ``scales [N]`` have been tried."""
    residuals = tl.fma(-scales.to(tl.float64)[:, None, None], _codes(values, scales, low, high), exact)
    terms = residuals
    if WEIGHTED:
        terms = weights * residuals
    errors = _lane_sums(terms * residuals)
    usable = (scales != 0) & (tl.abs(scales) < float("inf")) & ((scales > 0) | (negative != 0))
    better = usable & (errors < best)
    return tl.where(better, errors, best), tl.where(better, scales, winners)


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ADDRESSES)
def search_kernel(
    values_at,
    maxima_at,
    canonical_at,
    importance_at,
    factors_at,
    steps_at,
    codes_at,
    scales_at,
    groups,
    per_row,
    negative,
    low,
    high,
    L: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
    FIRST: tl.constexpr,
    LATER: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Search ``N`` groups of ``L * W`` lanes with ``FIRST`` candidates and then ``LATER`` ones, see ``_tables``.

    The arrays are those of :func:`search`, flat; ``low`` and ``high`` are the least and the largest code.
    """
    size: tl.constexpr = L * W
    group = tl.program_id(0) * N + tl.arange(0, N)
    there = group < groups
    lane = tl.arange(0, L)[None, :, None] * W + tl.arange(0, W)[None, None, :]
    at = group.to(tl.int64)[:, None, None] * size + lane
    values = tl.load(values_at + at, mask=there[:, None, None], other=0.0)
    exact = values.to(tl.float64)
    weights = exact
    if WEIGHTED:
        weights = tl.load(importance_at + (group % per_row)[:, None, None] * size + lane)
    maxima = tl.load(maxima_at + group, mask=there, other=0.0)
    canonical = tl.load(canonical_at + group, mask=there, other=1.0).to(tl.float32)
    canonical = tl.where(maxima == 0, 1.0, canonical)  # any usable one: all candidates give the same codes

    # The first lane of the largest magnitude, and its sign in the last bit.
    marks = tl.where(tl.abs(values) == maxima[:, None, None], 2 * lane + (values < 0).to(tl.int32), 2 * size)
    negated = tl.min(tl.min(marks, axis=2), axis=1) & 1
    extremes = tl.where(negated != 0, -maxima, maxima).to(tl.float64)
    upper, full = maxima.to(tl.float64) / high, extremes / low

    best = tl.full((N,), float("inf"), tl.float64)
    winners = canonical
    for number in range(FIRST):
        base = tl.where(number < 1, canonical.to(tl.float64), tl.where(number < FULL_RANGE, upper, full))
        scales = _rounded(base * tl.load(factors_at + number))
        best, winners = _consider(scales, best, winners, values, exact, weights, negative, low, high, WEIGHTED)
    base = canonical.to(tl.float64)
    for number in range(LATER):
        if (number == FIT) | (number == REFIT):
            suited = tl.where(number == FIT, canonical, winners)
            fits = _least_squares(values, exact, weights, suited, low, high, WEIGHTED)
            base = _rounded(fits).to(tl.float64)
        scales = _rounded(base * tl.load(factors_at + FIRST + number))
        step = tl.load(steps_at + number)
        scales = tl.where(step == 0, scales, _stepped(scales, step))
        best, winners = _consider(scales, best, winners, values, exact, weights, negative, low, high, WEIGHTED)

    codes = _codes(values, winners, low, high).to(tl.int32).to(tl.int8)
    tl.store(codes_at + at, codes, mask=there[:, None, None])
    tl.store(scales_at + group, tl.where(maxima == 0, 0.0, winners).to(tl.float16), mask=there)


def search(
    values: torch.Tensor,
    maxima: torch.Tensor,
    canonical: torch.Tensor,
    importance: torch.Tensor | None,
    format: QuantFormat,
    *,
    negative: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that :mod:`ninferbuild.rules.scale_search` finds, int8 ``[r, R, G]`` and float16 ``[r, R]``.

    The arguments are those of ``compiled.search``, contiguous and all on one device, which must be the current one.
    """
    width, groups = format.group_size // LANES, maxima.numel()
    side_by_side = 32 * WARPS // width
    # Where codes are symmetric, full-range scales are those of absmax with other signs: they cannot win.
    first = len(FIRST_FACTORS) if format.qmin != -format.qmax else 1 + len(RATIOS)
    factors, steps = _tables(first, values.device)
    codes = torch.empty(*maxima.shape, format.group_size, dtype=torch.int8, device=values.device)
    scales = torch.empty(maxima.shape, dtype=torch.float16, device=values.device)
    search_kernel[(triton.cdiv(groups, side_by_side),)](
        values,
        maxima,
        canonical,
        factors if importance is None else importance,
        factors,
        steps,
        codes,
        scales,
        groups,
        maxima.shape[-1],
        int(negative),
        float(format.qmin),
        float(format.qmax),
        L=LANES,
        N=side_by_side,
        W=width,
        FIRST=first,
        LATER=len(LATER_MOVES),
        WEIGHTED=importance is not None,
        num_warps=WARPS,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
    )
    return codes, scales


@cache
def _tables(first: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 factors of the first candidates and of the later ones, and int32 steps of those."""
    factors = (*FIRST_FACTORS[:first], *(factor for factor, _ in LATER_MOVES))
    steps = tuple(step for _, step in LATER_MOVES)
    return (
        torch.tensor(factors, dtype=torch.float64, device=device),
        torch.tensor(steps, dtype=torch.int32, device=device),
    )
