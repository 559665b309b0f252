"""Where the cache is unless a target says so."""

from __future__ import annotations

import os
from pathlib import Path


def default_directory() -> Path:
    """``$NINFERBUILD_CACHE``, else the platform's user cache directory."""
    chosen = os.environ.get("NINFERBUILD_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("ninferbuild", appauthor=False))
