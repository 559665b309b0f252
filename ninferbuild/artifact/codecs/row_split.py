"""``row_split_k128_v1``: grouped integer codes in a base, an optional high and a scale plane.

Codes and scales are *physical*: ``R = ceil(K / 128) * 128 / G`` groups a row, the columns beyond ``K`` holding code 0
and the groups entirely beyond ``K`` holding scale 0.

Packing works on several codes at once: a little-endian host or device sees the codes of neighbouring lanes as the
bytes of one wider integer, and shifts and multiplications bring their bits together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
import operator
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.codecs.buffers import (
    as_bytes,
    assemble,
    decoded_type,
    raise_faults,
    require,
    split,
)
from ninferbuild.artifact.formats import NumericFormat, QuantFormat, get_format
from ninferbuild.artifact.layouts import RowSplitGeometry, row_split_geometry

if TYPE_CHECKING:
    from ninferbuild.artifact.codecs.buffers import Payload, WordFaults


def _record(format: str | NumericFormat) -> QuantFormat:
    record = get_format(format) if isinstance(format, str) else format
    if not isinstance(record, QuantFormat):
        raise ValueError(f"format {record.name!r} is not a grouped integer format")
    return record


# Packing


def _lanes(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A fresh view of neighbouring int8 codes as one integer of ``dtype``."""
    codes = codes.reshape(-1)
    if codes.storage_offset() % dtype.itemsize:
        codes = codes.clone()
    return codes.view(dtype)


def _low_nibbles(codes: torch.Tensor) -> torch.Tensor:
    pairs = _lanes(codes, torch.int32) & 0x0F0F0F0F
    pairs |= pairs >> 4
    return pairs.view(torch.int16).to(torch.uint8)


def _bit_pairs(codes: torch.Tensor, shift: int) -> torch.Tensor:
    """Bits ``shift`` and ``shift + 1`` of four lanes in one byte, the first lane lowest."""
    lanes = _lanes(codes, torch.int32)
    lanes = (lanes >> shift if shift else lanes) & 0x03030303
    lanes *= 0x01041040  # lane i moves to bits 24 + 2i; nothing else reaches the top byte
    lanes >>= 24
    return lanes.to(torch.uint8)


def _bit_four(codes: torch.Tensor) -> torch.Tensor:
    """Bit 4 of eight lanes in one byte, the first lane lowest."""
    lanes = _lanes(codes, torch.int64) >> 4
    lanes &= 0x0101010101010101
    lanes *= 0x0102040810204080  # lane i moves to bit 56 + i; nothing else reaches the top byte
    lanes >>= 56
    return lanes.to(torch.uint8)


def pack_rows(codes: torch.Tensor, scales: torch.Tensor, format: str | QuantFormat) -> tuple[torch.Tensor, ...]:
    """The bytes that rows append to the planes: base, high (5 and 6 bits only), scale.

    Codes are reduced modulo ``2**bits``; nothing is checked (see :func:`word_faults`).

    Args:
        codes: int8 ``[r, R, G]``.
        scales: float16 ``[r, R]`` on the same device.

    Returns:
        1-D uint8 tensors on that device; they may share memory with the arguments.

    Raises:
        TypeError: another element type or shape.
        ValueError: not a grouped integer format.
    """
    record = _record(format)
    require(codes, "codes", torch.int8, (None, None, record.group_size))
    require(scales, "scales", torch.float16, codes.shape[:2])
    scale = as_bytes(scales)
    if record.bits == 8:
        return as_bytes(codes), scale
    if record.bits == 2:
        return _bit_pairs(codes, 0), scale
    base = _low_nibbles(codes)
    if record.bits == 5:
        return base, _bit_four(codes), scale
    if record.bits == 6:
        return base, _bit_pairs(codes, 4), scale
    return base, scale


def word_faults(codes: torch.Tensor, scales: torch.Tensor, format: str | QuantFormat) -> WordFaults:
    """What makes words illegal: a code outside the format's interval, a scale that is -0, infinite or NaN.

    Args:
        codes: int8 ``[r, R, G]``; for 2-bit formats also uint8 ``[r, R, G / 4]``, the bytes of the base plane.
        scales: float16 ``[r, R]``.
    """
    record = _record(format)
    words = scales.view(torch.int16)
    return (
        (_outside(codes, record), f"{record.name} codes must be in {record.qmin}..{record.qmax}"),
        (((words & 0x7C00) == 0x7C00).any(), f"{record.name} scales must be finite"),
        ((words == -0x8000).any(), f"{record.name} scales must not be -0"),
    )


def _outside(codes: torch.Tensor, record: QuantFormat) -> torch.Tensor:
    if codes.dtype == torch.uint8:
        pairs = _lanes(codes, torch.int64)
        illegal = pairs & ~(pairs << 1)
        illegal &= -0x5555_5555_5555_5556  # the upper bit of each pair: set above a clear one, it is the word 2
        return illegal.any()
    low, high = torch.aminmax(codes)
    return (low < record.qmin) | (high > record.qmax)


def zero_scale_faults(codes: torch.Tensor, scales: torch.Tensor, format: str | QuantFormat) -> WordFaults:
    """Codes other than 0 under a scale of 0. Arguments as for :func:`word_faults`."""
    zero = scales == 0
    if zero.device.type == "cpu" and not bool(zero.any()):  # the rule, and asking costs less than looking at codes
        return ()
    used = _lanes(codes, torch.int64).view(*scales.shape, -1).ne(0).any(-1)
    return (((used & zero).any(), f"{_record(format).name} codes under a scale of 0 must be 0"),)


def encode_rows(
    codes: torch.Tensor, scales: torch.Tensor, format: NumericFormat, columns: int
) -> tuple[torch.Tensor, ...]:
    """Check and pack rows of ``columns`` logical columns, see :func:`pack_rows`.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words.
    """
    record = _record(format)
    groups = row_split_geometry(record, (1, columns)).groups
    require(codes, "codes", torch.int8, (None, groups, record.group_size))
    require(scales, "scales", torch.float16, codes.shape[:2])
    raise_faults(word_faults(codes, scales, record))
    return pack_rows(codes, scales, record)


def encode_row_split(
    codes: torch.Tensor, scales: torch.Tensor, format: str | QuantFormat, shape: Sequence[int]
) -> bytes:
    """The object bytes of a matrix ``[N, K]``.

    Args:
        codes: int8 ``[N, R, G]``.
        scales: float16 ``[N, R]``.

    Raises:
        TypeError: another element type or shape.
        ValueError: illegal words, format or shape.
    """
    geometry = row_split_geometry(format, shape)
    require(codes, "codes", torch.int8, (geometry.rows, None, None))
    return assemble(geometry.planes, encode_rows(codes, scales, _record(format), geometry.columns))


# Decoding


def _unpack(planes: Sequence[torch.Tensor], record: QuantFormat, geometry: RowSplitGeometry) -> torch.Tensor:
    shape = (geometry.rows, geometry.groups, record.group_size)
    if record.bits == 8:
        return planes[0].view(torch.int8).reshape(shape)
    if record.bits == 2:
        words = _spread(planes[0], 2)
    else:
        words = _spread(planes[0], 4)
        if record.high_bytes:
            high = _spread(planes[1], record.bits - 4)
            words |= high << 4
    words = words.view(torch.int8)
    unused = 8 - record.bits
    return ((words << unused) >> unused).reshape(shape)


def _spread(data: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of ``bits`` bits, lowest first, one a byte."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).reshape(-1)


def decode_row_split_codes(
    source: Payload, format: str | QuantFormat, shape: Sequence[int], device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales, float16 ``[N, R]``, and the codes, int8 ``[N, R, G]``, of an object. Words are not checked.

    Raises:
        ValueError: illegal format or shape, or a payload of another length.
    """
    record = _record(format)
    geometry = row_split_geometry(record, shape)
    planes = split(source, geometry.planes, device)
    scales = planes[-1].clone().view(torch.float16).reshape(geometry.rows, geometry.groups)
    return scales, _unpack(planes, record, geometry)


def dequantize_row_split(
    source: Payload,
    format: str | QuantFormat,
    shape: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
    compiled: bool = False,
) -> torch.Tensor:
    """The values ``[N, K]`` of an object: the binary32 product of scale and code, converted to ``dtype``.

    Args:
        dtype: a floating type; None is bfloat16.
        compiled: accepted for callers that ask for a compiled kernel; the result is the same.

    Raises:
        TypeError: ``dtype`` is not floating.
        ValueError: illegal format or shape, or a payload of another length.
    """
    chosen = decoded_type(dtype)
    del compiled
    scales, codes = decode_row_split_codes(source, format, shape, device)
    values = codes.to(torch.float32)
    values *= scales.to(torch.float32).unsqueeze(-1)
    rows, columns = shape
    return values.reshape(rows, -1)[:, :columns].to(chosen).contiguous()


# Rows


@dataclass(frozen=True, slots=True)
class RowPlanes:
    """Rows of an object, a plane at a time: 1-D uint8 tensors; ``high`` is empty for formats without that plane."""

    base: torch.Tensor
    high: torch.Tensor
    scale: torch.Tensor
    rows: int


def _planes_by_row(
    source: Payload, format: str | QuantFormat, shape: Sequence[int]
) -> tuple[RowSplitGeometry, list[torch.Tensor]]:
    record = _record(format)
    geometry = row_split_geometry(record, shape)
    planes = [plane.reshape(geometry.rows, -1) for plane in split(source, geometry.planes)]
    if not record.high_bytes:
        planes.insert(1, planes[0].new_empty((geometry.rows, 0)))
    return geometry, planes


def split_row_planes(
    source: Payload, format: str | QuantFormat, shape: Sequence[int], row_begin: int, rows: int
) -> RowPlanes:
    """Rows ``[row_begin, row_begin + rows)`` of an object, as views of a tensor payload.

    Raises:
        IndexError: the rows are not inside the object, or none.
        ValueError: illegal format or shape, or a payload of another length.
    """
    geometry, planes = _planes_by_row(source, format, shape)
    if row_begin < 0 or rows <= 0 or row_begin + rows > geometry.rows:
        raise IndexError(f"rows [{row_begin}, {row_begin + rows}) are not inside the {geometry.rows} rows")
    base, high, scale = (plane[row_begin : row_begin + rows].reshape(-1) for plane in planes)
    return RowPlanes(base, high, scale, rows)


def gather_row_planes(
    source: Payload, format: str | QuantFormat, shape: Sequence[int], indices: Sequence[int]
) -> RowPlanes:
    """The rows at ``indices``, in that order; repeats are allowed.

    Raises:
        IndexError: an index outside the object.
        TypeError: an index that is no integer.
        ValueError: no indices, illegal format or shape, or a payload of another length.
    """
    geometry, planes = _planes_by_row(source, format, shape)
    chosen = [_row_index(index, geometry.rows) for index in indices]
    if not chosen:
        raise ValueError("no rows to gather")
    picked = torch.tensor(chosen, device=planes[0].device)
    base, high, scale = (plane.index_select(0, picked).reshape(-1) for plane in planes)
    return RowPlanes(base, high, scale, len(chosen))


def _row_index(index: object, rows: int) -> int:
    is_boolean = isinstance(index, bool) or getattr(index, "dtype", None) in (torch.bool, bool)
    if is_boolean or not hasattr(index, "__index__"):
        raise TypeError(f"a row index is an integer, not {index!r}")
    number = operator.index(index)
    if not 0 <= number < rows:
        raise IndexError(f"row {number} is not inside the {rows} rows")
    return number


def assemble_row_planes(planes: RowPlanes, format: str | QuantFormat, columns: int) -> bytes:
    """The object bytes of rows taken from another object of the same format and number of columns.

    Raises:
        ValueError: illegal format or columns, or planes of other sizes.
    """
    geometry = row_split_geometry(format, (planes.rows, columns))
    pieces = [piece for piece in (planes.base, planes.high, planes.scale) if piece.numel()]
    sizes = [piece.numel() for piece in pieces]
    if sizes != [plane.bytes for plane in geometry.planes]:
        raise ValueError(f"planes of {sizes} bytes are not those of {planes.rows} rows of {columns} columns")
    return assemble(geometry.planes, pieces)
