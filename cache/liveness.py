"""Whether a target still matters: its file still defines it, or the artifact that it built is still there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import tomllib

from ninferbuild.cache.records import BuildRecord

IsLive = Callable[[BuildRecord], bool]


def is_live(build: BuildRecord) -> bool:
    """Whether the target of a build is live. When in doubt it is."""
    if build.out and Path(build.out).exists():
        return True
    file, separator, name = build.target.rpartition("#")
    if not separator:
        return Path(build.target).exists()
    try:
        content = tomllib.loads(Path(file).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    targets = content.get("targets")
    return isinstance(targets, dict) and name in targets
