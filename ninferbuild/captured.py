"""The text of a value that a function captured: a global, a closure variable, a default, an attribute.

Unlike parameters (:mod:`ninferbuild.canonical`) captured values may be anything. What is known is written out, with the
order of dicts and the sharing of mutable objects, which a function can observe; other objects are taken apart the way
``pickle`` does it; what cannot be taken apart is alive (an open file, a lock, a generator) and makes the function
uncacheable.
"""

from __future__ import annotations

from collections.abc import Iterable
import copyreg
import enum
import functools
import io
import json
import sys
from types import (
    BuiltinFunctionType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, Protocol

from ninferbuild.canonical import array_text, is_array, is_tensor, scalar_text, tensor_text
from ninferbuild.digest import digest_of
from ninferbuild.hazards import RANDOM, Hazard

LIVE = Hazard(
    "it is alive: its state cannot be written down",
    "create it inside the function, or pass the data it stands for",
)
ITERATOR = Hazard("it is an iterator, which is used up as it runs", "pass a tuple or a list")
GENERATOR = Hazard("it is a random generator whose state moves on", RANDOM.fix)
UNORDERED = Hazard("it is a set of objects without a natural order", "use a list or a dict")
DEEP = Hazard("it is nested too deeply to be written down", "flatten it, or use an array")
TENSOR = Hazard("it is a tensor without dense storage", "pass a dense tensor")

_RANDOM_TYPES = {
    ("random", "Random"),
    ("numpy.random.mtrand", "RandomState"),
    ("numpy.random._generator", "Generator"),
    ("numpy.random.bit_generator", "BitGenerator"),
    ("torch._C", "Generator"),
}

_COMPILED_FUNCTIONS = frozenset(
    {"_ArrayFunctionDispatcher", "cython_function_or_method", "fused_cython_function", "nb_func", "ufunc"}
)
"""Types of functions that packages wrote in other languages; they hold nothing of a user's."""

_DESCRIPTORS = (
    ClassMethodDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)


class Nodes(Protocol):
    """Where functions, classes and modules go, which get lines of their own."""

    def of_function(self, function: FunctionType, where: str) -> str: ...

    def of_class(self, kind: type, where: str) -> str: ...

    def of_module(self, module: ModuleType, where: str) -> str: ...

    def of_compiled(self, function: object, where: str) -> str | None:
        """The text of a compiled function of a package; None when it is not found where it says it is."""

    def is_user_class(self, kind: type) -> bool:
        """Whether a user's class decides what is in the instance; its ``__reduce__`` might leave something out."""

    def of_special(self, value: object, where: str) -> str | None:
        """The text of an instance of one of this project's classes; None for instances of other classes."""

    def refuse(self, where: str, hazard: Hazard) -> str: ...


class ValueText:
    """Writes captured values. One object serves one fingerprint: it numbers mutable objects as it meets them."""

    def __init__(self, nodes: Nodes):
        self._nodes = nodes
        self._numbers: dict[int, int] = {}
        self._alive: list[object] = []  # an id is an identity only as long as its object lives
        self._depth = 0

    def text(self, value: object, where: str) -> str:
        """The text of ``value``; ``where`` names it in a refusal."""
        scalar = scalar_text(value)
        if scalar is not None:
            return scalar
        if self._depth > 100:
            return self._nodes.refuse(where, DEEP)
        self._depth += 1
        try:
            return self._compound(value, where)
        finally:
            self._depth -= 1

    def _compound(self, value: object, where: str) -> str:
        kind = type(value)
        if kind is tuple:
            assert isinstance(value, tuple)
            return f"tuple ({self._items(value, where)})"
        if kind is frozenset:
            assert isinstance(value, frozenset)
            return f"frozenset ({self._unordered(value, where)})"
        if isinstance(value, type):
            return self._nodes.of_class(value, where)
        callable_text = self._callable(value, where)
        if callable_text is not None:
            return callable_text
        if isinstance(value, ModuleType):
            return self._nodes.of_module(value, where)
        if isinstance(value, enum.Enum):
            return f"member {value.name} of {self.text(kind, where)}"
        number = self._numbers.get(id(value))
        if number is not None:
            return f"the same as #{number}"
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        return f"#{number} {self._object(value, where)}"

    def _items(self, values: Iterable[object], where: str) -> str:
        return ", ".join(self.text(value, f"{where}[{index}]") for index, value in enumerate(values))

    def _unordered(self, values: Iterable[object], where: str) -> str:
        found = list(values)
        if not all(map(_has_natural_order, found)):
            return self._nodes.refuse(where, UNORDERED)
        return ", ".join(sorted(self.text(value, where) for value in found))

    def _pairs(self, items: Iterable[tuple[object, object]], where: str) -> str:
        return ", ".join(
            f"{self.text(key, f'{where} key')}: {self.text(value, f'{where}[{_short(key)}]')}" for key, value in items
        )

    def _callable(self, value: object, where: str) -> str | None:
        if isinstance(value, FunctionType):
            return self._nodes.of_function(value, where)
        if isinstance(value, MethodType):
            return f"method ({self.text(value.__func__, where)} of {self.text(value.__self__, where)})"
        if isinstance(value, BuiltinFunctionType) or type(value).__name__ in _COMPILED_FUNCTIONS:
            compiled = self._nodes.of_compiled(value, where)
            if compiled is not None:
                return compiled
        if isinstance(value, BuiltinFunctionType):
            return f"method {value.__name__} of {self.text(value.__self__, where)}"
        if isinstance(value, _DESCRIPTORS):
            owner = getattr(value, "__objclass__", None)
            if owner is None:
                return f"method {value.__name__} of {self.text(getattr(value, '__self__', None), where)}"
            return f"descriptor {value.__name__} of {self.text(owner, where)}"
        if isinstance(value, CodeType):
            return self._nodes.refuse(where, Hazard("it is a code object", "pass the function"))
        return None

    def _object(self, value: object, where: str) -> str:
        special = self._nodes.of_special(value, where)
        if special is not None:
            return special
        for convert in (self._container, self._numeric, self._descriptor):
            text = convert(value, where)
            if text is not None:
                return text
        if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
            return self._nodes.refuse(where, LIVE)
        if any((base.__module__, base.__name__) in _RANDOM_TYPES for base in type(value).__mro__):
            return self._nodes.refuse(where, GENERATOR)
        if hasattr(type(value), "__next__"):
            return self._nodes.refuse(where, ITERATOR)
        return self._instance(value, where)

    def _container(self, value: object, where: str) -> str | None:
        """Exactly the built-in containers; subclasses are instances with contents."""
        kind = type(value)
        if kind is list:
            assert isinstance(value, list)
            return f"list ({self._items(value, where)})"
        if kind is dict or kind is MappingProxyType:
            assert isinstance(value, dict | MappingProxyType)
            return f"{kind.__name__} ({self._pairs(value.items(), where)})"
        if kind is set:
            assert isinstance(value, set)
            return f"set ({self._unordered(value, where)})"
        if kind is bytearray or kind is memoryview:
            assert isinstance(value, bytearray | memoryview)
            return f"{kind.__name__} {len(value)} {digest_of(bytes(value)).hex()}"
        if kind is slice:
            assert isinstance(value, slice)
            return f"slice ({self._items((value.start, value.stop, value.step), where)})"
        if kind is CellType:
            assert isinstance(value, CellType)
            return f"cell ({self.cell(value, where)})"
        return None

    def cell(self, cell: CellType, where: str) -> str:
        """What a closure cell holds."""
        try:
            content = cell.cell_contents
        except ValueError:
            return "unset"
        return self.text(content, where)

    def _numeric(self, value: object, where: str) -> str | None:
        """Arrays and tensors by content; a subclass also counts as the object that it is."""
        if is_array(value):
            array: Any = value
            if type(value).__name__ not in ("ndarray", "memmap"):
                return None
            self._nodes.of_class(type(value), where)  # its methods are the package's
            if array.dtype.hasobject:
                return f"array {array.dtype.str} {array.shape} ({self._items(array.reshape(-1).tolist(), where)})"
            return array_text(array)
        if is_tensor(value) and type(value).__name__ in ("Tensor", "Parameter"):
            tensor: Any = value
            self._nodes.of_class(type(value), where)
            try:
                text = tensor_text(tensor)
            except TypeError:
                return self._nodes.refuse(where, TENSOR)
            attributes = vars(tensor)
            return text + (f" {self._pairs(sorted(attributes.items()), where)}" if attributes else "")
        return None

    def _descriptor(self, value: object, where: str) -> str | None:
        """What class bodies hold."""
        if isinstance(value, staticmethod | classmethod):
            return f"{type(value).__name__} ({self.text(value.__func__, where)})"
        if type(value) is property:
            assert isinstance(value, property)
            return f"property ({self._items((value.fget, value.fset, value.fdel), where)})"
        if type(value) is functools.cached_property:
            assert isinstance(value, functools.cached_property)
            return f"cached_property ({self.text(value.func, where)})"
        if type(value) is functools.partial:
            assert isinstance(value, functools.partial)
            parts = (value.func, value.args, value.keywords, value.__dict__)
            return f"partial ({self._items(parts, where)})"
        return None

    def _instance(self, value: object, where: str) -> str:
        kind = type(value)
        head = f"instance of {self.text(kind, where)}"
        if self._nodes.is_user_class(kind):
            return f"{head} ({self._contents(value, where)}{self._attributes(value, where)})"
        return f"{head} ({self._taken_apart(value, where)})"

    def _attributes(self, value: object, where: str) -> str:
        found: dict[str, object] = {}
        for name in copyreg._slotnames(type(value)):  # type: ignore[attr-defined]
            if hasattr(value, name):
                found[name] = getattr(value, name)
        found.update(getattr(value, "__dict__", {}))
        return self._pairs(sorted(found.items()), where)

    def _contents(self, value: object, where: str) -> str:
        """What a subclass of a built-in container, array or number holds besides its attributes."""
        if is_array(value):
            import numpy as np

            plain: Any = value
            return self.text(plain.view(np.ndarray), where) + "; "
        if is_tensor(value):
            tensor: Any = value
            return self.text(tensor.as_subclass(_tensor_base(tensor)), where) + "; "
        match value:  # by the base class's own methods: the subclass may have overridden them
            case dict():
                return f"dict ({self._pairs(dict.items(value), where)}); "
            case list():
                return f"list ({self._items(list.__iter__(value), where)}); "
            case tuple():
                return f"tuple ({self._items(tuple.__iter__(value), where)}); "
            case set():
                return f"set ({self._unordered(set.__iter__(value), where)}); "
            case frozenset():
                return f"frozenset ({self._unordered(frozenset.__iter__(value), where)}); "
            case bytearray():
                return f"bytearray {digest_of(memoryview(value)).hex()}; "
            case str() | bytes() | int() | float() | complex():
                base: Any = next(kind for kind in (str, bytes, int, float, complex) if isinstance(value, kind))
                return f"{self.text(base.__getnewargs__(value)[0], where)}; "
            case BaseException():
                return f"{self.text(value.args, where)}; "
        native = [base for base in type(value).__mro__ if not self._nodes.is_user_class(base)]
        if not all(map(_is_plain, native)):
            return f"{self._taken_apart(value, where)}; "
        return ""

    def _taken_apart(self, value: object, where: str) -> str:
        """The parts that ``pickle`` would rebuild the object from."""
        try:
            reducer = copyreg.dispatch_table.get(type(value))
            parts = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        except Exception:  # whatever an object's own __reduce__ raises: it cannot be taken apart
            return self._nodes.refuse(where, LIVE)
        if isinstance(parts, str):
            module = str(getattr(value, "__module__", None))
            found: object = sys.modules.get(module)
            for name in parts.split("."):
                found = getattr(found, name, None)
            if found is value:
                return f"global {module} {json.dumps(parts)}"
            return self._nodes.refuse(where, LIVE)
        function, arguments, *rest = parts
        text = f"{self.text(function, where)} {self.text(tuple(arguments), where)}"
        state, items, pairs = (*rest, None, None, None)[:3]
        if state is not None:
            text += f" state {self.text(state, where)}"
        if items is not None:
            text += f" items ({self._items(items, where)})"
        if pairs is not None:
            text += f" pairs ({self._pairs(pairs, where)})"
        return text


def _tensor_base(tensor: Any) -> Any:
    return next(base for base in type(tensor).__mro__ if base.__module__ == "torch" and base.__name__ == "Tensor")


def _is_plain(kind: type) -> bool:
    """Whether instances of a library's class keep everything in ``__dict__`` and slots."""
    return kind is object or kind.__module__ in ("abc", "collections.abc", "contextlib", "typing")


def _has_natural_order(value: object) -> bool:
    """Whether the text of a set's element is the same in every process and involves no object of its own."""
    if isinstance(value, tuple | frozenset) and type(value) in (tuple, frozenset):
        return all(map(_has_natural_order, value))
    return scalar_text(value) is not None or isinstance(value, type | enum.Enum)


def _short(key: object) -> str:
    text = repr(key) if isinstance(key, str | int | float | tuple) else type(key).__name__
    return text if len(text) <= 40 else text[:40] + "…"
