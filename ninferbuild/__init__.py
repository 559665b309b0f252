"""Incremental, reproducible builds of ``.ninfer`` artifacts from model checkpoints and recipes.

The interface of the package, which the command line uses as well:

- :func:`load_target`: a target of ``ninferbuild.toml``;
- :func:`plan`: what a build of it would do and write;
- :func:`build`: build it;
- :func:`open_artifact`: read an artifact.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
import sys
from types import ModuleType

from ninferbuild.version import VERSION as __version__

TYPE_CHECKING = False  # typing takes longer to load than all of this, and an interrupt meanwhile would be a traceback
if TYPE_CHECKING:
    from typing import Any

    from ninferbuild.artifact.reader import Artifact
    from ninferbuild.build import build as build
    from ninferbuild.build import plan as plan
    from ninferbuild.errors import (
        CacheError,
        DiffersError,
        NinferbuildError,
        PayloadLostError,
        SourceChangedError,
        UsageError,
    )
    from ninferbuild.target import Target, load_target

    open_artifact = Artifact.open

__all__ = [
    "CacheError",
    "DiffersError",
    "NinferbuildError",
    "PayloadLostError",
    "SourceChangedError",
    "Target",
    "UsageError",
    "__version__",
    "build",
    "load_target",
    "open_artifact",
    "plan",
]

_HOMES = {
    "CacheError": "ninferbuild.errors",
    "DiffersError": "ninferbuild.errors",
    "NinferbuildError": "ninferbuild.errors",
    "PayloadLostError": "ninferbuild.errors",
    "SourceChangedError": "ninferbuild.errors",
    "UsageError": "ninferbuild.errors",
    "Target": "ninferbuild.target",
    "load_target": "ninferbuild.target",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "open_artifact":
        value = import_module("ninferbuild.artifact.reader").Artifact.open
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``ninferbuild.build`` and ``ninferbuild.plan`` the functions.

    There are modules of these names too, and importing a module binds it in its package; ``import`` finds the modules
    all the same, by their full names.
    """

    @property
    def build(self) -> Any:
        return import_module("ninferbuild.build").build

    @build.setter
    def build(self, module: ModuleType) -> None:
        """What the import system binds is left aside."""

    @property
    def plan(self) -> Any:
        return import_module("ninferbuild.build").plan

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        """What the import system binds is left aside."""


sys.modules[__name__].__class__ = _Package
