"""Storage layouts: where the words of a format lie inside one object.

Every geometry is a tuple of data planes. Within a plane rows follow each other, so rows ``[r, r + m)`` of an object
with ``N`` rows are the bytes ``[r * plane.bytes // N, (r + m) * plane.bytes // N)`` of each plane (for ``nvfp4``: in
whole tiles of 128 rows; its divisor plane holds one word for each stacked matrix instead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TypeVar

import msgspec

from ninferbuild.artifact.formats import (
    DirectFormat,
    Fp8RowFormat,
    GgufFormat,
    NumericFormat,
    Nvfp4Format,
    QuantFormat,
    get_format,
)
from ninferbuild.struct_fields import with_dataclass_fields

F = TypeVar("F", bound=NumericFormat)

PLANE_ALIGNMENT = 256
"""Planes and objects start at multiples of this many bytes."""

K_ALIGNMENT = 128
"""Columns of grouped formats are padded to a multiple of this."""

MAX_RANK = 16
SCALE_TILE_ROWS = 128
"""Rows of one NVFP4 scale tile; row blocks and stacked matrices are whole numbers of tiles."""

HADAMARD_BLOCK = 1024
"""Columns that one Hadamard transform rotates together."""


def align_up(value: int, alignment: int) -> int:
    """The smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


@with_dataclass_fields
class Plane(msgspec.Struct, frozen=True):
    """A run of data inside an object.

    Attributes:
        offset: first byte, relative to the object.
        bytes: length of the data.
        extent: length of the data and of the zero padding up to the next plane; the extents of an object sum to its
            encoded size.
    """

    offset: int
    bytes: int
    extent: int


def _stack(*sizes: int) -> tuple[Plane, ...]:
    """Planes of ``sizes`` bytes, each padded to the plane alignment except the last; empty ones are left out."""
    sizes = tuple(size for size in sizes if size)
    planes, offset = [], 0
    for size in sizes[:-1]:
        extent = align_up(size, PLANE_ALIGNMENT)
        planes.append(Plane(offset, size, extent))
        offset += extent
    return (*planes, Plane(offset, sizes[-1], sizes[-1]))


def _dimensions(shape: Sequence[int], name: str) -> tuple[int, ...]:
    dimensions = tuple(shape)
    for size in dimensions:
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{name}: dimensions must be positive integers, not {list(dimensions)}")
    return dimensions


def _matrix(shape: Sequence[int], name: str) -> tuple[int, int]:
    dimensions = _dimensions(shape, name)
    if len(dimensions) != 2:
        raise ValueError(f"{name} stores matrices [N, K], not rank {len(dimensions)}: {list(dimensions)}")
    return dimensions[0], dimensions[1]


def _typed(format: str | NumericFormat, kind: type[F], layout: str) -> F:
    record = get_format(format) if isinstance(format, str) else format
    if not isinstance(record, kind):
        raise ValueError(f"layout {layout!r} does not accept format {record.name!r}")
    return record


@with_dataclass_fields
class ContiguousGeometry(msgspec.Struct, frozen=True):
    """``contiguous_le_v1``: words in C order."""

    elements: int
    word_bytes: int
    planes: tuple[Plane, ...]


@with_dataclass_fields
class RowSplitGeometry(msgspec.Struct, frozen=True):
    """``row_split_k128_v1``: base, high and scale planes; ``groups`` is the number of physical groups of a row."""

    rows: int
    columns: int
    padded_columns: int
    groups: int
    base_row_bytes: int
    high_row_bytes: int
    scale_row_bytes: int
    high_offset: int
    scale_offset: int
    planes: tuple[Plane, ...]


@with_dataclass_fields
class BlockScaleGeometry(msgspec.Struct, frozen=True):
    """``block_scale_k16_m128x4_v1``: codes, swizzled scales, divisor words."""

    rows: int
    columns: int
    divisors: int
    scale_offset: int
    divisor_offset: int
    planes: tuple[Plane, ...]

    @property
    def rows_per_divisor(self) -> int:
        return self.rows // self.divisors


@with_dataclass_fields
class RowScaleGeometry(msgspec.Struct, frozen=True):
    """``row_scale_v1``: codes, then one scale for each row."""

    rows: int
    columns: int
    scale_offset: int
    planes: tuple[Plane, ...]


@with_dataclass_fields
class GgufBlocksGeometry(msgspec.Struct, frozen=True):
    """``gguf_blocks_v1``: rows of whole blocks, one after another, without padding."""

    rows: int
    columns: int
    blocks_per_row: int
    row_bytes: int
    planes: tuple[Plane, ...]


Geometry = ContiguousGeometry | RowSplitGeometry | BlockScaleGeometry | RowScaleGeometry | GgufBlocksGeometry


def contiguous_geometry(format: str | DirectFormat, shape: Sequence[int]) -> ContiguousGeometry:
    """Geometry of a direct tensor of rank 0..16.

    Raises:
        ValueError: another format class, a rank above 16, or a dimension that is not a positive integer.
    """
    record = _typed(format, DirectFormat, DirectFormat.layout)
    dimensions = _dimensions(shape, DirectFormat.layout)
    if len(dimensions) > MAX_RANK:
        raise ValueError(f"{DirectFormat.layout}: rank {len(dimensions)} exceeds {MAX_RANK}")
    elements = prod(dimensions)
    return ContiguousGeometry(elements, record.word_bytes, _stack(elements * record.word_bytes))


def row_split_geometry(format: str | QuantFormat, shape: Sequence[int]) -> RowSplitGeometry:
    """Geometry of a grouped matrix ``[N, K]``.

    Raises:
        ValueError: another format class, or not a matrix of positive dimensions.
    """
    record = _typed(format, QuantFormat, QuantFormat.layout)
    rows, columns = _matrix(shape, QuantFormat.layout)
    padded = align_up(columns, K_ALIGNMENT)
    groups = padded // record.group_size
    base, high, scale = groups * record.base_bytes, groups * record.high_bytes, groups * 2
    high_offset = align_up(rows * base, PLANE_ALIGNMENT)
    scale_offset = high_offset + align_up(rows * high, PLANE_ALIGNMENT)
    planes = _stack(rows * base, rows * high, rows * scale)
    return RowSplitGeometry(rows, columns, padded, groups, base, high, scale, high_offset, scale_offset, planes)


def block_scale_geometry(shape: Sequence[int], divisors: int = 1) -> BlockScaleGeometry:
    """Geometry of an ``nvfp4`` matrix ``[N, K]`` that stacks ``divisors`` separately quantised matrices.

    Raises:
        ValueError: ``N`` is no multiple of 128, ``K`` none of 64, or the stack is not made of whole scale tiles.
    """
    name = Nvfp4Format.layout
    rows, columns = _matrix(shape, name)
    if rows % SCALE_TILE_ROWS or columns % 64:
        raise ValueError(
            f"{name} needs N divisible by 128 and K divisible by 64, not {[rows, columns]}; choose another format"
        )
    _positive_divisors(divisors)
    if rows % divisors:
        raise ValueError(f"NVFP4 divisor count must divide the plane's rows: {rows} rows, {divisors} divisors")
    if rows // divisors % SCALE_TILE_ROWS:
        raise ValueError(
            "each NVFP4 divisor must cover a whole number of 128-row scale tiles: "
            f"{rows} rows, {divisors} divisors of {rows // divisors} rows"
        )
    codes, scales = rows * columns // 2, rows * columns // 16
    scale_offset = align_up(codes, PLANE_ALIGNMENT)
    # The divisors follow the scales without alignment; N % 128 == 0 makes the code plane end on one.
    planes = (
        Plane(0, codes, scale_offset),
        Plane(scale_offset, scales, scales),
        Plane(scale_offset + scales, 4 * divisors, 4 * divisors),
    )
    return BlockScaleGeometry(rows, columns, divisors, scale_offset, scale_offset + scales, planes)


def row_scale_geometry(shape: Sequence[int]) -> RowScaleGeometry:
    """Geometry of a row-scaled FP8 matrix ``[N, K]``.

    Raises:
        ValueError: not a matrix of positive dimensions.
    """
    rows, columns = _matrix(shape, Fp8RowFormat.layout)
    planes = _stack(rows * columns, rows * 2)
    return RowScaleGeometry(rows, columns, planes[1].offset, planes)


def gguf_blocks_geometry(format: str | GgufFormat, shape: Sequence[int]) -> GgufBlocksGeometry:
    """Geometry of a matrix ``[N, K]`` of ggml blocks.

    Raises:
        ValueError: another format class, not a matrix of positive dimensions, or rows that end within a block.
    """
    record = _typed(format, GgufFormat, GgufFormat.layout)
    rows, columns = _matrix(shape, GgufFormat.layout)
    blocks, rest = divmod(columns, record.block_elements)
    if rest:
        raise ValueError(
            f"{record.name} stores blocks of {record.block_elements} values, which do not divide K = {columns}"
        )
    row_bytes = blocks * record.block_bytes
    return GgufBlocksGeometry(rows, columns, blocks, row_bytes, _stack(rows * row_bytes))


def _positive_divisors(divisors: int) -> None:
    if not isinstance(divisors, int) or isinstance(divisors, bool) or divisors < 1:
        raise ValueError(f"the number of divisors must be a positive integer, not {divisors!r}")


@with_dataclass_fields
class Layout(msgspec.Struct, frozen=True):
    """A registered layout.

    Attributes:
        format_type: the class of formats it stores.
        geometry: from (format, shape, divisors), after the checks that are common to all layouts.
        stacks: whether an object may hold more than one divisor.
        alignment: object offsets are multiples of this.
        codec_version: raised when the bytes that the codec makes from the same words change.
    """

    name: str
    format_type: type[NumericFormat]
    geometry: Callable[[NumericFormat, Sequence[int], int], Geometry]
    stacks: bool = False
    alignment: int = PLANE_ALIGNMENT
    codec_version: int = 1


def _contiguous(format: NumericFormat, shape: Sequence[int], _divisors: int) -> Geometry:
    return contiguous_geometry(_typed(format, DirectFormat, DirectFormat.layout), shape)


def _row_split(format: NumericFormat, shape: Sequence[int], _divisors: int) -> Geometry:
    return row_split_geometry(_typed(format, QuantFormat, QuantFormat.layout), shape)


def _block_scale(_format: NumericFormat, shape: Sequence[int], divisors: int) -> Geometry:
    return block_scale_geometry(shape, divisors)


def _row_scale(_format: NumericFormat, shape: Sequence[int], _divisors: int) -> Geometry:
    return row_scale_geometry(shape)


def _gguf_blocks(format: NumericFormat, shape: Sequence[int], _divisors: int) -> Geometry:
    return gguf_blocks_geometry(_typed(format, GgufFormat, GgufFormat.layout), shape)


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(DirectFormat.layout, DirectFormat, _contiguous),
        Layout(QuantFormat.layout, QuantFormat, _row_split),
        Layout(Nvfp4Format.layout, Nvfp4Format, _block_scale, stacks=True),
        Layout(Fp8RowFormat.layout, Fp8RowFormat, _row_scale),
        Layout(GgufFormat.layout, GgufFormat, _gguf_blocks),
    )
}

CODEC_VERSIONS: dict[str, int] = {layout.name: layout.codec_version for layout in LAYOUTS.values()}


def get_layout(name: str) -> Layout:
    """The registered layout called ``name``.

    Raises:
        ValueError: there is none.
    """
    if not isinstance(name, str) or name not in LAYOUTS:
        raise ValueError(f"unknown tensor layout {name!r}; known: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def geometry(layout: str, format: str, shape: Sequence[int], divisors: int = 1) -> Geometry:
    """The geometry of an object.

    Raises:
        ValueError: unknown layout or format, a format of another layout, an illegal shape or number of divisors.
    """
    record = get_layout(layout)
    numeric = _typed(format, record.format_type, layout)
    _positive_divisors(divisors)
    if divisors != 1 and not record.stacks:
        raise ValueError(f"layout {layout!r} stores one divisor, not {divisors}")
    return record.geometry(numeric, shape, divisors)


def planes(layout: str, format: str, shape: Sequence[int], divisors: int = 1) -> tuple[Plane, ...]:
    """The data planes of an object, in file order.

    ``row_split``: base, high (5 and 6 bits only), scale. ``block_scale``: codes, scales, divisors. ``row_scale``:
    codes, scales. ``contiguous`` and ``gguf_blocks``: one.

    Raises:
        ValueError: as :func:`geometry`.
    """
    return geometry(layout, format, shape, divisors).planes


def encoded_size(layout: str, format: str, shape: Sequence[int], divisors: int = 1) -> int:
    """The exact number of bytes of an object.

    Raises:
        ValueError: as :func:`geometry`.
    """
    last = planes(layout, format, shape, divisors)[-1]
    return last.offset + last.extent
