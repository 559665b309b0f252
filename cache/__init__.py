"""The content-addressed store of encoded payloads, on LMDB. Always safe to delete.

Import it as ``ninferbuild.cache``.
"""

if __name__ != "ninferbuild.cache":
    raise ImportError("the cache package is imported as ninferbuild.cache, not under another name")

from ninferbuild.cache.api import Cache, default_directory
from ninferbuild.cache.compaction import SpaceResult
from ninferbuild.cache.environment import OutOfSpaceError
from ninferbuild.cache.lease import Lease
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
