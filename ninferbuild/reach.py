"""What a user's function reaches: one traversal of code and values, from the function outwards."""

from __future__ import annotations

import builtins
from collections import deque
from collections.abc import Callable, Mapping
import functools
import importlib
import importlib.util
import sys
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from ninferbuild.bytecode import Reference, attribute_names, code_text, references
from ninferbuild.captured import ValueText
from ninferbuild.findings import MUTATES, Findings, text_digest
from ninferbuild.hazards import (
    HAZARDOUS_ATTRIBUTES,
    HAZARDOUS_BUILTINS,
    PATH_ATTRIBUTES,
    Hazard,
)
from ninferbuild.lazy_torch import is_deferred
from ninferbuild.lookup import class_kind, exists, origin_by_name, origin_of_module, place_of
from ninferbuild.origins import Origin, origin_of
from ninferbuild.own_versions import CAPTURED, instance_text
from ninferbuild.user_classes import class_facts, is_generated

NO_SOURCE = Hazard("its source text cannot be read", "define it in a .py file")
KEEPS_RESULTS = Hazard(
    "it keeps results between calls, so files that it opened earlier cannot be seen",
    "remove the decorator, or compute the value while configuring",
)
IMPORT_FAILS = Hazard("it cannot be imported here", "install it, or remove the import")


class Reach:
    """A queue of functions, classes and modules that are reached.

    A function is visited once. What is found does not depend on where things stand in a file or in memory.
    """

    def __init__(self) -> None:
        self.findings = Findings()
        self._queue: deque[Callable[[], None]] = deque()
        self._seen: set[tuple[int, str]] = set()  # (id of a namespace, name) of the globals that have a line
        self._text = ValueText(self)

    def value(self, value: object, where: str) -> str:
        """The text of a value; what it refers to is queued. ``where`` names it in a reason."""
        text = self._text.text(value, where)
        if 'path "' in text:
            self.findings.note_paths()
        return text

    def finish(self) -> None:
        """Work until nothing new is reached."""
        while self._queue:
            self._queue.popleft()()
        self.findings.finish()

    def refuse(self, where: str, hazard: Hazard) -> str:
        return self.findings.refuse(where, hazard)

    def is_user_class(self, kind: type) -> bool:
        return class_kind(kind) == "user"

    # Functions

    def of_function(self, function: FunctionType, where: str) -> str:
        namespace = function.__globals__
        module = str(namespace.get("__name__", "?"))
        file = function.__code__.co_filename
        origin = origin_of(module, namespace.get("__file__") if file.startswith("<") else file)
        if origin.kind == "own" and not function.__closure__:
            self.findings.note_origin(origin, module, where)
            return f"function {module}.{function.__qualname__}"
        label, new = self.findings.label(function, f"{self.findings.namespace(namespace)}.{function.__qualname__}")
        if new:
            self._queue.append(lambda: self._visit_function(function, label, origin, where))
        return f"function {label}"

    def _visit_function(self, function: FunctionType, label: str, origin: Origin, where: str) -> None:
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        if origin.kind == "user":
            if not is_generated(function) and not _can_be_read(code.co_filename):
                self.refuse(_about(label, where), NO_SOURCE)
            self.findings.fact(
                f"{label} code", text_digest(code_text(code, lambda constant: self.value(constant, label)))
            )
            self._follow(function, cells, label)
            for name, annotation in sorted(function.__annotations__.items()):
                self.findings.fact(f"{label} annotation {name}", self._annotation(annotation, label))
        else:
            module = str(function.__globals__.get("__name__", "?"))
            self.findings.note_use(origin, module, tuple(function.__qualname__.split(".")), _about(label, where))
        for name, default in _defaults(function).items():
            self.findings.fact(f"{label} default {name}", self.value(default, f"{label}, default of {name}"))
        for name, cell in cells.items():
            if origin.kind != "user" or not isinstance(_content(cell), ModuleType):
                self.findings.fact(f"{label} closure {name}", self._cell(cell, f"{label}, closure variable {name}"))
        for name, value in sorted(vars(function).items()):
            self.findings.fact(f"{label} attribute {name}", self.value(value, f"{label}, attribute {name}"))

    def _cell(self, cell: CellType, where: str) -> str:
        try:
            content = cell.cell_contents
        except ValueError:
            return "unset"
        return self.value(content, where)

    def _annotation(self, annotation: object, where: str) -> str:
        """Only a few decorators look at annotations; text is enough for all but a user's own classes."""
        if isinstance(annotation, type) and self.is_user_class(annotation):
            return self.value(annotation, where)
        return annotation if isinstance(annotation, str) else repr(annotation).partition(" at 0x")[0]

    def _follow(self, function: FunctionType, cells: Mapping[str, CellType], label: str) -> None:
        """Everything that the code of a user's function refers to."""
        for attribute in sorted(attribute_names(function.__code__)):
            if attribute in HAZARDOUS_ATTRIBUTES:
                self.refuse(f"{label} (.{attribute})", HAZARDOUS_ATTRIBUTES[attribute])
            if attribute in PATH_ATTRIBUTES:
                self.findings.note_attribute(attribute, label)
        for reference in sorted(references(function.__code__), key=repr):
            if reference.kind == "free":
                self._free(reference, cells[reference.name], label)
            elif reference.kind == "import":
                self._import(reference, function.__globals__, label)
            else:
                self._global(reference, function.__globals__, label)

    def _free(self, reference: Reference, cell: CellType, label: str) -> None:
        where = f"{label}, closure variable {reference.name}"
        if reference.stores:
            self.refuse(where, MUTATES)
        content = _content(cell)
        if isinstance(content, ModuleType):
            self.findings.fact(f"{label} closure {reference.name}", f"module {content.__name__}")
            self._through(content, reference, where)
        else:
            self._foreign_callable(content, reference, where)

    def _global(self, reference: Reference, namespace: Mapping[str, Any], label: str) -> None:
        name = reference.name
        place = f"{self.findings.namespace(namespace)}.{name}"
        if reference.stores:
            self.refuse(f"{place} (assigned by {label})", MUTATES)
        if name in namespace:
            self._named(namespace, name, namespace[name], reference, f"{place} (used by {label})")
        elif not hasattr(builtins, name):
            self.findings.fact(f"global {place}", "missing")
        elif name in HAZARDOUS_BUILTINS:
            self.refuse(f"{name}() in {label}", HAZARDOUS_BUILTINS[name])

    def _named(self, namespace: Mapping[str, Any], name: str, value: object, reference: Reference, where: str) -> None:
        """A global of a user's module."""
        fact = f"global {self.findings.namespace(namespace)}.{name}"
        if isinstance(value, ModuleType):
            self.findings.fact(fact, f"module {value.__name__}")
            self._through(value, reference, where)
        elif (foreign := self._foreign_callable(value, reference, where)) is not None:
            self.findings.fact(fact, foreign)
        elif (id(namespace), name) not in self._seen:
            self._seen.add((id(namespace), name))
            self.findings.fact(fact, self.value(value, where))

    def _foreign_callable(self, value: object, reference: Reference, where: str) -> str | None:
        """A class or function of a package whose use is known: a seeded generator's class may be called."""
        if isinstance(value, FunctionType | MethodType) or not callable(value) or reference.chain:
            return None
        place = place_of(value)
        if place is None:
            return None
        module, name = place
        origin = origin_by_name(module)
        if origin.kind not in ("stdlib", "installed"):
            return None
        if module == "builtins" and name in HAZARDOUS_BUILTINS:
            self.refuse(where, HAZARDOUS_BUILTINS[name])
        self.findings.note_use(origin, module, tuple(name.split(".")), where, reference)
        return f"{module}.{name}"

    # Modules

    def _import(self, reference: Reference, namespace: Mapping[str, Any], label: str) -> None:
        name = reference.name
        if reference.level:
            package = str(namespace.get("__package__") or "").split(".")
            base = package[: len(package) - reference.level + 1]
            name = ".".join([*base, name] if name else base)
        where = f"import {name} in {label}"
        module = self._imported(name, where)
        if isinstance(module, ModuleType):
            self.findings.fact(f"import {name}", f"module {module.__name__}")
            if reference.binds:
                origin = origin_of_module(module)
                if origin.kind in ("stdlib", "installed"):
                    self.findings.note_origin(origin, name, where)
            else:
                self._through(module, reference, where)
        elif module is not None:
            if reference.binds:
                self.findings.note_origin(module, name, where)
            else:
                self.findings.note_use(module, name, reference.chain, where, reference)

    def _imported(self, name: str, where: str) -> ModuleType | Origin | None:
        """The module; its origin when it is a package's and not imported yet; None when it cannot be imported."""
        found = sys.modules.get(name)
        if found is not None and not is_deferred(found):
            return found
        try:
            spec = importlib.util.find_spec(name.partition(".")[0])
        except (ImportError, ValueError):
            spec = None
        if spec is not None:
            origin = origin_of(name.partition(".")[0], spec.origin)
            if origin.kind in ("installed", "stdlib"):
                return origin
        try:
            return importlib.import_module(name)
        except Exception:  # whatever a user's module raises while it is imported
            self.findings.fact(f"import {name}", "missing")
            self.refuse(where, IMPORT_FAILS)
            return None

    def _through(self, module: ModuleType, reference: Reference, where: str) -> None:
        """Follow the attributes taken from a module, as far as they lead through modules whose content counts."""
        origin = origin_of_module(module)
        if origin.kind in ("stdlib", "installed"):
            self.findings.note_use(origin, module.__name__, reference.chain, where, reference)
            self._patched(module, reference.chain, where)
            return
        if not reference.chain:
            self.of_module(module, where)
            return
        name, rest = reference.chain[0], reference.chain[1:]
        if reference.stores and not rest:
            self.refuse(f"{module.__name__}.{name} ({where})", MUTATES)
        following = Reference("global", name, chain=rest, call=reference.call, stores=reference.stores and bool(rest))
        if name not in vars(module) and "__getattr__" in vars(module):
            self._named(vars(module), "__getattr__", module.__getattr__, Reference("global", "__getattr__"), where)
        try:
            value = getattr(module, name)
        except AttributeError:
            # `from package import submodule`, or an attribute of a package that an import elsewhere will set
            submodule = f"{module.__name__}.{name}"
            if hasattr(module, "__path__") and exists(submodule):
                found = self._imported(submodule, where)
                if isinstance(found, ModuleType):
                    self._named(vars(module), name, found, following, where)
                return
            self.findings.fact(f"global {self.findings.namespace(vars(module))}.{name}", "missing")
            return
        self._named(vars(module), name, value, following, where)

    def _patched(self, module: ModuleType, chain: tuple[str, ...], where: str) -> None:
        """What a user has put in the place of an attribute of a package, which its version does not tell."""
        for name in chain:
            if is_deferred(module):
                return
            value = vars(module).get(name)
            if isinstance(value, ModuleType):
                module = value
                continue
            if isinstance(value, FunctionType):
                kind = origin_of(str(value.__globals__.get("__name__", "?")), value.__globals__.get("__file__")).kind
            else:
                kind = class_kind(value if isinstance(value, type) else type(value))
            if kind == "user":
                self.findings.fact(f"patched {module.__name__}.{name}", self.value(value, where))
            return

    def of_module(self, module: ModuleType, where: str) -> str:
        """A module that is used as an object: all that is in it can be reached."""
        origin = origin_of_module(module)
        if origin.kind == "own":
            self.refuse(where, CAPTURED)
        if origin.kind != "user":
            self.findings.note_use(origin, module.__name__, (), where)
            return f"module {module.__name__}"
        label = self.findings.namespace(vars(module))
        if (id(module), "*") not in self._seen:
            self._seen.add((id(module), "*"))
            self.findings.keep_alive(module)
            self._queue.append(lambda: self._visit_module(module, label))
        return f"module {label}"

    def _visit_module(self, module: ModuleType, label: str) -> None:
        for name, value in sorted(vars(module).items()):
            if not (name.startswith("__") and name.endswith("__")):
                self._named(vars(module), name, value, Reference("global", name), f"{label}.{name}")

    # What values refer to

    def of_compiled(self, function: object, where: str) -> str | None:
        place = place_of(function)
        if place is None:
            return None
        module, name = place
        if module == "builtins" and name in HAZARDOUS_BUILTINS:
            self.refuse(where, HAZARDOUS_BUILTINS[name])
        self.findings.note_use(origin_by_name(module), module, tuple(name.split(".")), where)
        return f"compiled {module}.{name}"

    def of_class(self, kind: type, where: str) -> str:
        origin = origin_by_name(kind.__module__)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not self.is_user_class(kind):
            self.findings.note_use(origin, kind.__module__, tuple(kind.__qualname__.split(".")), where)
            return f"class {name}"
        label, new = self.findings.label(kind, name)
        if new:
            self._queue.append(lambda: self._visit_class(kind, label))
        return f"class {label}"

    def _visit_class(self, kind: type, label: str) -> None:
        for name, value in class_facts(kind):
            self.findings.fact(f"{label} {name}", self.value(value, f"{label}, {name}"))

    def of_special(self, value: object, where: str) -> str | None:
        if isinstance(value, functools._lru_cache_wrapper):
            if origin_by_name(value.__wrapped__.__module__).kind == "user":
                self.refuse(where, KEEPS_RESULTS)
            return f"cached ({self.value(value.__wrapped__, where)})"
        kind = type(value)
        origin = origin_by_name(kind.__module__)
        if origin.kind != "own":
            return None
        text = instance_text(value, lambda part: self.value(part, where))
        if isinstance(text, Hazard):
            return self.refuse(where, text)
        self.findings.note_origin(origin, kind.__module__, where)
        return text


def _about(label: str, where: str) -> str:
    return label if where in ("the function", label) else f"{label} ({where})"


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _defaults(function: FunctionType) -> dict[str, object]:
    code = function.__code__
    values = function.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    found: dict[str, object] = dict(zip(names[len(names) - len(values) :], values, strict=True))
    found.update(function.__kwdefaults__ or {})
    return dict(sorted(found.items()))


def _can_be_read(file: str) -> bool:
    try:
        with open(file, "rb"):
            return True
    except OSError:
        return False
