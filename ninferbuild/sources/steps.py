"""Steps: what happens to decoded values before they are a source, said in plain values.

A step is a tuple of its name, the shape it starts from, and its arguments, all of which enter the key of an action:

================ =========================== =================================================================
name             arguments                   result
================ =========================== =================================================================
``rows``         ranges                      ranges of the leading axis, in order
``transpose``    axes                        the axes permuted, seen as the shape that the next step starts from
``reshape``      shape                       the same values in C order
``gather``       axis, ranges                ranges of one axis, in order
``float32``      Safetensors type            the stored type widened to FP32, exact
``add``          constant                    ``x + constant`` in FP32
``log_negative`` –                           ``float32(log(-float64(x)))``; refuses all but finite negative values
================ =========================== =================================================================

A step is *local to rows* when each row along the leading axis of its result needs only the same row of what it starts
from: rows are then selected before such steps, and values stream through them. :mod:`ninferbuild.sources.transforms`
does the arithmetic; nothing here reads values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ninferbuild.sources.ranges import Range

Step = tuple[Any, ...]

STEP_VERSIONS = {
    "rows": 1,
    "transpose": 1,
    "reshape": 1,
    "gather": 1,
    "float32": 1,
    "add": 1,
    "log_negative": 1,
}
"""Step → version. A version is part of every key; it changes when the resulting bits change."""

ELEMENTWISE = frozenset({"float32", "add", "log_negative"})
"""Steps that leave the shape alone and compute each value from the one at its place."""


def is_row_local(step: Step) -> bool:
    """Whether each row of the result depends on the same row alone."""
    name, shape, *arguments = step
    if name == "gather":
        return bool(arguments[0] > 0)
    if name == "reshape":
        return bool(shape and arguments[0]) and bool(shape[0] == arguments[0][0])
    return name in ELEMENTWISE


def are_elementwise(steps: Iterable[Step]) -> bool:
    return all(step[0] in ELEMENTWISE for step in steps)


def for_rows(steps: Iterable[Step], rows: int) -> tuple[Step, ...]:
    """Steps that are local to rows, for another number of rows."""
    found = []
    for name, shape, *arguments in steps:
        if name == "reshape":
            arguments = [(rows, *arguments[0][1:])]
        found.append((name, (rows, *shape[1:]), *arguments))
    return tuple(found)


def for_shape(steps: Iterable[Step], shape: tuple[int, ...]) -> tuple[Step, ...]:
    """Elementwise steps, for values of another shape."""
    return tuple((name, shape, *arguments) for name, _, *arguments in steps)


def gathered(extent: int, ranges: Iterable[Range]) -> int:
    """The extent of an axis after its ``ranges`` were gathered.

    Raises:
        ValueError: a range lies outside ``extent``.
    """
    total = 0
    for begin, end in ranges:
        if not 0 <= begin <= end <= extent:
            raise ValueError(f"gathered range [{begin}, {end}) lies outside {extent} positions")
        total += end - begin
    return total
