"""How a user's modules are imported: from the source text on disk now, never from a bytecode cache.

Python trusts a cached ``.pyc`` when size and whole-second time of the source agree, so an edit that keeps both would
run the old code. While :func:`source_only` is entered, every module that is a user's (see :mod:`ninferbuild.origins`)
is compiled from its text, no bytecode is written for it, and its name is remembered so that :func:`purge` can make the
next target start from the files as they are then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
import sys
import threading
from types import CodeType, ModuleType

from ninferbuild.origins import origin_of


class SourceOnlyLoader(SourceFileLoader):
    """Compiles the source text as it is now; reads and writes no bytecode."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        data = self.get_data(path)
        try:
            code: CodeType = self.source_to_code(data, path)
        except (SyntaxError, ValueError) as error:
            if isinstance(error, SyntaxError) and error.filename:
                raise
            # Python does not say where a NUL is.
            line = data.count(b"\n", 0, max(data.find(b"\0"), 0)) + 1
            raise SyntaxError(str(error), (path, line, None, None)) from None
        return code

    def exec_module(self, module: ModuleType) -> None:
        _imported.add(module.__name__)
        super().exec_module(module)


_imported: set[str] = set()


class _UserModuleFinder(MetaPathFinder):
    """First on ``sys.meta_path`` while active: asks the finders after it and replaces the loader of user modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top != fullname and top in sys.modules and top not in _imported:
            return None  # inside a package that is not a user's
        for finder in sys.meta_path:
            if isinstance(finder, _UserModuleFinder):
                continue
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                return self._adapt(spec)
        return None

    @staticmethod
    def _adapt(spec: ModuleSpec) -> ModuleSpec | None:
        if spec.loader is None:  # a namespace package; what is inside decides for itself
            if spec.origin is None and spec.submodule_search_locations:
                _imported.add(spec.name)
            return spec
        if type(spec.loader) is not SourceFileLoader or spec.origin is None:
            return spec
        if origin_of(spec.name, spec.origin).kind != "user":
            return spec
        spec.loader = SourceOnlyLoader(spec.name, spec.origin)
        spec.cached = None
        return spec


_finder = _UserModuleFinder()
_lock = threading.Lock()
_depth = 0


@contextmanager
def source_only() -> Iterator[None]:
    """While entered, user modules are imported from their source text. Nests; counts over all threads."""
    global _depth
    with _lock:
        if _depth == 0:
            sys.meta_path.insert(0, _finder)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                sys.meta_path.remove(_finder)


def imported() -> frozenset[str]:
    """Names of the modules that were imported as a user's and are still in ``sys.modules``."""
    return frozenset(name for name in _imported if name in sys.modules)


def remember(name: str) -> None:
    """Count ``name`` among the modules that :func:`purge` removes."""
    _imported.add(name)


def evict(name: str) -> None:
    """Forget one top-level user module and everything below it."""
    for found in [found for found in _imported if found == name or found.startswith(name + ".")]:
        sys.modules.pop(found, None)
        _imported.discard(found)


def purge() -> None:
    """Remove every user module from ``sys.modules``, so that the next import reads the files again.

    Functions that were taken from them keep working: they hold their module's namespace.
    """
    for name in list(_imported):
        sys.modules.pop(name, None)
    _imported.clear()
