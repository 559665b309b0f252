"""Element types of stored tensors, by their Safetensors names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WORD_BYTES = {
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "F64": 8,
    "I32": 4,
    "I64": 8,
    "I8": 1,
    "U8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "BOOL": 1,
    "I16": 2,
    "U16": 2,
    "U32": 4,
    "U64": 8,
}
"""Bytes of one element."""

STORED_DTYPES = frozenset(("BF16", "F16", "F32", "F64", "I32", "I64", "I8", "U8", "F8_E4M3"))
"""The element types that may be read from a checkpoint; the others occur in arrays in memory only."""

TORCH_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float64",
    "I32": "int32",
    "I64": "int64",
    "I8": "int8",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
    "I16": "int16",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
}
"""Attribute of the ``torch`` module for each type."""

NAMES_OF_TORCH = {f"torch.{attribute}": name for name, attribute in TORCH_NAMES.items()}
"""``str(tensor.dtype)`` → name."""

NAMES_OF_NUMPY = {
    "f2": "F16",
    "f4": "F32",
    "f8": "F64",
    "i1": "I8",
    "i2": "I16",
    "i4": "I32",
    "i8": "I64",
    "u1": "U8",
    "u2": "U16",
    "u4": "U32",
    "u8": "U64",
    "b1": "BOOL",
}
"""Kind and item size of a numpy dtype → name."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a Safetensors name; imports torch."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype
