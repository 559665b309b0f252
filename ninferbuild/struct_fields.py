"""Structs that the functions of :mod:`dataclasses` take.

Records of which a plan has one a parameter are msgspec structs, which are made in a tenth of the time. Recipes and
methods see some of them and may call ``replace``, ``fields`` or ``asdict``, as they can on the records beside them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn, TypeVar

import msgspec

S = TypeVar("S", bound=type[msgspec.Struct])


def with_dataclass_fields(struct: S) -> S:
    """The frozen class itself, with the description of its fields that the functions of :mod:`dataclasses` look for.

    Private fields are left out. Assigning to a field raises ``FrozenInstanceError``, as of a frozen dataclass.
    """
    # `help` evaluates what is annotated to show a signature, and names that only type checkers import are not there.
    struct.__annotations__ = dict.fromkeys(struct.__annotations__, Any)
    names = [(name, object) for name in struct.__struct_fields__ if not name.startswith("_")]
    described = dataclasses.make_dataclass(  # methods would be compiled and a text written, and nobody asks for them
        struct.__name__, names, init=False, repr=False, eq=False, match_args=False, namespace={"__doc__": "fields"}
    )
    struct.__dataclass_fields__ = described.__dataclass_fields__  # type: ignore[attr-defined]
    struct.__setattr__ = _refuse_to_assign  # type: ignore[method-assign]
    struct.__delattr__ = _refuse_to_delete  # type: ignore[method-assign]
    return struct


def _refuse_to_assign(record: object, name: str, value: object) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(record: object, name: str) -> NoReturn:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
