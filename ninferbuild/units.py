"""Sizes and ages as people write them: ``200G``, ``200Gi``, ``30d``."""

from __future__ import annotations

from decimal import Decimal
import re

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40, "pi": 1 << 50}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?i?)b?", re.IGNORECASE | re.ASCII)
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of a size: ``200G`` is 2·10¹¹, ``200Gi`` is 200·2³⁰, a bare number is bytes; a final ``B`` is ignored.

    Raises:
        ValueError: ``text`` is not a size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = ({**_DECIMAL, **_BINARY}).get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with a unit such as 200G or 200Gi")
    size = Decimal(match[1]) * unit
    if size != int(size):
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size)


def parse_age(text: str) -> float:
    """Seconds of an age: ``45s``, ``90m``, ``12h``, ``30d``, ``2w``.

    Raises:
        ValueError: ``text`` is not an age.
    """
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not an age; write a number with one of s, m, h, d, w, such as 30d")
    return float(match[1]) * _SECONDS[match[2]]


def format_size(size: int) -> str:
    """``size`` bytes in decimal units with three significant digits: ``512 B``, ``8.70 kB``, ``54.0 GB``."""
    if size < 1000:
        return f"{size} B"
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
