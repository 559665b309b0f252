"""Conversion of elements to the words of the direct formats."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ninferbuild.rules.error_flags import ErrorFlags

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

_INTEGERS = frozenset(("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"))


def cast_elements(values: torch.Tensor, format: str, errors: ErrorFlags) -> torch.Tensor:
    """``values`` as the element type of the direct format ``format``, in their shape and where they are.

    ``bf16``: to binary32, then to bfloat16 (binary64 is rounded twice); ``fp32``: to binary32; both to nearest, ties
    to even, overflowing to infinity. ``int32``: truncated towards zero. Elements that have the type already are
    copied bit for bit.

    Errors:
        ValueError: NaN that would have to be converted, or an integer outside the range.
        TypeError: complex elements.
    """
    return _CASTS[format](values, errors)


def _to_bf16(values: torch.Tensor, errors: ErrorFlags) -> torch.Tensor:
    return values if values.dtype == torch.bfloat16 else _binary32(values, "BF16", errors).to(torch.bfloat16)


def _to_fp32(values: torch.Tensor, errors: ErrorFlags) -> torch.Tensor:
    return values if values.dtype == torch.float32 else _binary32(values, "FP32", errors)


def _binary32(values: torch.Tensor, target: str, errors: ErrorFlags) -> torch.Tensor:
    """``values`` rounded to binary32; narrower floating types fit exactly. NaN is refused: its bits are undefined."""
    _require_real(values)
    rounded = values.to(torch.float32)
    if values.is_floating_point() and rounded.numel():
        errors.note(
            torch.isnan(rounded.amax()),  # amax passes NaN on and needs no mask of the size of the block
            f"cast_direct source contains NaN, whose conversion from {_name(values.dtype)} to {target} is undefined; "
            "mend the weights",
        )
    return rounded


def _to_int32(values: torch.Tensor, errors: ErrorFlags) -> torch.Tensor:
    _require_real(values)
    if values.dtype == torch.int32:
        return values
    if values.is_floating_point():
        # Narrow floats compare in binary32, which cannot hold 2^31 - 1; the bound there is what lies below 2^31.
        exact = values if values.dtype == torch.float64 else values.to(torch.float32)
        below = exact <= INT32_MAX if exact.dtype == torch.float64 else exact < float(2**31)
        inside = (exact >= INT32_MIN) & below  # false for NaN
    elif values.dtype == torch.uint64:
        exact = values.view(torch.int64)  # the upper half of the range turns negative
        inside = (exact >= 0) & (exact <= INT32_MAX)
    else:
        exact = values.to(torch.int64)  # torch compares neither uint16 nor uint32
        inside = (exact >= INT32_MIN) & (exact <= INT32_MAX)
    errors.note(~inside, f"{_name(values.dtype)} source has elements outside the representable range of INT32")
    return exact.to(torch.int32)


def _require_real(values: torch.Tensor) -> None:
    if not (values.is_floating_point() or _name(values.dtype) in _INTEGERS):
        raise TypeError(f"cast_direct source must hold real numbers, got {_name(values.dtype)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_CASTS: dict[str, Callable[[torch.Tensor, ErrorFlags], torch.Tensor]] = {
    "bf16": _to_bf16,
    "fp32": _to_fp32,
    "int32": _to_int32,
}
