"""Which scales of a search can win, told in binary32 with bounds that hold whatever it rounds.

A search compares exact errors in binary64; most of its candidates are worse by far, and half the precision is enough
to show it. For a scale ``s``, the error is ``s²`` times ``E = sum h (w/s - q)²``, the square of a norm. In binary32 a
lane of ``w/s - q`` is off by at most ``2⁻²² (Y + 1)``, ``Y`` being the largest ``|w/s|`` of the group: two roundings of
the product, one of the difference. By the triangle inequality the norm itself is off by at most that times the norm of
ones, and the rounding of squares and of their sum stays within a factor of ``1 ± 2⁻¹⁶``. A candidate whose lower bound
exceeds the upper bound of another one is worse in binary64 too, where sums are right to about ``2⁻⁴⁹`` of themselves.

Importance is divided by its largest value in the group first: comparisons are within groups, and neither squares nor
sums can leave the range of binary32 in a way that matters beside the bound above.
"""

from __future__ import annotations

import math

import torch

from ninferbuild.artifact.formats import QuantFormat

LANE = 2.0**-22
"""Error of a lane, relative to one more than the largest quotient."""

SUM = 2.0**-16
"""Relative error of the norm by rounding squares and sums."""

USUAL = (2.0**-500, 2.0**500)
"""Importance within which binary64 errors neither overflow nor underflow. No bound is claimed beyond."""


def can_win(
    values: torch.Tensor,
    weights: torch.Tensor | None,
    maxima: torch.Tensor,
    candidates: torch.Tensor,
    usable: torch.Tensor,
    format: QuantFormat,
) -> torch.Tensor:
    """Where a candidate may have the least error of its group, or be the earliest of several that have it.

    Args:
        values: float32 ``[G, n]``, lanes first.
        weights: float64 ``[G, n]``, or None for equal ones.
        maxima: float32 ``[n]``, largest magnitudes.
        candidates: nonzero finite float16 ``[c, n]``.
        usable: bool ``[c, n]``; the first row must be true.

    Returns:
        bool ``[c, n]``, at least one true in each column.
    """
    live = usable.clone()
    # An equal scale earlier in the list has the same error, and all scales have the same in a group of zeros.
    live[1:] &= (candidates[1:] != candidates[:-1]) & (candidates[1:] != candidates[0]) & (maxima > 0)
    scaled, unknown = None, None
    mass = torch.full(maxima.shape, math.sqrt(values.shape[0]), dtype=torch.float64)
    if weights is not None:
        largest = weights.amax(dim=0)
        unknown = (largest < USUAL[0]) | (largest > USUAL[1])
        scaled = (weights / largest.clamp(min=USUAL[0])).float()
        mass = scaled.sum(dim=0).double().sqrt_()
        live[1:] &= largest > 0  # otherwise every error is zero
    norms = torch.full(candidates.shape, math.inf, dtype=torch.float64)
    reciprocals = candidates.double().reciprocal_()
    _norms(values, scaled, reciprocals.float(), live, format, norms)
    slack = (reciprocals.abs_().mul_(maxima).add_(1.0)).mul_(LANE).mul_(mass)
    magnitudes = candidates.double().abs_()
    upper = (norms * (1 + SUM) + slack).mul_(magnitudes)
    lower = norms.mul_(1 - SUM).sub_(slack).mul_(magnitudes)
    beaten = lower > torch.where(live, upper, math.inf).amin(dim=0)
    if unknown is not None:
        beaten &= ~unknown
    return live & ~beaten


def _norms(
    values: torch.Tensor,
    weights: torch.Tensor | None,
    reciprocals: torch.Tensor,
    live: torch.Tensor,
    format: QuantFormat,
    norms: torch.Tensor,
) -> None:
    """Write ``sqrt(sum h (w/s - q)²)`` of the live candidates to ``norms [c, n]``; others may be written too."""
    products, codes = torch.empty_like(values), torch.empty_like(values)
    for row, factors in enumerate(reciprocals):
        if not bool(live[row].any()):
            continue
        torch.mul(values, factors, out=products)
        torch.clamp(products, format.qmin, format.qmax, out=codes)
        codes.round_()
        codes.sub_(products)
        torch.mul(codes, codes, out=products)
        if weights is not None:
            products.mul_(weights)
        norms[row] = products.sum(dim=0).sqrt_()
