"""Grouped absmax quantisation: integer codes with one binary16 scale for each group of columns.

For each group, with elements ``x`` rounded to binary32 and ``RN32``/``RN16`` rounding to nearest, ties to even::

    scale = RN16(RN32(max |x| / qmax)), or 2^-24 where that is zero and the group is not
    code  = clamp(rint(RN32(x * RN32(1 / scale))), qmin, qmax)

The quotient and the reciprocal are formed in binary64 because a binary32 division by a scalar is a multiplication by
its rounded reciprocal on CUDA, which gives other bits. Maximum, product, ``rint`` and clamp are exact or rounded once
on every device, so CPU and CUDA agree to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
import math

import torch

from ninferbuild.artifact.codecs import row_split
from ninferbuild.artifact.formats import QuantFormat, get_format
from ninferbuild.artifact.layouts import K_ALIGNMENT, RowSplitGeometry, align_up, row_split_geometry
from ninferbuild.rules import compiled
from ninferbuild.rules.devices import pick_device
from ninferbuild.rules.error_flags import ErrorFlags
from ninferbuild.rules.tiles import bfloat16_maxima, row_tiles

__all__ = ["QuantizedMatrix", "encode_matrix", "pick_device", "quantize_matrix", "quantize_rows"]

SMALLEST_SCALE = 2.0**-24
"""The smallest positive binary16 number, word 0x0001."""

OVERFLOW = 65520.0
"""From here on binary32 numbers round to infinity in binary16."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Codes int8 ``[N, R, group]`` and scales float16 ``[N, R]``, ``R`` groups in each row padded to 128 columns."""

    codes: torch.Tensor
    scales: torch.Tensor


def grouped_format(name: str) -> QuantFormat:
    """The grouped-integer format ``name``. Raises ``ValueError`` for any other format."""
    format = get_format(name)
    if not isinstance(format, QuantFormat):
        raise ValueError(f"grouped quantization requires a quantized numeric format, not {name!r}")
    return format


def require_floating_matrix(weight: torch.Tensor) -> None:
    """Raises ``ValueError`` unless ``weight`` is a matrix with elements, ``TypeError`` unless they are floating."""
    if weight.ndim != 2:
        raise ValueError(f"grouped quantization requires rank 2, got {tuple(weight.shape)}")
    if not weight.is_floating_point():
        raise TypeError(f"weight must be floating point, got {weight.dtype}")
    if 0 in weight.shape:
        raise ValueError(f"grouped quantization requires positive dimensions, got {tuple(weight.shape)}")


def group_scales(maxima: torch.Tensor, qmax: int, errors: ErrorFlags) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and reciprocals of groups from their largest magnitudes.

    Args:
        maxima: float32, NaN where the group holds one.

    Returns:
        float16 scales and positive float32 reciprocals, shaped like ``maxima``. A zero group has scale 0 and some
        finite reciprocal: its codes are 0 whatever that is.
    """
    check_largest(maxima.amax(), qmax, errors)
    # Every quotient below the smallest scale either rounds to it or underflows, and is then set to it.
    quotients = maxima.double().div_(qmax).clamp_min_(SMALLEST_SCALE)
    scales = quotients.float().half()
    reciprocals = scales.double().reciprocal_().float()
    return scales.masked_fill_(maxima == 0, 0.0), reciprocals


def check_largest(largest: torch.Tensor, qmax: int, errors: ErrorFlags) -> None:
    """Note to ``errors`` what makes a largest magnitude, a float32 scalar, impossible to quantise."""
    errors.note(
        ~(largest < math.inf),
        "grouped quantization source contains NaN or infinity; keep it in bf16 with cast_direct, or mend the weights",
    )
    errors.note(
        largest >= OVERFLOW * qmax,
        "grouped quantization scale is not finite and positive: the weights are too large; keep them in bf16",
    )


def quantize_rows(
    rows: torch.Tensor, format: QuantFormat, errors: ErrorFlags, scratch: Scratch | None = None
) -> QuantizedMatrix:
    """Quantise floating rows ``[r, K]`` where they are. With ``scratch`` the codes last until its next use."""
    count, columns = rows.shape
    padded = align_up(columns, K_ALIGNMENT)
    size, shape = count * padded, (count, padded // format.group_size, format.group_size)
    scratch = scratch or Scratch(count, padded, rows.device)
    work = scratch.work[:size].view(shape)
    if rows.dtype == torch.float32 and columns == padded:
        values = rows.reshape(shape)
    else:
        values = scratch.values[:size].view(shape)
        flat = values.view(count, padded)
        flat[:, :columns].copy_(rows)
        flat[:, columns:].zero_()
    if rows.dtype == torch.bfloat16 and columns == padded:
        words = scratch.work.view(torch.int16)[:size].view(shape)
        maxima = bfloat16_maxima(rows.reshape(shape), words)
        work = values  # the product replaces its factor: less memory to go through
    else:
        maxima = torch.abs(values, out=work).amax(dim=-1)
    scales, reciprocals = group_scales(maxima, format.qmax, errors)
    torch.mul(values, reciprocals[..., None], out=work)
    work.round_().clamp_(format.qmin, format.qmax)
    codes = scratch.codes[:size].view(shape)
    codes.copy_(work)
    return QuantizedMatrix(codes, scales)


class Scratch:
    """Memory for one tile, used again for the next."""

    __slots__ = ("codes", "values", "work")

    def __init__(self, rows: int, padded: int, device: torch.device):
        self.values = torch.empty(rows * padded, dtype=torch.float32, device=device)
        self.work = torch.empty_like(self.values)
        self.codes = torch.empty(rows * padded, dtype=torch.int8, device=device)


def encode_matrix(weight: torch.Tensor, format: QuantFormat, errors: ErrorFlags) -> tuple[torch.Tensor, ...]:
    """Quantise and pack rows ``[r, K]`` where they are: the bytes of the base, high (5 and 6 bits) and scale planes.

    Raises:
        TypeError: the elements are not floating point.
    """
    require_floating_matrix(weight)
    geometry = row_split_geometry(format, (weight.shape[0], weight.shape[1]))
    whole = weight.dtype == torch.bfloat16 and weight.shape[1] == geometry.padded_columns
    if whole and weight.device.type == "cpu" and compiled.ready(compiled.Work.ENCODE, format):
        # A loop looks at all groups once, so that tiles would only make threads wait for the interpreter.
        planes = tuple(torch.empty(plane.bytes, dtype=torch.uint8) for plane in geometry.planes)
        check_largest(compiled.encode(weight.contiguous(), format, planes), format.qmax, errors)
        return planes
    return encode_by_torch(weight, format, errors)


def encode_by_torch(weight: torch.Tensor, format: QuantFormat, errors: ErrorFlags) -> tuple[torch.Tensor, ...]:
    """What :func:`encode_matrix` makes of a floating matrix, on any device."""
    geometry = row_split_geometry(format, (weight.shape[0], weight.shape[1]))

    def tiles() -> Iterator[tuple[int, int, QuantizedMatrix]]:
        scratch: Scratch | None = None
        for begin, end in row_tiles(weight, geometry.padded_columns):
            scratch = scratch or Scratch(end - begin, geometry.padded_columns, weight.device)
            yield begin, end, quantize_rows(weight[begin:end], format, errors, scratch)

    return packed_planes(geometry, weight.device, tiles(), format)


def packed_planes(
    geometry: RowSplitGeometry,
    device: torch.device,
    tiles: Iterable[tuple[int, int, QuantizedMatrix]],
    format: QuantFormat,
) -> tuple[torch.Tensor, ...]:
    """The bytes of the planes of a matrix from ranges of rows; each tile is packed before the next is asked for."""
    planes: tuple[torch.Tensor, ...] | None = None
    for begin, end, tile in tiles:
        pieces = row_split.pack_rows(tile.codes, tile.scales, format)
        if end - begin == geometry.rows:
            return pieces
        if planes is None:
            planes = tuple(torch.empty(plane.bytes, dtype=torch.uint8, device=device) for plane in geometry.planes)
        for plane, packed in zip(planes, pieces, strict=True):
            row_bytes = len(plane) // geometry.rows
            plane[begin * row_bytes : end * row_bytes] = packed
    assert planes is not None
    return planes


def quantize_matrix(weight: torch.Tensor, format: str, *, device: str | torch.device | None = None) -> QuantizedMatrix:
    """Quantise a floating matrix ``[N, K]`` as ``grouped_absmax`` does.

    Args:
        format: name of a grouped-integer format.
        device: where to work and leave the result; None is CUDA if there is one. CUDA falls back to the CPU.

    Raises:
        ValueError: rank other than 2, no elements, another format, NaN or infinity, or a scale that overflows binary16.
        TypeError: ``weight`` is not floating point.
    """
    quantized = grouped_format(format)
    require_floating_matrix(weight)
    with torch.no_grad():
        weight = weight.to(pick_device(device))
        errors = ErrorFlags(weight.device)
        padded = align_up(weight.shape[1], K_ALIGNMENT)
        tiles = [quantize_rows(weight[begin:end], quantized, errors) for begin, end in row_tiles(weight, padded)]
        errors.raise_if_any()
    if len(tiles) == 1:
        return tiles[0]
    return QuantizedMatrix(torch.cat([tile.codes for tile in tiles]), torch.cat([tile.scales for tile in tiles]))
