"""The content-addressed store of encoded payloads, on LMDB. Always safe to delete.

Import it as ``ninferbuild.cache``.
"""

if __name__ != "ninferbuild.cache":
    raise ImportError("the cache package is imported as ninferbuild.cache, not under another name")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninferbuild.cache.api import Cache
    from ninferbuild.cache.compaction import SpaceResult
    from ninferbuild.cache.environment import OutOfSpaceError
    from ninferbuild.cache.lease import Lease
    from ninferbuild.cache.location import default_directory
    from ninferbuild.cache.pruning import PruneResult
    from ninferbuild.cache.reading import View
    from ninferbuild.cache.records import ActionRecord, AuxiliaryRow, BuildRecord, Dep
    from ninferbuild.cache.statistics import Entry, Group, Statistics
    from ninferbuild.cache.store import Limits
    from ninferbuild.cache.verification import VerifyResult
    from ninferbuild.cache.writer import Writer

__all__ = [
    "ActionRecord",
    "AuxiliaryRow",
    "BuildRecord",
    "Cache",
    "Dep",
    "Entry",
    "Group",
    "Lease",
    "Limits",
    "OutOfSpaceError",
    "PruneResult",
    "SpaceResult",
    "Statistics",
    "VerifyResult",
    "View",
    "Writer",
    "default_directory",
]

_MODULES = {
    "ActionRecord": "records",
    "AuxiliaryRow": "records",
    "BuildRecord": "records",
    "Cache": "api",
    "Dep": "records",
    "Entry": "statistics",
    "Group": "statistics",
    "Lease": "lease",
    "Limits": "store",
    "OutOfSpaceError": "environment",
    "PruneResult": "pruning",
    "SpaceResult": "compaction",
    "Statistics": "statistics",
    "VerifyResult": "verification",
    "View": "reading",
    "Writer": "writer",
    "default_directory": "location",
}
"""Name → the module it is imported from when it is first asked for: a plan where nothing is cached needs few."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value
