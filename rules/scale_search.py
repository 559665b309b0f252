"""Grouped quantisation with searched scales: each group takes the one of 69 candidates with the least weighted error.

Codes of a candidate are those that :mod:`ninferbuild.rules.groupwise` gives for its scale. With ``x`` the elements,
``q`` the codes and ``h`` the importance of each column, all in binary64, the error of a scale ``s`` is the sum of
``(h * r) * r`` over ``r = x - s * q``. The absmax scale is the first candidate and ties keep the earlier one, so no
group is ever worse than with ``grouped_absmax``.

Sums are trees of pairwise additions in one order: lane ``i`` and lane ``i + G/2`` of a group, then halves again.
Products and additions are separate steps that each round once, and quotients are formed from tensors, so that no
compiler fuses or replaces any of them: CPU and CUDA agree to the bit, however the rows are cut.

Torch works on tiles *lanes first*, ``[G, n]`` for ``n`` groups, where trees and scales run along contiguous memory. On
the CPU :mod:`ninferbuild.rules.compiled_search` and on CUDA :mod:`ninferbuild.rules.triton_search` do the same group
after group, where they are ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
import math

import torch

from ninferbuild.artifact.formats import QuantFormat
from ninferbuild.artifact.layouts import K_ALIGNMENT, align_up, row_split_geometry
from ninferbuild.rules import compiled, fused
from ninferbuild.rules.devices import pick_device
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.groupwise import (
    SMALLEST_SCALE,
    QuantizedMatrix,
    group_scales,
    grouped_format,
    packed_planes,
    quantize_matrix,
    require_floating_matrix,
)
from ninferbuild.rules.scale_bounds import can_win
from ninferbuild.rules.tiles import CPU_TILE_ELEMENTS

__all__ = ["encode_matrix", "search_quantize_matrix", "search_tile"]

RATIOS = tuple(round(0.70 + 0.02 * step, 2) for step in range(25))
"""Multiples of the scale at which the largest magnitude, or the extreme element, just fits."""

STEPS = (-2, -1, 1, 2)
"""Neighbours of a scale that are tried, in words of binary16."""

LARGEST_WORD = 0x7BFF
"""The largest finite binary16 number."""

CPU_TILE_GROUPS = 1 << 11
"""Groups that torch on the CPU takes through all candidates at a time; their working set stays in its cache."""

CUDA_TILE_ELEMENTS = 1 << 20
"""Elements that torch on CUDA takes at a time: every step works on them for several candidates at once."""

FUSED_TILE_ELEMENTS = 1 << 23
"""Elements that the kernel takes at a time: enough to keep a GPU busy, at some 20 bytes of memory each."""

CUDA_CANDIDATES = 8
"""Candidates of one step on CUDA; the memory that a step takes grows with them."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """Groups lanes first.

    Attributes:
        values: float32 ``[G, n]``.
        weights: float64 importance ``[G, n]``, None for equal ones.
        maxima: float32 ``[n]``, largest magnitude of each group.
        format: of the codes.
    """

    values: torch.Tensor
    weights: torch.Tensor | None
    maxima: torch.Tensor
    format: QuantFormat

    def take(self, groups: torch.Tensor) -> _Tile:
        """Some groups, by index; a group may occur several times."""
        weights = self.weights.index_select(1, groups) if self.weights is not None else None
        return _Tile(self.values.index_select(1, groups), weights, self.maxima.index_select(0, groups), self.format)


def lane_sums(terms: torch.Tensor) -> torch.Tensor:
    """Sums over the lanes of ``[..., G, n]``, in the one order that results are defined by. Overwrites ``terms``."""
    lanes = terms.shape[-2]
    while lanes > 1:
        lanes //= 2
        terms[..., :lanes, :].add_(terms[..., lanes : 2 * lanes, :])
    return terms[..., 0, :]


def _codes(values: torch.Tensor, scales: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """Codes of ``values [G, n]`` under nonzero finite scales ``[..., n]``: integral float32 ``[..., G, n]``."""
    products = values * scales.double().reciprocal_().float().unsqueeze(-2)
    return products.round_().clamp_(format.qmin, format.qmax)


def _errors(tile: _Tile, scales: torch.Tensor) -> torch.Tensor:
    """Weighted squared errors, float64, of nonzero finite scales ``[..., n]``."""
    approximations = _codes(tile.values, scales, tile.format).double()
    approximations *= scales.double().unsqueeze(-2)  # exact
    residuals = tile.values.double() - approximations
    terms = residuals if tile.weights is None else torch.mul(tile.weights, residuals, out=approximations)
    return lane_sums(terms * residuals)


def _least_squares(tile: _Tile, scales: torch.Tensor) -> torch.Tensor:
    """The scales, float64 ``[n]``, that suit the codes of nonzero finite ``scales`` best; 0 where all codes are 0."""
    codes = _codes(tile.values, scales, tile.format).double()
    values = tile.values.double()
    numerators, denominators = values, codes
    if tile.weights is not None:
        numerators, denominators = tile.weights * values, tile.weights * codes
    numerator, denominator = lane_sums(numerators * codes), lane_sums(denominators * codes)
    quotients = numerator / denominator.clamp(min=1e-300)
    return torch.where(denominator > 0, quotients, 0.0)


def _rounded(scales: torch.Tensor) -> torch.Tensor:
    """Scales in binary16, by way of binary32. What underflows becomes the smallest number of its sign."""
    words = scales.float().half()
    smallest = torch.full_like(words, SMALLEST_SCALE).copysign_(scales)
    return torch.where((words == 0) & (scales != 0), smallest, words)


def _stepped(scales: torch.Tensor, steps: Sequence[int]) -> torch.Tensor:
    """Binary16 scales ``[n]`` moved by words of magnitude: ``[len(steps), n]``, 0 where that leaves the finite ones."""
    words = scales.view(torch.int16)
    magnitudes, signs = words & 0x7FFF, words & -0x8000
    moved = magnitudes + torch.tensor(steps, dtype=torch.int16, device=scales.device)[:, None]
    legal = (magnitudes != 0) & (moved >= 1) & (moved <= LARGEST_WORD)
    return torch.where(legal, signs | moved, torch.zeros_like(moved)).view(torch.float16)


def _multiples(scales: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """``[len(factors), n]`` rounded products of float64 ``scales [n]``."""
    return _rounded(scales * torch.tensor(factors, dtype=torch.float64, device=scales.device)[:, None])


def _quotients(numerators: torch.Tensor, bound: int) -> torch.Tensor:
    """float64 quotients; by a tensor, since CUDA multiplies by the reciprocal of a number."""
    return numerators.double() / torch.full((1,), bound, dtype=torch.float64, device=numerators.device)


def _extremes(tile: _Tile) -> torch.Tensor:
    """The first element of each group that has its largest magnitude, with its sign: float32 ``[n]``."""
    lanes = torch.arange(tile.values.shape[0], device=tile.values.device)[:, None]
    largest = tile.values.abs() == tile.maxima
    first = torch.where(largest, lanes, tile.values.shape[0] - 1).amin(dim=0)
    return tile.values.gather(0, first[None])[0]


def _candidates(tile: _Tile, canonical: torch.Tensor) -> torch.Tensor:
    """All scales that do not depend on the outcome of the search: float16 ``[c, n]``, the canonical ones first.

    Where codes are symmetric (8 bits), full-range scales are those of absmax with other signs and the same errors:
    they cannot win and are left out.
    """
    exact = canonical.double()
    fit = _rounded(_least_squares(tile, canonical))
    rows = [canonical[None], _multiples(_quotients(tile.maxima, tile.format.qmax), RATIOS)]
    if tile.format.qmin != -tile.format.qmax:
        rows.append(_multiples(_quotients(_extremes(tile), tile.format.qmin), RATIOS))
    rows += [_multiples(exact, (0.25, 0.5, 2.0, 4.0)), _stepped(canonical, STEPS)]
    rows += [fit[None], _multiples(fit.double(), (0.5, 2.0)), _stepped(fit, STEPS)]
    return torch.cat(rows)


def _refined(tile: _Tile, scales: torch.Tensor) -> torch.Tensor:
    """What is tried after the winner is known: ``[4, n]``, the winner first."""
    refit = _rounded(_least_squares(tile, scales))
    return torch.cat([scales[None], refit[None], _stepped(refit, (-1, 1))])


def _best(tile: _Tile, candidates: torch.Tensor, *, negative: bool) -> torch.Tensor:
    """Of candidates ``[c, n]`` the one with the least error, the earliest of several: float16 ``[n]``.

    The first row must be usable; zeros, infinities, NaN and, unless ``negative``, negative scales are passed over.
    """
    usable = candidates.isfinite() & ((candidates != 0) if negative else (candidates > 0))
    stand_ins = torch.where(usable, candidates, candidates[0])
    if candidates.device.type == "cpu":
        errors = _errors_of_contenders(tile, stand_ins, usable)
    else:
        errors = torch.cat([_errors(tile, batch) for batch in _parts(stand_ins, CUDA_CANDIDATES)])
        errors = errors.masked_fill_(~usable, math.inf)
    numbers = torch.arange(len(candidates), device=candidates.device)[:, None]
    winners = torch.where(errors == errors.amin(dim=0), numbers, len(candidates)).amin(dim=0)
    winners = torch.where(winners < len(candidates), winners, 0)  # where data are invalid, which is reported elsewhere
    return candidates.gather(0, winners[None])[0]


def _errors_of_contenders(tile: _Tile, candidates: torch.Tensor, usable: torch.Tensor) -> torch.Tensor:
    """Errors ``[c, n]`` of those that :func:`can_win` leaves, infinity for all others."""
    contenders = can_win(tile.values, tile.weights, tile.maxima, candidates, usable, tile.format)
    rows, groups = contenders.nonzero(as_tuple=True)
    errors = torch.full(candidates.shape, math.inf, dtype=torch.float64)
    for row, group in zip(_parts(rows, CPU_TILE_GROUPS), _parts(groups, CPU_TILE_GROUPS), strict=True):
        errors[row, group] = _errors(tile.take(group), candidates[row, group])
    return errors


def _parts(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    return (tensor[begin : begin + size] for begin in range(0, len(tensor), size))


def search_tile(
    rows: torch.Tensor,
    format: QuantFormat,
    importance: torch.Tensor | None,
    errors: ErrorFlags,
    *,
    negative_scales: bool = False,
) -> QuantizedMatrix:
    """Quantise floating rows ``[r, K]`` where they are, all candidates of all their groups.

    Args:
        importance: float64 ``[K]`` on the same device, finite and not negative; None weighs all columns alike.
        negative_scales: admit negative scales, whose range of codes has one more on the other side.
    """
    count, columns = rows.shape
    padded = align_up(columns, K_ALIGNMENT)
    group, per_row = format.group_size, padded // format.group_size
    if columns == padded:
        values = rows.to(torch.float32).contiguous()
    else:
        values = torch.zeros(count, padded, dtype=torch.float32, device=rows.device)
        values[:, :columns] = rows
    maxima = values.view(count, per_row, group).abs().amax(dim=-1)
    canonical, _ = group_scales(maxima, format.qmax, errors)
    weights = None
    if importance is not None:
        weights = torch.zeros(padded, dtype=torch.float64, device=rows.device)
        weights[:columns] = importance
    if rows.device.type == "cpu" and compiled.ready(compiled.Work.SEARCH, format):
        return QuantizedMatrix(*compiled.search(values, maxima, canonical, weights, format, negative=negative_scales))
    if rows.device.type == "cuda" and fused.ready(rows.device, format, weighted=weights is not None):
        return QuantizedMatrix(*fused.search(values, maxima, canonical, weights, format, negative=negative_scales))
    return search_by_torch(values, maxima, canonical, weights, format, negative=negative_scales)


def search_by_torch(
    values: torch.Tensor,
    maxima: torch.Tensor,
    canonical: torch.Tensor,
    importance: torch.Tensor | None,
    format: QuantFormat,
    *,
    negative: bool,
) -> QuantizedMatrix:
    """What :func:`search_tile` finds, on any device; the arguments are those of ``compiled.search``."""
    count, per_row = maxima.shape
    lanes = values.view(-1, format.group_size).t().contiguous()
    maxima, canonical = maxima.view(-1), canonical.view(-1)
    zero = maxima == 0
    scales = canonical.masked_fill(zero, 1.0)  # any usable one: all candidates of such a group give the same codes
    weights = None
    if importance is not None:
        weights = importance.view(per_row, format.group_size).t().repeat(1, count)
    tile = _Tile(lanes, weights, maxima, format)
    scales = _best(tile, _candidates(tile, scales), negative=negative)
    scales = _best(tile, _refined(tile, scales), negative=negative)
    codes = _codes(lanes, scales, format).to(torch.int8).t().contiguous()
    return QuantizedMatrix(
        codes.view(count, per_row, format.group_size), scales.masked_fill_(zero, 0.0).view(count, per_row)
    )


def _tiles(
    weight: torch.Tensor,
    format: QuantFormat,
    importance: torch.Tensor | None,
    errors: ErrorFlags,
    negative_scales: bool,
) -> Iterator[tuple[int, int, QuantizedMatrix]]:
    """Ranges of rows, each with its result."""
    padded = align_up(weight.shape[1], K_ALIGNMENT)
    if weight.device.type == "cpu":
        fast = compiled.ready(compiled.Work.SEARCH, format)
        elements = CPU_TILE_ELEMENTS if fast else CPU_TILE_GROUPS * format.group_size
    else:
        fast = fused.ready(weight.device, format, weighted=importance is not None)
        elements = FUSED_TILE_ELEMENTS if fast else CUDA_TILE_ELEMENTS
    step = max(1, elements // padded)
    for begin in range(0, weight.shape[0], step):
        end = min(begin + step, weight.shape[0])
        rows = weight[begin:end]
        yield begin, end, search_tile(rows, format, importance, errors, negative_scales=negative_scales)


def encode_matrix(
    weight: torch.Tensor,
    format: QuantFormat,
    importance: torch.Tensor | None,
    errors: ErrorFlags,
    *,
    negative_scales: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Quantise and pack rows ``[r, K]`` where they are: the bytes of the base, high (5 and 6 bits) and scale planes.

    Args:
        importance: as :func:`search_tile` takes it.

    Raises:
        ValueError, TypeError: as ``groupwise.require_floating_matrix``.
    """
    require_floating_matrix(weight)
    geometry = row_split_geometry(format, (weight.shape[0], weight.shape[1]))
    return packed_planes(geometry, weight.device, _tiles(weight, format, importance, errors, negative_scales), format)


def search_quantize_matrix(
    weight: torch.Tensor,
    format: str,
    *,
    importance: torch.Tensor | Sequence[float] | None = None,
    negative_scales: bool = False,
    device: str | torch.device | None = None,
) -> QuantizedMatrix:
    """Quantise a floating matrix ``[N, K]`` as ``grouped_search`` does.

    Args:
        format: name of a grouped-integer format.
        importance: one weight for each column ``[K]``, finite and not negative; None weighs all columns alike.
        negative_scales: admit negative scales.
        device: where to work and leave the result; None is CUDA if there is one. CUDA falls back to the CPU.

    Raises:
        ValueError: as ``quantize_matrix``, or the importance is not one finite, nonnegative number for each column.
        TypeError: ``weight`` is not floating point.
    """
    quantized = grouped_format(format)
    require_floating_matrix(weight)
    with torch.no_grad():
        weight = weight.to(pick_device(device))
        quantize_matrix(weight, format, device=weight.device)  # weights are refused before their importance is
        errors = ErrorFlags(weight.device)
        weights = None if importance is None else _require_importance(importance, weight)
        tiles = [tile for *_, tile in _tiles(weight, quantized, weights, errors, negative_scales)]
        errors.raise_if_any()
    return QuantizedMatrix(torch.cat([tile.codes for tile in tiles]), torch.cat([tile.scales for tile in tiles]))


def _require_importance(importance: torch.Tensor | Sequence[float], weight: torch.Tensor) -> torch.Tensor:
    given = torch.as_tensor(importance, dtype=torch.float64, device=weight.device)
    columns = weight.shape[1]
    if given.ndim != 1 or len(given) != columns:
        raise ValueError(
            f"importance must have one value per input channel ({columns}), not shape {tuple(given.shape)}"
        )
    if not bool((given.isfinite() & (given >= 0)).all()):
        raise ValueError("importance must be finite and nonnegative")
    return given
