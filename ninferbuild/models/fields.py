"""Checks of single ``config.json`` fields that every architecture adapter shares.

Each check raises :class:`ValueError` with a message that begins with the field, written ``label.key``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
import struct
from typing import Any

Config = Mapping[str, Any]
"""A parsed ``config.json`` object."""


def require_object(value: object, label: str) -> Config:
    """``value`` itself; raises ``ValueError`` unless it is a JSON object."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{label}: expected an object, got {value!r}")
    return value


def positive(value: object, label: str) -> int:
    """An integer above zero. ``True`` is no integer here."""
    if type(value) is not int or value <= 0:
        raise ValueError(f"{label}: expected a positive integer, got {value!r}")
    return value


def positives(config: Config, keys: tuple[str, ...], label: str) -> dict[str, int]:
    """The required positive integers ``keys`` of ``config``, in the order of ``keys``."""
    return {key: positive(config.get(key), f"{label}.{key}") for key in keys}


def binary32(value: object, label: str) -> float:
    """A positive finite real number, rounded to binary32 and widened again.

    The runtime keeps these numbers as FP32, so the artifact stores the value that it will compute with.
    """
    if type(value) not in (int, float):
        raise ValueError(f"{label}: expected a real value, got {value!r}")
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except (OverflowError, struct.error) as error:
        raise ValueError(f"{label}: {value!r} is not representable as F32") from error
    if not isfinite(rounded) or rounded <= 0:
        raise ValueError(f"{label}: expected a positive finite F32, got {value!r}")
    return float(rounded)


def boolean(value: object, label: str) -> bool:
    """``True`` or ``False``; nothing else counts as one."""
    if type(value) is not bool:
        raise ValueError(f"{label}: must be boolean, got {value!r}")
    return value


def require_fixed(config: Config, label: str, **expected: object) -> None:
    """Each key of ``expected`` is absent from ``config`` or has exactly that value.

    A boolean must be a JSON boolean: ``0`` does not pass for ``False``.
    """
    for key, value in expected.items():
        if key not in config:
            continue
        actual = config[key]
        if actual != value or (isinstance(value, bool) and type(actual) is not bool):
            raise ValueError(f"{label}.{key}: expected {value!r}, got {actual!r}")


def unscaled_rope(config: Config, label: str) -> dict[str, Any]:
    """The RoPE fields of ``rope_scaling`` and ``rope_parameters`` in one dict.

    Checkpoints name the object either way, and some carry both. Only plain RoPE is accepted.

    Raises:
        ValueError: one of the two is no object, they contradict each other, or they ask for scaled RoPE.
    """
    merged: dict[str, Any] = {}
    for source in ("rope_scaling", "rope_parameters"):
        if config.get(source) is None:
            continue
        fields = require_object(config[source], f"{label}.{source}")
        require_fixed(fields, f"{label}.{source}", type="default", rope_type="default")
        if "factor" in fields and binary32(fields["factor"], f"{label}.{source}.factor") != 1:
            raise ValueError(f"{label}.{source}.factor: scaled RoPE is not supported, got {fields['factor']!r}")
        for key, value in fields.items():
            if key in merged and merged[key] != value:
                raise ValueError(f"{label}.{source}.{key}: conflicting RoPE field: {merged[key]!r} and {value!r}")
            merged[key] = value
    return merged
