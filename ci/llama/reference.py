"""What llama.cpp itself makes of a file: entries as its package gguf reads them, values as ggml decodes them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
import json
from math import prod
from pathlib import Path
import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llama.package import LlamaCpp

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
"""Types of single values; those of BF16 are the upper halves of FP32."""


@dataclass(frozen=True)
class Entry:
    """A tensor: row-major shape, name of its type, first byte in the file, bytes."""

    shape: tuple[int, ...]
    type: str
    begin: int
    size: int


class Reference:
    """One file as llama.cpp reads it.

    Attributes:
        kv: keys and values of the header.
        tensors: name → entry.
    """

    def __init__(self, llama_cpp: LlamaCpp, path: Path):
        script = Path(__file__).with_name("listing.py")
        command = [sys.executable, str(script), str(llama_cpp.source), str(path)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        self.kv: dict[str, Any] = found["kv"]
        self.tensors = {
            name: Entry(tuple(shape), kind, begin, size) for name, shape, kind, begin, size in found["tensors"]
        }
        self._library = llama_cpp.ggml
        self._data = np.fromfile(path, np.uint8)

    def raw(self, name: str) -> Bytes:
        """The stored bytes of a tensor, 1-D."""
        entry = self.tensors[name]
        return self._data[entry.begin : entry.begin + entry.size]

    def values(self, name: str) -> Values:
        """The FP32 values of a tensor, in its shape."""
        entry, raw = self.tensors[name], self.raw(name)
        if entry.type == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(entry.shape)
        if entry.type in PLAIN:
            return raw.view(PLAIN[entry.type]).astype(np.float32).reshape(entry.shape)
        blocks = np.ascontiguousarray(raw)
        values = np.empty(prod(entry.shape), np.float32)
        decode = getattr(self._ggml, f"dequantize_row_{entry.type.lower().replace('_k', '_K')}")
        decode.argtypes, decode.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
        decode(blocks.ctypes.data, values.ctypes.data, values.size)
        return values.reshape(entry.shape)

    @cached_property
    def _ggml(self) -> ctypes.CDLL:
        return ctypes.CDLL(str(self._library))


def package_values(kind: str, raw: Bytes, shape: tuple[int, ...]) -> Values | None:
    """The FP32 values of blocks as the installed package gguf decodes them; None for a type that it does not decode."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    if kind not in GGMLQuantizationType.__members__:
        return None
    try:
        found: Values = dequantize(raw.reshape(*shape[:-1], -1), GGMLQuantizationType[kind])
    except NotImplementedError:
        return None
    return found.reshape(shape)


def equal(left: Values, right: Values) -> bool:
    """Whether values have the same shape and the same bits."""
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def nearly_equal(left: Values, right: Values) -> bool:
    """Whether values agree to a few units in the last place, as logarithms of exponentials do."""
    return left.shape == right.shape and bool(np.allclose(left, right, rtol=1e-6, atol=1e-6))
