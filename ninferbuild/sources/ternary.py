"""Ternary matrices of GGUF files as sources: codes and scales bit for bit, or their values.

``t2_g128_fp16`` holds the same codes and scales as the blocks of the file, each in a plane of its own; importing them
rounds nothing. Nothing here imports torch or reads a payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ninferbuild.artifact.formats import T2_G128_FP16
from ninferbuild.sources.description import Description, Part
from ninferbuild.sources.ggml_types import PQ2_0, PTQ1_0
from ninferbuild.sources.logical import LogicalSource
from ninferbuild.sources.ranges import Range
from ninferbuild.sources.stored import StoredReader

if TYPE_CHECKING:
    from ninferbuild.sources.encoded import EncodedRows
    from ninferbuild.sources.gguf import GGUFFile

DECODERS = {PQ2_0.id: "pq2_0", PTQ1_0.id: "ptq1_0"}
"""Ternary ggml type → its decoder."""


def ternary_source(
    gguf: GGUFFile, name: str, shape: tuple[int, int], rows: Sequence[Range] | None = None
) -> LogicalSource:
    """A matrix made of rows of the tensor ``name``.

    Args:
        shape: (rows, columns) of the matrix. Checked with everything else at the first use.
        rows: row map: ranges of stored rows in the order of the matrix; repeats are allowed. None: all rows.

    The first use raises ``KeyError`` where the tensor is absent, and ``ValueError`` where it is not ternary, has not
    the shape, or is cut off.
    """
    label = f"{name}[{T2_G128_FP16.name}]{list(shape)}"
    reader = StoredReader(partial(_describe, gguf, name, rows), shape=shape, name=f"{gguf.path}: {name}")
    return LogicalSource(shape, label, reader.read_values, reader.read_encoded)


def ternary_rows(gguf: GGUFFile, name: str, begin: int = 0, end: int | None = None) -> EncodedRows:
    """Rows ``[begin, end)`` of a tensor: codes int8 ``[rows, K/128, 128]``, scales float16 ``[rows, K/128]``.

    Raises:
        KeyError: there is no such tensor.
        ValueError: it is no ternary matrix, the rows are none or lie outside, or a block holds a code that is not
            ternary.
    """
    from ninferbuild.sources import decoding

    description = _describe(gguf, name, None)
    height = description.shape[0]
    end = height if end is None else end
    if not 0 <= begin < end <= height:
        raise ValueError(f"{gguf.path}: {name}: row range [{begin},{end}) is outside {height}")
    return decoding.read_encoded(description, begin, end)


def _describe(gguf: GGUFFile, name: str, rows: Sequence[Range] | None) -> Description:
    info = gguf.info(name)
    decoder = DECODERS.get(info.type_id)
    if decoder is None:
        raise ValueError(f"{gguf.path}: {name}: {info.type_name} is not a ternary format")
    if len(info.shape) != 2:
        raise ValueError(f"{gguf.path}: {name}: row access requires rank 2, got {info.shape}")
    try:
        row_bytes = info.row_bytes
    except ValueError as error:
        raise ValueError(f"{gguf.path}: {error}") from error
    part = Part("blocks", gguf.region(name), row_bytes, name=f"{gguf.path}: {name}")
    whole = Description(info.shape, "F32", decoder, (part,), encoding=T2_G128_FP16.name)
    return whole if rows is None else whole.select_rows(rows)
