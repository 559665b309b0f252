"""``gguf_blocks_v1``: rows of ggml blocks, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.codecs.buffers import as_bytes, decoded_type, payload_tensor, to_bytes
from ninferbuild.artifact.formats import GGUF_FORMATS, GgufFormat, NumericFormat
from ninferbuild.artifact.layouts import gguf_blocks_geometry

if TYPE_CHECKING:
    from ninferbuild.artifact.codecs.buffers import Payload


def require_rows(rows: torch.Tensor, format: GgufFormat, columns: int) -> None:
    """Raises ``ValueError`` unless ``rows`` is uint8 ``[rows, row bytes]`` for rows of ``columns`` values."""
    row_bytes = gguf_blocks_geometry(format, (1, columns)).row_bytes
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row_bytes:
        raise ValueError(
            f"rows of {columns} {format.name} values must be torch.uint8 [rows, {row_bytes}], "
            f"not {rows.dtype} {list(rows.shape)}"
        )


def pack_rows(rows: torch.Tensor) -> tuple[torch.Tensor]:
    """The bytes that rows append to the one plane: 1-D uint8, sharing memory with ``rows``. Nothing is checked."""
    return (as_bytes(rows),)


def encode_rows(
    codes: torch.Tensor, scales: torch.Tensor, format: NumericFormat, columns: int
) -> tuple[torch.Tensor, ...]:
    """Check and pack rows of ``columns`` values, see :func:`pack_rows`; ``scales`` is ignored.

    Raises:
        ValueError: another element type or shape.
    """
    del scales
    require_rows(codes, GGUF_FORMATS[format.name], columns)
    return pack_rows(codes)


def encode_gguf_blocks(rows: torch.Tensor, format: str, shape: Sequence[int]) -> bytes:
    """The object bytes of a matrix ``[N, K]`` from its blocks, uint8 ``[N, row bytes]``.

    Raises:
        ValueError: not a ``gguf_*`` format, an illegal shape, or blocks of another element type or shape.
    """
    geometry = gguf_blocks_geometry(format, shape)
    require_rows(rows, GGUF_FORMATS[format], geometry.columns)
    if rows.shape[0] != geometry.rows:
        raise ValueError(f"{rows.shape[0]} rows of blocks for a matrix of {geometry.rows} rows")
    return to_bytes(rows)


def decode_gguf_blocks(
    payload: Payload, format: str, shape: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The blocks, uint8 ``[N, row bytes]``, of an object.

    Raises:
        ValueError: not a ``gguf_*`` format, an illegal shape, or a payload of another length.
    """
    geometry = gguf_blocks_geometry(format, shape)
    data = payload_tensor(payload, geometry.planes[0].bytes, device)
    return data.reshape(geometry.rows, geometry.row_bytes)


def dequantize_gguf_blocks(
    payload: Payload,
    format: str,
    shape: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The values ``[N, K]`` of an object: those that ggml computes in binary32, converted to ``dtype``.

    Args:
        dtype: a floating type; None is bfloat16.

    Raises:
        TypeError: ``dtype`` is not floating.
        ValueError: as :func:`decode_gguf_blocks`, or the package ``gguf`` is needed and missing or decodes otherwise.
    """
    from ninferbuild.artifact.codecs.ggml_values import decode_rows

    chosen = decoded_type(dtype)
    rows = decode_gguf_blocks(payload, format, shape)
    values = torch.empty(tuple(shape), dtype=torch.float32)
    decode_rows(rows.numpy(), format, values.numpy())
    return values.to(device=device, dtype=chosen)
