"""Says which source file is being opened, to whoever watches this thread open files (:mod:`ninferbuild.recording`).

A module of its own, because sources need it and nothing of what watching needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import threading


class _Current(threading.local):
    source: object = None


_current = _Current()


@contextmanager
def opening(source: object) -> Iterator[None]:
    """Within the context, files that this thread opens are the business of ``source``."""
    before, _current.source = _current.source, source
    try:
        yield
    finally:
        _current.source = before


def opened_by() -> object:
    """The source that is opening a file on this thread; None when it is somebody else."""
    return _current.source
