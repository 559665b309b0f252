"""``import torch`` that costs nothing until torch is used.

Recipe files start with ``import torch``, and most builds never need it: everything comes from the cache. While
:func:`deferred` is active, the import statement gives a module object that loads itself on the first attribute access.

There is only ever one module object. Whoever imports torch for real afterwards, from whatever thread, loads *into* the
object that recipes already hold, so ``sys.modules["torch"]`` and a recipe's global ``torch`` stay identical, and once
loaded the object is an ordinary module with no indirection left. The import system's own module lock serialises this.

``import torch.nn`` and ``from torch import nn`` need the package's contents and load it at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
import importlib
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
import sys
import threading
from types import ModuleType
from typing import Any

from ninferbuild.platform_io import interrupts_held

_NAME = "torch"

_IMPORT_ATTRIBUTES = frozenset({"__class__", "__file__", "__loader__", "__name__", "__package__", "__spec__"})
"""What the import system and those who sweep ``sys.modules`` look at; reading these does not load anything."""


class _DeferredModule(ModuleType):
    """Torch before it is loaded, and while one thread is loading it.

    ``super()`` is of no use here: the class of the object changes while a method runs.
    """

    def __getattribute__(self, name: str) -> Any:
        if name not in _IMPORT_ATTRIBUTES:
            _load_for_outsiders()
        return ModuleType.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _IMPORT_ATTRIBUTES:
            _load_for_outsiders()
        ModuleType.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        _load_for_outsiders()
        ModuleType.__delattr__(self, name)

    def __dir__(self) -> list[str]:
        _load_for_outsiders()
        return list(ModuleType.__dir__(self))


class _State:
    """The one deferred module of this process; ``lock`` is never held while anything is imported."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0  # nested and concurrent deferrals
        self.module: ModuleType | None = None  # deferred or loading; None once it is an ordinary module
        self.loading_thread: int | None = None


_state = _State()
_this_thread = threading.local()
"""``.earnest``: imports torch for real although a deferral is active; ``.placing``: installs the deferred module."""


class _DeferringLoader(Loader):
    """Hands out the deferred module and runs nothing."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        with _state.lock:
            if _state.module is None:
                _state.module = _DeferredModule(spec.name)
            _this_thread.placing = True  # the import system goes on to look at the module's attributes
            return _state.module

    def exec_module(self, module: ModuleType) -> None:
        _this_thread.placing = False


class _LoadingLoader(Loader):
    """Runs torch inside the module object that recipes already hold."""

    def __init__(self, loader: Loader):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        with _state.lock:
            # From here on no other thread takes the module out of sys.modules: see _load.
            _state.loading_thread = threading.get_ident()
            return _state.module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self.loader
        try:
            self.loader.exec_module(module)
        except BaseException:
            with _state.lock:
                _state.loading_thread = None
            raise
        with _state.lock:
            module.__class__ = ModuleType
            _state.module = None
            _state.loading_thread = None
        _uninstall()


class _TorchFinder(MetaPathFinder):
    """First on ``sys.meta_path`` while torch is deferred; knows one name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        defer = _state.depth > 0 and not getattr(_this_thread, "earnest", False)
        if not defer and _state.module is None:
            return None
        spec.loader = _DeferringLoader(spec.loader) if defer else _LoadingLoader(spec.loader)
        return spec


_finder = _TorchFinder()


def _uninstall() -> None:
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def _load_for_outsiders() -> None:
    """Load torch, unless this very thread is loading it or putting the deferred module into place."""
    if _state.loading_thread != threading.get_ident() and not getattr(_this_thread, "placing", False):
        _load()


def _load() -> None:
    """Import torch for real; returns when it is loaded. Any thread may call this any number of times."""
    before = getattr(_this_thread, "earnest", False)
    _this_thread.earnest = True
    try:
        while (pending := _state.module) is not None:
            with _state.lock:
                if _state.loading_thread is None and sys.modules.get(_NAME) is pending:
                    del sys.modules[_NAME]
                if _finder not in sys.meta_path and _state.module is not None:
                    sys.meta_path.insert(0, _finder)
            with interrupts_held():  # torch's extensions import numpy, and drop what that raises
                importlib.import_module(_NAME)
    finally:
        _this_thread.earnest = before


def is_loaded() -> bool:
    """Whether torch is imported in earnest. Never imports it."""
    return _NAME in sys.modules and not is_deferred(sys.modules[_NAME])


def is_deferred(module: object) -> bool:
    """Whether ``module`` is torch before it is loaded. Never imports it."""
    return type(module) is _DeferredModule


@contextmanager
def deferred() -> Iterator[None]:
    """While active, ``import torch`` gives a module that loads on first use.

    Does nothing when torch is loaded already. On leaving, a torch that nobody touched is taken out of ``sys.modules``;
    the module objects that were handed out still load on use. May be nested and used by several threads.
    """
    with _state.lock:
        _state.depth += 1
        if not is_loaded() and _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    try:
        yield
    finally:
        with _state.lock:
            _state.depth -= 1
            if _state.depth == 0:
                pending = _state.module
                if pending is None:
                    _uninstall()
                elif _state.loading_thread is None and sys.modules.get(_NAME) is pending:
                    del sys.modules[_NAME]
