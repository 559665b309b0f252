"""The JSON text of a directory: what is accepted, and the one form that is written."""

from __future__ import annotations

import json
from math import isfinite
import re
from typing import Any, NoReturn

import msgspec

from ninferbuild.artifact.primitives import ArtifactError

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ArtifactError(f"directory: member {name!a} appears twice in one object")
            seen.add(name)
    return value


def _constant(token: str) -> NoReturn:
    raise ArtifactError(f"directory: {token} is no JSON number")


def _float(token: str) -> float:
    value = float(token)
    if not isfinite(value):
        raise ArtifactError(f"directory: {token[:40]} is outside the range of binary64")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


def decode_json(data: bytes) -> Any:
    """The value of a UTF-8 JSON text (RFC 8259) whose member names are unique in every object.

    Numbers must be finite in binary64 and strings free of lone surrogates, so that whatever is read can be written.

    Raises:
        ArtifactError: the text is anything else.
    """
    try:
        value = _DECODER.decode(data.decode())
        if _SURROGATE_ESCAPE.search(data):
            encode_json(value)
    except ArtifactError:
        raise
    except UnicodeDecodeError as error:
        raise ArtifactError(f"directory: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise ArtifactError("directory: JSON is nested too deeply") from error
    except ValueError as error:
        raise ArtifactError(f"directory: not valid JSON: {error}") from error
    return value


def encode_json(value: Any) -> bytes:
    """``value`` on one line: no spaces, non-ASCII raw, members in insertion order, shortest round-trip floats.

    Raises:
        ArtifactError: a number that is not finite, a string that UTF-8 cannot encode, or no JSON type.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()
    except UnicodeEncodeError as error:
        raise ArtifactError("directory: a string cannot be encoded as UTF-8 (lone surrogate)") from error
    except RecursionError as error:
        raise ArtifactError("directory: the value is nested too deeply or contains itself") from error
    except (TypeError, ValueError) as error:
        raise ArtifactError(f"directory: not serialisable as JSON: {error}") from error


def encode_records(value: Any) -> bytes:
    """:func:`encode_json` in a fraction of the time, of a value made of text, integers, arrays and objects alone.

    The two would write floats in other forms, and this one writes some types that JSON does not have.

    Raises:
        ArtifactError: as :func:`encode_json`.
    """
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        return encode_json(value)  # says what is wrong with it
