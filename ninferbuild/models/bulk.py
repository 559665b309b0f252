"""Making very many objects at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import gc


@contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection inside.

    A model with thousands of experts makes hundreds of thousands of objects that all stay alive. The collector would
    walk them again and again and find nothing, which takes as long as making them.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
