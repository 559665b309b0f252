"""Where objects say they come from, and what is found there."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from ninferbuild.lazy_torch import is_deferred
from ninferbuild.origins import Kind, Origin, origin_of


def origin_by_name(module: str) -> Origin:
    """The origin of the module that a class or function says it is from."""
    found = sys.modules.get(module)
    file = None if found is None else _file_of(found)
    if file is None and "." in module and (top := sys.modules.get(module.partition(".")[0])) is not None:
        file = _file_of(top)
        return origin_of(module.partition(".")[0], file)
    return origin_of(module, file)


def origin_of_module(module: ModuleType) -> Origin:
    """The origin of a module object. Never loads a deferred torch."""
    return origin_of(module.__name__, _file_of(module))


def place_of(value: object) -> tuple[str, str] | None:
    """Module and name under which a class or compiled function is found; None when something else is found there.

    A package's functions may carry the name of a hidden class: torch.randn is called _VariableFunctionsClass.randn.
    """
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualified, str):
        return None
    for name in (qualified, qualified.rpartition(".")[2]):
        found: object = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is value:
            return module, name
    return None


def exists(module: str) -> bool:
    """Whether a module can be found, without importing it; the packages above it are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _file_of(module: ModuleType) -> str | None:
    file = getattr(module, "__file__", None) if not is_deferred(module) else None
    return file or getattr(getattr(module, "__spec__", None), "origin", None)


def class_kind(kind: type) -> Kind:
    """Whose a class is; ``installed`` stands in for compiled classes that say they are from nowhere."""
    origin = origin_by_name(kind.__module__)
    if origin.kind != "user":
        return origin.kind
    module = sys.modules.get(kind.__module__)
    file = None if module is None else _file_of(module)
    return "user" if file is not None and file.endswith(".py") else "installed"
