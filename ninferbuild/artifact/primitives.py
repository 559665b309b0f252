"""The checks that every member of a directory is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NoReturn

from ninferbuild.artifact.layouts import MAX_RANK

U64_MAX = 2**64 - 1


class ArtifactError(ValueError):
    """An artifact, or the description of one, is not what the container format allows."""


def fail(label: str, problem: str) -> NoReturn:
    raise ArtifactError(f"{label}: {problem}")


def check_u64(value: Any, label: str) -> int:
    """An integer in ``0 .. 2**64 - 1``; booleans and floats are none."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= U64_MAX:
        fail(label, f"expected an integer from 0 to 2^64-1, not {_shown(value)}")
    return value


def check_positive(value: Any, label: str) -> int:
    """A :func:`check_u64` integer other than 0."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= U64_MAX:
        fail(label, f"expected an integer from 1 to 2^64-1, not {_shown(value)}")
    return value


def check_id(value: Any, label: str) -> str:
    """A non-empty string without U+0000 that UTF-8 can encode."""
    if not isinstance(value, str):
        fail(label, f"expected a string, not {_shown(value)}")
    if not value:
        fail(label, "must not be empty")
    if "\0" in value:
        fail(label, "must not contain U+0000")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            fail(label, f"{value!a} cannot be encoded as UTF-8")
    return value


def check_object(value: Any, label: str) -> dict[str, Any]:
    """A JSON object of any members."""
    if not isinstance(value, dict):
        fail(label, f"expected an object, not {_shown(value)}")
    return value


def check_array(value: Any, label: str) -> list[Any]:
    """A JSON array; a tuple is none."""
    if not isinstance(value, list):
        fail(label, f"expected an array, not {_shown(value)}")
    return value


def check_members(value: Any, required: Sequence[str], optional: Iterable[str], label: str) -> dict[str, Any]:
    """An object with every member of ``required`` and none outside ``required`` and ``optional``."""
    record = check_object(value, label)
    for name in required:
        if name not in record:
            fail(label, f"member {name!r} is missing")
    if len(record) > len(required):
        extra = record.keys() - {*required, *optional}
        if extra:
            fail(label, f"unknown member {min(extra, key=str)!a}")
    return record


def check_shape(value: Any, label: str) -> tuple[int, ...]:
    """An array or tuple of at most 16 positive integers whose product stays in 64 bits; ``[]`` is a scalar."""
    if not isinstance(value, list | tuple):
        fail(label, f"expected an array, not {_shown(value)}")
    if len(value) > MAX_RANK:
        fail(label, f"rank {len(value)} exceeds {MAX_RANK}")
    shape = tuple(check_positive(size, label) for size in value)
    if prod(shape) > U64_MAX:
        fail(label, f"{list(shape)} has more than 2^64-1 elements")
    return shape


def _shown(value: Any) -> str:
    """A short text of an arbitrary value: messages stay one readable line whatever a damaged file holds."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, int) and abs(value) > U64_MAX:
        return "an integer beyond 64 bits"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
