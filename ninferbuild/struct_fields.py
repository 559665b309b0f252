"""Structs that the functions of :mod:`dataclasses` take.

Records of which a plan has one a parameter are msgspec structs, which are made in a tenth of the time. Recipes and
methods see some of them and may call ``replace``, ``fields`` or ``asdict``, as they can on the records beside them.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import msgspec

S = TypeVar("S", bound=type[msgspec.Struct])


def with_dataclass_fields(struct: S) -> S:
    """The class itself, with the description of its fields that the functions of :mod:`dataclasses` look for."""
    names = [(name, object) for name in struct.__struct_fields__]
    described = dataclasses.make_dataclass(struct.__name__, names)
    struct.__dataclass_fields__ = described.__dataclass_fields__  # type: ignore[attr-defined]
    return struct
