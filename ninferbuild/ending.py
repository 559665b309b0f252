"""Not taking very many objects apart where the process is about to end."""

from __future__ import annotations

_kept: list[object] = []
_ends_at_once = False


def process_ends_at_once() -> None:
    """Say that the process will end without taking its objects apart, as the ``ninferbuild`` program does."""
    global _ends_at_once
    _ends_at_once = True


def keep_to_the_end(work: object) -> None:
    """Let ``work`` live to the end of a process that ends at once, and no longer what was kept so far.

    To take the objects of a plan apart takes a tenth of the time that making them took.
    """
    if _ends_at_once:
        _kept[:] = [work]
