"""Typed canonical text of plain values: equal text exactly for values that a function cannot tell apart.

``1``, ``1.0`` and ``True`` differ, so do ``(1,)`` and ``[1]``, ``0.0`` and ``-0.0``. Floats are exact. Arrays, tensors
and bytes are represented by digests of their content. The order of a dict's keys does not count.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import math
from pathlib import PurePath
import struct
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ninferbuild.digest import digest_of

if TYPE_CHECKING:
    import numpy as np
    import torch


def canonical(value: object) -> str:
    """The canonical text of ``value``.

    Accepts None, bool, int, float, complex, str, bytes, bytearray, paths, numpy scalars, arrays and dtypes, torch
    tensors and dtypes, and tuples, lists, sets, frozensets and dicts of these. Subclasses count as something else.

    Raises:
        TypeError: another type; the message says where in ``value`` it is.
    """
    return _text(value, "", ())


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a ``torch.Tensor``. Never imports torch."""
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def is_array(value: object) -> bool:
    """Whether ``value`` is a ``numpy.ndarray``. Never imports numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def scalar_text(value: object) -> str | None:
    """The text of an immutable value without parts, or None when ``value`` is something else."""
    writer = _SCALARS.get(type(value))
    if writer is not None:
        return writer(value)
    kind = type(value)
    if kind.__module__ == "numpy" or kind.__module__.startswith("numpy."):
        return _numpy_scalar(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout", "memory_format"):
        return f"torch.{kind.__name__} {value}"
    if isinstance(value, PurePath) and kind.__module__.partition(".")[0] == "pathlib":
        return f"path {json.dumps(str(value))}"
    return None


def array_text(value: np.ndarray[Any, Any]) -> str:
    """Element type, shape, strides unless C order, and content digest of an array without object elements.

    Strides count because sums over the same elements in another memory order differ in their last bits.
    """
    import numpy as np

    strides = "" if value.flags.c_contiguous else f" strides {value.strides}"
    data = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return f"array {dtype_text(value.dtype)} {value.shape}{strides} {digest_of(data.data).hex()}"


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Name, byte order and size of an element type; structured types with their fields and offsets."""
    if dtype.names is None and dtype.subdtype is None:
        return f"{dtype.name}{dtype.str}"
    return f"{dtype.descr}" if dtype.subdtype is None else f"{dtype!r}"


def tensor_text(value: torch.Tensor) -> str:
    """Element type, shape, strides unless C order, device type and content digest of a dense tensor.

    Raises:
        TypeError: the tensor is sparse, quantized, nested or without storage.
    """
    import torch

    if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.device.type == "meta":
        raise TypeError("only dense tensors have a canonical text")
    detached = value.detach()
    strides = "" if detached.is_contiguous() else f" strides {tuple(detached.stride())}"
    flags = " requires grad" if value.requires_grad else ""
    if detached.is_conj() or detached.is_neg():
        detached = detached.resolve_conj().resolve_neg()
    data = detached.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    content = digest_of(data.data).hex()
    return f"tensor {value.dtype} {tuple(value.shape)}{strides} {value.device.type}{flags} {content}"


def _float(value: float) -> str:
    return struct.pack(">d", value).hex() if math.isnan(value) else value.hex()


_SCALARS: dict[type, Callable[[Any], str]] = {
    type(None): lambda value: "None",
    type(...): lambda value: "Ellipsis",
    type(NotImplemented): lambda value: "NotImplemented",
    bool: str,
    int: lambda value: f"int {value:#x}" if abs(value) >> 1024 else f"int {value}",
    float: lambda value: f"float {_float(value)}",
    complex: lambda value: f"complex {_float(value.real)} {_float(value.imag)}",
    str: lambda value: f"str {json.dumps(value)}",
    bytes: lambda value: f"bytes {len(value)} {digest_of(value).hex()}",
    range: lambda value: f"{value!r}",
}


def _numpy_scalar(value: Any) -> str | None:
    import numpy as np

    if isinstance(value, np.dtype) and not value.hasobject:
        return f"dtype {dtype_text(value)}"
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return f"scalar {dtype_text(value.dtype)} {value.tobytes().hex()}"
    return None


def _text(value: object, where: str, above: tuple[int, ...]) -> str:
    scalar = scalar_text(value)
    if scalar is not None:
        return scalar
    kind = type(value)
    if kind is bytearray:
        assert isinstance(value, bytearray)
        return f"bytearray {len(value)} {digest_of(value).hex()}"
    if id(value) in above:
        raise TypeError(f"a value that contains itself{where} has no canonical text")
    inside = (*above, id(value))
    if kind is tuple or kind is list:
        assert isinstance(value, tuple | list)
        items = [_text(item, f"{where}[{index}]", inside) for index, item in enumerate(value)]
        return f"{kind.__name__} ({', '.join(items)})"
    if kind is set or kind is frozenset:
        assert isinstance(value, set | frozenset)
        return f"{kind.__name__} ({', '.join(sorted(_text(item, where, inside) for item in value))})"
    if kind is dict or kind is MappingProxyType:
        assert isinstance(value, dict | MappingProxyType)
        pairs = [
            (_text(key, f"{where} key {key!r}", inside), _text(item, f"{where}[{key!r}]", inside))
            for key, item in value.items()
        ]
        return f"dict ({', '.join(f'{key}: {item}' for key, item in sorted(pairs))})"
    return _array(value, where, inside)


def _array(value: object, where: str, inside: tuple[int, ...]) -> str:
    if is_array(value) and type(value).__name__ in ("ndarray", "memmap"):
        array: Any = value
        if not array.dtype.hasobject:
            return array_text(array)
        if array.dtype.kind == "O":
            items = [_text(item, f"{where}[…]", inside) for item in array.reshape(-1).tolist()]
            return f"array object {array.shape} ({', '.join(items)})"
    elif is_tensor(value) and type(value).__name__ in ("Tensor", "Parameter"):
        try:
            return tensor_text(value)  # type: ignore[arg-type]
        except TypeError as error:
            raise TypeError(f"{error}{where and ' at ' + where}") from None
    kind = type(value)
    raise TypeError(
        f"a value of type {kind.__module__}.{kind.__qualname__}{where and ' at ' + where} has no canonical text; "
        "use numbers, strings, bytes, paths, arrays, and tuples, lists, sets and dicts of them"
    )
