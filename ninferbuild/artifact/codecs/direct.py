"""``contiguous_le_v1``: values bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ninferbuild.artifact.codecs.buffers import as_bytes, payload_tensor, to_bytes
from ninferbuild.artifact.formats import BF16, FP32, INT32, DirectFormat
from ninferbuild.artifact.layouts import contiguous_geometry

if TYPE_CHECKING:
    from ninferbuild.artifact.codecs.buffers import Payload

_DTYPES = {BF16.name: "bfloat16", FP32.name: "float32", INT32.name: "int32"}
"""Element type of each direct format, by name: looking one up in torch would load it with this module."""


def element_type(format: str) -> torch.dtype:
    """The element type of the direct format ``format``. Raises ``KeyError`` for any other format."""
    found: torch.dtype = getattr(torch, _DTYPES[format])
    return found


def require_dtype(values: torch.Tensor, format: str | DirectFormat) -> None:
    """Raises ``TypeError`` unless ``values`` is a tensor of exactly the element type of ``format``."""
    name = format if isinstance(format, str) else format.name
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} values must be a tensor, not {type(values).__name__}")
    wanted = element_type(name)
    if values.dtype != wanted:
        raise TypeError(f"{name} values must be {wanted}, not {values.dtype}; nothing is converted implicitly")


def pack(values: torch.Tensor) -> torch.Tensor:
    """The little-endian words of ``values`` in C order, 1-D uint8 on their device; no copy when contiguous."""
    return as_bytes(values)


def encode_direct(values: torch.Tensor, format: str | DirectFormat) -> bytes:
    """The object bytes of a bfloat16, float32 or int32 tensor of rank 0..16.

    Raises:
        TypeError: another element type than the format's.
        ValueError: not a direct format, a rank above 16 or an empty dimension.
    """
    name = format if isinstance(format, str) else format.name
    contiguous_geometry(name, tuple(getattr(values, "shape", ())))
    require_dtype(values, name)
    return to_bytes(values)


def decode_direct(
    payload: Payload, format: str | DirectFormat, shape: Sequence[int], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The tensor of ``shape`` whose object bytes are ``payload``.

    Raises:
        ValueError: not a direct format, an illegal shape, or a payload of another length.
    """
    name = format if isinstance(format, str) else format.name
    data = payload_tensor(payload, contiguous_geometry(name, shape).planes[0].bytes, device)
    dtype = element_type(name)
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype).reshape(tuple(shape))
