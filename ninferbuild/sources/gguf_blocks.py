"""Matrices of GGUF files as sources: blocks as they are stored, or their values.

Both are described by the stored bytes, so that neither is ever read to find whether it changed. Nothing here imports
torch or reads a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.gguf import GGUFFile
from ninferbuild.sources.logical import LogicalSource
from ninferbuild.sources.ranges import Range, coalesce
from ninferbuild.sources.stored import StoredReader

RowMap = Callable[[int, int], Any] | Sequence[Range]
"""Where logical rows lie: ``(begin, end) -> `` stored rows of logical rows ``[begin, end)`` (a 1-D integer array, a
tensor or a sequence), or half-open ranges of stored rows in logical order. Any order and repeats are allowed."""


def block_source(gguf: GGUFFile, tensor: str, shape: tuple[int, int], row_map: RowMap | None = None) -> LogicalSource:
    """The matrix of ``shape`` ``(N, K)`` whose rows are rows of a tensor of any rank.

    Args:
        tensor: rows run along its last axis; those of rank 3 follow each other matrix by matrix.
        row_map: asked once, when the source is first looked at. None: all rows of the tensor.

    Raises:
        KeyError: there is no such tensor.
        ValueError: its type is not a stored block format, or its rows are not whole blocks. The first use raises it
            where ``K`` is not that of the tensor, the row map names other than ``N`` rows or rows outside the tensor,
            or the file ends before the tensor does.
    """
    shape = (shape[0], shape[1])
    _, format = gguf.block_rows(tensor)
    label = f"{tensor}[{format}]{list(shape)}"
    describe = partial(_describe, gguf, tensor, shape, row_map)
    reader = StoredReader(describe, shape=shape, name=f"{gguf.path}: {tensor}")
    return LogicalSource(shape, label, reader.read_values, reader.read_encoded)


def describe_blocks(gguf: GGUFFile, tensor: str) -> Description:
    """All rows of a tensor as a matrix.

    Raises:
        KeyError: there is no such tensor.
        ValueError: its type is not a stored block format, its rows are not whole blocks, or the file ends before it
            does.
    """
    info, format = gguf.block_rows(tensor)
    part = Part("blocks", gguf.region(tensor), info.row_bytes, name=f"{gguf.path}: {tensor}")
    return Description((info.rows, info.columns), "F32", format, (part,), encoding=format)


def _describe(gguf: GGUFFile, tensor: str, shape: tuple[int, int], row_map: RowMap | None) -> Description:
    whole = describe_blocks(gguf, tensor)
    height, columns = whole.shape
    if columns != shape[1]:
        raise ValueError(f"{gguf.path}: {tensor}: expected rows of {shape[1]} columns, got {columns}")
    ranges = ((0, height),) if row_map is None else _ranges(row_map, shape[0])
    if not all(0 <= begin <= end <= height for begin, end in ranges):
        raise ValueError(f"{gguf.path}: {tensor}: the row map names rows outside its {height} rows")
    count = sum(end - begin for begin, end in ranges)
    if count != shape[0]:
        raise ValueError(f"{gguf.path}: {tensor}: expected {shape[0]} rows, the row map names {count}")
    return whole if ranges == ((0, height),) else whole.select_rows(ranges)


def _ranges(row_map: RowMap, rows: int) -> tuple[Range, ...]:
    if not callable(row_map):
        return coalesce(row_map)
    found = row_map(0, rows)
    # An array's list holds Python integers, which are several times faster to go through.
    indices = map(index, found.tolist() if hasattr(found, "tolist") else found)
    return coalesce((row, row + 1) for row in indices)
