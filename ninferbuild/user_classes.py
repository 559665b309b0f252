"""What a user's class is made of, as named facts."""

from __future__ import annotations

from collections.abc import Iterator
import enum
from types import FunctionType, GetSetDescriptorType

_IGNORED = frozenset(
    {
        "__abstractmethods__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__qualname__",
        "__slotnames__",
        "__static_attributes__",
        "__weakref__",
        "_abc_impl",
    }
)
"""Bookkeeping: positions, text without effect, caches, and what is in an order that varies."""

_GENERATED = frozenset(
    {
        "__delattr__",
        "__eq__",
        "__ge__",
        "__getnewargs__",
        "__getstate__",
        "__gt__",
        "__hash__",
        "__init__",
        "__le__",
        "__lt__",
        "__new__",
        "__replace__",
        "__repr__",
        "__setattr__",
        "__setstate__",
        "_asdict",
        "_make",
        "_replace",
    }
)
"""Functions that dataclasses and named tuples write into a class."""


def class_facts(kind: type) -> Iterator[tuple[str, object]]:
    """Bases, metaclass and everything in the class body, in an order that does not depend on the source."""
    yield "bases", kind.__bases__
    if type(kind) is not type:
        yield "metaclass", type(kind)
    if issubclass(kind, enum.Enum):
        yield "members", tuple((name, member.value) for name, member in kind.__members__.items())
    for name, value in sorted(vars(kind).items()):
        if name in _IGNORED or isinstance(value, GetSetDescriptorType):
            continue
        if issubclass(kind, enum.Enum) and not isinstance(value, FunctionType | classmethod | staticmethod | property):
            continue
        yield name, value


def is_generated(function: FunctionType) -> bool:
    """Whether the standard library wrote the function into a class: its text is no user's, its code is at hand."""
    names = function.__qualname__.split(".")
    return function.__code__.co_filename.startswith("<") and names[-1] in _GENERATED
