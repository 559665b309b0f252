"""Writing TOML: values and keys as text. The standard library reads TOML but does not write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
from math import isfinite, isnan
import re

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_string(text: str) -> str:
    """``text`` as a basic string. JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """``name`` as a key: bare where that is possible, quoted otherwise."""
    return name if _BARE_KEY.fullmatch(name) else toml_string(name)


def toml_value(value: object) -> str:
    """``value`` on one line: a string, bool, int, float, list or (inline) table.

    Raises:
        TypeError: TOML has no such value (None, for one).
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return toml_string(value)
        case int():
            return str(value)
        case float():
            if isfinite(value):
                return repr(value)
            return "nan" if isnan(value) else "inf" if value > 0 else "-inf"
        case Mapping():
            body = ", ".join(f"{toml_key(str(key))} = {toml_value(item)}" for key, item in value.items())
            return f"{{ {body} }}" if body else "{}"
        case Sequence():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case _:
            raise TypeError(f"TOML has no value for {type(value).__name__}")
