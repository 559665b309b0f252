"""Checks that every rule makes before any payload is read. Nothing here imports torch for stored sources."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninferbuild.method import PrepareRequest


def refuse_parameters(rule: str, request: PrepareRequest) -> None:
    """Raises ``ValueError`` when the recipe gave parameters to a rule that has none."""
    if request.parameters:
        raise ValueError(f"{rule} accepts no numerical parameters, got {sorted(request.parameters)}")


def check_counts(request: PrepareRequest, where: str = "") -> None:
    """Raises ``ValueError`` unless the inputs fill the parent exactly, told with ``where`` in front, and the chunk size
    is usable."""
    inputs, parent = sum([prod(item.source.shape) for item in request.inputs]), prod(request.target.shape)
    if inputs != parent:
        raise ValueError(f"{where}parent and logical source counts differ: {parent} elements from {inputs}")
    rows = request.rows_per_chunk
    if not isinstance(rows, int) or isinstance(rows, bool) or rows <= 0:
        raise ValueError(f"rows_per_chunk must be positive, not {rows!r}")


def check_readable(request: PrepareRequest) -> None:
    """Let missing and mis-shaped stored tensors fail now; the error is the reader's own.

    A described source is checked by describing it. Anything else is asked for its first element, which runs the
    user's reader.
    """
    for item in request.inputs:
        if item.source.description is None:
            item.source.values(0, 1)
